"""`--protect` of plan, compress and compare: what stays bit for bit, what is refused, and what auto sees and costs."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compressor.attribution.figures import Attribution, Receiver, Sender
from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.entry_points import PROTECTORS
from compressor.model.opened import open_model
from compressor.pipeline import resolve
from compressor.recipe.steps_plan import Plan
from tests.support import small
from tests.support.audit import paths_of
from tests.support.command_line import Run, names, refused
from tests.support.plans import pruned, recipe_of
from tests.support.plugins import install
from tests.support.small import tree

pytestmark = pytest.mark.usefixtures("offline", "hasty")

EXPERTS = "model.layers.{}.mlp.experts"
HUBS = [{"layer": 0, "expert": 3, "influence": 9.5}, {"layer": 1, "expert": 6}, {"layer": 1, "expert": 0}]
PROTECTED = {EXPERTS.format(0): [3], EXPERTS.format(1): [0, 6]}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("originals")
    small.save(folder / "model")
    small.save(folder / "groups", "deepseek_v3", num_nextn_predict_layers=0)
    small.text_file(folder)
    (folder / "hubs.json").write_text(json.dumps(HUBS), encoding="utf-8")
    return folder


@pytest.fixture
def model(originals: Path) -> Path:
    return originals / "model"


@pytest.fixture
def data(originals: Path) -> tuple[Any, ...]:
    return ("--calibration", originals / "calibration.txt", "--samples", 16, "--sequence-length", 32)


@pytest.fixture
def hubs(originals: Path) -> Path:
    return originals / "hubs.json"


def written(out: Path) -> dict[str, Any]:
    return pruned(json.loads((out / "compression.json").read_text(encoding="utf-8"))["plan"])


def planned(path: Path) -> dict[str, Any]:
    return pruned(json.loads(path.read_text(encoding="utf-8")))


def same_bytes(source: Path, out: Path, layer: int, expert: int) -> None:
    """The expert's weights and router row stand unchanged at the place of its group."""
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    groups = written(out)["layers"][layer]["groups"]
    (slot,) = [number for number, group in enumerate(groups) if group["members"] == [expert]]
    block = f"model.layers.{layer}.block_sparse_moe"
    for part in ("w1", "w2", "w3"):
        old, new = (f"{block}.experts.{number}.{part}.weight" for number in (expert, slot))
        assert torch.equal(before[old], after[new])
    assert torch.equal(before[f"{block}.gate.weight"][expert], after[f"{block}.gate.weight"][slot])


# --- a list of experts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ("--strategy", "count-guided"),
        ("--strategy", "model-centric"),
        ("--strategy", "data-centric", "--merge", "learned", "--option", "align=true", "--sequential"),
        ("--strategy", "router-guided", "--experts", 2),
        ("--strategy", "auto", "--correct", "none", "--sequential"),
    ],
)
def test_protected_experts_come_out_bit_for_bit(
    arguments: tuple[Any, ...], run: Run, model: Path, data: tuple[Any, ...], hubs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    result = run("compress", model, "-o", out, "--experts", 3, "--protect", hubs, *data, *arguments)
    assert result.status == 0, result.err
    assert "3 protected experts, neither merged nor dropped" in result.out
    for entry in HUBS:
        same_bytes(model, out, int(entry["layer"]), int(entry["expert"]))
    assert written(out)["protected"] == PROTECTED


def test_a_corrected_plan_keeps_them_too_and_the_same_plan_is_applied(
    run: Run, model: Path, data: tuple[Any, ...], hubs: Path, tmp_path: Path
) -> None:
    arguments = ("--experts", 3, "--correct", "ridge", "--strategy", "hc-smoe", "--protect", hubs, *data)
    summary = run("compress", model, "-o", tmp_path / "out", *arguments, "--json")
    assert summary.status == 0, summary.err
    assert json.loads(summary.out)["protected_experts"] == 3
    made = run("plan", model, "-o", tmp_path / "plan.json", *arguments)
    assert made.status == 0 and "3 protected experts, neither merged nor dropped" in made.out
    assert run("apply", tmp_path / "plan.json", "-o", tmp_path / "applied").status == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "applied")
    plan = planned(tmp_path / "plan.json")
    assert plan["protected"] == PROTECTED
    for layer in plan["layers"]:
        members = [group["members"] for group in layer["groups"]]
        assert all([expert] in members for expert in PROTECTED[layer["module"]])


