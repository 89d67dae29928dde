"""Drawings by matplotlib: as SVG elements for a page, as one PNG for a file."""

import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field
from html import escape
from typing import TYPE_CHECKING, Any

from compressor.formatting import readable
from compressor.frozen import frozen

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

DPI = 150
FONT = 8.0  # points
PNG_WIDTH = 11.0  # inches at the most, unless one drawing alone is wider
SETTINGS: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "moe-compressor",
    "font.size": FONT,
    "font.family": ["DejaVu Sans"],
    "text.parse_math": False,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": FONT,
    "axes.labelsize": FONT,
    "axes.axisbelow": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2,
    "ytick.major.size": 2,
    "xtick.labelsize": FONT - 1,
    "ytick.labelsize": FONT - 1,
    "legend.frameon": False,
    "legend.fontsize": FONT - 1,
    "axes.facecolor": "none",
}
CLUTTER = re.compile(  # what an element within a page does not need, or would force on it
    r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>|(?<=<g) id=\"[^\"]*\""
    r"| transform=\"rotate\(-0 [^\"]*\"",
    re.S,
)
REFERENCE = re.compile(r'(?<= id=")|(?<=url\(#)|(?<=href="#)')
SHAPE = re.compile(r' (?:d|x|y|width|height|transform)="[^"]*"')
LONG = re.compile(r"(?<=\d\.\d\d)\d+")  # more digits of a point than an eye can see


@frozen
class Drawing:
    """One picture: `draw` fills a figure of `size`, its width and height in inches."""

    title: str
    alt: str  # what is to be seen, in numbers
    size: tuple[float, float]
    draw: Callable[["FigureBase"], object] = field(repr=False, compare=False)


@contextmanager
def drawing_settings() -> Iterator[None]:
    """Apply the settings of every drawing; letters that no font here has are the reader's to
    show."""
    from matplotlib import rc_context

    with rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _drawn(drawing: Drawing, **style: Any) -> Any:
    from matplotlib.figure import Figure as Canvas

    canvas = Canvas(figsize=drawing.size, layout="constrained", **style)
    drawing.draw(canvas)
    return canvas


def inline_svgs(name: str, drawings: Sequence[Drawing]) -> list[str]:
    """Return an SVG element for each drawing, with a title and a description; every id in it begins
    with `name`."""
    svgs = []
    bare = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    for number, drawing in enumerate(drawings):
        prefix = f"{name}-{number}"
        content = io.StringIO()
        with drawing_settings():
            _drawn(drawing, facecolor="none").savefig(content, format="svg", metadata=bare)
        start, _, body = content.getvalue().partition("<svg ")[2].partition(">")
        (size,) = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', start)
        width, height = map(float, size)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
            f'class="plot" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width * 96 / 72:.0f}" height="{height * 96 / 72:.0f}" '
            f'stroke-linejoin="round" '
            f'aria-labelledby="{prefix}-title {prefix}-desc">'
            f'<title id="{prefix}-title">{escape(readable(drawing.title))}</title>'
            f'<desc id="{prefix}-desc">{escape(readable(drawing.alt))}</desc>'
        )
        body = CLUTTER.sub("", body).replace("xlink:href", "href")
        body = body.replace("'DejaVu Sans'", "system-ui, sans-serif")
        body = REFERENCE.sub(f"{prefix}-", body)
        body = SHAPE.sub(lambda shape: LONG.sub("", shape[0]), body)
        svgs.append(head + body.strip())
    return svgs


def png(title: str, drawings: Sequence[Drawing]) -> bytes:
    """Return all drawings in one PNG below a title, on white; the same bytes for the same
    drawings."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    most = max(1, int(PNG_WIDTH / max(drawing.size[0] for drawing in drawings)))
    # as many in each row as can be
    columns = math.ceil(len(drawings) / math.ceil(len(drawings) / most))
    rows = [list(drawings[start : start + columns]) for start in range(0, len(drawings), columns)]
    width = columns * max(drawing.size[0] for drawing in drawings)
    lines = textwrap.wrap(readable(title), max(20, int(width / 0.1)))

    def draw(canvas: "FigureBase") -> None:
        canvas.text(0.1 / width, 0.5, "\n".join(lines), va="center", fontsize=10, fontweight="bold")

    rows.insert(0, [Drawing("", "", (width, 0.17 * len(lines) + 0.17), draw)])
    images = []
    right = bottom = 0
    with drawing_settings():
        for row in rows:
            left = 0
            top = bottom
            for drawing in row:
                canvas = FigureCanvasAgg(_drawn(drawing, facecolor="white", dpi=DPI))
                canvas.draw()
                size = canvas.get_width_height()
                image = Image.frombuffer("RGBA", size, canvas.buffer_rgba())
                images.append((image, (left, top)))
                left += image.width
                bottom = max(bottom, top + image.height)
            right = max(right, left)
    sheet = Image.new("RGB", (right, bottom), "white")
    for image, corner in images:
        sheet.paste(image, corner)
    content = io.BytesIO()
    sheet.save(content, format="PNG", dpi=(DPI, DPI))
    return content.getvalue()
