"""A small Hugging Face Hub on loopback for tests: it can be pushed to, read back from, and told to fail.

It speaks what huggingface_hub asks of a Hub for models (and, as far as that is the same, data sets), with Git LFS and
without Xet: xet-write-token is answered 404, so a client must have HF_HUB_DISABLE_XET=1 before huggingface_hub is
imported. With Xet on, upload_folder takes another path that never falls back to LFS, and fails with a ConnectionError.
The address is no https, so the client shows a refusal with 401 as HfHubHTTPError, never as RepositoryNotFoundError.
A repository made through the API starts with a commit of .gitattributes, as on the Hub; one made with Hub.create holds
just the files given.
"""

from tests.hub.faults import Fault
from tests.hub.server import serve
from tests.hub.state import Commit, Hub, PullRequest, Repository, Request

__all__ = ["Commit", "Fault", "Hub", "PullRequest", "Repository", "Request", "serve"]