def test_an_empty_list_changes_nothing(run: Run, model: Path, data: tuple[Any, ...], tmp_path: Path) -> None:
    (tmp_path / "none.json").write_text("[]")
    arguments = ("--experts", 4, "--strategy", "reap", *data)
    assert run("compress", model, "-o", tmp_path / "plain", *arguments).status == 0
    with_list = run("compress", model, "-o", tmp_path / "out", *arguments, "--protect", tmp_path / "none.json")
    assert with_list.status == 0 and "protected" not in with_list.out
    assert tree(tmp_path / "plain") == tree(tmp_path / "out")


@pytest.mark.parametrize("command", ["plan", "compress", "compare"])
@pytest.mark.parametrize(
    ("which", "experts", "content", "message"),
    [
        (
            "model",
            2,
            [{"layer": 1, "expert": e} for e in (1, 2, 5)],
            "layers.1.mlp.experts: 3 protected experts do not fit into the 2 places",
        ),
        (
            "groups",
            4,
            [{"layer": 1, "expert": e} for e in (0, 1, 3)],
            "layers.1.mlp.experts: 3 .* the 2 places of experts 0 to 3",
        ),
        ("model", 4, [{"layer": 7, "expert": 1}], "layer 7 has no experts module; layers with experts are 0 to 1"),
        ("model", 4, None, "--protect .*absent.json is neither 'auto' nor a file"),
    ],
)
def test_what_cannot_be_is_refused_before_any_text_is_read(
    command: str, which: str, experts: int, content: Any, message: str, originals: Path, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / ("hubs.json" if content else "absent.json")
    if content:
        path.write_text(json.dumps(content))
    before = names(tmp_path)
    asked = (originals / which, "-o", tmp_path / "out", "--experts", experts, "--protect", path)
    with paths_of("open", "calibration.txt") as read:
        refused(run(command, *asked, "--calibration", originals / "calibration.txt"), message)
    assert not read
    assert names(tmp_path) == before


def test_the_key_of_a_run_is_of_the_files_content(model: Path, tmp_path: Path) -> None:
    opened = open_model(locate(str(model), None), "float32", "cpu")
    path, copy = tmp_path / "hubs.json", tmp_path / "copy.json"
    path.write_text('[{"layer": 0, "expert": 2}]')
    copy.write_text('[{"layer": 0, "expert": 2, "influence": 0.5}]')

    def key(protect: str | None) -> str:
        recipe = recipe_of(model, experts=4, strategy="reap", protect=protect)
        return resolve.prepare(recipe, opened, opened, None).key()

    first = key(str(path))
    assert first == key(str(copy)) != key(None) != key("auto")
    assert len({key(protect) for protect in ("auto", "graph:1", "graph:2")}) == 3
    path.write_text('[{"layer": 0, "expert": 1}]')
    assert key(str(path)) != first


def test_compare_protects_in_every_row(
    run: Run, model: Path, data: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random drops too: with all places taken by protected experts, every way of dropping is the same."""
    hubs = tmp_path / "hubs.json"
    hubs.write_text(json.dumps([{"layer": layer, "expert": e} for layer in (0, 1) for e in (7, 2)]))
    out = tmp_path / "comparison"
    result = run(
        "compare", model, "-o", out, "--experts", 2, "--strategies", "count-guided,hc-smoe", "--correct", "none",
        "--random-seeds", 2, "--protect", hubs, *data, "--evaluation-samples", 4,
    )  # fmt: skip
    assert result.status == 0, result.err
    content = json.loads((out / "comparison.json").read_text())
    assert content["protected"] == {EXPERTS.format(0): [2, 7], EXPERTS.format(1): [2, 7]}
    assert len({row["loss"] for row in content["rows"][1:]}) == 1 and len(content["rows"]) == 5
    assert f"{EXPERTS.format(1)}: 2, 7" in (out / "comparison.md").read_text()
    hubs.write_text(json.dumps([{"layer": 0, "expert": e} for e in (7, 2, 1)]))
    several = run("compare", model, "-o", tmp_path / "no", "--experts", "3,2", "--protect", hubs, *data)
    refused(several, "layers.0.mlp.experts: 3 protected experts do not fit into the 2 places when 2 are kept")


# --- auto -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def attributed(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[int, Sequence[int]]], list[Calibration]]:
    """Have the analysis find these hubs of each layer, the strongest first; returns what it is shown."""

    def install(found: dict[int, Sequence[int]]) -> list[Calibration]:
        seen: list[Calibration] = []

        def sender(layer: int, expert: int) -> Sender:
            hubs = list(found.get(layer, ()))
            influence = 90.0 - hubs.index(expert) if expert in hubs else 1.0
            module = EXPERTS.format(layer)
            return Sender(
                f"{module}.{expert}", "expert", layer, module, expert, 0.5,
                (influence,), (1.0,), (-1.0,), (influence,), (None,),
            )  # fmt: skip

        def attribute(model: Any, data: Calibration, progress: Any, seed: int = 0) -> Attribution:
            seen.append(data)
            senders = tuple(sender(layer, expert) for layer in (0, 1) for expert in range(8))
            return Attribution("model", (Receiver("head", 2, 1.0, 0.0),), senders, (), data.tokens, {}, {}, {})

        monkeypatch.setattr("compressor.attribution.measure.attribute", attribute)
        return seen

    return install


Attributed = Callable[[dict[int, Sequence[int]]], list[Calibration]]


@pytest.mark.full
def test_auto_is_the_list_of_what_it_finds(
    run: Run, model: Path, data: tuple[Any, ...], hubs: Path, attributed: Attributed, tmp_path: Path
) -> None:
    seen = attributed({0: [3], 1: [6, 0]})
    for strategy in ("reap", "model-centric", "auto"):
        arguments = ("--experts", 3, "--strategy", strategy, "--sequential", *data)
        assert run("plan", model, "-o", tmp_path / "a.json", "--protect", "auto", "--overwrite", *arguments).status == 0
        assert run("plan", model, "-o", tmp_path / "b.json", "--protect", hubs, "--overwrite", *arguments).status == 0
        first, second = (Plan.load(tmp_path / name) for name in ("a.json", "b.json"))
        assert planned(tmp_path / "a.json")["protected"] == PROTECTED
        assert first.calibration is not None and (second.calibration is None) == (strategy == "model-centric")
        assert first.expert_plan.layers == second.expert_plan.layers and first.sequential == second.sequential
    assert first.calibration is not None
    held = [first.calibration["sources"][0]["heldout_samples"], sum(len(b) for b in seen[-1].batches)]
    assert held == [2, 14] and not seen[-1].heldout  # of 16 sequences, those that judge are not seen
    assert len(seen) == 3 and sum(len(batch) for batch in seen[0].batches) == 16


def test_hubs_that_do_not_fit_are_let_go_with_one_warning(
    run: Run, model: Path, data: tuple[Any, ...], attributed: Attributed, tmp_path: Path
) -> None:
    attributed({0: [5, 1, 6], 1: [2]})
    result = run(
        "compress", model, "-o", tmp_path / "out", "--experts", 2, "--protect", "auto", "--strategy", "hc-smoe", *data
    )
    assert result.status == 0
    assert (
        result.err.count("WARNING") == 1
        and "1 of 4 experts of --protect auto do not fit where 2 are kept" in result.err
    )
    assert written(tmp_path / "out")["protected"] == {EXPERTS.format(0): [1, 5], EXPERTS.format(1): [2]}


def test_the_experts_that_stand_highest_in_the_graph_are_protected(
    run: Run, model: Path, data: tuple[Any, ...], attributed: Attributed, tmp_path: Path
) -> None:
    """Here PageRank goes by influence alone, and relative PageRank is influence over the mean of the layer."""
    seen = attributed({0: [5, 1, 6], 1: [2]})  # 90, 89 and 88 stand before 5 experts of 1, and 90 before 7
    expected = {1: {1: [2]}, 2: {0: [5], 1: [2]}, 4: {0: [1, 5, 6], 1: [2]}}
    for count, layers in expected.items():
        arguments = ("--experts", 4, "--protect", f"graph:{count}", "--strategy", "model-centric", "--overwrite", *data)
        assert run("plan", model, "-o", tmp_path / "plan.json", *arguments).status == 0
        plan = planned(tmp_path / "plan.json")
        assert plan["protected"] == {EXPERTS.format(layer): experts for layer, experts in layers.items()}
    assert len(seen) == 3 and not seen[0].heldout
    result = run(
        "compress", model, "-o", tmp_path / "out", "--experts", 2, "--protect", "graph:6", "--strategy", "reap", *data
    )
    assert result.status == 0 and "2 of 6 experts of --protect graph:6 do not fit where 2 are kept" in result.err
    protected = written(tmp_path / "out")["protected"]
    assert protected[EXPERTS.format(0)] == [1, 5] and protected[EXPERTS.format(1)][:1] == [0]
    sizes = ("--evaluation-samples", 4, "--random-seeds", 1, "--strategies", "reap", "--json")
    result = run("compare", model, "-o", tmp_path / "c", "--experts", "4,3", "--protect", "graph:2", *sizes, *data)
    assert result.status == 0, result.err
    assert json.loads(result.out)["protected"] == {EXPERTS.format(0): [5], EXPERTS.format(1): [2]}


@pytest.mark.parametrize(
    ("command", "count"),
    [
        *(("plan", count) for count in (":", ":0", ":-1", ":1.5", ":ten", ":²", ":hubs.json", "")),
        *(("compress", ":ten"), ("compare", ":ten")),
    ],
)
def test_a_graph_without_a_number_is_refused_before_anything_is_read(
    command: str, count: str, run: Run, tmp_path: Path
) -> None:
    arguments = ("-o", tmp_path / "out", "--experts", 4, "--protect", f"graph{count}")
    refused(run(command, tmp_path / "no-model", *arguments), "should be graph:N with a whole number N above 0")
    assert names(tmp_path) == []


def test_a_third_party_finds_experts_to_protect(
    run: Run, model: Path, data: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = """
def first(planner, count):
    assert not planner.once("first", lambda text: text).heldout
    return [(layer.name, expert) for layer in planner.model.architecture.layers for expert in range(count)]
"""
    install(tmp_path / "site", monkeypatch, "first", source, group=PROTECTORS, value=":first")
    arguments = ("-o", tmp_path / "plan.json", "--experts", 4, "--strategy", "model-centric", *data)
    assert run("plan", model, *arguments, "--protect", "first:2").status == 0
    assert planned(tmp_path / "plan.json")["protected"] == {EXPERTS.format(layer): [0, 1] for layer in (0, 1)}
    refused(run("plan", model, *arguments, "--protect", "auto:2"), "--protect auto:2 should be auto, without a number")


def test_auto_in_a_plan_of_several_sources_and_in_a_comparison(
    run: Run, model: Path, originals: Path, attributed: Attributed, tmp_path: Path
) -> None:
    seen = attributed({0: [5, 1, 6], 1: [2]})
    small.text_file(tmp_path, small.TEXT.upper())
    sources = ("--calibration", originals / "calibration.txt", "--calibration", tmp_path / "calibration.txt")
    sizes = ("--samples", 16, "--sequence-length", 32)
    arguments = ("--experts", 4, "--strategy", "count-guided", "--protect", "auto", *sources, *sizes)
    assert run("plan", model, "-o", tmp_path / "plan.json", *arguments).status == 0
    expected = {EXPERTS.format(0): [1, 5, 6], EXPERTS.format(1): [2]}
    assert planned(tmp_path / "plan.json")["protected"] == expected and len(seen) == 1
    result = run(
        "compare", model, "-o", tmp_path / "comparison", "--experts", "4,2", "--strategies", "reap", "--json",
        "--random-seeds", 1, "--protect", "auto", *sources, *sizes, "--evaluation-samples", 4,
    )  # fmt: skip
    assert result.status == 0 and "1 of 4 experts of --protect auto do not fit where 2 are kept" in result.err
    assert json.loads(result.out)["protected"] == {EXPERTS.format(0): [1, 5], EXPERTS.format(1): [2]}
    assert len(seen) == 2 and sum(len(batch) for batch in seen[1].batches) == 14


@pytest.mark.full
def test_the_text_is_read_once_and_warned_of_once(
    run: Run, model: Path, originals: Path, attributed: Attributed, tmp_path: Path
) -> None:
    """Attribution, planning and correction share what was read."""
    attributed({0: [3], 1: [6]})
    arguments = ("--experts", 4, "--protect", "auto", "--strategy", "reap", "--correct", "ridge")
    long = ("--calibration", originals / "calibration.txt", "--samples", 1000, "--sequence-length", 32)
    plain = ("--experts", 4, "--strategy", "reap", "--correct", "none")
    with paths_of("open", "calibration.txt") as once:
        assert run("compress", model, "-o", tmp_path / "plain", *plain, *long).status == 0
    with paths_of("open", "calibration.txt") as reads:
        result = run("compress", model, "-o", tmp_path / "out", *arguments, *long)
    assert result.status == 0 and len(reads) == len(once) > 0
    assert result.err.count("WARNING: calibration data") == result.err.count("WARNING") == 1
    assert run("plan", model, "-o", tmp_path / "plan.json", *arguments, *long).status == 0
    assert run("apply", tmp_path / "plan.json", "-o", tmp_path / "applied").status == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "applied")


def test_the_analysis_leaves_the_model_as_it_was(run: Run, model: Path, data: tuple[Any, ...], tmp_path: Path) -> None:
    """The real one: random experts are no hubs, and the plan is that of a model nobody looked at."""
    arguments = ("--experts", 4, "--strategy", "data-centric", "--merge", "learned", *data)
    result = run("plan", model, "-o", tmp_path / "auto.json", "--protect", "auto", *arguments)
    assert result.status == 0 and "no expert of this model is a hub" in result.err
    assert run("plan", model, "-o", tmp_path / "plain.json", *arguments).status == 0
    auto, plain = (json.loads((tmp_path / name).read_text()) for name in ("auto.json", "plain.json"))
    assert auto["steps"][0]["options"].pop("protect") == "auto" and auto == plain
