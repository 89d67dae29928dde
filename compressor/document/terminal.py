"""Blocks on a terminal, through rich; nothing of what they say is taken for rich's markup."""

import textwrap
from collections.abc import Iterable, Mapping
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text as RichText

from compressor.document import blocks
from compressor.document.blocks import Block, Table, Words, plain_words
from compressor.formatting import readable

PIPED_WIDTH = 120  # columns of a table that no terminal limits
LEAST_WORDS = 20  # letters of a column of words that stay on one line while there are columns to leave out
STYLES = {"good": "green", "bad": "red", "unsure": "yellow", "note": "dim", "": ""}


def console() -> Console:
    """What prints on stdout, wide enough for a table where no terminal limits it."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=max(plain.width, PIPED_WIDTH))


def show(document: Iterable[Block]) -> None:
    """Print them on stdout: paragraphs on one line however long, tables as wide as the terminal lets them be.

    Columns that a table leaves out for want of room are named below it.
    """
    out = console()
    above = ""
    for block in document:
        match block:
            case blocks.Heading(words):
                above = plain_words(words)
                continue
            case blocks.Facts():
                out.print(_facts(block, above))
            case blocks.Table():
                left_out, heads = _fitting(block, out.width)
                out.print(_table(block, block.caption or above, heads))
                if left_out:
                    out.print(RichText(f"In a wider terminal, or with --json: {', '.join(left_out)}."), soft_wrap=True)
            case blocks.Text(words, tone):
                out.print(_words(words, STYLES[tone]), soft_wrap=True)
            case blocks.Items(items):
                for item in items:
                    out.print(_words(("- ", item)), soft_wrap=True)
            case blocks.Listing(text):
                out.print(RichText(readable(text)), soft_wrap=True)
            case blocks.Figure() | blocks.Details():
                pass
        above = ""


def _words(words: Words, style: str | Style = "") -> RichText:
    match words:
        case str():
            return RichText(readable(words), style)
        case blocks.Code(text) | blocks.Note(text):
            return RichText(readable(text), style)
        case tuple():
            return RichText.assemble(*(_words(each, style) for each in words))
        case blocks.Strong(inner):
            return _words(inner, Style.parse(str(style)) + Style(bold=True))
        case blocks.Toned(text, tone):
            return RichText(readable(text), STYLES[tone])
        case blocks.Link(text, target):
            return _words(text if target in text or target.startswith("#") else f"{text} ({target})", style)


def _titled(title: str, **style: Any) -> RichTable:
    return RichTable(title=_words(title) if title else None, title_justify="left", **style)


def _facts(block: blocks.Facts, title: str) -> RichTable:
    grid = _titled(title, show_header=False)
    for _ in range(2):
        grid.add_column(overflow="fold")
    for name, value in block.pairs:
        lines = value.items if isinstance(value, blocks.Items) else (value,)
        grid.add_row(_words(name), RichText("\n").join(map(_words, lines)))
    return grid


def _fitting(block: Table, room: int) -> tuple[tuple[str, ...], Mapping[int, str]]:
    """Optional columns to leave out, and the headers of the others by place: broken at spaces before a column goes."""
    least = [max((_width(plain_words(row[n])) for row in block.rows), default=0) for n in range(len(block.columns))]
    least = [min(width, LEAST_WORDS) if block.is_text(place) else width for place, width in enumerate(least)]
    for gone in range(len(block.optional) + 1):
        kept = {place: name for place, name in enumerate(block.columns) if name not in block.optional[:gone]}
        broken = {
            place: textwrap.fill(name, max(least[place], 1), break_long_words=False, break_on_hyphens=False)
            for place, name in kept.items()
        }
        for heads in (kept, broken):
            if sum(max(least[place], _width(head)) + 3 for place, head in heads.items()) < room:
                return block.optional[:gone], heads
    return block.optional, broken


def _width(text: str) -> int:
    return max(map(cell_len, text.splitlines()), default=0)


def _table(block: Table, title: str, heads: Mapping[int, str]) -> RichTable:
    grid = _titled(title)
    for place, head in heads.items():
        grid.add_column(_words(head), justify="left" if block.is_text(place) else "right", overflow="fold")
    for number, row in enumerate(block.rows):
        grid.add_row(*(_words(row[place]) for place in heads), end_section=number in block.ruled)
    return grid
