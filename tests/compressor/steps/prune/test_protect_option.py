"""`--protect` of plan, compress and compare: what stays bit for bit, what is refused, and what auto sees and costs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from compressor.checkpoint.source import locate
from compressor.entry_points import PROTECTORS
from compressor.model.opened import open_model
from compressor.pipeline import resolve
from tests.support import small, zoo
from tests.support.audit import paths_of
from tests.support.command_line import Run, names, refused
from tests.support.plans import pruned, recipe_of
from tests.support.plugins import install
from tests.support.small import tree

pytestmark = pytest.mark.usefixtures("offline")

EXPERTS = "model.layers.{}.mlp.experts"
HUBS = [{"layer": 0, "expert": 3, "influence": 9.5}, {"layer": 1, "expert": 6}, {"layer": 1, "expert": 0}]
SIZES = ("--samples", 16, "--sequence-length", 32)


def by_module(*layers: list[int]) -> dict[str, list[int]]:
    return {EXPERTS.format(number): experts for number, experts in enumerate(layers) if experts}


PROTECTED = by_module([3], [0, 6])


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
    return ("--calibration", originals / "calibration.txt", *SIZES)


@pytest.fixture
def hubs(originals: Path) -> Path:
    return originals / "hubs.json"


def content_of(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def written(out: Path) -> dict[str, Any]:
    return pruned(content_of(out / "compression.json")["plan"])


def planned(run: Run, path: Path, *arguments: Any) -> dict[str, Any]:
    """What `plan` decides with these arguments."""
    result = run("plan", "-o", path, "--overwrite", *arguments)
    assert result.status == 0, result.err
    return pruned(content_of(path))


def same_bytes(source: Path, out: Path, layer: int, expert: int) -> None:
    """The expert's weights and router row stand unchanged at the place of its group."""
    before, after = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    groups = [group["members"] for group in written(out)["layers"][layer]["groups"]]
    slot = groups.index([expert])
    block = f"model.layers.{layer}.block_sparse_moe"
    for part in ("w1", "w2", "w3"):
        old, new = (f"{block}.experts.{number}.{part}.weight" for number in (expert, slot))
        assert torch.equal(before[old], after[new])
    assert torch.equal(before[f"{block}.gate.weight"][expert], after[f"{block}.gate.weight"][slot])


