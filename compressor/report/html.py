"""HTML in small pieces: whatever is not `Html` is escaped."""

import html
from collections.abc import Iterable, Sequence, Set

from compressor.report.drawing import Picture, readable


class Html(str):
    """Text that is HTML already; joined to other text with + it is that no more."""

    __slots__ = ()


def escaped(content: object) -> Html:
    """Anything as HTML that shows it."""
    return content if isinstance(content, Html) else Html(html.escape(readable(content)))


def joined(contents: Iterable[object], between: str = "\n") -> Html:
    """Several pieces, one after the other."""
    return Html(between.join(escaped(content) for content in contents))


def tag(name: str, *contents: object, **attributes: object) -> Html:
    """An element; `class_` is its class, and other underscores in attributes are hyphens."""
    given = "".join(f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{given}>{joined(contents, '')}</{name}>")


def paragraph(*contents: object) -> Html:
    """A paragraph of text."""
    return tag("p", *contents)


def table(
    caption: str, columns: Sequence[str], rows: Iterable[Iterable[object]], texts: Set[str] = frozenset()
) -> Html:
    """A table in a region of its own, which scrolls by keyboard too; columns in `texts` and the first hold words."""
    words = {0} | {place for place, column in enumerate(columns) if column in texts}
    head = [_cell(column, "col", place in words) for place, column in enumerate(columns)]
    scopes = ("row", *[""] * len(columns))
    lines = [
        tag("tr", *(_cell(content, scopes[place], place in words) for place, content in enumerate(row))) for row in rows
    ]
    made = tag("table", tag("caption", caption), tag("thead", tag("tr", *head)), tag("tbody", joined(lines)))
    return tag("div", made, class_="scroll", role="region", tabindex="0", aria_label=f"Table: {caption}")


def _cell(content: object, scope: str, is_word: bool) -> Html:
    """A cell of words or numbers, which heads its column or row if it has a scope."""
    attributes = {"scope": scope, "class": "word" if is_word else ""}
    return tag("th" if scope else "td", content, **{name: value for name, value in attributes.items() if value})


def facts(pairs: Iterable[tuple[str, object]]) -> Html:
    """Names and what they stand for."""
    return tag("dl", joined(tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs), class_="facts")


def folded(summary: object, *contents: object, class_: str = "fold") -> Html:
    """Content that opens below its summary."""
    return tag("details", tag("summary", summary), *contents, class_=class_)


def bullets(items: Iterable[object]) -> Html:
    """A list."""
    return tag("ul", joined(tag("li", item) for item in items))


def command(text: str) -> Html:
    """A command line."""
    return tag("pre", tag("code", text))


def figure(picture: Picture) -> Html:
    """A picture with its caption; a group of drawings names itself as one."""
    several = len(picture.parts) > 1
    drawing = tag(
        "div", Html(picture.svg), class_="many" if several else "one",
        **({"role": "group", "aria_label": picture.title} if several else {}),
    )  # fmt: skip
    said = tag("figcaption", tag("strong", f"{picture.title}. "), picture.caption)
    return tag("figure", drawing, said, id=f"figure-{picture.name}")
