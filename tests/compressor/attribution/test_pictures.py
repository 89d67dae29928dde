import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from PIL import Image
from scipy.stats import spearmanr

from compressor.attribution.figures import Attribution, Sender
from compressor.attribution.hubs import Hub, find_hubs
from compressor.attribution.pictures import NAMES, pictures
from compressor.attribution.report import findings, write_attribution
from compressor.document.blocks import Figure
from tests.support.attribution_results import attribution, sender
from tests.support.rendered_figures import assert_texts_apart, axes_of, canvases
from tests.support.small import tree

SMALL = attribution(hubs={(1, 3): 400.0, (2, 6): 90.0})
LARGE = attribution(layers=64, experts=3, heads=1, dense=(0, 1, 2, 3), hubs={(n, n % 3): 500.0 for n in range(4, 40)})
ODD_NAME = replace(sender("other", 2, (0.5, 0.25, 0.125)), name="model.layers.2.a_$module_whose^name$_is_long")
MODELS: dict[str, Attribution] = {
    "small": SMALL,
    "large": LARGE,
    "one receiver": attribution(layers=2, experts=4, shared=False),
    "zeros": attribution(scale=0.0),
    "huge and tiny": replace(
        SMALL, senders=(*SMALL.senders, *(sender("other", n, (10.0**-n, 1e9, 0.0)) for n in range(12)))
    ),
    "long names": replace(
        SMALL,
        senders=(ODD_NAME, replace(ODD_NAME, name="$x^$"), *SMALL.senders),
        model="org/$m_" + "x" * 120 + " $y^2$",
    ),
    "two mixers in a layer": replace(SMALL, senders=(*SMALL.senders, replace(SMALL.senders[1], name="mamba_mixer"))),
    "nothing": replace(SMALL, senders=(), receivers=()),
    "no numbers": replace(SMALL, senders=(sender("token", None, (math.inf, math.nan, 1.0)),)),
}


def drawn(name: str, made: Attribution, hubs: Sequence[Hub] = ()) -> Figure:
    return {figure.name: figure for figure in pictures(made, hubs, 4)}[name]


def panels(name: str, made: Attribution, hubs: Sequence[Hub] = ()) -> dict[str, Axes]:
    figure = drawn(name, made, hubs)
    return {axes.get_title(loc="left").replace("\n", " "): axes for axes in axes_of(figure) if axes.images}


def cells(axes: Axes) -> np.ndarray[Any, Any]:
    """The numbers that the colours stand for; NaN for blank cells."""
    return np.asarray(np.ma.filled(axes.images[0].get_array(), np.nan))  # type: ignore[no-untyped-call]


def rows(senders: tuple[Sender, ...], name: str = "influence") -> np.ndarray[Any, Any]:
    found = [[math.nan if value is None else abs(value) for value in getattr(each, name)] for each in senders]
    return np.array([row for row in found if not all(map(math.isnan, row))])


def names(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.get_yticklabels()]


@pytest.mark.parametrize("name", ["small", "large", "one receiver"])
def test_cells_are_the_influences_on_one_scale(name: str) -> None:
    made = MODELS[name]
    found = panels("influence", made)
    kinds = {"token embedding": "token", "attention": "attention", "dense MLP": "mlp", "MoE": "moe"}
    wanted = {title: rows(made.of_kind(kind)) for title, kind in kinds.items() if len(rows(made.of_kind(kind)))}
    assert found.keys() == wanted.keys()
    for title, axes in found.items():
        np.testing.assert_allclose(cells(axes), wanted[title], rtol=1e-6)
    limits = {axes.images[0].get_clim() for axes in found.values()}
    assert len(limits) == 1
    assert next(iter(limits))[1] == pytest.approx(np.nanmax(np.concatenate([*wanted.values()])))


def test_rows_and_columns_are_numbered_by_layer() -> None:
    found = panels("influence", SMALL)
    assert names(found["attention"]) == ["L0", "L1", "L2", "L3"] and names(found["MoE"]) == ["L1", "L2"]
    assert [text.get_text() for text in found["MoE"].get_xticklabels()] == ["1", "2", "3"]
    several = panels("influence", MODELS["two mixers in a layer"])["attention"]
    assert names(several)[0] == "model.layers.0.self_attn" and names(several)[-1] == "mamba_mixer"


