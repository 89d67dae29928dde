"""A strategy from another package: found by its entry point, measured, planned and refused like the built-in ones."""

import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import compressor
from compressor import entry_points
from compressor.checkpoint.source import find_model
from compressor.entry_points import packages
from compressor.errors import CompressionError
from compressor.model.opened import open_model
from compressor.pipeline.resolve import prepare
from compressor.progress import Silent
from compressor.recipe import registry
from compressor.recipe.registry import load_strategy
from tests.support import small
from tests.support.opened_models import batches, calibration, opened
from tests.support.plans import make_plan
from tests.support.plugins import REAP, install


def test_an_unknown_name_or_option_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "their-reap", REAP)
    with pytest.raises(
        CompressionError, match=r"no strategy 'thier-reap'; did you mean 'their-reap'\? known are .*their-reap"
    ):
        load_strategy("thier-reap")
    with pytest.raises(CompressionError, match="strategy 'their-reap' has no option 'merge'; known are none"):
        load_strategy("their-reap", {"merge": "uniform"})


# --- faults of one plugin, which must not be everybody's --------------------------------------------------------------

BROKEN = {
    "an-error": ("raise RuntimeError('no\\nGPU here')", "RuntimeError: no GPU here"),
    "no-plan": ("NEEDS = frozenset()", "is no plugin: .* and a function plan"),
    "needs-a-set": ("NEEDS = {'routed_count'}\ndef plan(*a): ...", "is no plugin: it needs a frozenset NEEDS"),
    "odd-needs": ("NEEDS = frozenset({'odd'})\ndef plan(*a): ...", "needs the statistic 'odd', which does not"),
    "odd-correction": (
        "NEEDS = frozenset()\nCORRECTION = 'ridgid'\ndef plan(*a): ...",
        "is no plugin: CORRECTION should be none, ridge, tune, not 'ridgid'",
    ),
    "dataclass": (
        "from dataclasses import dataclass\nNEEDS = frozenset()\n@dataclass(frozen=True)\nclass Options:\n"
        "    a: int = 1\ndef plan(*a): ...",
        "Options is no class of options; write `class Options",
    ),
    "bad-defaults": (
        "from compressor.plugins import NamedOptions\nNEEDS = frozenset()\nclass Options(NamedOptions):\n"
        "    a: int = 1\n    def model_post_init(self, _): 1 / 0\ndef plan(*a): ...",
        "does not take these options: division by zero",
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_plugin_is_named_and_left_out(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    source, message = BROKEN[fault]
    install(tmp_path, monkeypatch, fault, source)
    found = [strategy.name for strategy in registry.working_strategies()]
    assert "reap" in found and len(found) == 21 and fault not in found
    (record,) = caplog.records
    said = record.getMessage()
    assert record.levelname == "WARNING" and f"strategy '{fault}'" in said and message.partition(".")[0] in said
    with pytest.raises(CompressionError, match=f"strategy '{fault}'.*{message}"):
        load_strategy(fault)


def test_a_name_that_two_packages_offer_is_refused_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path / "one", monkeypatch, "their-reap", REAP, "first_package")
    install(tmp_path / "two", monkeypatch, "their-reap", REAP, "second_package")
    assert len(list(registry.working_strategies())) == 21
    assert "two packages offer 'their-reap'" in caplog.text
    with pytest.raises(CompressionError, match=r"two packages offer 'their-reap' .*; uninstall one"):
        load_strategy("their-reap")


PLANS = {
    "too few": ("return LayerPlan.keep(stats.layer, range(1))", "1 experts are fewer than the top-k of 2"),
    "None": ("return None", "returned no plan of this layer that keeps 4 experts"),
    "another layer": (
        "from dataclasses import replace\n"
        "    return LayerPlan.keep(replace(stats.layer, name='model.layers.9.mlp.experts'), range(keep))",
        "returned no plan of this layer",
    ),
    "an exception": (
        "return stats.routed_cuont",
        r"failed: AttributeError: .*routed_cuont.*; mend its plan\(\) or choose another strategy",
    ),
    "an unknown merge": (
        "return merge_groups(stats, [[0, 1], [2, 3], [4, 5], [6, 7]], method='avg')",
        "there is no merge 'avg'; known are uniform, max, frequency, learned",
    ),
    "scores that are no numbers": (
        "return keep_best(stats, stats.routed_count * float('nan'), keep, protected)",
        r"the score of expert 0 is not a number",
    ),
}


@pytest.mark.parametrize("fault", PLANS)
def test_what_is_no_plan_of_the_layer_is_refused(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body, message = PLANS[fault]
    source = (
        "from compressor.plugins import LayerPlan, keep_best, merge_groups\n"
        "NEEDS = frozenset({'routed_count', 'weights'})\n"
        f"def plan(stats, keep, protected=frozenset()):\n    {body}\n"
    )
    install(tmp_path / "site", monkeypatch, "odd", source)
    stock, model = opened("mixtral", tmp_path / "model")
    where = "" if "no merge" in message else r"model\.layers\.0\.mlp\.experts: "
    who = "" if any(word in message for word in ("score", "no merge", "a group", "top-k")) else "strategy 'odd' "
    with pytest.raises(CompressionError, match=f"{where}{who}{message}"):
        make_plan(model, load_strategy("odd"), 4, {}, calibration(batches(stock)), Silent())


# --- exporters, options and the packages behind them ------------------------------------------------------------------


def test_the_packages_of_plugins_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "their-reap", REAP)
    assert packages() == ["compressor", "exporters", "strategies", "their_reap_plugin"]
    folders = list(sys.path)
    install(tmp_path, monkeypatch, "later", REAP)
    monkeypatch.setattr(sys, "path", folders)
    assert packages() == ["compressor", "exporters", "later_plugin", "strategies", "their_reap_plugin"]
    shutil.rmtree(tmp_path / "their_reap_plugin-1.0.dist-info")
    assert packages() == ["compressor", "exporters", "later_plugin", "strategies"]


# --- steps that store tensors in a way of their own -------------------------------------------------------------------

STORING = '''
"""A step that halves the width of experts."""
from typing import Any, ClassVar
import torch
from compressor.plugins import (
    Step, StepOptions, copy_job, rewritten, rewritten_size,
)
def of_experts(name):
    return ".experts." in name
class Narrow(StepOptions):
    """Keep the first half of each expert's neurons."""
    name: ClassVar[str] = "narrow"
    implementation: ClassVar[str] = "storing_plugin:NarrowStep"
    format: ClassVar[str | None] = "narrow"
class NarrowStep(Step[Narrow]):
    def change(self, name, tensor):
        if not of_experts(name): return tensor
        dim = 1 if "w2" in name else 0
        return tensor.narrow(dim, 0, tensor.shape[dim] // 2)
    def output_size(self, model, experts, changed=False): return rewritten_size(model, experts, self.change, changed)
    def write(self, state):
        width = state.model.config.intermediate_size
        return rewritten(copy_job(state.model), self.change, {"intermediate_size": width // 2})
'''


def test_a_step_that_stores_tensors_otherwise_is_known_to_dry_run_disk_check_and_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch, "narrow", STORING, "storing_plugin", entry_points.STEPS, ":Narrow")
    folder = small.save(tmp_path / "model")
    pruned = [{"prune": {"experts": 4, "strategy": "model-centric"}}]
    for steps, out in ((pruned, "pruned"), ([*pruned, "narrow"], "out")):
        compressor.compress(compressor.Recipe.of({"model": str(folder), "steps": steps}), tmp_path / out)
    before, after = (load_file(tmp_path / out / "model.safetensors") for out in ("pruned", "out"))
    assert set(before) == set(after)
    for key, tensor in before.items():
        if ".experts." in key:
            tensor = tensor.chunk(2, dim=1 if "w2" in key else 0)[0]
        assert torch.equal(after[key], tensor), key

    recipe = compressor.Recipe.of({"model": str(folder), "steps": [*pruned, "narrow"]})
    plain, nbytes = (sum(value.nbytes for value in tensors.values()) for tensors in (before, after))
    assert compressor.dry_run(recipe).after.bytes == nbytes < plain
    model = open_model(find_model(str(folder)))
    assert prepare(recipe, model, model, None).space == plain + nbytes  # each checkpoint beside the one before
    again = [*pruned, "narrow", {"prune": {"experts": 3, "strategy": "model-centric"}}]
    ordered = compressor.Recipe.of({"model": str(folder), "steps": again})
    assert [step["name"] for step in compressor.dry_run(ordered).steps] == ["prune", "narrow", "prune"]
