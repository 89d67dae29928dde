"""Drawings by matplotlib: as SVG elements for a page, as one PNG for a file."""

import io
import math
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from compressor.formatting import readable

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
    r"<metadata>.*?</metadata>|<!--.*?-->|<style.*?</style>|(?<=<g) id=\"[^\"]*\"| transform=\"rotate\(-0 [^\"]*\"",
    re.S,
)
REFERENCE = re.compile(r'(?<= id=")|(?<=url\(#)|(?<=href="#)')
SHAPE = re.compile(r' (?:d|x|y|width|height|transform)="[^"]*"')
LONG = re.compile(r"(?<=\d\.\d\d)\d+")  # more digits of a point than an eye can see


@dataclass(frozen=True, slots=True)
class Drawing:
    """One picture: `draw` fills a figure of `size`, its width and height in inches."""

    title: str
    alt: str  # what is to be seen, in numbers
    size: tuple[float, float]
    draw: Callable[["FigureBase"], object] = field(repr=False, compare=False)
    is_legend: bool = False  # stands above the others, on a line of its own
    margins: tuple[float, float, float, float] | None = None  # inches left, below, right, above; None: as needed


@contextmanager
def drawing_settings() -> Iterator[None]:
    """With the settings of every drawing; letters that no font here has are the reader's to show."""
    from matplotlib import rc_context

    with rc_context(SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def _drawn(drawing: Drawing, **style: Any) -> Any:
    from matplotlib.figure import Figure as Canvas

    if drawing.margins is None:
        canvas = Canvas(figsize=drawing.size, layout="constrained", **style)
    else:  # many alike drawings line up so, and their layout takes no time
        (left, below, right, above), (width, height) = drawing.margins, drawing.size
        canvas = Canvas(figsize=drawing.size, **style)
        canvas.subplots_adjust(left / width, below / height, 1 - right / width, 1 - above / height)
    drawing.draw(canvas)
    return canvas


def inline_svgs(name: str, drawings: Sequence[Drawing]) -> list[str]:
    """An SVG element for each drawing, with a title and a description; every id in it begins with `name`."""
    found = []
    for number, drawing in enumerate(drawings):
        prefix, content = f"{name}-{number}", io.StringIO()
        with drawing_settings():
            bare = dict.fromkeys(("Date", "Creator", "Format", "Type"))
            _drawn(drawing, facecolor="none").savefig(content, format="svg", metadata=bare)
        start, _, body = content.getvalue().partition("<svg ")[2].partition(">")
        (size,) = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', start)
        width, height = map(float, size)
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" role="img" '
            f'class="{"legend" if drawing.is_legend else "plot"}" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width * 96 / 72:.0f}" height="{height * 96 / 72:.0f}" stroke-linejoin="round" '
            f'aria-labelledby="{prefix}-title {prefix}-desc">'
            f'<title id="{prefix}-title">{escape(readable(drawing.title))}</title>'
            f'<desc id="{prefix}-desc">{escape(readable(drawing.alt))}</desc>'
        )
        body = CLUTTER.sub("", body).replace("xlink:href", "href").replace("'DejaVu Sans'", "system-ui, sans-serif")
        body = SHAPE.sub(lambda found: LONG.sub("", found[0]), REFERENCE.sub(f"{prefix}-", body))
        found.append(f"{head}{body.strip()}")
    return found


def png(title: str, drawings: Sequence[Drawing]) -> bytes:
    """All drawings in one PNG below a title, on white; the same bytes for the same drawings."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    lines = [[each] for each in drawings if each.is_legend]
    if shown := [each for each in drawings if not each.is_legend]:
        most = max(1, int(PNG_WIDTH / max(each.size[0] for each in shown)))
        columns = math.ceil(len(shown) / math.ceil(len(shown) / most))  # as many in each line as can be
        lines += [shown[start : start + columns] for start in range(0, len(shown), columns)]
    width = max((sum(each.size[0] for each in line) for line in lines), default=3.0)
    heading = textwrap.wrap(readable(title), max(20, int(width / 0.1)))
    style: Any = {"va": "center", "fontsize": 10, "fontweight": "bold"}
    size = width, 0.17 * len(heading) + 0.17
    lines.insert(0, [Drawing("", "", size, lambda canvas: canvas.text(0.1 / width, 0.5, "\n".join(heading), **style))])
    rows: list[list[Image.Image]] = []
    with drawing_settings():
        for line in lines:
            canvases = [FigureCanvasAgg(_drawn(each, facecolor="white", dpi=DPI)) for each in line]
            for canvas in canvases:
                canvas.draw()
            rows.append([Image.frombuffer("RGBA", each.get_width_height(), each.buffer_rgba()) for each in canvases])
    heights = [max(image.height for image in row) for row in rows]
    sheet = Image.new("RGB", (max(sum(image.width for image in row) for row in rows), sum(heights)), "white")
    for row, top in zip(rows, accumulate(heights, initial=0), strict=False):
        for image, left in zip(row, accumulate((image.width for image in row), initial=0), strict=False):
            sheet.paste(image, (left, top))
    content = io.BytesIO()
    sheet.save(content, format="PNG", dpi=(DPI, DPI))
    return content.getvalue()
