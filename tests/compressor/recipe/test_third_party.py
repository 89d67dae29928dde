"""A strategy from another package: found by its entry point, measured, planned and refused like the built-in ones."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import compressor
from compressor import entry_points
from compressor.checkpoint.source import find_model
from compressor.entry_points import names, packages
from compressor.errors import CompressionError
from compressor.model.opened import open_model
from compressor.pipeline.resolve import prepare
from compressor.progress import Silent
from compressor.recipe import registry
from compressor.recipe.registry import load_strategy
from tests.support import small
from tests.support.command_line import Run
from tests.support.opened_models import batches, calibration, one_expert, opened, plain_calls
from tests.support.plans import make_plan
from tests.support.plugins import REAP, install


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_plugin_plans_a_whole_model(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "site", monkeypatch, "their-reap", REAP)
    assert "their-reap" in names(registry.STRATEGIES)
    strategy = load_strategy("their-reap")
    assert strategy.needs == {"gated_norm_sum", "routed_count"}
    assert strategy.summary.startswith("REAP: keep the experts")
    assert load_strategy("their-reap").options is None
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


def test_an_unknown_name_or_option_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "their-reap", REAP)
    with pytest.raises(
        CompressionError, match=r"no strategy 'thier-reap'; did you mean 'their-reap'\? known are .*their-reap"
    ):
        load_strategy("thier-reap")
    with pytest.raises(CompressionError, match="strategy 'their-reap' has no option 'merge'; it has none"):
        load_strategy("their-reap", {"merge": "uniform"})


# --- faults of one plugin, which must not be everybody's --------------------------------------------------------------

BROKEN = {
    "an-error": ("raise RuntimeError('no\\nGPU here')", "RuntimeError: no GPU here"),
    "a-syntax-error": ("def plan(:", "SyntaxError"),
    "no-plan": ("NEEDS = frozenset()", "is no plugin: .* and a function plan"),
    "needs-a-set": ("NEEDS = {'routed_count'}\ndef plan(*a): ...", "is no plugin: it needs a frozenset NEEDS"),
    "odd-needs": (
        "NEEDS = frozenset({'odd'})\ndef plan(*a): ...",
        "needs the statistic 'odd', which does not",
    ),
    "odd-correction": (
        "NEEDS = frozenset()\nCORRECTION = 'ridgid'\ndef plan(*a): ...",
        "is no plugin: CORRECTION should be none, ridge, tune, not 'ridgid'",
    ),
    "odd-options": ("NEEDS = frozenset()\nOptions = dict\ndef plan(*a): ...", "Options should be a frozen dataclass"),
    "bad-defaults": (
        "from dataclasses import dataclass\nNEEDS = frozenset()\n@dataclass(frozen=True)\nclass Options:\n"
        "    a: int = 1\n    def __post_init__(self): 1 / 0\ndef plan(*a): ...",
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
    assert "reap" in found and len(found) == 19 and fault not in found
    (record,) = caplog.records
    said = record.getMessage()
    assert record.levelname == "WARNING" and f"strategy '{fault}'" in said and message.partition(".")[0] in said
    with pytest.raises(CompressionError, match=f"strategy '{fault}'.*{message}"):
        load_strategy(fault)


def test_the_others_are_listed_and_described_without_a_broken_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run
) -> None:
    install(tmp_path, monkeypatch, "broken", "raise RuntimeError('no GPU here')")
    shown = run("list", "strategies", "--json")
    listed = json.loads(shown.out)
    assert shown.status == 0 and len(listed) == 19
    assert all(set(each["help"]) == set(each["options"]) and all(each["help"].values()) for each in listed)
    assert "'broken'" in shown.err and "no GPU here; it is left out" in shown.err
    small.save(tmp_path / "model")
    refused = run("compare", tmp_path / "model", "-o", tmp_path / "more", "--strategies", "broken", "--experts", 4)
    assert refused.status == 2 and "RuntimeError: no GPU here" in refused.err and "Traceback" not in refused.err


def test_a_name_that_two_packages_offer_is_refused_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(tmp_path / "one", monkeypatch, "their-reap", REAP, "first_package")
    install(tmp_path / "two", monkeypatch, "their-reap", REAP, "second_package")
    assert len(list(registry.working_strategies())) == 19
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


def test_an_exporter_is_checked_and_gets_its_options(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "from dataclasses import dataclass\nfrom compressor.plugins import option\n@dataclass(frozen=True)\n"
        "class Options:\n    level: int = option(3, help='how small')\n"
        "def export(checkpoint, output, options, progress): ...\n"
    )
    install(tmp_path / "good", monkeypatch, "npz", source, group=registry.EXPORTERS)
    assert {"npz", "onnx"} <= set(names(registry.EXPORTERS))
    assert callable(registry.load_exporter("npz").export)
    assert registry.exporter_options("npz", {"level": 5}).level == 5
    listed = {each["name"]: each for each in json.loads(run("list", "exporters", "--json").out)}
    assert (listed["npz"]["help"], listed["npz"]["options"]) == ({"level": "how small"}, {"level": 3})
    with pytest.raises(CompressionError, match="exporter 'npz' has no option 'lvel'; it has level"):
        registry.exporter_options("npz", {"lvel": 5})
    with pytest.raises(CompressionError, match="exporter 'npz': option level is 'x', it should be like its default 3"):
        registry.exporter_options("npz", {"level": "x"})
    for number, (wrong, message) in enumerate(
        [
            ("def run(): ...", "is no plugin: it needs a function export"),
            ("raise ValueError('x')", "cannot be imported: ValueError: x"),
        ]
    ):
        install(tmp_path / str(number), monkeypatch, f"odd{number}", wrong, group=registry.EXPORTERS)
        with pytest.raises(CompressionError, match=f"exporter 'odd{number}'.*{message}"):
            registry.load_exporter(f"odd{number}")


def test_the_packages_of_plugins_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is installed, or uninstalled, while the process runs is, too."""
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
"""Steps that store tensors otherwise: one halves the width of experts, one packs them into bfloat16."""
from typing import Any, ClassVar
import torch
from compressor.plugins import (
    FORMAT, WEIGHTS, Step, StepOptions, plain_job, rewritten, rewritten_size,
)
def of_experts(name):
    return ".experts." in name
