"""A document's figures as matplotlib draws them, to read back what is in them."""

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
