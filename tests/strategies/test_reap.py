"""REAP, gated mass, MAN, MSAN and count-guided: scores by a loop over the tokens of a plain forward, by hand, refusals.

How many stay of each routing group, and that protected ones do, is `keep_best`'s (tests/compressor/steps/prune).
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.errors import CompressionError
from compressor.model.moe_layer import MoeLayer
from compressor.progress import Silent
from compressor.recipe.registry import load_strategy
from compressor.statistics.statistics import LayerStatistics
from strategies.ranked import SALIENCIES, Reap, count_guided, gated_mass, man, msan
from tests.support.opened_models import Calls, batches, calibration, one_expert, opened, plain_calls
from tests.support.plans import by_hand, kept, make_plan

Options, plan = Reap.Options, Reap.plan
OTHERS = ("gated-mass", "count-guided", "man", "msan")

SUMS: dict[str, list[float]] = {  # of three experts that are like no other, two alike and one that no token reached
    "routed_count": [4, 0, 1, 2, 3, 2],
    "norm_sum": [8, 0, 5, 6, 3, 6],
    "squared_norm_sum": [20, 0, 25, 18, 99, 18],
    "gated_norm_sum": [2, 0, 2, 3, 1.5, 3],
}


def stats(top_k: int = 2, sums: Any = None, **groups: Any) -> LayerStatistics:
    """A layer with these sums; by default those above."""
    values = {key: torch.tensor(value, dtype=torch.float64) for key, value in (sums or SUMS).items()}
    count = len(next(iter(values.values())))
    layer = MoeLayer("layers.1.experts", "layers.1", "layers.1.gate", "layers.1", 1, count, top_k, **groups)
    return LayerStatistics(layer, 6, values)


def naive_scores(stock: Any, layer: MoeLayer, calls: Calls) -> dict[str, list[float]]:
    """Each saliency of each expert, over lists of its visits: (gate weight, output norm) one by one."""
    visits: list[list[tuple[float, float]]] = [[] for _ in range(layer.experts)]
    if not calls.experts_arguments:
        return dict.fromkeys((*SALIENCIES, *OTHERS), [0.0] * layer.experts)
    hidden, index, weights = calls.joined()
    for expert in range(layer.experts):
        outputs = one_expert(stock.get_submodule(layer.name), expert, hidden).double()
        for token in range(len(hidden)):
            for place in range(layer.top_k):
                if int(index[token, place]) == expert:
                    length = sum(value**2 for value in outputs[token].tolist()) ** 0.5
                    visits[expert].append((float(weights[token, place]), length))
    mean = [max(1, len(seen)) for seen in visits]
    return {
        "reap": [sum(g * n for g, n in seen) / count for seen, count in zip(visits, mean, strict=True)],
        **{key: [float(len(seen)) for seen in visits] for key in ("frequency", "count-guided")},
        "ean": [sum(n for _, n in seen) for seen in visits],
        "man": [sum(n for _, n in seen) / count for seen, count in zip(visits, mean, strict=True)],
        "msan": [sum(n * n for _, n in seen) / count for seen, count in zip(visits, mean, strict=True)],
        "gated-mass": [sum(g * n for g, n in seen) for seen in visits],
    }


def best(scores: list[float], keep: int, layer: MoeLayer, protected: frozenset[int] = frozenset()) -> list[int]:
    """The experts to keep: protected ones first, then by score, then by number; equally many of each block."""
    size = layer.experts // layer.routing_groups
    found: list[int] = []
    for begin in range(0, layer.experts, size):
        block = sorted(range(begin, begin + size), key=lambda e: (e not in protected, -scores[e], e))
        found += block[: keep // layer.routing_groups]
    return sorted(found)


@pytest.mark.parametrize("saliency", [*SALIENCIES, *OTHERS])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "ernie4_5_vl_moe"])
def test_a_whole_model_against_a_loop_over_its_tokens(name: str, saliency: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock)
    options = {"saliency": saliency} if saliency in SALIENCIES else {}
    strategy = load_strategy("reap" if options else saliency, options)
    guarded = {layer.name: frozenset({5}) for layer in model.architecture.layers[:1]}
    first, second = (
        make_plan(model, strategy, 4, options, calibration(parts), Silent(), protected=guarded) for _ in range(2)
    )
    assert by_hand(first).to_json() == by_hand(second).to_json()
    calls = plain_calls(stock, model.architecture, parts)
    for layer, made in zip(model.architecture.layers, first.layers, strict=True):
        scores = naive_scores(stock, layer, calls[layer.name])[saliency]
        assert kept(made) == best(scores, 4, layer, guarded.get(layer.name, frozenset()))
        share = sum(scores[expert] for expert in kept(made)) / (sum(scores) or 1)
        assert next(iter(made.figures.values())) == pytest.approx(share, abs=2e-6)
        assert made.decided_by == {"gated-mass": "gated_norm_sum", "count-guided": "routed_count"}.get(
            saliency, saliency
        )


@pytest.mark.parametrize(
    ("saliency", "keep", "expected", "share"),
    [
        ("reap", 2, [2, 3], 3.5 / 6),  # means 0.5 0 2 1.5 0.5 1.5: of the tie, the lower
        ("reap", 4, [0, 2, 3, 5], 5.5 / 6),
        ("frequency", 3, [0, 3, 4], 9 / 12),
        ("ean", 3, [0, 3, 5], 20 / 28),
    ],
)
def test_cases_by_hand(saliency: str, keep: int, expected: list[int], share: float) -> None:
    made = plan(stats(), keep, options=Options(saliency))
    assert kept(made) == expected
    assert made.figures == {"kept_share_of_saliency": round(share, 6)}


def test_man_and_msan_by_hand() -> None:
    made = man.plan(stats(), 3)
    assert kept(made) == [2, 3, 5] and made.figures == {"kept_share_of_saliency": round(11 / 14, 6)}  # 2 0 5 3 1 3
    made = msan.plan(stats(), 2)
    assert kept(made) == [2, 4] and made.figures == {"kept_share_of_saliency": round(58 / 81, 6)}  # 5 0 25 9 33 9


def test_gated_mass_and_count_guided_by_hand() -> None:
    made = gated_mass.plan(stats(), 3)
    assert kept(made) == [0, 3, 5]  # 2 0 2 3 1.5 3
    assert made.figures == {"kept_share_of_saliency": round(8 / 11.5, 6)}
    assert {"gated_norm_sum"} == gated_mass.NEEDS and load_strategy("gated-mass").options is None
    made = count_guided.plan(stats(), 3)
    assert kept(made) == [0, 3, 4] and made.dropped == (1, 2, 5)
    assert made.figures == {"kept_share_of_visits": round(9 / 12, 6)}
    for keep in range(2, 7):
        assert kept(plan(stats(), keep, options=Options("frequency"))) == kept(count_guided.plan(stats(), keep))


def test_a_rare_specialist_stays_by_its_mean_but_not_by_its_mass() -> None:
    found = stats(sums={"gated_norm_sum": [8, 6, 3, 1], "routed_count": [16, 12, 1, 4]})  # means 0.5, 0.5, 3 and 0.25
    assert kept(gated_mass.plan(found, 2)) == [0, 1]
    assert kept(plan(found, 2)) == [0, 2]


@pytest.mark.parametrize("saliency", SALIENCIES)
def test_unreached_experts_go_first_and_unreached_layers_keep_the_lowest(saliency: str) -> None:
    assert kept(plan(stats(), 5, options=Options(saliency))) == [0, 2, 3, 4, 5]
    silent = plan(stats(sums={key: [0.0] * 6 for key in SUMS}), 3, options=Options(saliency))
    assert kept(silent) == [0, 1, 2]
    assert silent.figures == {"kept_share_of_saliency": 0.0}


def test_outputs_that_are_not_finite_are_refused() -> None:
    overflowed = {**SUMS, "gated_norm_sum": [2, 0, float("inf"), 3, 1, 3]}
    with pytest.raises(CompressionError, match=r"layers\.1\.experts: the outputs of expert 2 are not finite .*float32"):
        plan(stats(sums=overflowed), 3)
    with pytest.raises(CompressionError, match="the outputs of expert 2 are not finite"):
        gated_mass.plan(stats(sums=overflowed), 3)


def test_needs_are_what_the_saliency_reads() -> None:
    for saliency in SALIENCIES:
        strategy = load_strategy("reap", {"saliency": saliency})
        only = {key: SUMS[key] for key in strategy.needs}
        assert kept(strategy.plan_layer(stats(sums=only), 3)) == kept(plan(stats(), 3, options=Options(saliency)))
        for missing in strategy.needs:
            fewer = {key: value for key, value in SUMS.items() if key != missing}
            with pytest.raises(CompressionError, match=f"'{missing}' was not collected"):
                strategy.plan_layer(stats(sums=fewer), 3)
    assert load_strategy("reap", {"saliency": "ean"}).needs == {"norm_sum"}
