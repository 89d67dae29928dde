import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.document.drawing import ROLES
from compressor.report.comparison_report import Comparison, choice, comparison_figure, sentences, write_reports
from compressor.report.comparison_rows import Row, Variant, related
from tests.support.rendered_figures import canvases

BASE = (1.0, 1.2, 0.9, 1.1)  # losses of sequences


def pair(nbytes: int, kls: tuple[float, ...], share: float = 0.5, scheme: str = "int4") -> Row:
    """A pair whose loss is above the base's by twice its KL."""
    losses = tuple(loss + 2 * kl for loss, kl in zip(BASE, kls, strict=True))
    way = {"name": "base", "correction": "none"} if share == 1 else {"name": "auto", "correction": "ridge"}
    size: dict[str, Any] = {
        "bytes": nbytes,
        "share": share,
        "scheme": scheme,
        "group_size": 64,
    }
    size |= {"experts": round(8 * share), "experts_before": 8, "parameters": 4000}
    return Row(
        variant=Variant(strategy=way["name"], **way, **size),
        loss=sum(losses) / 4,
        kl=sum(kls) / 4,
        flips=0.1,
        kl_by_sequence=kls,
        loss_by_sequence=losses,
    )


def comparison(pairs: list[Row], **others: Any) -> Comparison:
    base = pair(8000, (0.0,) * 4, 1.0, "none")
    fields: dict[str, Any] = {
        **{"formats": ("none", "int4"), "limit": None, "context": 0, "cache": 0, "parameters": 4000},
        **{"left_out": (), "formats_left_out": ("int2",), "seed": 0, "versions": {"torch": "2.13.0"}},
        **{"calibration": {"source": "/home/wiki.txt", "tokens": 64}, "evaluation": {"wiki": 32}},
        "calibration_seconds": 1.0,
        **others,
    }
    return Comparison(model="tiny", rows=related([base, *pairs]), **fields)


@given(st.lists(st.tuples(st.integers(1, 7000), st.floats(0.01, 5)), unique_by=(lambda x: x[0], lambda x: x[1])))
def test_the_frontier_is_what_nothing_dominates(drawn: list[tuple[int, float]]) -> None:
    """Against all pairs of pairs; behind is the distance to the best of those that are no larger."""
    made = comparison([pair(nbytes, (kl,) * 4) for nbytes, kl in drawn])
    sizes = [each.variant.bytes for each in made.rows]
    assert sizes == sorted(sizes, reverse=True)
    for each in made.rows:
        assert each.standing.frontier is not any(
            one.variant.bytes < each.variant.bytes and one.kl < each.kl for one in made.rows
        )
        best = min(one.kl for one in made.rows if one.variant.bytes <= each.variant.bytes)
        assert each.standing.behind == pytest.approx(each.kl - best, abs=1e-12)


def test_increases_are_paired_with_the_base_by_sequence() -> None:
    made = comparison([pair(1000, (0.1, 0.3, 0.1, 0.3))])
    (found,) = [each for each in made.rows if each.variant.bytes == 1000]
    assert made.increase(found) == pytest.approx(0.4)
    assert found.standing.loss_error == pytest.approx(math.sqrt(4 * 0.04 / 3) / 2)  # of 0.2, 0.6, 0.2, 0.6
    assert found.standing.kl_error == pytest.approx(math.sqrt(4 * 0.01 / 3) / 2)


def test_what_is_within_a_standard_error_of_the_best_is_named() -> None:
    pairs = [
        pair(3000, (0.2, 0.2, 0.2, 0.2), 1.0, "int4"),
        pair(2900, (0.1, 0.35, 0.1, 0.35), 0.75, "int8"),  # 0.025 behind, standard error 0.072
        pair(2800, (0.25, 0.25, 0.25, 0.26), 0.5, "none"),  # 0.0525 behind, and surely so
    ]
    made = comparison(pairs, limit=3000)
    assert [each.variant.bytes for each in made.fitting] == [3000, 2900, 2800]
    assert [each.variant.bytes for each in made.alike] == [2900]
    first, second = choice(made)
    assert first.startswith(
        "Best of 3 that fit in 3 kB: 8 of 8 experts, int4 (3 kB, 6 bits a weight; KL 0.2000 ± 0.0000"
    )
    assert second == "On 4 held-out sequences it cannot be told apart from 6 of 8 experts, int8 (2.9 kB)."
    assert (
        "0.0525 ± 0.0025 below that of the next, 4 of 8 experts, as stored"
        in choice(comparison([pairs[0], pairs[2]], limit=3000))[1]
    )
    content = made.to_dict()
    assert (content["best"], content["alike"]) == ("8 of 8 experts, int4", ["6 of 8 experts, int8"])


def test_the_cache_counts_and_what_does_not_fit_is_said() -> None:
    made = comparison([pair(3000, (0.2,) * 4), pair(1000, (0.4,) * 4)], limit=3000, context=64, cache=500)
    assert [each.variant.bytes for each in made.fitting] == [1000]
    assert "fit in 3 kB beside 500 B for 64 tokens of context" in choice(made)[0]
    assert choice(replace(made, limit=1499)) == [
        "Nothing fits in 1.5 kB beside 500 B for 64 tokens of context: the smallest is 4 of 8 experts, int4, with 1 kB."
    ]
    assert choice(replace(made, limit=None)) == []
    assert sentences(replace(made, left_out=("int3 with 1/2 of the experts (odd)",)))[-2:] == [
        "Left out: int3 with 1/2 of the experts (odd).",
        "Not tried: GPTQ in place of rounding to nearest, int2, "
        "strategies other than auto, corrections other than ridge, other shares and splits.",
    ]


def test_files_hold_all_pairs_and_the_picture_its_marks(tmp_path: Path) -> None:
    broken = pair(900, (math.nan,) * 4, 0.25, "nvfp4")
    made = comparison([pair(3000, (0.2,) * 4), broken, pair(1000, (0.4,) * 4, 0.5, "int2")], limit=2000)
    written = write_reports(made, tmp_path / "out")
    content = json.loads(written[0].read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert [each["bytes"] for each in content["rows"]] == [8000, 3000, 1000, 900]
    assert content["rows"][-1]["kl"] is None and content["best"] == "4 of 8 experts, int2"
    text = written[1].read_text(encoding="utf-8")
    assert "**4 of 8**" in text and "Calibrated with wiki.txt (64 tokens)" in text and "/home" not in text
    (canvas,) = canvases(comparison_figure(made))
    (axes,), (legend,) = canvas.axes, canvas.legends
    drawn = {(float(x), float(y)) for line in axes.lines for x, y in zip(*line.get_data(), strict=True) if x > 1}
    shown = {size for size, increase in drawn if math.isfinite(increase) and size != 2000}
    assert shown == {1000, 3000, 8000}  # what is no number is not
    names = [each.get_text() for each in legend.get_texts()]
    assert set(names[:-1]) == {"base", "auto + ridge, int4", "auto + ridge, int2", "auto + ridge, nvfp4"}
    assert names[-1] == "no model is smaller and better"
    (rings,) = [line for line in axes.lines if line.get_markersize() == 12]
    assert [float(size) for size in rings.get_xdata()] == [8000, 3000, 1000]
    assert [float(line.get_xdata()[0]) for line in axes.lines if line.get_color() == ROLES["bad"]] == [2000]
