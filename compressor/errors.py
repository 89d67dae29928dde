"""The one exception meant for users, what keeps secrets out of its text, and one bad item of
many."""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_tb

logger = logging.getLogger(__name__)

# as the Hub gives them out
TOKEN = re.compile(r"hf_(?:[A-Za-z0-9]{30,}|(?:oauth|jwt)_[\w.~-]{20,})")
KEY_VARIABLE = "OPENAI_API_KEY"  # of servers
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", KEY_VARIABLE)
SHORTEST_TOKEN = 8  # a shorter value is a placeholder, and part of ordinary words
NO_MEMORY = ("out of memory", "cannot allocate memory")  # of a device, and of the system
NAMED = 3  # faults of items that a warning quotes
PATIENCE = 1_000  # items with a fault before the first one without


class CompressionError(Exception):
    """An error that a user can mend, in one sentence. Names that it quotes cannot hide or reverse
    the rest."""

    def __init__(self, sentence: str = "") -> None:
        super().__init__(plain(sentence))


class ItemError(CompressionError):
    """An error in one row, document or item of many, which can be left out."""


@dataclass
class LeftOut:
    """Counts the items of a file or data set that have a fault; with `strict` the first one ends
    the run.

    Where the first `PATIENCE` items all have one, the file or data set is at fault, and the first
    of them is raised."""

    what: str  # the items, in the plural
    strict: bool = False
    used: int = 0
    faults: int = 0
    first: list[ItemError] = field(default_factory=list)
    columns: set[str] = field(default_factory=set)  # that were read
    unread: set[str] = field(default_factory=set)  # columns of text that were passed over

    @contextmanager
    def each(self) -> Iterator[None]:
        """Use one item; an `ItemError` leaves it out."""
        try:
            yield
            self.used += 1
        except ItemError as error:
            self.faults += 1
            self.first += [error] if len(self.first) < NAMED else []
            if self.strict or (not self.used and self.faults == PATIENCE):
                raise self.first[0] from error

    def report(self) -> None:
        """Warn once of what was left out and of unread columns; raises the first fault if nothing
        else was there."""
        if self.first and not self.used:
            raise self.first[0]
        if self.first:
            more = (
                f", and {self.faults - len(self.first):,} more"
                if self.faults > len(self.first)
                else ""
            )
            named = "; ".join(str(error) for error in self.first)
            total = self.used + self.faults
            logger.warning(
                "%d of %d %s are left out: %s%s", self.faults, total, self.what, named, more
            )
        if self.unread:
            names = ", ".join(sorted(self.unread))
            why = (
                "a chat goes first where the model has a template; "
                if "text" in self.unread
                else ""
            )
            message = "%s have columns of text that are not read: %s (%sSOURCE#column reads one)"
            logger.warning(message, self.what, names, why)


def plain(text: str) -> str:
    """Return text in which what cannot be seen is escaped."""
    if text.isprintable():
        return text
    shown = (
        x if x.isprintable() or x in "\n\t\xa0" else x.encode("unicode_escape").decode()
        for x in text
    )
    return "".join(shown)


def is_panic(error: BaseException) -> bool:
    """Return True if a library in Rust panicked, as a tokenizer whose pattern backtracks for ever:
    no `Exception`."""
    return type(error).__module__ == "pyo3_runtime"


def reason_of(error: BaseException, most: int = 300) -> str:
    """Return the message of another library's exception, on one line and not too long."""
    text = " ".join(without_tokens(str(error)).split()) or type(error).__name__
    if isinstance(error, RecursionError):
        text = "nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        text = f"byte {error.start:,} is no UTF-8"
    # before Python's advice to programmers
    text = text.partition(" for integer string conversion")[0]
    return text if len(text) <= most else f"{text[:most]} ..."


@contextmanager
def wrap_faults(what: str, memory: str, otherwise: str) -> Iterator[None]:
    """Turn the exceptions of models and runtimes, which raise what they like, into one sentence
    with its remedy.

    `memory` is the remedy where that ran out, `otherwise` the one where neither memory nor a file
    is at fault."""
    try:
        yield
    except CompressionError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if isinstance(error, MemoryError) or any(
            words in str(error).lower() for words in NO_MEMORY
        ):
            raise CompressionError(f"{what}: memory ran out; {memory}") from error
        hint = "check its files" if isinstance(error, OSError) else otherwise
        reason = reason_of(error)
        if isinstance(error, AttributeError | TypeError | LookupError):
            *_, (frame, _) = walk_tb(error.__traceback__)
            if Path(frame.f_code.co_filename).is_relative_to(Path(__file__).parent):
                # our code met a value of another kind than it reads, as Python words it
                reason = "it is not built as expected"
        raise CompressionError(f"{what}: {reason}; {hint}") from error


def without_tokens(text: str) -> str:
    """The text with every access token replaced by `***`: those in use here, and all that look like
    the Hub's."""
    for token in tokens_in_use():
        text = text.replace(token, "***")
    return TOKEN.sub("***", text)


def tokens_in_use() -> list[str]:
    """Return the tokens of the environment and of `hf auth login`, longest first.

    Only ever read to be taken out of text.
    """
    from huggingface_hub import constants

    tokens = {os.environ.get(name, "").strip() for name in TOKEN_VARIABLES}
    with suppress(OSError, ValueError):  # nobody has logged in, or what lies there is no text
        tokens.add(Path(constants.HF_TOKEN_PATH).read_text(encoding="utf-8").strip())
    return sorted(
        (token for token in tokens if len(token) >= SHORTEST_TOKEN), key=len, reverse=True
    )