@pytest.mark.parametrize(
    "arguments",
    [
        zoo.full(("--strategy", "count-guided")),
        ("--strategy", "data-centric", "--merge", "learned", "--option", "align=true", "--sequential"),
        zoo.full(("--strategy", "router-guided", "--experts", 2)),
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
    arguments = (model, "--experts", 3, "--correct", "ridge", "--strategy", "hc-smoe", "--protect", hubs, *data)
    summary = run("compress", "-o", tmp_path / "out", *arguments, "--json")
    assert summary.status == 0 and json.loads(summary.out)["protected_experts"] == 3
    plan = planned(run, tmp_path / "plan.json", *arguments)
    assert run("apply", tmp_path / "plan.json", "-o", tmp_path / "applied").status == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "applied")
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
    ("which", "experts", "hubs", "message"),
    [
        ("model", 2, [(1, 1), (1, 2), (1, 5)], "layers.1.mlp.experts: 3 protected experts do not fit into the 2 pl"),
        ("groups", 4, [(1, 0), (1, 1), (1, 3)], "layers.1.mlp.experts: 3 .* the 2 places of experts 0 to 3"),
        ("model", 4, [(7, 1)], "layer 7 has no experts module; layers with experts are 0 to 1"),
        ("model", 4, None, "--protect .*absent.json is neither 'auto' nor a file"),
    ],
)
def test_what_cannot_be_is_refused_before_any_text_is_read(
    command: str, which: str, experts: int, hubs: Any, message: str, originals: Path, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / ("hubs.json" if hubs else "absent.json")
    if hubs:
        path.write_text(json.dumps([{"layer": layer, "expert": expert} for layer, expert in hubs]))
    before = names(tmp_path)
    asked = (originals / which, "-o", tmp_path / "out", "--experts", experts, "--protect", path)
    with paths_of("open", "calibration.txt") as read:
        refused(run(command, *asked, "--calibration", originals / "calibration.txt"), message)
    assert not read and names(tmp_path) == before


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


def test_compare_protects_in_every_row(run: Run, model: Path, data: tuple[Any, ...], tmp_path: Path) -> None:
    """Random drops too: with all places taken by protected experts, every way of dropping is the same."""
    hubs, out = tmp_path / "hubs.json", tmp_path / "comparison"
    hubs.write_text(json.dumps([{"layer": layer, "expert": e} for layer in (0, 1) for e in (7, 2)]))
    rows = ("--strategies", "count-guided,hc-smoe", "--correct", "none", "--random-seeds", 2)
    asked = ("compare", model, *rows, "--protect", hubs, *data, "--evaluation-samples", 4)
    result = run(*asked, "-o", out, "--experts", 2)
    assert result.status == 0, result.err
    content = content_of(out / "comparison.json")
    assert content["protected"] == by_module([2, 7], [2, 7])
    assert len({row["loss"] for row in content["rows"][1:]}) == 1 and len(content["rows"]) == 5
    assert f"{EXPERTS.format(1)}: 2, 7" in (out / "comparison.md").read_text()
    hubs.write_text(json.dumps([{"layer": 0, "expert": e} for e in (7, 2, 1)]))
    several = run(*asked, "-o", tmp_path / "no", "--experts", "3,2")
    refused(several, "layers.0.mlp.experts: 3 protected experts do not fit into the 2 places when 2 are kept")


FOUND = f"""
FOUND = [(0, 5), (0, 1), (0, 6), (1, 2)]
def find(planner):
    def shown(text):
        assert not text.heldout
        print("shown", sum(len(batch) for batch in text.batches))
    planner.once("found", shown)
    return [({EXPERTS!r}.format(layer), expert) for layer, expert in FOUND]
def first(planner, count):
    return [(layer.name, expert) for layer in planner.model.architecture.layers for expert in range(count)]
"""


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A third party's protector, which finds experts 5, 1 and 6 of the first layer and 2 of the second."""
    install(tmp_path / "site", monkeypatch, "found", FOUND, group=PROTECTORS, value=":find")


@pytest.mark.usefixtures("found")
def test_experts_that_do_not_fit_are_let_go_with_one_warning(
    run: Run, model: Path, data: tuple[Any, ...], tmp_path: Path
) -> None:
    arguments = ("--experts", 2, "--protect", "found", "--strategy", "hc-smoe", *data)
    result = run("compress", model, "-o", tmp_path / "out", *arguments)
    assert result.status == 0 and result.err.count("WARNING") == 1
    assert "1 of 4 experts of --protect found do not fit where 2 are kept" in result.err
    assert written(tmp_path / "out")["protected"] == by_module([1, 5], [2])


@pytest.mark.usefixtures("found")
def test_what_finds_experts_sees_text_once_without_what_is_held_out(
    run: Run, model: Path, originals: Path, data: tuple[Any, ...], tmp_path: Path
) -> None:
    """Plans in order, corrections and several sources included; of 16 sequences a correction holds two out."""
    small.text_file(tmp_path, small.TEXT.upper())
    sources = (*data, "--calibration", tmp_path / "calibration.txt")
    for text, more, seen in (
        (data, ("--strategy", "reap", "--sequential"), "16\n"),
        (data, ("--strategy", "auto", "--sequential", "--set", "prune.correct.steps=2"), "14\n"),
        (sources, ("--strategy", "count-guided"), ""),
    ):
        arguments = (model, "--experts", 4, "--protect", "found", *more, *text)
        result = run("plan", "-o", tmp_path / "plan.json", "--overwrite", *arguments)
        assert result.status == 0 and result.out.count("shown") == 1 and f"shown {seen}" in result.out
        plan = pruned(content_of(tmp_path / "plan.json"))
        assert plan["protected"] == by_module([1, 5, 6], [2])
    rows = ("--strategies", "reap", "--random-seeds", 1, "--evaluation-samples", 4)
    result = run("compare", model, "-o", tmp_path / "c", "--experts", "4,2", "--protect", "found", *rows, *sources)
    assert result.status == 0 and result.out.count("shown") == 1, result.err
    assert "1 of 4 experts of --protect found do not fit where 2 are kept" in result.err
    assert content_of(tmp_path / "c" / "comparison.json")["protected"] == by_module([1, 5], [2])


@pytest.mark.full
@pytest.mark.usefixtures("found")
def test_found_experts_give_the_plan_of_a_list_and_no_more_reading_of_text(
    run: Run, model: Path, originals: Path, tmp_path: Path
) -> None:
    """Finding, planning and correction share what was read, and warn of it once."""
    (tmp_path / "list.json").write_text(json.dumps([{"layer": 0, "expert": e} for e in (5, 1, 6)]))
    long = ("--calibration", originals / "calibration.txt", "--samples", 1000, "--sequence-length", 32)
    arguments = (model, "--experts", 4, "--strategy", "reap", "--correct", "ridge", *long)
    with paths_of("open", "calibration.txt") as once:
        assert run("compress", "-o", tmp_path / "plain", *arguments).status == 0
    with paths_of("open", "calibration.txt") as reads:
        result = run("compress", "-o", tmp_path / "out", "--protect", "found", *arguments)
    assert result.status == 0 and len(reads) == len(once) > 0
    assert result.err.count("WARNING: calibration data") == result.err.count("WARNING") == 1
    plan = planned(run, tmp_path / "plan.json", "--protect", "found", *arguments)
    assert run("apply", tmp_path / "plan.json", "-o", tmp_path / "applied").status == 0
    assert tree(tmp_path / "out") == tree(tmp_path / "applied")
    listed = planned(run, tmp_path / "list-plan.json", "--protect", tmp_path / "list.json", *arguments)
    assert plan["layers"][0]["groups"] == listed["layers"][0]["groups"]


def test_a_third_party_finds_as_many_experts_as_asked(
    run: Run, model: Path, data: tuple[Any, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", monkeypatch, "first", FOUND, group=PROTECTORS, value=":first")
    arguments = (model, "--experts", 4, "--strategy", "model-centric", *data)
    plan = planned(run, tmp_path / "p.json", *arguments, "--protect", "first:2")
    assert plan["protected"] == by_module([0, 1], [0, 1])
    wrong = run("plan", "-o", tmp_path / "no.json", *arguments, "--protect", "auto:2")
    refused(wrong, "--protect auto:2 should be auto, without a number")


def test_the_experts_that_stand_highest_in_the_graph_are_protected(
    run: Run, model: Path, data: tuple[Any, ...], tmp_path: Path
) -> None:
    """As `attribute` ranks them on the same text."""
    assert run("attribute", model, "-o", tmp_path / "attribution", *data).status == 0
    ranked = content_of(tmp_path / "attribution" / "attribution.json")["graph"]["first"]["relative PageRank"]
    for count in (1, 3):
        arguments = (model, "--experts", 4, "--protect", f"graph:{count}", "--strategy", "model-centric", *data)
        expected: tuple[list[int], list[int]] = ([], [])
        for layer, expert in (re.fullmatch(r"L(\d) E(\d)", label).groups() for label in ranked[:count]):
            expected[int(layer)].append(int(expert))
        assert planned(run, tmp_path / "plan.json", *arguments)["protected"] == by_module(*map(sorted, expected))


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
    (tmp_path / "model").mkdir()
    arguments = ("-o", tmp_path / "out", "--experts", 4, "--protect", f"graph{count}")
    refused(run(command, tmp_path / "model", *arguments), "should be graph:N with a whole number N above 0")
    assert names(tmp_path) == ["model"]


def test_the_analysis_leaves_the_model_as_it_was(run: Run, model: Path, data: tuple[Any, ...], tmp_path: Path) -> None:
    """Random experts are no hubs, and the plan is that of a model nobody looked at."""
    arguments = ("--experts", 4, "--strategy", "data-centric", "--merge", "learned", *data)
    result = run("plan", model, "-o", tmp_path / "auto.json", "--protect", "auto", *arguments)
    assert result.status == 0 and "no expert of this model is a hub" in result.err
    assert run("plan", model, "-o", tmp_path / "plain.json", *arguments).status == 0
    auto, plain = (content_of(tmp_path / name) for name in ("auto.json", "plain.json"))
    assert auto["steps"][0]["options"].pop("protect") == "auto" and auto == plain
