"""Blocks on a terminal, through rich; nothing of what they say is taken for rich's markup."""

import os
from collections.abc import Iterable, Sequence
from typing import Literal

from rich.cells import cell_len
from rich.console import Console
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text as RichText

from compressor.document import blocks
from compressor.document.blocks import Block, Table, Words, plain_words
from compressor.formatting import readable

PIPED_WIDTH = 120  # columns of a table that neither a terminal nor COLUMNS limits
LEAST_WORDS = (20, 8)  # letters of a word that is not broken while there are columns to leave out
STYLES = {"good": "green", "bad": "red", "unsure": "yellow", "note": "dim", "": ""}


def show(document: Iterable[Block]) -> None:
    """Print blocks on stdout: paragraphs on one line however long, tables as wide as the terminal
    lets them be.

    Columns that a table leaves out for want of room are named below it.
    """
    out = Console()
    if not (out.is_terminal or "COLUMNS" in os.environ):
        # wide enough for most tables where nothing limits it, as in the log of a CI job
        out = Console(width=PIPED_WIDTH)
    above = ""
    for block in document:
        match block:
            case blocks.Heading(words):
                above = plain_words(words)
                continue
            case blocks.Facts(pairs):
                title = _words(above) if above else None
                facts = RichTable(title=title, title_justify="left", show_header=False)
                for _ in range(2):
                    facts.add_column(overflow="fold")
                for name, value in pairs:
                    lines = value.items if isinstance(value, blocks.Items) else (value,)
                    facts.add_row(_words(name), RichText("\n").join(map(_words, lines)))
                out.print(facts)
            case blocks.Table():
                grid, left_out = _table(block, block.caption or above, out.width)
                out.print(grid)
                if left_out:
                    out.print(
                        RichText(f"In a wider terminal, or with --json: {', '.join(left_out)}."),
                        soft_wrap=True,
                    )
            case blocks.Text(words, tone):
                out.print(_words(words, STYLES[tone]), soft_wrap=True)
            case blocks.Items(items):
                for item in items:
                    out.print(_words(("- ", item)), soft_wrap=True)
            case blocks.Listing(text):
                out.print(RichText(readable(text)), soft_wrap=True)
            case blocks.Figure() | blocks.Details() | blocks.Sides():
                pass
        above = ""


def _words(words: Words, style: str | Style = "") -> RichText:
    match words:
        case str():
            return RichText(readable(words), style)
        case blocks.Code(text) | blocks.Note(text) | blocks.Marked(text):
            return RichText(readable(text), style)
        case tuple():
            return RichText.assemble(*(_words(part, style) for part in words))
        case blocks.Strong(inner):
            return _words(inner, Style.parse(str(style)) + Style(bold=True))
        case blocks.Toned(text, tone):
            return RichText(readable(text), STYLES[tone])
        case blocks.Link(text, target):
            return _words(
                text if target in text or target.startswith("#") else f"{text} ({target})", style
            )


def _table(block: Table, title: str, room: int) -> tuple[RichTable, Sequence[str]]:
    """Return the table and the columns that it leaves out, so that words and numbers stay whole.

    Optional columns go first, then words fold, then others go from the right; the first column and
    verdicts stay."""
    every = range(len(block.columns))
    cells = []
    verdicts = set[int]()
    for column in every:
        words = [row[column] for row in block.rows]
        if any(isinstance(cell, blocks.Toned) for cell in words):
            verdicts.add(column)
        cells.append([readable(text) for text in (block.columns[column], *map(plain_words, words))])
    optional = [block.columns.index(name) for name in block.optional if name in block.columns]
    others = [column for column in reversed(every) if column not in {0, *optional, *verdicts}]
    steps = [(number, LEAST_WORDS[0]) for number in range(len(optional) + 1)]
    steps += [
        (number, LEAST_WORDS[1]) for number in range(len(optional), len(optional + others) + 1)
    ]
    for number, least in steps:
        left_out = (optional + others)[:number]
        columns = [column for column in every if column not in left_out]
        # at which no number of a column is broken, and no word of up to `least` letters
        widths = []
        for column in columns:
            width = max(map(cell_len, " ".join(cells[column]).split()), default=0)
            is_folded = block.is_text(column) and column not in verdicts
            widths.append(min(width, least) if is_folded else width)
        spare = room - 1 - sum(width + 3 for width in widths)
        if spare >= 0:
            break
    else:
        widths = [max(1, (room - 1) // len(columns) - 3)] * len(columns)
    # rich would narrow the widest columns first, also below what they need, and cut the last one
    # off
    for place, column in sorted(enumerate(columns), key=lambda entry: block.is_text(entry[1])):
        grown = min(max(0, spare), max(map(cell_len, cells[column])) - widths[place])
        widths[place] += grown
        spare -= grown
    grid = RichTable(title=_words(title) if title else None, title_justify="left")
    for column, width in zip(columns, widths, strict=True):
        side: Literal["left", "right"] = "left" if block.is_text(column) else "right"
        grid.add_column(_words(block.columns[column]), justify=side, overflow="fold", width=width)
    for number, row in enumerate(block.rows):
        grid.add_row(
            *(_words(row[column]) for column in columns), end_section=number in block.ruled
        )
    return grid, [block.columns[column] for column in left_out]
