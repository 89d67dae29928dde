import base64
import io
import math
from dataclasses import replace
from itertools import chain
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import colormaps
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from matplotlib.patches import StepPatch
from PIL import Image

from compressor.document.blocks import Figure
from compressor.document.picture import inline_svgs, png
from compressor.report.data import ERRORS, LayerReport, Report, named, order
from compressor.report.figures import LEVELS, cells, figures, limits
from compressor.steps.dispositions import all_dispositions, dispositions
from tests.support.rendered_figures import canvases
from tests.support.report_data import STEPS, bare, layer, report

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def made() -> dict[str, Figure]:
    return by_name(report())


def by_name(data: Report) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures(data)}


def groups(each: LayerReport) -> list[tuple[int, ...]]:
    return [group.members for group in each.plan.groups]


def svgs(figure: Figure) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in inline_svgs(figure.name, figure.drawings)]


def test_matrices_hold_the_similarities_in_the_order_of_the_groups(made: dict[str, Figure]) -> None:
    data = report()
    low, high = limits(data.layers)
    palette = colormaps["viridis"].resampled(LEVELS)
    for each, svg in zip(data.layers, svgs(made["similarity"]), strict=True):
        assert each.similarity is not None
        grouped = [expert for group in groups(each) if len(group) > 1 for expert in group]
        assert sorted(order(each.plan)) == list(range(each.plan.experts))
        assert set(order(each.plan)[: len(grouped)]) == set(grouped) and order(each.plan)[-1:] == each.plan.dropped
        wanted = [[each.similarity[row][column] for column in order(each.plan)] for row in order(each.plan)]
        shades = palette((np.array(wanted) - low) / (high - low), bytes=True)[..., :3]
        (image,) = svg.iter(f"{SVG}image")
        content = base64.b64decode(image.attrib["href"].removeprefix("data:image/png;base64,"))
        assert (np.asarray(Image.open(io.BytesIO(content)).convert("RGB")) == shades).all()


def test_scale_holds_all_but_the_diagonal() -> None:
    matrix = ((1.0, 0.2, 0.9), (0.2, 1.0, 0.4), (0.9, 0.4, 1.0))
    assert limits([layer(0, 3, 2, 0, groups=((0, 2), (1,)), similarity=matrix)]) == pytest.approx((0.2, 0.9))


def test_bars_are_as_high_as_the_shares(made: dict[str, Figure]) -> None:
    for each, canvas in zip(report().layers, canvases(made["visits"]), strict=True):
        above, below = canvas.axes
        for axes, shares in ((above, each.visits_before), (below, each.visits_after)):
            bars = [patch for patch in axes.patches if isinstance(patch, StepPatch)]
            assert all(bar.get_fill() == (bar.get_label() != "dropped") for bar in bars)
            steps = [np.asarray(bar.get_data()[0]) for bar in bars]
            heights = np.nansum(steps, axis=0)
            assert heights[::2] == pytest.approx(shares) and not heights[1::2].any()  # gaps between bars
        kinds = [next(bar.get_label() for bar in above.patches if bar.get_data()[0][2 * n] > 0) for n in range(16)]  # type: ignore[attr-defined]
        words = [became.split()[0] for became in dispositions(each.plan, each.protected)]
        assert kinds == [word.replace("protected", "kept") for word in words]
        assert above.get_ylim() == below.get_ylim()


def test_every_expert_has_one_disposition_and_layers_are_told_apart() -> None:
    each = layer(1, 16, 12, 1, rescaled=(4,))
    found = dispositions(each.plan, each.protected)
    names = [each.name for each in named([layer(0), layer(0, module="vision.0"), layer(1)])]
    assert names == ["model.layers.0.mlp.experts", "vision.0", "Layer 1"]
    assert len(found) == 16 and found[15] == "dropped" and found[11] == "protected as slot 11"
    assert found[0] == found[12] == "merged into slot 0" and found[5] == "kept as slot 5"
    assert found[4] == "rescaled as slot 4"
    assert all_dispositions([each.plan] * 2) == "16 experts kept, 2 rescaled, 12 merged into 6 and 2 dropped"


