"""What the Hub client raises, told in one sentence; a token in its messages is never repeated."""

import errno

from huggingface_hub import errors

from compressor.errors import CompressionError, first_line

PASSING = (408, 429)  # answers that say nothing about the model: too slow, too often


def is_refusal(error: Exception) -> bool:
    """Whether the Hub answered, and said no; otherwise it could not be asked, or is in trouble itself."""
    status = error.response.status_code if isinstance(error, errors.HfHubHTTPError) else 500
    return status < 500 and status not in PASSING


def told_reason(error: Exception) -> str:
    """The first line of what went wrong; where the client only says that it found nothing, of what led to that."""
    led = error.__cause__ if isinstance(error, errors.LocalEntryNotFoundError) else None
    return first_line(led or error)


def hub_fault(model: str, revision: str | None, error: Exception, file: str | None = None) -> CompressionError:
    """The sentence for an exception of the Hub client, which met it over one `file` or over the model as a whole."""
    at = f" at revision {revision!r}" if revision else ""
    if isinstance(error, errors.GatedRepoError):
        said = f"{model} is gated on the Hub; ask for access on its page and log in with `hf auth login`"
    elif isinstance(error, errors.RevisionNotFoundError):
        said = f"{model} has no revision {revision!r} on the Hub; check --revision"
    elif isinstance(error, errors.RepositoryNotFoundError):
        said = f"{model!r} is neither a folder here nor a model on the Hub; check the name, or log in if it is private"
    elif isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
        said = f"{model}{at} lacks a file that is needed on the Hub: {first_line(error)}"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        what = f"the disk is full, {file or 'the files'} of {model} could not be kept"
        said = f"{what}; free some space, or set HF_HOME to a folder on a larger disk"
    elif file is not None:
        said = f"{file} of {model} could not be downloaded ({told_reason(error)}); run the same command again to go on"
    else:
        what = f"{model!r} is no folder here, and the Hub could not be asked for it ({told_reason(error)})"
        said = f"{what}; check the path or the network"
    return CompressionError(said)
