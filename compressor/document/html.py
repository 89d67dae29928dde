"""Blocks as one HTML page that needs nothing beside it: no network, no script, no font of its own.

Jinja2 escapes whatever is not `Markup`; the template and the style sheet are the only ones there
are."""

from collections.abc import Callable, Iterable
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from compressor.document import blocks
from compressor.document.blocks import Block, Facts, Heading, Words
from compressor.document.picture import inline_svgs
from compressor.formatting import readable

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup

POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
    "form-action 'none'"
)
PHONE = 3.9  # inches of a figure that fits on a phone


def page(
    title: str, kind: str, lead: str, tiles: Facts, document: Iterable[Block], made_by: str
) -> str:
    """The page: its title and what kind of page it is, a sentence, the facts one looks for first,
    then sections.

    Each heading of level 2 begins a section; a figure directly below it stands beside or above the
    rest."""
    from markupsafe import Markup

    sections: list[tuple[Heading, list[Block]]] = []
    for block in document:
        if isinstance(block, Heading) and block.level == 2:
            sections.append((block, []))
        else:
            sections[-1][1].append(block)
    content = {"title": title, "kind": kind, "lead": lead, "tiles": tiles, "sections": sections}
    return (
        _template().render(**content, made_by=made_by, policy=POLICY, style=Markup(stylesheet()))
        + "\n"
    )


def words_html(words: Words) -> "Markup":
    """Words with their elements; all letters in them are data."""
    from markupsafe import Markup, escape

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
        case blocks.Marked(text, why):
            return Markup('<mark class="{}">{}</mark>').format(why, readable(text))
        case blocks.Toned(text, tone, sign):
            shown = (
                Markup('<span aria-hidden="true" class="sign">{}</span> ').format(sign)
                if sign
                else ""
            )
            return Markup('<span class="verdict {}">{}{}</span>').format(
                tone, shown, readable(text)
            )


@cache
def stylesheet() -> str:
    return files("compressor.document").joinpath("page.css").read_text(encoding="utf-8")


@cache
def _template() -> "Template":
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    filters: dict[str, Callable[..., Any]] = {
        "words": words_html,
        "kind": lambda block: type(block).__name__,
        "svgs": lambda figure: Markup("\n").join(
            map(Markup, inline_svgs(figure.name, figure.drawings))
        ),
    }
    environment.filters |= filters
    environment.globals["PHONE"] = PHONE
    return environment.from_string(
        files("compressor.document").joinpath("page.html").read_text(encoding="utf-8")
    )
