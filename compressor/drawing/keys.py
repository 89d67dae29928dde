"""What the colours and marks of drawings mean, as a drawing of its own beside many alike ones."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

Look = Mapping[str, Any]  # of a line if it has a marker, of a patch otherwise


def draw_key(canvas: "FigureBase", looks: Sequence[tuple[str, Look | Sequence[Look]]], **style: Any) -> None:
    """A line for each label, or `ncols` in one; several looks of a label lie on one another."""
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: Any = [
        tuple(
            Line2D([], [], **each) if "marker" in each else Patch(**each)
            for each in ([look] if isinstance(look, Mapping) else look)
        )
        for _, look in looks
    ]
    style = {"loc": "center left", "handlelength": 1.2, "columnspacing": 1.2, **style}
    canvas.legend(handles, [label for label, _ in looks], handler_map={tuple: HandlerTuple(1)}, **style)
