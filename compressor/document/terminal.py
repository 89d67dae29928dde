"""Blocks on a terminal, through rich; nothing of what they say is taken for rich's markup."""

from collections.abc import Iterable

from rich.console import Console, RenderableType
from rich.style import Style
from rich.table import Table as RichTable
from rich.text import Text as RichText

from compressor.document.blocks import (
    Block,
    Code,
    Details,
    Facts,
    Figure,
    Heading,
    Items,
    Link,
    Listing,
    Note,
    Strong,
    Table,
    Text,
    Toned,
    Words,
    plain_words,
)

PIPED_WIDTH = 110  # columns of a table that no terminal limits
STYLES = {"good": "green", "bad": "red", "unsure": "yellow", "note": "dim", "": ""}


def console() -> Console:
    """What prints on stdout, wide enough for a table where no terminal limits it."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=max(plain.width, PIPED_WIDTH))


def show(blocks: Iterable[Block]) -> None:
    """Print them on stdout: paragraphs on one line however long, tables as wide as the terminal lets them be."""
    out = console()
    above = ""
    for block in blocks:
        match block:
            case Heading():
                above = plain_words(block.words)
                continue
            case Table() | Facts():
                out.print(_table(block, above, out) if isinstance(block, Table) else _facts(block, above))
            case Text(words, tone):
                out.print(_words(words, STYLES[tone]), soft_wrap=True)
            case Items(items):
                for item in items:
                    out.print(_words(("- ", item)), soft_wrap=True)
            case Listing(text):
                out.print(RichText(text), soft_wrap=True)
            case Figure() | Details():
                pass
        above = ""


def _words(words: Words, style: str | Style = "") -> RichText:
    match words:
        case str():
            return RichText(words, style)
        case tuple():
            return RichText.assemble(*(_words(each, style) for each in words))
        case Strong(inner):
            return _words(inner, Style.parse(str(style)) + Style(bold=True))
        case Toned(text, tone):
            return RichText(text, STYLES[tone])
        case Link(text, target):
            return RichText(text if target in text or target.startswith("#") else f"{text} ({target})", style)
        case Code(text) | Note(text):
            return RichText(text, style)


def _facts(block: Facts, title: str) -> RichTable:
    made = RichTable(title=RichText(title) if title else None, title_justify="left", show_header=False)
    for _ in range(2):
        made.add_column(overflow="fold")
    for name, value in block.pairs:
        lines = [_words(each) for each in value.items] if isinstance(value, Items) else [_words(value)]
        made.add_row(RichText(name), RichText("\n").join(lines))
    return made


def _table(block: Table, above: str, out: Console) -> RenderableType:
    """The table with as many of its optional columns as there is room for."""
    left_out = [name for name in block.optional if name in block.columns]
    for gone in range(len(left_out) + 1):
        made = _columns(block, block.caption or above, frozenset(left_out[:gone]))
        if made.__rich_measure__(out, out.options.update(max_width=10_000)).maximum <= out.width:
            break
    return made


def _columns(block: Table, title: str, left_out: frozenset[str]) -> RichTable:
    made = RichTable(title=RichText(title) if title else None, title_justify="left")
    places = [place for place, name in enumerate(block.columns) if name not in left_out]
    for place in places:
        is_text = not place or block.columns[place] in block.texts
        made.add_column(RichText(block.columns[place]), justify="left" if is_text else "right", overflow="fold")
    for number, row in enumerate(block.rows):
        made.add_row(*(_words(row[place]) for place in places), end_section=number in block.ruled)
    return made
