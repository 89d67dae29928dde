"""Blocks as one HTML page that needs nothing beside it: no network, no script, no font of its own.

Jinja2 escapes whatever is not `Markup`; the template and the style sheet are the only ones there are.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup, escape

from compressor.document import blocks
from compressor.document.blocks import Block, Facts, Figure, Heading, Table, Words
from compressor.document.picture import inline_svgs
from compressor.formatting import readable

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
        if self.figure is None:
            return "plain"
        if self.figure.is_many or self.figure.width > NARROW:
            return "wide"
        most = max((len(block.columns) for block in self.blocks if isinstance(block, Table)), default=0)
        return "beside" if most <= MOST_COLUMNS else "around"


def page(title: str, kind: str, lead: str, tiles: Facts, document: Iterable[Block], made_by: str) -> str:
    """The page: its title and what kind of page it is, a sentence, the facts one looks for first, then sections."""
    content = {"title": title, "kind": kind, "lead": lead, "tiles": tiles, "sections": sections(document)}
    return _template().render(**content, made_by=made_by, policy=POLICY, style=Markup(stylesheet())) + "\n"


def sections(document: Iterable[Block]) -> tuple[Section, ...]:
    """The blocks below each heading of level 2; a figure directly after the heading leads its section."""
    parts: list[tuple[Heading, list[Block]]] = []
    for block in document:
        if isinstance(block, Heading) and block.level == 2:
            parts.append((block, []))
        else:
            parts[-1][1].append(block)
    return tuple(
        Section(heading, below[0], tuple(below[1:]))
        if below and isinstance(below[0], Figure)
        else Section(heading, None, tuple(below))
        for heading, below in parts
    )


def words_html(words: Words) -> Markup:
    """Words with their elements; all letters in them are data."""
    match words:
        case str():
            return escape(readable(words))
        case tuple():
            return Markup("").join(map(words_html, words))
        case blocks.Code(text):
            return Markup("<code>{}</code>").format(readable(text))
        case blocks.Link(text, target):
            return Markup('<a href="{}">{}</a>').format(readable(target), readable(text))
        case blocks.Strong(inner):
            return Markup("<strong>{}</strong>").format(words_html(inner))
        case blocks.Note(text):
            return Markup('<span class="said">{}</span>').format(readable(text))
        case blocks.Toned(text, tone, sign):
            shown = Markup('<span aria-hidden="true" class="sign">{}</span> ').format(sign) if sign else ""
            return Markup('<span class="verdict {}">{}{}</span>').format(tone, shown, readable(text))


@cache
def stylesheet() -> str:
    """The page's CSS."""
    return files("compressor.document").joinpath("page.css").read_text(encoding="utf-8")


@cache
def _template() -> "Template":
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    filters: dict[str, Callable[..., Any]] = {
        "words": words_html,
        "kind": lambda block: type(block).__name__,
        "svgs": lambda figure: Markup("\n").join(map(Markup, inline_svgs(figure.name, figure.drawings))),
    }
    environment.filters |= filters
    environment.globals["PHONE"] = PHONE
    return environment.from_string(files("compressor.document").joinpath("page.html").read_text(encoding="utf-8"))
