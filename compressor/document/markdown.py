"""Blocks as Markdown, for GitHub and the Hub: model cards, reports beside JSON, summaries of CI jobs."""

import html
import re
from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import quote

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
from compressor.words import readable

SPECIAL = re.compile(r"[\\|*`<\[\]~&$#]|(?<![^\W_])_|_(?![^\W_])")  # underscores inside words mean nothing in Markdown
AT_START = re.compile(r"^(\d*)([-+>=.)])")  # what would make a list or a quotation of a paragraph
MOST_ALTERNATIVE = 4_000  # letters that describe a picture
NO_IMAGES: Mapping[str, str] = {}


def markdown(blocks: Iterable[Block], images: Mapping[str, str] = NO_IMAGES) -> str:
    """The document's text, ending in a line break; `images` are the paths of figures by name, others are left out."""
    lines: list[str] = []
    above = ""
    for block in blocks:
        above = plain_words(block.words) if isinstance(block, Heading) else above
        lines += [*_block(block, images, above), ""]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


def escaped(text: str) -> str:
    """Text on one line that means nothing in Markdown but itself."""
    return SPECIAL.sub(r"\\\g<0>", " ".join(readable(text).split()))


def _words(words: Words) -> str:
    match words:
        case str():
            words = readable(words)  # first, for some of what it replaces counts as a blank
            edges = words[: len(words) - len(words.lstrip())], words[len(words.rstrip()) :]
            return escaped(words).join(" " if edge else "" for edge in edges) if words.strip() else " "[: len(words)]
        case tuple():
            return "".join(map(_words, words))
        case Code(text):
            return _code(text)
        case Link(text, target):
            return f"[{escaped(text)}]({target})"
        case Strong(inner):
            return f"**{_words(inner)}**"
        case Note(text) | Toned(text):
            return escaped(text)


def _code(text: str) -> str:
    """Code within a line, which none of its own backticks can end; a bar would end a table's cell."""
    line = " ".join(readable(text).split())
    if "|" in line or not line:
        return escaped(line)
    fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 1)
    space = " " if "`" in line else ""
    return f"{fence}{space}{line}{space}{fence}"


def _block(block: Block, images: Mapping[str, str], above: str) -> list[str]:
    match block:
        case Heading():
            return [f"{'#' * block.level} {_words(block.words)}"]
        case Text():
            return [_paragraph(block.words)]
        case Items():
            return [f"- {_paragraph(item)}" for item in block.items]
        case Listing():
            fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", block.text)), 3)
            return [f"{fence}{block.language}", readable(block.text), fence]
        case Facts():
            return [line for name, value in block.pairs for line in _fact(name, value)]
        case Table():
            return [*([] if block.caption in ("", above) else [f"{_paragraph(block.caption)}:", ""]), *table(block)]
        case Figure():
            alternative = escaped(block.alt[:MOST_ALTERNATIVE])
            return [f"![{alternative}]({quote(images[block.name])})"] if block.name in images else []
        case Details():
            summary = html.escape(" ".join(readable(plain_words(block.summary)).split()))
            return ["<details>", f"<summary>{summary}</summary>", "", markdown(block.blocks, images), "</details>"]


def _paragraph(words: Words) -> str:
    """Words at the beginning of a line, where some would make a list or a quotation."""
    return AT_START.sub(r"\1\\\2", _words(words).strip())


def _fact(name: str, value: Words | Items) -> list[str]:
    if isinstance(value, Items):
        return [f"- {escaped(name)}:", *(f"  - {_paragraph(item)}" for item in value.items)]
    return [f"- {escaped(name)}: {_words(value)}"]


def table(block: Table) -> list[str]:
    """A table's lines: words begin at the left, numbers end at the right."""
    columns = block.columns
    rule = [":---" if not place or name in block.texts else "---:" for place, name in enumerate(columns)]
    return [_line([*map(escaped, columns)]), _line(rule), *(_line([*map(_words, row)]) for row in block.rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