def test_promotion_and_inhibition_have_a_column_each_on_the_same_scale() -> None:
    whole = panels("scores", SMALL)
    found = dict(whole)
    for title, kind in {"token embedding": "token", "attention": "attention", "dense MLP": "mlp", "MoE": "moe"}.items():
        for score, name in {"APS": "positive", "ANS": "negative"}.items():
            np.testing.assert_allclose(cells(found.pop(f"{title}: {score}")), rows(SMALL.of_kind(kind), name))
    assert not found
    assert len({each.images[0].get_clim() for each in whole.values()}) == 1
    colours = {title[-3:]: each.images[0].get_cmap().name for title, each in whole.items()}
    assert colours["APS"] != colours["ANS"]


def test_strips_are_the_strongest_experts_and_heads_with_hubs_marked() -> None:
    found = panels("experts", SMALL, find_hubs(SMALL))
    experts, heads = found["strongest routed experts (★ hub)"], found["strongest attention heads"]
    assert names(experts)[:2] == ["★ L1 E3", "★ L2 E6"] and len(names(experts)) == 4
    assert not any("★" in label for label in [*names(experts)[2:], *names(heads)])
    for axes, kind in ((experts, "expert"), (heads, "head")):
        strong = tuple(sorted(SMALL.of_kind(kind), key=lambda each: -each.total_influence)[:4])
        np.testing.assert_allclose(cells(axes), rows(strong))
    assert "strongest routed experts (★ hub)" in panels("experts", SMALL)


def points(axes: Axes) -> dict[str, list[tuple[float, float]]]:
    return {
        str(line.get_label()): sorted(map(tuple, np.asarray(line.get_xydata()).tolist())) for line in axes.get_lines()
    }


def measured(*senders: Sender) -> list[tuple[float, float]]:
    both = [pair for each in senders for pair in zip(each.influence, each.rank_change, strict=True)]
    return sorted((x, y) for x, y in both if x is not None and y is not None)


def test_points_are_influence_and_rank_change() -> None:
    components, experts = axes_of(drawn("causal", SMALL, find_hubs(SMALL)))
    kinds = {"token embedding": "token", "attention": "attention", "dense MLP": "mlp", "MoE": "moe"}
    wanted = {title: measured(*SMALL.of_kind(kind)) for title, kind in {**kinds, "shared experts": "shared"}.items()}
    assert points(components) == wanted
    hubs = {(1, 3): "hub L1 E3", (2, 6): "hub L2 E6"}
    by_label: dict[str, list[Sender]] = {}
    for each in SMALL.of_kind("expert"):
        by_label.setdefault(hubs.get((each.layer, each.number), "no hub"), []).append(each)  # type: ignore[arg-type]
    assert points(experts) == {label: measured(*found) for label, found in by_label.items()}


def test_the_rank_correlation_is_in_the_title() -> None:
    senders = tuple(
        sender("expert", 1, (0.5 + n, 2.0 * n, None), number=n, rank_change=(float(n * 7 % 5), 1.0 / (1 + n), None))
        for n in range(6)
    )
    _, experts = axes_of(drawn("causal", replace(SMALL, senders=senders)))
    wanted = spearmanr(*zip(*measured(*senders), strict=True)).statistic
    assert f"Spearman rank correlation {wanted:.2f} (12 pairs)" in experts.get_title()
    flat, _ = axes_of(drawn("causal", MODELS["zeros"]))
    assert "no rank correlation" in flat.get_title()


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
def test_no_text_covers_another_or_leaves_its_picture(name: str) -> None:
    made = MODELS[name]
    for picture in pictures(made, find_hubs(made), 10):
        for canvas in canvases(picture):
            assert_texts_apart(canvas)


@pytest.mark.full
def test_the_files_are_pngs_and_the_same_each_time(tmp_path: Path) -> None:
    made = attribution(layers=3, heads=1, dense=(), hubs={(0, 3): 400.0})
    for folder in ("one", "two"):
        write_attribution(findings(made), tmp_path / folder, False)
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    for name in NAMES:
        with Image.open(tmp_path / "one" / f"{name}.png") as picture:
            assert picture.format == "PNG"
    with Image.open(tmp_path / "one" / "influence.png") as picture:
        assert (0xFD, 0xE7, 0x24) in {colour for _, colour in picture.convert("RGB").getcolors(1 << 24)}
