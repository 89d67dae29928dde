"""The one exception meant for users, and what keeps secrets out of its text."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

TOKEN = re.compile(r"hf_(?:[A-Za-z0-9]{30,}|(?:oauth|jwt)_[\w.~-]{20,})")  # as the Hub gives them out
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
SHORTEST_TOKEN = 8  # a shorter value is a placeholder, and part of ordinary words
NO_MEMORY = ("out of memory", "cannot allocate memory")  # of a device, and of the system
MOST_LETTERS = 2_000  # of a sentence, whatever it quotes: a path may have 4,096, a name in a file 100 million


class CompressionError(Exception):
    """A fault a user can mend, told in one sentence, of which no name that it quotes can hide or turn the rest."""

    def __init__(self, sentence: str = "") -> None:
        super().__init__(plain(sentence))


class RejectedError(CompressionError):
    """An output that is whole but was not accepted, so that it is not put in place."""


def plain(text: str, most: int = MOST_LETTERS) -> str:
    """Text without its middle where it is too long, as remedies stand at the end; what cannot be seen is escaped."""
    if len(text) > most:
        text = without_tokens(text)  # before half of one is cut off
        text = f"{text[: most - most // 4]} ... {text[-(most // 4) :]}" if len(text) > most else text
    if text.isprintable():
        return text
    return "".join(x if x.isprintable() or x in "\n\t\xa0" else x.encode("unicode_escape").decode() for x in text)


def is_panic(error: BaseException) -> bool:
    """Return True if a library in Rust panicked, as a tokenizer whose pattern backtracks for ever: no `Exception`."""
    return type(error).__module__ == "pyo3_runtime"


def first_line(error: BaseException) -> str:
    """The first line of what another library's exception says, or its type where it says nothing."""
    text = without_tokens(str(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__


def reason_of(error: BaseException, most: int = 300) -> str:
    """What another library's exception says, on one line and not too long."""
    text = " ".join(without_tokens(str(error)).split()) or type(error).__name__
    return text if len(text) <= most else f"{text[:most]} ..."


@contextmanager
def wrap_faults(what: str, memory: str, otherwise: str) -> Iterator[None]:
    """Turn the exceptions of models and runtimes, which raise what they like, into one sentence with its remedy.

    `memory` is the remedy where that ran out, `otherwise` the one where neither memory nor a file is at fault.
    """
    try:
        yield
    except CompressionError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if isinstance(error, MemoryError) or any(words in str(error).lower() for words in NO_MEMORY):
            raise CompressionError(f"{what}: memory ran out; {memory}") from error
        remedy = "check its files" if isinstance(error, OSError) else otherwise
        raise CompressionError(f"{what}: {reason_of(error)}; {remedy}") from error


def without_tokens(text: str) -> str:
    """The text with every access token of the Hub replaced by `***`: those in use here, and all that look like one."""
    for token in tokens_in_use():
        text = text.replace(token, "***")
    return TOKEN.sub("***", text)


def tokens_in_use() -> list[str]:
    """The tokens of the environment and of `hf auth login`, longest first; only ever read to be taken out of text."""
    from huggingface_hub import constants

    found = {os.environ.get(name, "").strip() for name in TOKEN_VARIABLES}
    with suppress(OSError, ValueError):  # nobody has logged in, or what lies there is no text
        found.add(Path(constants.HF_TOKEN_PATH).read_text(encoding="utf-8").strip())
    return sorted((token for token in found if len(token) >= SHORTEST_TOKEN), key=len, reverse=True)
