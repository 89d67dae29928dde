"""A strategy from another package: found by its entry point, measured, planned and refused like the built-in ones."""

from pathlib import Path
from typing import Any

import pytest
import torch

from compressor.errors import CompressionError
from compressor.planning import registry
from compressor.planning.make import make_plan
from compressor.planning.registry import load_strategy, names, option_fields
from compressor.progress import Silent
from tests.opened import batches, calibration, one_expert, opened, plain_calls
from tests.plugins import REAP, install


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_plugin_plans_a_whole_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch, "their-reap", REAP)
    assert "their-reap" in names(registry.STRATEGIES)
    strategy = load_strategy("their-reap")
    assert strategy.needs == {"gated_norm_sum", "routed_count"}
    assert strategy.summary.startswith("REAP: keep the experts")
    assert option_fields("their-reap") == {}
    stock, model = opened(name, tmp_path / "model")
    parts = batches(stock)
    guarded = {model.architecture.layers[0].name: frozenset({7})}
    made = make_plan(model, strategy, 5, {}, calibration(parts), Silent(), protected=guarded)
    assert made.strategy == "their-reap" and made.is_drop
    calls = plain_calls(stock, model.architecture, parts)
    for layer, plan in zip(model.architecture.layers, made.layers, strict=True):
        hidden, index, weights = calls[layer.name].joined()
        scores = []
        for expert in range(layer.experts):
            norms = one_expert(stock.get_submodule(layer.name), expert, hidden).norm(dim=-1)
            gated = [
                float(weights[token, place] * norms[token])
                for token in range(len(hidden))
                for place in range(layer.top_k)
                if index[token, place] == expert
            ]
            scores.append(sum(gated) / max(1, len(gated)))
        for expert in guarded.get(layer.name, ()):
            scores[expert] = float("inf")
        best = sorted(range(layer.experts), key=lambda expert: (-scores[expert], expert))[:5]
        assert [group.members for group in plan.groups] == [(expert,) for expert in sorted(best)]


def test_layer_plans_of_a_plugin_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch, "their-reap", REAP)
    strategy = load_strategy("their-reap")
    stock, model = opened("mixtral", tmp_path / "model")
    with pytest.raises(CompressionError, match="1 experts are fewer than the top-k of 2"):
        make_plan(model, strategy, 1, {}, calibration(batches(stock)), Silent())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "NEEDS = frozenset({'weighted_norm'})\ndef plan(*a): ...",
            "needs the statistic 'weighted_norm', which does not",
        ),
        ("NEEDS = {'routed_count'}\ndef plan(*a): ...", "is no plugin: it needs a frozenset NEEDS"),
        ("NEEDS = frozenset()", "is no plugin: .* and a function plan"),
        ("import no_such_package_anywhere", "cannot be imported: No module named 'no_such_package_anywhere'"),
        ("NEEDS = frozenset()\nOptions = dict\ndef plan(*a): ...", "Options should be a frozen dataclass"),
    ],
)
def test_a_plugin_at_fault_is_refused(
    source: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "broken", source)
    with pytest.raises(CompressionError, match=f"strategy 'broken'.*{message}"):
        load_strategy("broken")


def test_two_owners_of_a_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "one", monkeypatch, "their-reap", REAP, "first_package")
    install(tmp_path / "two", monkeypatch, "their-reap", REAP, "second_package")
    with pytest.raises(CompressionError, match=r"two packages offer 'their-reap' .*; uninstall one"):
        load_strategy("their-reap")


def test_an_unknown_name_lists_plugins_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "their-reap", REAP)
    with pytest.raises(
        CompressionError, match=r"no strategy 'thier-reap'; did you mean 'their-reap'\? known are .*their-reap"
    ):
        load_strategy("thier-reap")


def test_an_option_that_a_plugin_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "their-reap", REAP)
    with pytest.raises(CompressionError, match="strategy 'their-reap' has no option 'merge'; it has none"):
        load_strategy("their-reap", {"merge": "uniform"})


def test_a_plugin_reads_frozen_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch, "their-reap", REAP)
    seen: list[Any] = []
    strategy = load_strategy("their-reap")
    stock, model = opened("mixtral", tmp_path / "model")
    from compressor.calibration.collecting import collect

    for stats in collect(model, strategy.needs, calibration(batches(stock)), Silent()):
        before = stats.gated_norm_sum.clone()
        strategy.plan_layer(stats, 4, frozenset({1}))
        assert torch.equal(stats.gated_norm_sum, before)
        with pytest.raises(AttributeError):
            stats.layer = None  # type: ignore[assignment,misc]
        seen.append(stats)
    assert len(seen) == 2