def test_grid_of_experts_draws_every_cell(made: dict[str, Figure]) -> None:
    """Kept, merged, dropped and protected are told apart without colours, too: equal marks are equal groups."""
    data = report()
    (canvas,) = canvases(made["experts"])
    (axes,) = canvas.axes
    shades = np.asarray(axes.images[0].get_array())
    filled = {(column, row, to_hex(shades[row, column])) for row, column in np.ndindex(shades.shape[:2])}
    looks = [(column, row, *cell) for row, each in enumerate(data.layers) for column, cell in enumerate(cells(each))]
    assert filled == {(column, row, colour.lower()) for column, row, colour, _ in looks}
    *marked, frames = [
        np.asarray(each.get_offsets()).tolist() for each in axes.collections if isinstance(each, PathCollection)
    ]
    assert sorted(chain(*marked)) == sorted([column, row] for column, row, _, mark in looks if mark)
    assert frames == [[expert, row] for row, each in enumerate(data.layers) for expert in each.protected]
    said = " ".join(text.get_text() for text in canvas.legends[0].get_texts())
    assert all(word in said for word in ("kept", "merged", "dropped", "protected"))
    assert "Grid of 4 MoE layers by 16 experts: 36 experts kept, 24 merged into 12 and 4 dropped" in made["experts"].alt
    assert len(set(cells(layer(0, 144, 72, 0)))) == 72


def test_the_curve_of_a_distillation_runs_through_its_evaluations(made: dict[str, Figure]) -> None:
    (axes,) = canvases(made["distillation"])[0].axes
    start, curve, ring = axes.get_lines()
    told = STEPS[1]["result"]
    assert list(curve.get_xdata()) == [entry["step"] for entry in told["curve"]]
    assert list(curve.get_ydata()) == [entry["kl"] for entry in told["curve"]]
    assert [*ring.get_xdata(), *ring.get_ydata()] == [told["best"], told["after"]]
    assert list(start.get_ydata()) == [told["before"]] * 2
    alt = made["distillation"].alt
    assert alt.endswith("0.36 after 0 steps, 0.13 after 30; the state after 20 was taken, at 0.125.")


def test_what_is_not_known_is_not_drawn() -> None:
    assert list(by_name(bare())) == ["experts"]
    half = report(2)
    half = replace(half, layers=(replace(half.layers[0], similarity=None, visits_before=(0.0,) * 16), half.layers[1]))
    assert len(by_name(half)["similarity"].drawings) == 1 and len(by_name(half)["visits"].drawings) == 2
    assert [each.name for each in figures(half, ("errors", "experts"))] == ["errors", "experts"]


@pytest.mark.filterwarnings("error")
def test_errors_that_no_axis_can_hold_are_left_to_the_table() -> None:
    for before, after in ((1.7e308, -1.7e308), (math.inf, math.nan)):
        odd = layer(0, heldout_error_before=before, heldout_error_after=after, error=None)
        assert "errors" not in by_name(report(layers=(odd,)))
    odd = layer(0, heldout_error_before=5e-324, heldout_error_after=-9e29, error=1e308)
    found = by_name(report(layers=(odd,)))["errors"]
    assert png(found.title, found.drawings)[:4] == b"\x89PNG" and "-9e+29" in found.alt


def test_errors_lie_at_their_values(made: dict[str, Figure]) -> None:
    (axes,) = canvases(made["errors"])[0].axes
    drawn = {
        str(line.get_label()): [float(value) for value in np.asarray(line.get_xdata())] for line in axes.get_lines()
    }
    for field, label in ERRORS.items():
        assert drawn[label] == [getattr(each, field) for each in report().layers]
    assert [text.get_text() for text in axes.get_yticklabels()] == [each.name for each in report().layers]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # from above
