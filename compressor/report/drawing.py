"""Drawings of a report: matplotlib draws them once, as PNG for a model card and as SVG made fit for the page.

Colours have roles, such as "merged", whose values for light and dark pages stand in page.css alone.
"""

import base64
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from compressor.drawing.palette import DPI, axes_at, png_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FONT = 8.5  # points
PNG_WIDTH = 11.0  # inches at the most, unless one part alone is wider
MARGIN, TITLE = 0.12, 0.34  # inches round the parts of a PNG, and above them
SETTINGS: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "report", "font.size": FONT, "font.family": ["DejaVu Sans"],
    "text.parse_math": False, "axes.linewidth": 0.6, "axes.spines.top": False, "axes.spines.right": False,
    "axes.edgecolor": "black", "axes.facecolor": "none", "xtick.major.width": 0.6, "ytick.major.width": 0.6,
    "xtick.major.size": 0, "ytick.major.size": 0, "axes.unicode_minus": True,
}  # fmt: skip
NOT_TEXT = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]"
)

SPACE, LINK = "http://www.w3.org/2000/svg", "{http://www.w3.org/1999/xlink}href"
PIXELS = 96 / 72  # of a point
LONG, HEX = re.compile(r"-?\d+\.\d{2,}(?:e-?\d+)?"), re.compile(r"#[0-9a-f]{6}\b")
REFERENCE = re.compile(r"(?<=url\(#)[^)]+|(?<=^#).+")
PNG_DATA = "data:image/png;base64,"


@dataclass(frozen=True, slots=True)
class Sheet:
    """A place on a figure, for what is measured in inches from the place's lower left corner."""

    figure: "Figure"
    x: float = 0.0
    y: float = 0.0

    def axes(self, x: float, y: float, width: float, height: float) -> "Axes":
        """New axes, of this size."""
        return axes_at(self.figure, self.x + x, self.y + y, width, height)

    def text(self, x: float, y: float, text: str, role: str = "ink", **style: Any) -> None:
        """Text that begins here, on its baseline unless told otherwise."""
        across, up = self.figure.get_size_inches()
        place = (self.x + x) / across, (self.y + y) / up
        self.figure.text(*place, readable(text), color=colour(role), **style)


@dataclass(frozen=True, slots=True)
class Panel:
    """One drawing of a picture, such as that of one layer."""

    title: str  # names it among the parts
    alt: str  # what is to be seen, in numbers
    size: tuple[float, float]  # inches
    draw: Callable[[Sheet], None]
    is_legend: bool = False  # stands above the others, on a line of its own


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure of the report; `png` makes the same one as a file."""

    name: str
    title: str
    alt: str  # what is to be seen, in numbers
    caption: str
    svg: str  # one SVG element for each part
    parts: tuple[Panel, ...] = field(default=(), repr=False, compare=False)


@cache
def stylesheet() -> str:
    """The page's CSS."""
    return files("compressor.report").joinpath("page.css").read_text(encoding="utf-8")


@cache
def colours() -> Mapping[str, str]:
    """The light colours by their roles, from the stylesheet's first block."""
    return dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{6});", stylesheet().partition("@media")[0]))


def colour(role: str) -> str:
    """What to draw a role with; ink is black here, and in the page whatever the text is."""
    return "black" if role == "ink" else colours()[role]


def readable(text: object) -> str:
    """Text without what neither HTML nor XML can hold, or what turns the direction of the text after it."""
    return NOT_TEXT.sub("\ufffd", str(text))


