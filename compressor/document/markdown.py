"""Blocks as Markdown, for GitHub and the Hub: model cards, reports beside JSON, summaries of CI
jobs."""

import html
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

from compressor.document import blocks
from compressor.document.blocks import Block, Words, plain_words
from compressor.formatting import one_line, readable

# underscores inside words mean nothing in Markdown
SPECIAL = re.compile(r"[\\|*`<\[\]~&$#]|(?<![^\W_])_|_(?![^\W_])")
AT_START = re.compile(r"^(\d*)([-+>=.)])")  # what would make a list or a quotation of a paragraph
# a listing, whose own blank lines stay, or more than one blank line
BLANK = re.compile(r"^(?P<listing>(`{3,})[^\n]*\n.*?^\2$)|\n{3,}", re.MULTILINE | re.DOTALL)
NO_IMAGES: Mapping[str, str] = {}


def markdown(document: Iterable[Block], images: Mapping[str, str] = NO_IMAGES) -> str:
    """The document's text, ending in a line break; `images` are the paths of figures by name,
    others are left out."""
    lines = []
    above = ""
    for block in document:
        match block:
            case blocks.Heading(words, level):
                above = plain_words(words)
                lines.append(f"{'#' * level} {_words(words)}")
            case blocks.Text(words):
                lines.append(_paragraph(words))
            case blocks.Items(items):
                lines += [f"- {_paragraph(item)}" for item in items]
            case blocks.Listing(text, language):
                fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
                lines += [f"{fence}{language}", readable(text), fence]
            case blocks.Facts(pairs):
                for name, value in pairs:
                    if isinstance(value, blocks.Items):
                        lines.append(f"- {escaped(name)}:")
                        lines += [f"  - {_paragraph(item)}" for item in value.items]
                    else:
                        lines.append(f"- {escaped(name)}: {_words(value)}")
            case blocks.Table(caption):
                if caption not in ("", above):  # the heading need not be repeated
                    lines += [f"{_paragraph(caption)}:", ""]
                # words begin at the left, numbers end at the right
                places = range(len(block.columns))
                rule = [":---" if block.is_text(place) else "---:" for place in places]
                rows = [list(map(escaped, block.columns)), rule]
                rows += [list(map(_words, row)) for row in block.rows]
                lines += [f"| {' | '.join(cells)} |" for cells in rows]
            case blocks.Figure(name):
                if name in images:
                    lines.append(f"![{escaped(block.alt)}]({quote(images[name])})")
            case blocks.Details(words, inner):
                summary = html.escape(" ".join(readable(plain_words(words)).split()))
                lines += ["<details>", f"<summary>{summary}</summary>", ""]
                lines += [markdown(inner, images), "</details>"]
            case blocks.Sides():
                pass
        lines.append("")
    return _ended("\n".join(lines))


def filled(template: str, images: Mapping[str, str], **values: Any) -> str:
    """Fill a Markdown template of Jinja2: a block, or a list of blocks, is rendered, and words mean
    nothing in Markdown but themselves, unless they are `raw`, as in a listing."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    def shown(value: Any) -> str:
        if isinstance(value, Markup):
            return value
        if isinstance(value, list):
            return markdown(value, images)
        if isinstance(value, blocks.Block):
            return markdown([value], images)
        if isinstance(value, str | tuple | blocks.Span):
            return _words(value)
        # a number; what is undefined raises
        return "" if value is None else escaped(str(value))

    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=shown
    )
    environment.globals["Listing"] = blocks.Listing
    environment.filters["raw"] = lambda words: Markup(one_line(words))
    text = environment.from_string(template).render(values)
    return _ended(text)


def _ended(text: str) -> str:
    """The text with at most one blank line between blocks, ending in a line break."""
    return BLANK.sub(lambda found: found["listing"] or "\n\n", text).strip("\n") + "\n"


def escaped(text: str) -> str:
    """Text on one line that means nothing in Markdown but itself."""
    return SPECIAL.sub(r"\\\g<0>", " ".join(readable(text).split()))


def _words(words: Words) -> str:
    match words:
        case str():
            words = readable(words)  # first, for some of what it replaces counts as a blank
            text = escaped(words)
            before = " " if words[:1].isspace() else ""
            after = " " if text and words[-1:].isspace() else ""
            return f"{before}{text}{after}"
        case tuple():
            return "".join(map(_words, words))
        case blocks.Code(text):
            # none of its own backticks can end it; a bar would end a table's cell
            line = " ".join(readable(text).split())
            if "|" in line or not line:
                return escaped(line)
            fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
            space = " " if "`" in line else ""
            return f"{fence}{space}{line}{space}{fence}"
        case blocks.Link(text, target):
            return f"[{escaped(text)}]({target})"
        case blocks.Strong(inner):
            return f"**{_words(inner)}**"
        case blocks.Note(text) | blocks.Toned(text) | blocks.Marked(text):
            return escaped(text)


def _paragraph(words: Words) -> str:
    """Words at the beginning of a line, where some would make a list or a quotation."""
    return AT_START.sub(r"\1\\\2", _words(words).strip())
