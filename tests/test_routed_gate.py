"""`moe-compress gate --routing c3po` as it is typed: what is told, what is stored, and what is refused unread."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import compressor
from compressor.data.demo import demo_checkpoint
from compressor.evaluation.gate import GateRequest
from compressor.evaluation.gate_report import read_gate
from compressor.evaluation.tasks import EvaluationOptions
from compressor.pathways.options import PathwayOptions, Routing
from compressor.pathways.reference import reference_digest
from tests import small
from tests.command_line import Run, captured, refused
from tests.evaluations import Steps, ask, written_task

pytestmark = [pytest.mark.full, pytest.mark.usefixtures("offline", "own_cache")]

TASKS = ("moe_demo_recall", "moe_demo_sorting")


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_COMPRESSOR_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model, a smaller one, and a reference set of that one."""
    folder = tmp_path_factory.mktemp("gate")
    with demo_checkpoint() as demo:
        shutil.copytree(demo, folder / "base")
    data = ("--strategy", "count-guided", "--calibration", "demo", "--samples", 8, "--sequence-length", 64)
    made = captured("compress", folder / "base", "-o", folder / "smaller", "--experts", 8, *data)
    kept = captured("reference", folder / "smaller", "--tasks", "moe_demo_sorting", "--limit", 20, "-o", folder / "set")
    assert (made.status, kept.status) == (0, 0), (made, kept)
    return folder


def test_the_compressed_model_alone_is_routed_and_the_report_tells(run: Run, place: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(
        "gate", place / "base", place / "smaller", "--tasks", ",".join(TASKS), "--limit", 12, "--routing", "c3po",
        "--reference", place / "set", "--pathway-optimizer", "kernel", "--share", 0, "--pathway-layers", 2,
        "--max-drop", 0.12, "-o", out,
    )  # fmt: skip
    assert result.status in (1, 3), result
    found = read_gate(out)
    plain = {model: ask(place / model, *TASKS, limit=12) for model in ("base", "smaller")}
    for task in found.tasks:  # without a move both are what they are by themselves
        for figure, model in ((task.base, "base"), (task.compressed, "smaller")):
            assert figure == pytest.approx(sum(plain[model][task.task].values) / 12)
    assert found.routing is not None and found.routing.reference == reference_digest(place / "set")
    assert found.routing.options["share"] == 0 and found.routing.options["layers"] == 2
    assert found.routing.cost == pytest.approx(1.5)  # two layers of four once more
    told = "on pathways optimised by c3po (kernel, 3 neighbours of the reference set "
    assert told in (out / "gate.md").read_text() and told in (out / "gate.xml").read_text()
    assert told in " ".join(result.out.split()) and "which cost 1.5 plain forwards of the same items." in result.out
    content = json.loads((out / "gate.json").read_text())
    assert content["model_index"][0]["results"][0]["metrics"][0]["name"].endswith(", routed by c3po)")
    del content["routing"]  # as it was written before there was any
    (out / "gate.json").write_text(json.dumps(content))
    assert read_gate(out).routing is None


def test_results_are_stored_by_what_routed_them(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "set", tmp_path / "other")
    small.edit_json(tmp_path / "other" / "reference.json", lambda content: content.update(model="renamed"))
    wanted = GateRequest(EvaluationOptions(("moe_demo_sorting",), limit=4), 0.9, cache=tmp_path / "results")
    two = str(place / "base"), str(place / "smaller")

    def asked(routing: Routing | None) -> tuple[int, Any]:
        steps = Steps()
        found = compressor.gate(*two, wanted, routing=routing, progress=steps)
        return sum(phase.startswith("Evaluating smaller") for phase, _ in steps.phases), found

    mode = PathwayOptions("mode")
    first, second = (asked(Routing(place / "set", mode)) for _ in range(2))
    assert (first[0], second[0]) == (1, 0) and first[1].routing == second[1].routing is not None
    others = [Routing(place / "set", PathwayOptions("mode", share=0.2)), Routing(tmp_path / "other", mode), None]
    assert [asked(routing)[0] for routing in others] == [1, 1, 1]
    assert [asked(routing)[0] for routing in others] == [0, 0, 0]
    assert asked(None)[1].routing is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--reference", "set"), "--reference goes with --routing c3po"),
        (("--pathway-layers", 2), "--pathway-layers goes with --routing c3po"),
        (("--routing", "c3po"), "takes a reference set of the compressed model"),
        (("--routing", "c4po", "--reference", "set"), "there is no routing 'c4po'; known is c3po"),
        (("--routing", "c3po", "--reference", "none"), r"holds no reference\.json"),
        (("--routing", "c3po", "--reference", "set", "--optimizer", "oracle"), "optimizer is oracle; input should be"),
        (("--routing", "c3po", "--reference", "set", "--kernel", "flat"), "kernel is flat"),
        (("--routing", "c3po", "--reference", "set", "--steps", 0), "steps is 0"),
        (("--routing", "c3po", "--reference", "set", "--embedding", "some/model"), "embedded by 'own', not 'some/mo"),
        (("--routing", "c3po", "--reference", "set", "--tasks", "moe_demo_text"), "'moe_demo_text' rates whole texts"),
        (("--routing", "c3po", "--reference", "set", "--stream"), "leave out --stream or --routing"),
        (("--routing", "c3po", "--reference", "set", "--tasks", "written"), "'written' writes its answers"),
    ],
)
def test_what_cannot_be_is_refused_before_a_model_is_read(
    words: tuple[Any, ...], message: str, run: Run, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    written_task(tmp_path)
    tasks = () if "--tasks" in words else ("--tasks", TASKS[0])
    absent = ("gate", "no-base", "no-model")  # which would be told if they were looked for
    refused(run(*absent, *tasks, "--include-path", tmp_path, "--limit", 1, *words), message)


def test_the_set_of_another_model_is_refused_before_the_base_answers(run: Run, place: Path) -> None:
    words = ("--tasks", TASKS[0], "--limit", 3, "--max-drop", 0.9, "--routing", "c3po", "--reference", place / "set")
    result = run("gate", place / "base", place / "base", *words)
    refused(result, "is of a model with 8 experts a layer, base has 16")
    refused(run("gate", "--demo", *words), "judges a model that has a reference set; name two models")
