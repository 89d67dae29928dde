"""Gated mass: by a loop over the tokens of a plain forward, by hand, and beside REAP's mean."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer
from compressor.progress import Silent
from compressor.recipe.registry import load_strategy, option_fields
from compressor.statistics.statistics import LayerStatistics, collect
from strategies import reap
from strategies.gated_mass import plan
from tests.opened import batches, calibration, one_expert, opened, plain_calls
from tests.plans import by_hand, make_plan


def stats(mass: list[float], counts: list[float] | None = None, **groups: Any) -> LayerStatistics:
    layer = MoeLayer("layers.1.experts", "layers.1", "layers.1.gate", "layers.1", 1, len(mass), 2, **groups)
    values = {"gated_norm_sum": torch.tensor(mass, dtype=torch.float64)}
    if counts is not None:
        values["routed_count"] = torch.tensor(counts, dtype=torch.float64)
    return LayerStatistics(layer, 9, values)


def kept(made: Any) -> list[int]:
    assert made.is_drop
    return [group.members[0] for group in made.groups]


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "ernie4_5_vl_moe"])
def test_a_whole_model_against_a_loop_over_its_tokens(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock)
    strategy = load_strategy("gated-mass")
    first, second = (make_plan(model, strategy, 4, {}, calibration(parts), Silent()) for _ in range(2))
    assert by_hand(first).to_json() == by_hand(second).to_json()
    calls = plain_calls(stock, model.architecture, parts)
    for layer, made in zip(model.architecture.layers, first.layers, strict=True):
        mass = [0.0] * layer.experts
        for hidden, index, weights in list(calls[layer.name].experts_arguments):  # one_expert's calls are noted too
            outputs = [one_expert(stock.get_submodule(layer.name), expert, hidden) for expert in range(8)]
            for token in range(len(hidden)):
                for expert, weight in zip(index[token].tolist(), weights[token].tolist(), strict=True):
                    mass[expert] += float((weight * outputs[expert][token]).double().norm())
        size = layer.experts // layer.routing_groups
        blocks = [range(begin, begin + size) for begin in range(0, layer.experts, size)]
        chosen = [sorted(block, key=lambda e: (-mass[e], e))[: 4 // len(blocks)] for block in blocks]
        assert kept(made) == sorted(expert for block in chosen for expert in block)
        share = sum(mass[expert] for expert in kept(made)) / (sum(mass) or 1)
        assert made.figures == {"kept_share_of_saliency": pytest.approx(share, abs=2e-6)}
        assert made.decided_by == "gated_norm_sum"


def test_a_case_by_hand_with_a_tie_and_an_unreached_expert() -> None:
    made = plan(stats([3, 0, 5, 1, 3, 4]), 3)
    assert kept(made) == [0, 2, 5]
    assert made.figures == {"kept_share_of_saliency": 0.75}
    assert kept(plan(stats([3, 0, 5, 1, 3, 4]), 5)) == [0, 2, 3, 4, 5]
    silent = plan(stats([0, 0, 0, 0]), 2)
    assert kept(silent) == [0, 1] and silent.figures == {"kept_share_of_saliency": 0.0}


def test_a_rare_specialist_stays_by_its_mean_but_not_by_its_mass() -> None:
    found = stats([8, 6, 3, 1], counts=[16, 12, 1, 4])  # means 0.5, 0.5, 3 and 0.25
    assert kept(plan(found, 2)) == [0, 1]
    assert kept(reap.plan(found, 2)) == [0, 2]


@given(mass=st.lists(st.floats(0, 1e6), min_size=3, max_size=12), visits=st.integers(1, 1000), keep=st.integers(2, 3))
def test_mass_and_mean_agree_where_all_are_visited_alike(mass: list[float], visits: int, keep: int) -> None:
    visits = 2 ** (visits % 11)  # so that the quotients are exact
    found = stats(mass, counts=[float(visits)] * len(mass))
    assert kept(plan(found, keep)) == kept(reap.plan(found, keep))


def test_protected_experts_stay_and_routing_groups_keep_equally_many() -> None:
    assert kept(plan(stats([3, 0, 5, 1, 3, 4]), 3, frozenset({1, 3}))) == [1, 2, 3]
    with pytest.raises(CompressionError, match=r"layers\.1\.experts: 3 protected experts do not fit into 2"):
        plan(stats([3, 0, 5, 1]), 2, frozenset({0, 1, 3}))
    groups = {"routing_groups": 2, "chosen_groups": 1, "experts_per_group": 2}
    assert kept(plan(stats([9, 8, 7, 6, 0, 0, 1, 0], **groups), 4)) == [0, 1, 4, 6]
    with pytest.raises(CompressionError, match="do not divide into its 2 routing groups"):
        plan(stats([9, 8, 7, 6, 0, 0, 1, 0], **groups), 5)


def test_refusals_say_why() -> None:
    with pytest.raises(CompressionError, match="1 experts are fewer than the top-k of 2; keep at least 2"):
        plan(stats([1, 2, 3]), 1)
    with pytest.raises(CompressionError, match="the outputs of expert 1 are not finite"):
        plan(stats([1, float("nan"), 3]), 2)
    with pytest.raises(CompressionError, match="strategy 'gated-mass' has no option 'saliency'; it has none"):
        load_strategy("gated-mass", {"saliency": "ean"})


def test_only_the_sum_is_measured(tmp_path: Path) -> None:
    strategy = load_strategy("gated-mass")
    assert strategy.needs == {"gated_norm_sum"} and option_fields("gated-mass") == {}
    assert strategy.summary.startswith("Gated mass: keep the experts")
    stock, model = opened("mixtral", tmp_path)
    for found in collect(model, strategy.needs, calibration(batches(stock, (1,), length=2)), Silent()):
        missed = (found.gated_norm_sum == 0).nonzero().flatten().tolist()
        assert len(missed) >= 4  # two tokens of two experts each
        assert not set(kept(strategy.plan_layer(found, 8 - len(missed)))) & set(missed)
