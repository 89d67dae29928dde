"""Blocks as one HTML page that needs nothing beside it: no network, no script, no font of its own.

Jinja2 escapes whatever is not `Markup`; the template and the style sheet are the only ones there are.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

from compressor.document.blocks import (
    Block,
    Code,
    Facts,
    Figure,
    Heading,
    Link,
    Note,
    Strong,
    Table,
    Toned,
    Words,
)
from compressor.drawing.picture import inline_svgs
from compressor.words import readable

if TYPE_CHECKING:
    from jinja2 import Template

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


NARROW, PHONE = 5.0, 3.9  # inches of a figure that fits beside text, and on a phone
MOST_COLUMNS = 7  # of a table that fits beside a figure


@dataclass(frozen=True, slots=True)
class Section:
    """A level 2 heading with what stands below it, the figure that leads it apart."""

    heading: Heading
    figure: Figure | None
    blocks: tuple[Block, ...]

    @property
    def shape(self) -> str:
        """How the style sheet places the figure: above the rest if it is wide, else beside it; 'around' wide tables."""
        if self.figure is None or _is_many(self.figure) or _width(self.figure) > NARROW:
            return "plain" if self.figure is None else "wide"
        most = max((len(block.columns) for block in self.blocks if isinstance(block, Table)), default=0)
        return "beside" if most <= MOST_COLUMNS else "around"


def page(title: str, kind: str, lead: str, tiles: Facts, blocks: Iterable[Block], made_by: str) -> str:
    """The page: its title and what kind of page it is, a sentence, the facts one looks for first, then sections."""
    given = {"title": title, "kind": kind, "lead": lead, "tiles": tiles, "sections": sections(blocks)}
    return _template().render(**given, made_by=made_by, policy=POLICY, style=Markup(stylesheet())) + "\n"


def sections(blocks: Iterable[Block]) -> tuple[Section, ...]:
    """The blocks below each heading of level 2; a figure directly after the heading leads its section."""
    found: list[tuple[Heading, list[Block]]] = []
    for block in blocks:
        if isinstance(block, Heading) and block.level == 2:
            found.append((block, []))
        else:
            found[-1][1].append(block)
    return tuple(
        Section(heading, below[0], tuple(below[1:]))
        if below and isinstance(below[0], Figure)
        else Section(heading, None, tuple(below))
        for heading, below in found
    )


def words_html(words: Words) -> Markup:
    """Words with their elements; all letters in them are data."""
    match words:
        case str():
            return escape(readable(words))
        case tuple():
            return Markup("").join(map(words_html, words))
        case Code(text):
            return Markup("<code>{}</code>").format(readable(text))
        case Link(text, target):
            return Markup('<a href="{}">{}</a>').format(readable(target), readable(text))
        case Strong(inner):
            return Markup("<strong>{}</strong>").format(words_html(inner))
        case Note(text):
            return Markup('<span class="said">{}</span>').format(readable(text))
        case Toned(text, tone, sign):
            shown = Markup('<span aria-hidden="true" class="sign">{}</span> ').format(sign) if sign else ""
            return Markup('<span class="verdict {}">{}{}</span>').format(tone, shown, readable(text))


def _width(figure: Figure) -> float:
    return max(drawing.size[0] for drawing in figure.drawings)


def _is_many(figure: Figure) -> bool:
    return sum(not drawing.is_legend for drawing in figure.drawings) > 1


@cache
def stylesheet() -> str:
    """The page's CSS."""
    return files("compressor.document").joinpath("page.css").read_text(encoding="utf-8")


@cache
def _template() -> "Template":
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {
        "words": words_html,
        "kind": lambda block: type(block).__name__,
        "svgs": lambda figure: Markup("\n").join(map(Markup, inline_svgs(figure.name, figure.drawings))),
        "is_many": _is_many,
        "scrolls": lambda figure: not _is_many(figure) and _width(figure) > PHONE,
    }
    return environment.from_string(files("compressor.document").joinpath("page.html").read_text(encoding="utf-8"))
