import math

import pytest
from hypothesis import given, settings
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from compressor.document.picture import DPI
from compressor.report import comparison_report as picture
from compressor.report.comparison_report import Comparison, label
from tests.support.comparison_results import EXPERTS, base, comparison, comparisons, full, row
from tests.support.rendered_figures import assert_texts_apart, canvases


def comparison_figure(made: Comparison) -> Figure:
    (canvas,) = canvases(picture.comparison_figure(made))
    return canvas


def labelled(figure: Figure) -> dict[str, Line2D]:
    (legend,) = figure.legends
    drawn = {
        (line.get_color(), line.get_linestyle(), line.get_marker(), _face(line)): line for line in figure.axes[0].lines
    }
    assert len(drawn) == len(figure.axes[0].lines)  # no two lines look alike
    return {
        text.get_text(): drawn[handle.get_color(), handle.get_linestyle(), handle.get_marker(), _face(handle)]
        for handle, text in zip(legend.get_lines(), legend.get_texts(), strict=True)
    }


def _face(line: Line2D) -> str:
    return to_hex(line.get_markerfacecolor())


def points(line: Line2D) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def expected(made: Comparison) -> dict[str, list[tuple[float, float]]]:
    """The points of each line by label: from the base, by falling bytes, the mean of equal ones."""
    together: dict[str, dict[int, list[float]]] = {}
    for each in made.rows[1:]:
        name = label(each, "random") if each.is_random else label(each)
        together.setdefault(name, {}).setdefault(each.bytes, []).append(each.loss - made.rows[0].loss)
    return {
        name: [
            (made.rows[0].bytes, 0.0),
            *((size, sum(by_size[size]) / len(by_size[size])) for size in sorted(by_size, reverse=True)),
        ]
        for name, by_size in together.items()
    }


def assert_lines(figure: Figure, made: Comparison) -> None:
    found = {text.replace("\n", " "): points(line) for text, line in labelled(figure).items()}
    assert found.pop("base") == [(0.0, 0.0), (1.0, 0.0)]  # from edge to edge, at no increase
    wanted = expected(made)
    for name in list(found):
        plain = name.removesuffix(" (one drop)").partition(" (mean and range of ")[0]
        found[plain] = found.pop(name)
    assert found.keys() == wanted.keys()
    for name, line in wanted.items():
        assert found[name] == [pytest.approx(point, abs=1e-5) for point in line]


def test_lines_start_at_the_base_and_are_listed_as_they_end() -> None:
    """Colour is the strategy, line style the correction, and random drops are a dashed mean in a band."""
    made = full()
    figure = comparison_figure(made)
    assert_lines(figure, made)
    lines, axes = labelled(figure), figure.axes[0]
    ends = [points(line)[-1][1] for line in lines.values()]
    assert len(ends) == 17 and ends == sorted(ends, reverse=True)
    sizes = [row("size", count, 0.0).bytes for count in (EXPERTS, 12, 8)]
    assert axes.get_xlim()[0] > sizes[0] > sizes[2] > axes.get_xlim()[1]  # falls to the right, where the legend is
    assert picture.comparison_figure(made).title.startswith("org/tiny-moe")
    assert "nats per token" in axes.get_ylabel() and "base's 1.2500" in axes.get_ylabel()
    assert "experts" in axes.get_xlabel() and "base has 16" in axes.get_xlabel()
    assert lines["reap"].get_color() == lines["reap + tune"].get_color() != lines["auto"].get_color()
    styles = [[lines[f"{name}{correction}"] for name in ("reap", "auto")] for correction in ("", " + ridge", " + tune")]
    assert all(one.get_linestyle() == other.get_linestyle() for one, other in styles)
    assert len({str(one._unscaled_dash_pattern) for one, _ in styles}) == 3  # type: ignore[attr-defined]
    assert lines["random (mean and range of 3)"].get_linestyle() == "--"
    (band,) = axes.collections
    corners = {(float(x), round(float(y), 9)) for path in band.get_paths() for x, y in path.vertices}
    increases = [(0, 0), (1, 1.75), (1, 2.25), (2, 3.5), (2, 4.5)]
    assert corners == {(sizes[place], increase) for place, increase in increases}


@settings(max_examples=8)
@given(comparisons())
def test_any_rows_give_their_lines(made: Comparison) -> None:
    assert_lines(comparison_figure(made), made)


LONG = "a-strategy-of-a-third-party (with=several, options=each, of_some=length, and_a_cost=$x^2$)"
PICTURES = {
    "many counts": full((192, 128, 127, 96, 64, 32, 16, 8, 4, 2), 256),
    "long names": comparison(
        [base(), row(LONG, 8, 2.0), *(row(f"{LONG} {n}", 8, 2.0 + n) for n in range(30))], model="org/$m_" + "x" * 90
    ),
    "both signs": comparison([base(), *(row(f"x{n}", 8, 1.25 + 1.4 * (-10.0) ** -n) for n in range(5))]),
    "small spread": comparison([base(), row("reap", 8, 1.5), row("auto", 8, 1.75)]),
    "better than the base": comparison([base(), row("reap", 8, 1.2), row("auto", 8, 1.3), row("tune", 8, 4.0)]),
    "no formulas": comparison([base(), row("$^$", 8, 2.0)], model=r"$\frac$"),
    "the base alone": comparison([base()]),
    "no numbers": comparison([base(), row("reap", 8, math.nan), row("auto", 8, math.inf), row("x", 8, 2.0)]),
}


@pytest.mark.parametrize("name", PICTURES)
def test_no_text_covers_another_or_leaves_the_picture(name: str) -> None:
    (canvas,) = canvases(picture.comparison_figure(PICTURES[name]))
    assert_texts_apart(canvas)
    (axes,), (legend,) = canvas.axes, canvas.legends
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    assert axes.get_window_extent().width > 5 * DPI


def test_alternative_text_has_each_line() -> None:
    rows = [base(), row("auto", 12, 1.5), row("auto", 8, 1.75), row("reap", 8, 2.0), row("random", 8, 2.5, seed=0)]
    made = comparison(rows)
    assert picture.comparison_figure(made).alt == (
        "Loss above the base's 1.2500 by experts kept. auto: 12 +0.2500, 8 +0.5000. reap: 8 +0.7500. random: 8 +1.2500."
    )
    assert "random (one drop)" in labelled(comparison_figure(made))
