"""Drawings of a report: matplotlib draws them once, as SVG inside the page and as PNG for a model card.

Colours have roles, such as "merged", whose values for light and dark pages stand in page.css alone.
"""

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150  # of the PNG
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


@dataclass(frozen=True, slots=True)
class Sheet:
    """A place on a figure, for what is measured in inches from the place's lower left corner."""

    figure: "Figure"
    x: float = 0.0
    y: float = 0.0

    def axes(self, x: float, y: float, width: float, height: float) -> "Axes":
        """New axes, of this size."""
        across, up = self.figure.get_size_inches()
        return self.figure.add_axes(((self.x + x) / across, (self.y + y) / up, width / across, height / up))

    def text(self, x: float, y: float, text: str, role: str = "ink", **style: Any) -> None:
        """Text that begins here, on its baseline unless told otherwise."""
        across, up = self.figure.get_size_inches()
        place = (self.x + x) / across, (self.y + y) / up
        self.figure.text(*place, readable(text), color=colour(role), **style)


@dataclass(frozen=True, slots=True)
class Part:
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
    parts: tuple[Part, ...] = field(default=(), repr=False, compare=False)


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


def part_svg(part: Part) -> str:
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

    lines = list(_lines([part for part in picture.parts if not part.is_legend]))
    lines = [[part] for part in picture.parts if part.is_legend] + lines
    heights = [max(part.size[1] for part in line) for line in lines]
    width = max((sum(part.size[0] for part in line) for line in lines), default=3.0) + 2 * MARGIN
    height = sum(heights) + TITLE + MARGIN
    content = io.BytesIO()
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
        figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def _lines(parts: Sequence[Part]) -> Iterator[Sequence[Part]]:
    """The parts in lines of nearly equal length."""
    if not parts:
        return
    most = max(1, int(PNG_WIDTH / max(part.size[0] for part in parts)))
    columns = math.ceil(len(parts) / math.ceil(len(parts) / most))  # as many in each line as can be
    for start in range(0, len(parts), columns):
        yield parts[start : start + columns]
