"""What all pictures share: colours, markers, resolution, axes that are placed in inches, and a PNG's bytes."""

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
COLOURS = (  # "muted", Paul Tol's qualitative scheme that stays apart for colour-blind readers
    "#332288", "#CC6677", "#117733", "#88CCEE", "#DDCC77", "#882255", "#44AA99", "#AA4499", "#999933",
)  # fmt: skip
MARKERS = "osD^vPX<>"  # filled in the first round, hollow in the second


def axes_at(figure: "Figure", x: float, y: float, width: float, height: float) -> "Axes":
    """New axes at these inches from the lower left."""
    across, up = figure.get_size_inches()
    return figure.add_axes((x / across, y / up, width / across, height / up))


def png_bytes(figure: "Figure") -> bytes:
    """The picture's bytes, the same for the same picture."""
    stream = io.BytesIO()
    figure.savefig(stream, dpi=DPI, format="png", metadata={"Software": None})
    return stream.getvalue()
