"""Options of the built-in strategies: what they need measured, and which values are refused; what auto stands for."""

from pathlib import Path
from typing import Any

import pytest

from compressor.errors import CompressionError
from compressor.recipe.registry import load_strategy
from tests.support.strategy_runs import planned_layers

LEARNED = {"inputs", "top_k_index", "top_k_weights", "router_arguments", "weights"}


@pytest.mark.parametrize(
    ("name", "options", "needs"),
    [
        ("model-centric", {}, {"weights"}),
        ("model-centric", {"merge": "learned"}, LEARNED),
        ("data-centric", {}, {"mixed_outputs"}),
        ("data-centric", {"mix_tokens": False}, {"expert_outputs"}),
        ("data-centric", {"merge": "max"}, {"mixed_outputs", "routed_count"}),
        ("hc-smoe", {}, {"expert_outputs", "routed_count"}),
        ("hc-smoe", {"merge": "uniform"}, {"expert_outputs"}),
        ("router-guided", {}, {"routed_count", "router_logits"}),
        ("router-guided", {"merge": "learned"}, LEARNED | {"routed_count", "router_logits"}),
        ("hub-guided", {}, {"gated_norm_sum", "rank_change"}),
        ("hub-guided", {"mass": "visits", "exponent": 2}, {"routed_count", "rank_change"}),
        ("hub-guided", {"mass": "visits", "exponent": 0.0}, {"routed_count"}),
    ],
)
def test_needs_follow_the_options(name: str, options: dict[str, Any], needs: set[str]) -> None:
    assert load_strategy(name, options).needs == needs


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, {"merge": "sum"}, "merge should be") for name in ("data-centric", "hc-smoe", "router-guided")),
        ("data-centric", {"similarity": "cka"}, "similarity should be 'linear-cka', 'rbf-cka' or"),
        ("model-centric", {"representation": "mean"}, "representation should be 'surrogate' or"),
        ("model-centric", {"similarity": "rbf-cka"}, "'similarity'; known are merge, merge_routers, align, repr"),
        ("reap", {"saliency": "ean"}, "'saliency'"),
        ("hub-guided", {"mass": "ean"}, "mass should be 'gated-mass' or 'visits', it is 'ean'"),
        *(("hub-guided", {"exponent": value}, "exponent should be") for value in (-0.5, 11, float("nan"))),
        ("ream", {"group_size": 1}, "group_size is 1; it must be 2 or more, or 0"),
    ],
)
def test_impossible_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(CompressionError, match=message):
        load_strategy(name, options)


def test_auto_is_energy_corrected_by_tune(tmp_path: Path) -> None:
    made, alone = (planned_layers("mixtral", tmp_path / name, name) for name in ("auto", "energy"))
    for layer, wanted in zip(made, alone, strict=True):
        assert layer.plan.groups == wanted.plan.groups
        assert layer.plan.figures == {**wanted.plan.figures, "won": "energy"}
    auto = load_strategy("auto")
    assert auto.correction == "tune" and auto.options is None and auto.needs == load_strategy("energy").needs