class Narrow(StepOptions):
    """Keep the first half of each expert's neurons."""
    name: ClassVar[str] = "narrow"
    implementation: ClassVar[str] = "storing_plugin:NarrowStep"
    order: ClassVar[int | None] = 4
    @property
    def changes(self): return frozenset({WEIGHTS})
class NarrowStep(Step[Narrow]):
    def change(self, name, tensor):
        if not of_experts(name): return tensor
        dim = 1 if "w2" in name else 0
        return tensor.narrow(dim, 0, tensor.shape[dim] // 2)
    def output_size(self, model, experts, changed=False): return rewritten_size(model, experts, self.change, changed)
    def writer(self, state):
        width = state.model.config.intermediate_size
        return rewritten(plain_job(state), self.change, {"intermediate_size": width // 2})
class Pack(StepOptions):
    """Store experts in bfloat16."""
    name: ClassVar[str] = "pack"
    implementation: ClassVar[str] = "storing_plugin:PackStep"
    order: ClassVar[int | None] = 4
    cannot_follow: ClassVar[dict[str, str]] = {FORMAT: "experts are packed once"}
    @property
    def changes(self): return frozenset({FORMAT})
class PackStep(Step[Pack]):
    def change(self, name, tensor): return tensor.bfloat16() if of_experts(name) else tensor
    def output_size(self, model, experts, changed=False): return rewritten_size(model, experts, self.change, changed)
    def writer(self, state): return rewritten(plain_job(state), self.change)
'''


def change(name: str, tensor: torch.Tensor, step: str) -> torch.Tensor:
    """What `step` should make of a stored tensor, computed another way."""
    if ".experts." not in name:
        return tensor
    if step == "pack":
        return tensor.to(torch.bfloat16)
    neurons = tensor.shape[1 if "w2" in name else 0] // 2
    return tensor[:, :neurons] if "w2" in name else tensor[:neurons]


@pytest.mark.parametrize("name", ["narrow", "pack"])
def test_a_step_that_stores_tensors_otherwise_is_known_to_dry_run_disk_check_and_order(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(
        tmp_path / "site", monkeypatch, name, STORING, "storing_plugin", entry_points.STEPS, f":{name.capitalize()}"
    )
    folder = small.save(tmp_path / "model")
    pruned = [{"prune": {"experts": 4, "strategy": "model-centric"}}]
    for steps, out in ((pruned, "pruned"), ([*pruned, name], "out")):
        compressor.compress(compressor.Recipe.of({"model": str(folder), "steps": steps}), tmp_path / out)
    before, after = (load_file(tmp_path / out / "model.safetensors") for out in ("pruned", "out"))
    assert set(before) == set(after)
    for key, tensor in before.items():
        assert torch.equal(after[key], change(key, tensor, name)), key

    recipe = compressor.Recipe.of({"model": str(folder), "steps": [*pruned, name]})
    nbytes = sum(value.nbytes for value in after.values())
    shown = compressor.dry_run(recipe)
    assert shown.after.bytes == nbytes < sum(value.nbytes for value in before.values())
    model = open_model(find_model(str(folder)))
    plain = sum(value.nbytes for value in before.values())
    assert prepare(recipe, model, model, None).space == plain + nbytes  # each stage beside the one before

    again = [*pruned, name, {"prune": {"experts": 3, "strategy": "model-centric"}}, {"correct": {"method": "ridge"}}]
    ordered = compressor.Recipe.of({"model": str(folder), "steps": again})
    if name == "pack":
        with pytest.raises(CompressionError, match="correct cannot stand after pack: it would write the experts"):
            compressor.dry_run(ordered)
    else:
        assert [step["name"] for step in compressor.dry_run(ordered).steps] == ["prune", "narrow", "prune", "correct"]
