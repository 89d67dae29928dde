"""The one exception meant for users."""


class CompressionError(Exception):
    """A fault a user can mend, told in one sentence."""


class RejectedError(CompressionError):
    """An output that is whole but was not accepted, so that it is not put in place."""


def first_line(error: BaseException) -> str:
    """The first line of what another library's exception says, or its type where it says nothing."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def reason_of(error: BaseException, most: int = 300) -> str:
    """What another library's exception says, on one line and not too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= most else f"{text[:most]} ..."
