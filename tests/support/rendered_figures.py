"""A document's figures as matplotlib draws them, to read back what is in them."""

from itertools import combinations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from compressor.document.blocks import Figure
from compressor.document.picture import drawing_settings


def canvases(figure: Figure) -> list[Canvas]:
    """Each drawing on a canvas of its own, laid out."""
    found = []
    for drawing in figure.drawings:
        with drawing_settings():
            canvas = Canvas(figsize=drawing.size, layout="constrained", dpi=150)
            drawing.draw(canvas)
            canvas.draw_without_rendering()
        found.append(canvas)
    return found


def axes_of(figure: Figure) -> list[Axes]:
    """The axes of all drawings."""
    return [axes for canvas in canvases(figure) for axes in canvas.axes]


def assert_texts_apart(canvas: Canvas) -> None:
    """No text covers another or leaves the picture, no axes overlap, and no name is read as a formula."""
    shown = [*canvas.texts, *(text for legend in canvas.legends for text in legend.get_texts())]
    for axes in canvas.axes:
        shown += [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label]  # type: ignore[attr-defined]
        for axis in (axes.xaxis, axes.yaxis):
            least, most = sorted(axis.get_view_interval())
            ticks = [tick for tick in axis.get_major_ticks() if least <= tick.get_loc() <= most]
            shown += [label for tick in ticks for label in (tick.label1, tick.label2)]
    shown = [text for text in dict.fromkeys(shown) if text.get_text() and text.get_visible()]
    boxes = [text.get_window_extent() for text in shown]
    corners = np.array([[*box.min, *box.max] for box in boxes])
    apart = (corners[:, None, :2] > corners[None, :, 2:]).any(-1)
    covered = np.argwhere(np.triu(~(apart | apart.T), k=1))
    assert not [(shown[one].get_text(), shown[other].get_text()) for one, other in covered]
    for text, box in zip(shown, boxes, strict=True):
        assert canvas.bbox.contains(*box.min) and canvas.bbox.contains(*box.max), text.get_text()
        assert "$" not in text.get_text() or not text.get_parse_math()
    for one, other in combinations(canvas.axes, 2):
        assert not one.get_window_extent().overlaps(other.get_window_extent())
