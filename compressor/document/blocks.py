"""The blocks of a report: frozen words and tables, without a word of Markdown, HTML or the terminal
in them.

Every plain `str` is data: each renderer shows it as it is written, whatever it looks like in the
renderer's language."""

from collections.abc import Collection, Sequence
from typing import Literal

from compressor.document.picture import Drawing
from compressor.frozen import frozen

Tone = Literal["good", "bad", "unsure"]


@frozen
class Code:
    """Words of a program within a line: a name of a file or a tensor, an option, a digest."""

    text: str


@frozen
class Link:
    """Words that lead to a web address, or to a heading of the same page by '#' and its anchor."""

    text: str
    target: str


@frozen
class Strong:
    """Words that stand out."""

    words: "Words"


@frozen
class Note:
    """Words beside the point, in small letters where there are any."""

    text: str


@frozen
class Toned:
    """Words that tell good from bad; their colour only repeats what they say."""

    text: str
    tone: Tone
    sign: str = ""  # stands before the words where colours do


@frozen
class Marked:
    """Words of a quoted text that a reader looks for."""

    text: str
    why: Literal["difference", "loop"]


Span = Code | Link | Strong | Note | Toned | Marked
Words = str | Span | tuple["Words", ...]


@frozen
class Heading:
    """A heading; those of level 2 with an anchor begin the sections of a page."""

    words: Words
    level: int = 2
    anchor: str = ""


@frozen
class Text:
    """A paragraph."""

    words: Words
    tone: Tone | Literal["", "note"] = ""  # "note" for small print


@frozen
class Items:
    """A list with bullets."""

    items: Sequence[Words]


@frozen
class Listing:
    """Lines of a program, shown as they are."""

    text: str
    language: str = ""


@frozen
class Facts:
    """Names and what they stand for."""

    pairs: Collection[tuple[str, "Words | Items"]]


@frozen
class Table:
    """Rows of cells; the first column and those in `texts` hold words, the others numbers."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Words]]
    texts: Collection[str] = ()
    # columns that a narrow terminal leaves out, the first of them first
    optional: Sequence[str] = ()
    ruled: Collection[int] = ()  # rows that a rule stands below, where there are rules

    def is_text(self, place: int) -> bool:
        """Return True for a column of words, which begin at the left; numbers end at the right."""
        return not place or self.columns[place] in self.texts


@frozen
class Figure:
    """Drawings under one caption, such as one for each layer."""

    name: str  # of its file, without an ending
    title: str
    caption: str
    drawings: Sequence[Drawing]

    @property
    def alt(self) -> str:
        """The drawings' own words, each after its title if there are several."""
        if len(self.drawings) == 1:
            return self.drawings[0].alt
        return " ".join(f"{drawing.title}: {drawing.alt}" for drawing in self.drawings)


@frozen
class Details:
    """Blocks that fold away below their summary; a terminal leaves them out."""

    summary: Words
    blocks: Sequence["Block"]


@frozen
class Side:
    """Texts to compare below what they answer, and the value that each filter knows them by."""

    title: Words
    above: Words
    texts: tuple[tuple[str, Words], ...]
    values: tuple[str, ...]


@frozen
class Sides:
    """Texts side by side, which a page can filter by the values of each name; only pages show
    them."""

    filters: tuple[str, ...]
    sides: Sequence[Side]

    @property
    def choices(self) -> tuple[tuple[str, ...], ...]:
        """The values of each filter."""
        by_filter = zip(*(side.values for side in self.sides), strict=True)
        return tuple(tuple(dict.fromkeys(values)) for values in by_filter)


Block = Heading | Text | Items | Listing | Facts | Table | Figure | Details | Sides


def plain_words(words: Words) -> str:
    """Return words without what sets them off."""
    match words:
        case str():
            return words
        case tuple():
            return "".join(map(plain_words, words))
        case Strong(inner):
            return plain_words(inner)
        case _:
            return words.text