@contextmanager
def drawing() -> Iterator[None]:
    """With the settings of every drawing; letters that no font here has are the reader's to show."""
    from matplotlib import rc_context

    with rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _part_svg(part: Panel) -> str:
    """The SVG file of one part, as matplotlib writes it."""
    from matplotlib.figure import Figure

    content = io.StringIO()
    with drawing():
        figure = Figure(figsize=part.size, facecolor="none")
        part.draw(Sheet(figure))
        figure.savefig(content, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return content.getvalue()


def png(picture: Picture) -> bytes:
    """The picture as a PNG of all its parts, in light colours, below its title."""
    from matplotlib.figure import Figure

    lines = [[part] for part in picture.parts if part.is_legend]
    if shown := [part for part in picture.parts if not part.is_legend]:
        most = max(1, int(PNG_WIDTH / max(part.size[0] for part in shown)))
        columns = math.ceil(len(shown) / math.ceil(len(shown) / most))  # as many in each line as can be
        lines += [shown[start : start + columns] for start in range(0, len(shown), columns)]
    heights = [max(part.size[1] for part in line) for line in lines]
    width = max((sum(part.size[0] for part in line) for line in lines), default=3.0) + 2 * MARGIN
    height = sum(heights) + TITLE + MARGIN
    with drawing():
        figure = Figure(figsize=(width, height), facecolor="white", dpi=DPI)
        Sheet(figure).text(MARGIN, height - 0.24, picture.title, fontsize=10, fontweight="bold")
        top = height - TITLE
        for line, tallest in zip(lines, heights, strict=True):
            left = MARGIN
            for part in line:
                part.draw(Sheet(figure, left, top - part.size[1]))
                left += part.size[0]
            top -= tallest
        return png_bytes(figure)


def inline_svg(part: Panel, prefix: str) -> str:
    """One part as an SVG element with a title and a description; every id in it begins with `prefix`."""
    root = ElementTree.fromstring(_part_svg(part))
    for element in list(root.iter()):
        element.tag = element.tag.removeprefix(f"{{{SPACE}}}")
        element.tail = None
        if element.tag != "text":
            element.text = None
    _slim(root)
    _rename(root, prefix)
    for element in root.iter():
        _restyle(element)
    for defs in root.findall("defs"):
        defs[:] = [each for each in defs if each.tag != "style"]
    return ElementTree.tostring(_dressed(root, part, prefix), encoding="unicode")


def _dressed(root: ElementTree.Element, part: Panel, prefix: str) -> ElementTree.Element:
    """The element with its size in the page, its text alternative and what all drawings share."""
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    dressed = ElementTree.Element(
        "svg",
        {
            "xmlns": SPACE, "class": "legend" if part.is_legend else "plot",
            "viewBox": f"{left:g} {top:g} {width:g} {height:g}",
            "width": f"{width * PIXELS:.0f}", "height": f"{height * PIXELS:.0f}", "role": "img",
            "aria-labelledby": f"{prefix}-title {prefix}-desc", "fill": "currentColor", "stroke-linejoin": "round",
        },
    )  # fmt: skip
    for tag, text in (("title", part.title), ("desc", part.alt)):
        ElementTree.SubElement(dressed, tag, {"id": f"{prefix}-{tag}"}).text = readable(text)
    dressed.extend(child for child in root if child.tag != "defs" or len(child))
    return dressed


def _slim(parent: ElementTree.Element) -> None:
    """Leave out groups that say nothing but a name, and shapes that nobody sees."""
    kept: list[ElementTree.Element] = []
    for child in parent:
        _slim(child)
        style = child.get("style", "")
        if child.tag == "metadata" or (child.tag == "path" and style == "fill: none"):
            continue
        is_plain = child.tag == "g" and set(child.attrib) <= {"id"}
        kept += list(child) if is_plain else [child]
    parent[:] = kept


def _rename(root: ElementTree.Element, prefix: str) -> None:
    """Number the ids that something refers to, and drop the others."""
    used = [found for element in root.iter() for value in element.attrib.values() for found in REFERENCE.findall(value)]
    names = {name: f"{prefix}-{number}" for number, name in enumerate(dict.fromkeys(used))}
    for element in root.iter():
        name = element.attrib.pop("id", None)
        if name in names:
            element.set("id", names[name])
        if (link := element.attrib.pop(LINK, None)) is not None:
            element.set("href", link)
        for attribute in ("href", "clip-path"):
            if attribute in element.attrib:
                element.set(attribute, REFERENCE.sub(lambda found: names[found[0]], element.attrib[attribute]))


def _restyle(element: ElementTree.Element) -> None:
    """Use the page's font and colours, and no more digits than an eye can see."""
    style = element.get("style", "")
    if element.tag == "image":
        element.set("href", _small_image(element.attrib["href"]))
        element.set("style", "image-rendering:pixelated")
    elif style:
        parts = [each for each in style.split("; ") if not each.startswith("font-family")]
        element.set("style", HEX.sub(lambda found: _variable(found[0]), ";".join(parts)))
    for name in ("d", "x", "y", "width", "height", "transform"):
        if name in element.attrib:
            element.set(name, LONG.sub(_fewer_digits, element.attrib[name]))
    if element.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    if "d" in element.attrib:
        element.set("d", " ".join(element.attrib["d"].split()))


def _fewer_digits(found: re.Match[str]) -> str:
    value = float(found[0])
    return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"


def _variable(code: str) -> str:
    """The page's variable of a colour's role; itself if it has none."""
    roles = {value: role for role, value in colours().items()}
    return "currentColor" if code == "#000000" else f"var(--{roles[code]},{code})" if code in roles else code


def _small_image(link: str) -> str:
    """The same pixels as a PNG with a palette, if they have at most 256 colours and are opaque."""
    import numpy as np
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(link.removeprefix(PNG_DATA)))).convert("RGBA"))
    codes, places = np.unique(pixels.reshape(-1, 4), axis=0, return_inverse=True)
    if len(codes) > 256 or (codes[:, 3] < 255).any():
        return link
    image = Image.fromarray(places.reshape(pixels.shape[:2]).astype(np.uint8), mode="P")
    image.putpalette(codes[:, :3].tobytes())
    content = io.BytesIO()
    image.save(content, format="PNG", optimize=True)
    return PNG_DATA + base64.b64encode(content.getvalue()).decode()
