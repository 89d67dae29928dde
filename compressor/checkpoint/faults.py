"""What the Hub client raises, told in one sentence; a token in its messages is never repeated."""

import errno

from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from compressor.errors import CompressionError, first_line

PASSING = (408, 429)  # answers that say nothing about the model: too slow, too often


def is_refusal(error: Exception) -> bool:
    """Whether the Hub answered, and said no; otherwise it could not be asked, or is in trouble itself."""
    if not isinstance(error, HfHubHTTPError):
        return False
    return error.response.status_code < 500 and error.response.status_code not in PASSING


def told_reason(error: Exception) -> str:
    """The first line of what went wrong; where the client only says that it found nothing, of what led to that."""
    led = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
    return first_line(led or error)


def hub_fault(model: str, revision: str | None, error: Exception, file: str | None = None) -> CompressionError:
    """The sentence for an exception of the Hub client, which met it over one `file` or over the model as a whole."""
    at = f" at revision {revision!r}" if revision else ""
    if isinstance(error, GatedRepoError):
        return CompressionError(
            f"{model} is gated on the Hub; ask for access on its page and log in with `hf auth login`"
        )
    if isinstance(error, RevisionNotFoundError):
        return CompressionError(f"{model} has no revision {revision!r} on the Hub; check --revision")
    if isinstance(error, RepositoryNotFoundError):
        return CompressionError(
            f"{model!r} is neither a folder here nor a model on the Hub; check the name, or log in if it is private"
        )
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return CompressionError(f"{model}{at} lacks a file that is needed on the Hub: {first_line(error)}")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return CompressionError(
            f"the disk is full, {file or 'the files'} of {model} could not be kept; free some space, or set HF_HOME "
            "to a folder on a larger disk"
        )
    if file is not None:
        return CompressionError(
            f"{file} of {model} could not be downloaded ({told_reason(error)}); run the same command again to go on"
        )
    return CompressionError(
        f"{model!r} is no folder here, and the Hub could not be asked for it ({told_reason(error)}); check the path or "
        "the network"
    )
