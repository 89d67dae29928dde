"""A grid of coloured cells, each with a mark or a number, so that colour is never the only sign."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from compressor.drawing.palette import COLOURS, FONT, ROLES, ink_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = "osD^vP<>"  # one fewer than colours, so that a row's first 72 groups differ in one or the other
GAP = 0.04  # between cells, in parts of one


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: what it is filled with, a marker of matplotlib's or a number in it, and whether it is framed."""

    colour: str
    mark: str = ""
    number: int | None = None
    is_framed: bool = False


def group_look(number: int) -> tuple[str, str]:
    """Colour and mark of the n-th group in a row."""
    return COLOURS[number % len(COLOURS)], MARKS[number % len(MARKS)]


def draw_cells(axes: "Axes", grid: Sequence[Sequence[Cell]], size: float, is_numbered: bool) -> None:
    """Rows of cells of `size` inches, the first above; numbers stand in the place of marks if `is_numbered`."""
    fills: dict[str, list[tuple[int, int]]] = {}
    marks: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for row, line in enumerate(grid):
        for column, cell in enumerate(line):
            fills.setdefault(cell.colour, []).append((column, row))
            if is_numbered and cell.number is not None:
                axes.text(
                    column,
                    row,
                    str(cell.number),
                    fontsize=min(FONT, 30 * size),
                    color=ink_on(cell.colour),
                    ha="center",
                    va="center_baseline",
                )
            elif cell.mark:
                marks.setdefault((cell.mark, ink_on(cell.colour)), []).append((column, row))
    for colour, places in fills.items():
        _squares(axes, places, 0.5 - GAP, facecolor=colour, edgecolor="none")
    for (mark, colour), places in marks.items():
        xs, ys = zip(*places, strict=True)
        axes.scatter(xs, ys, s=(0.5 * size * 72) ** 2, marker=mark, color=colour, linewidths=max(0.4, 3 * size))
    framed = [(column, row) for row, line in enumerate(grid) for column, cell in enumerate(line) if cell.is_framed]
    width = max(0.6, 5 * size)
    _squares(axes, framed, 0.5 - width / 144 / size, fill=False, edgecolor=ROLES["ink"], linewidth=width)
    axes.set(xlim=(-0.5, max(map(len, grid)) - 0.5), ylim=(len(grid) - 0.5, -0.5))


def _squares(axes: "Axes", centres: Sequence[tuple[int, int]], half: float, **style: Any) -> None:
    """Squares round these places as one path, which keeps a page small."""
    import numpy as np
    from matplotlib.patches import PathPatch
    from matplotlib.path import Path

    if centres:
        corners = half * np.array([(-1, -1), (1, -1), (1, 1), (-1, 1), (-1, -1)])
        points = (np.array(centres)[:, None] + corners).reshape(-1, 2)
        codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * len(centres)
        axes.add_artist(PathPatch(Path(points, codes), joinstyle="miter", **style))  # add_patch looks at every point
