"""A small Hugging Face Hub on loopback for tests: models can be pushed to it and read back, and it can be told to fail.

It speaks what huggingface_hub asks of a Hub for models, with Git LFS and without Xet: xet-write-token is answered 404,
so a client must have HF_HUB_DISABLE_XET=1. The address is no https, so the client shows a refusal with 401 as
HfHubHTTPError, never as RepositoryNotFoundError. A repository made through the API starts with a commit of
.gitattributes, as on the Hub; one made with Hub.create holds just the files given.
"""

from tests.support.hub.server import point, serve
from tests.support.hub.state import Commit, Fault, Hub, PullRequest, Repository, Request

__all__ = ["Commit", "Fault", "Hub", "PullRequest", "Repository", "Request", "point", "serve"]
