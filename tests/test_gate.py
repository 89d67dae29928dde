import gzip
import json
import re
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import compressor
from compressor.cli.terminal import annotate
from compressor.data.demo import demo_checkpoint
from compressor.entry_points import EXPORTERS
from compressor.model.loaded import given
from compressor.pipeline.compress import next_count
from compressor.pipeline.outcome import Attempt
from compressor.quality_gate.baseline import Baseline
from compressor.quality_gate.report import read_gate
from compressor.recipe.recipe import recipe_yaml
from compressor.run_record import cache_folder
from tests.support import small
from tests.support.command_line import Result, Run, captured, names, refused, succeeded
from tests.support.eval_tasks import no_stock_tasks
from tests.support.gate_results import gate, task
from tests.support.plugins import install
from tests.support.small import tree

pytestmark = pytest.mark.usefixtures("offline", "own_cache")

EASY = "moe_demo_sorting"  # which survives nearly everything
TASKS = f"{EASY},moe_demo_recall"
CALIBRATION = ("--calibration", "demo", "--samples", 32, "--sequence-length", 128, "--strategy", "count-guided")
MEASURED = "moe_demo,moe_demo_text"
REPORTS = ["gate.json", "gate.md", "gate.xml"]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def own_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOE_COMPRESSOR_CACHE", str(cache))
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with demo_checkpoint() as folder:
        return Path(shutil.copytree(folder, tmp_path_factory.mktemp("base") / "original"))


def changed(base: Path, folder: Path, noise: float) -> Path:
    shutil.copytree(base, folder)
    file = folder / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(0)
    for name, value in tensors.items():
        if "experts" in name:
            draw = torch.randn(value.shape, generator=generator) * noise * value.float().std()
            tensors[name] = (value.float() + draw).to(value.dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def sickened(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    small.edit_tensors(folder, lambda tensors: tensors["model.norm.weight"].fill_(float("nan")))
    return folder


@pytest.fixture(scope="module")
def good(base: Path) -> Path:
    return changed(base, base.parent / "good", 0.02)


@pytest.fixture(scope="module")
def ruined(base: Path) -> Path:
    return changed(base, base.parent / "ruined", 3.0)


@pytest.mark.full
def test_a_good_model_passes_and_a_ruined_one_fails(
    run: Run, base: Path, good: Path, ruined: Path, tmp_path: Path
) -> None:
    ask = ("--tasks", TASKS, "--limit", 120, "--max-drop", 0.05, "-o")
    result = run("gate", base, good, *ask, tmp_path / "good")
    assert result.status == 0 and "Pass" in result.out, result
    assert "layer in memory" not in result.out  # of itself it streams only what does not fit
    assert names(tmp_path / "good") == REPORTS
    found = read_gate(tmp_path / "good" / "gate.json")
    assert found.pooled is not None and found.pooled.items == 240 and found.pooled.upper < 0.05
    assert found.verdict == "pass" and [row.verdict for row in found.rows] == ["pass", "pass", "pass"]
    assert [row.max_drop for row in found.rows] == pytest.approx([0.15, 0.15, 0.05])
    suite = ElementTree.parse(tmp_path / "good" / "gate.xml").getroot()
    assert len(list(suite.iter("testcase"))) == 3
    assert not list(suite.iter("failure")) and not list(suite.iter("skipped"))
    assert run("gate", base, ruined, *ask, tmp_path / "ruined").status == 1
    found = read_gate(tmp_path / "ruined")
    assert found.verdict == "fail" and found.pooled is not None and found.pooled.lower > 0.05
    assert list(ElementTree.parse(tmp_path / "ruined" / "gate.xml").getroot().iter("failure"))


@pytest.mark.full
def test_an_identical_copy_passes_or_the_gate_is_refused(run: Run, base: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    result = run("gate", base, copy, "--tasks", TASKS, "--limit", 150)  # by itself neither has enough items
    assert result.status == 0, result
    lines = [line.split("│") for line in result.out.splitlines() if line.startswith("│")]
    first = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in lines[:3]}
    alone = ["150", "0.03", "0.0198", "0.0427", "0.0562"]
    together = ["300", "0.01", "0.0099", "0.0262", "0.0367"]
    assert first == {EASY: alone, "moe_demo_recall": alone, "all together": together}
    sick = sickened(base, tmp_path / "sick")  # which would be refused for another reason if it were asked
    for more in (("--limit", 10), ("--max-drop", 0.001)):
        said = "20 items .*at least 299 items" if "--limit" in more else "400 items .*at least 2,995 items"
        refused(run("gate", sick, sick, "--tasks", TASKS, "--json", *more), said)
        refused(
            captured("compress", sick, "-o", tmp_path / "out", *CALIBRATION, "--search", "--gate", TASKS, *more),
            "items",
        )
    assert names(tmp_path) == ["copy", "sick"]


def test_a_dry_run_needs_no_models_and_says_what_the_gate_can_show(run: Run) -> None:
    result = succeeded(run("gate", "--tasks", "moe_demo,moe_demo_text", "--limit", 70, "--dry-run", "--json"))
    content = json.loads(result.out)
    assert [(each["task"], each["items"], each["max_drop"]) for each in (*content["tasks"], content["pooled"])] == [
        ("moe_demo", 350, 0.03), ("moe_demo_text", 70, 0.01), ("all together", 350, 0.01)
    ]  # fmt: skip
    assert content["tasks"][1]["shown"] is None and content["pooled"]["shown"][0] == pytest.approx(
        1 - 0.05 ** (1 / 350)
    )
    shown = run("gate", "--demo", "--limit", 9, "--dry-run")
    assert shown.status == 2 and re.search(r"all together +│ +45", shown.out) and "--limit 12" in shown.err


def test_the_demo_asks_its_tasks_beside_other_conditions(run: Run, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("some text\n")
    (tmp_path / "suite.yaml").write_text(json.dumps({"tasks": [{"name": "moe_demo_text"}]}))
    skills = [f"moe_demo_{skill}" for skill in ("arithmetic", "sorting", "reversal", "recall", "facts")]
    for more, tasks in (
        (("--text", tmp_path / "text.txt", "--max-flips", 0.5), skills),
        (("--suite", tmp_path / "suite.yaml"), skills),  # named tasks take the place of a suite's
        (("--tasks", EASY), [EASY]),
    ):
        shown = succeeded(run("gate", "--demo", *more, "--limit", 100, "--dry-run", "--json"))
        assert sorted(row["task"] for row in json.loads(shown.out)["tasks"]) == sorted(tasks)


def test_a_dry_run_of_compress_says_what_its_gate_can_show(base: Path, tmp_path: Path) -> None:
    ask = ("--search", "--gate", TASKS, "--max-drop", 0.05, "--dry-run", "--json")
    content = json.loads(captured("compress", base, *CALIBRATION, *ask).out)
    assert content["gate"]["pooled"]["items"] == 400 and content["gate"]["confidence"] == pytest.approx(1 - 0.05 / 4)
    assert content["after"]["num_experts"] == 15  # the largest model that the search may try
    few = captured("compress", base, *CALIBRATION, *ask, "--limit", 10)
    assert few.status == 2 and re.search("20 items .*at least 86 items", few.err), few


def lm_eval_command(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lm_eval.__main__ import cli_evaluate

    tasks = Path(compressor.__file__).parent / "demo" / "tasks"
    ask = ["--model", "hf", "--model_args", f"pretrained={model},dtype=float32", "--tasks", MEASURED, "--limit", "9"]
    ask += ["--include_path", str(tasks), "--device", "cpu", "--batch_size", "8", "--log_samples", "--output_path"]
    monkeypatch.setattr(sys, "argv", ["lm-eval", "run", *ask, str(out)])
    cli_evaluate()


@pytest.mark.full
def test_a_baseline_and_the_files_of_lm_evals_own_command_give_the_same_verdict_without_a_base(
    run: Run, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ("--tasks", MEASURED, "--limit", 9, "--dtype", "float32", "--inconclusive", "fail", "--max-drop", 0.1)
    noisy = changed(base, tmp_path / "noisy", 0.6)
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    saved = tmp_path / "base.json.gz"
    assert names(tmp_path) == ["copy", "noisy"]
    refused(run("gate", "baseline", copy, tmp_path / "base.txt"), "should end in .json or .json.gz")
    succeeded(run("gate", "baseline", copy, saved, *ask[:-4]))
    for model, name in ((copy, "of-base"), (noisy, "of-noisy")):
        lm_eval_command(model, tmp_path / name, monkeypatch)
    shutil.rmtree(copy)
    # as the command was written first, with and without a smaller model
    beside = tmp_path / "beside.json"
    own = json.loads(run("gate", base, noisy, *ask, "--save-baseline", beside, "--json").out)
    assert own["written"] == [str(beside)]
    succeeded(run("gate", base, *ask[:-4], "--save-baseline", tmp_path / "alone.json"))
    assert Baseline.read(tmp_path / "alone.json") == Baseline.read(beside)
    assert Baseline.read(beside).tasks == Baseline.read(saved).tasks
    kept = json.loads(run("gate", "--baseline", saved, noisy, *ask[4:], "--json").out)
    recorded = json.loads(run("gate", "results", tmp_path / "of-base", tmp_path / "of-noisy", *ask[6:], "--json").out)
    assert own["pooled"]["lost"] > 0 and own["pooled"]["items"] == 45
    for other in (kept, recorded):
        assert (other["verdict"], other["pooled"]) == (own["verdict"], own["pooled"])
        for mine, theirs in zip(own["tasks"], other["tasks"], strict=True):
            for name in ("task", "metric", "kind", "items", "lost", "gained", "verdict", "equivalent"):
                assert mine[name] == theirs[name]
            for name in ("base", "compressed", "drop", "lower", "upper", "p_pass", "p_fail"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-3, abs=1e-6)
    refused(run("gate", "--baseline", saved, noisy, "--limit", 5), "was made with limit 9, and this gate is to use 5")
    refused(run("gate", "--baseline", saved, noisy, "--tasks", "moe_demo_facts"), "no answers to moe_demo_facts")
    refused(run("gate", "--baseline", saved, noisy, "--prompts", "demo"), "answers to tasks alone")
    refused(run("gate", "--baseline", saved, base, noisy), "name the base or its --baseline")
    content = json.loads(gzip.decompress(saved.read_bytes()))
    content["tasks"][0]["version"] = "1.0+another"
    (tmp_path / "other.json").write_text(json.dumps(content))
    refused(run("gate", "--baseline", tmp_path / "other.json", noisy), "answers to version 1.0.another of moe_demo")
    refused(run("gate", "--baseline", base / "config.json", noisy), "is no baseline")
    prune = {"strategy": "model-centric", "experts": 12}
    gate = {"baseline": str(saved), "max_drop": 0.1, "inconclusive": "pass", "keep_failed": True}
    recipe = compressor.Recipe.of({"model": str(base), "steps": [{"prune": prune}], "gate": gate})
    (tmp_path / "recipe.yaml").write_bytes(recipe_yaml(recipe))
    run("compress", tmp_path / "recipe.yaml", "-o", tmp_path / "out", "--json")
    assert read_gate(tmp_path / "out").base == copy.name


@pytest.mark.parametrize(("treat", "status"), [("pass", 0), ("fail", 1), (None, 3)])
def test_an_undecided_gate_counts_as_it_is_told(run: Run, tiny: Path, treat: str | None, status: int) -> None:
    compressor.compress(str(tiny / "model"), tiny / "small", strategy="model-centric", experts=4)
    text = ("--text", "calibration.txt", "--text-samples", 16, "--text-length", 16, "--max-flips", 0.49)
    how = () if treat is None else ("--inconclusive", treat)
    result = run("gate", tiny / "model", tiny / "small", *text, "--json", *how)
    content = json.loads(result.out)
    assert content["verdict"] == "inconclusive" and content["written"] == []
    assert result.status == status, result


def test_the_job_summary_gets_the_report(
    run: Run, base: Path, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "summary.md"
    page.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    ask = ("--tasks", EASY, "--limit", 12, "--inconclusive", "pass")
    passed = run("gate", base, good, *ask, "--max-drop", 0.3)
    assert page.read_text().startswith("before\n\n<!-- moe-compress gate: ") and EASY in page.read_text()
    assert passed.status == 0 and "::" not in passed.out
    unclear = run("gate", base, good, *ask, "--max-drop", 0.001)
    (line,) = [line for line in unclear.out.splitlines() if line.startswith("::")]
    assert line.startswith("::warning title=Accuracy gate of good::Inconclusive: with confidence 95%25, ")
    assert "%0AName more tasks" in line or "%0ARaise --limit" in line
    as_json = run("gate", base, good, *ask, "--max-drop", 0.001, "--json")
    assert json.loads(as_json.out)["verdict"] == "inconclusive" and line in as_json.err.splitlines()
    wrong = run("gate", base, good, *ask, "--max-drop", -1)
    assert wrong.status == 2 and wrong.out.startswith(
        "::error title=Accuracy gate::the command line: max_drop should be"
    )


def test_a_message_of_a_job_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    annotate("error", "a:b,c 5%\r\n::x", "one\r\ntwo: 5%, \x1b[31m::error::three", False)
    expected = "::error title=a%3Ab%2Cc 5%25 %3A%3Ax::one%0Atwo: 5%25, [31m::error::three\n"
    assert capsys.readouterr().out == expected


def test_a_base_with_an_unexpected_score_passes_nothing(run: Run, base: Path, good: Path, tmp_path: Path) -> None:
    suite = tmp_path / "suite.yaml"
    suite.write_text(json.dumps({"tasks": [{"name": EASY, "limit": 12}]}))
    ask = ("gate", base, good, "--suite", suite, "--max-drop", 0.3, "--expect", f"{EASY}=0.2±0.1")
    result = run(*ask, "-o", tmp_path / "out")
    assert result.status == 3 and f"ANOMALOUS scores on {EASY}, so that the pass" in result.out, result
    found = read_gate(tmp_path / "out")
    assert found.verdict == "inconclusive" and found.pooled is not None and found.pooled.verdict == "pass"
    assert [anomaly.task for anomaly in found.anomalies] == [EASY]
    assert all("ANOMALOUS" in (tmp_path / "out" / name).read_text() for name in REPORTS)
    (suite_of_cases,) = ElementTree.parse(tmp_path / "out" / "gate.xml").getroot()
    assert len(list(suite_of_cases.iter("skipped"))) == int(suite_of_cases.attrib["skipped"]) == 1
    assert run(*ask, "--inconclusive", "pass").status == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--tasks", "moe_demo_sortin"), "no task 'moe_demo_sortin'.*moe_demo_sorting"),
        (("--tasks", ","), "--tasks names none"),
        (("--tasks", f"{EASY},{EASY}"), "named twice"),
        (("--max-drop", -0.1), "max_drop should be .*, it is -0.1"),
        (("--max-drop", "nan"), "max_drop should be a number, it is nan"),
        (("--confidence", 1), "confidence should be .*, it is 1"),
        (("--batch-size", "many"), "batch_size is many"),
        (("--inconclusive", "maybe"), "inconclusive should be 'pass' or 'fail', it is 'maybe'"),
        (("--include-path", "nowhere"), "nowhere is not a folder"),
        (("--suite", "nope"), "there is no suite 'nope'; name base, chat, code or math"),
        (("--expect", f"{EASY}=high"), "should be task=score or task=score±tolerance"),
        (("--expect", "rte=0.7"), f"names the task 'rte', which is not asked; asked are {EASY}"),
    ],
)
def test_bad_options_are_refused(
    run: Run, base: Path, good: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[Any, ...], message: str
) -> None:
    no_stock_tasks(monkeypatch)
    tasks = () if "--tasks" in more else ("--tasks", EASY)
    refused(run("gate", base, good, *tasks, *more, "--json"), message)


def test_bad_models_are_refused(run: Run, base: Path, good: Path, tmp_path: Path) -> None:
    ask = ("--tasks", EASY, "--limit", 5, "--max-drop", 0.5, "--json", "-o", tmp_path / "out")
    refused(run("gate", base, *ask), "name two models")
    # a file that is not even read, for there is no model to gate by it
    for more in ((), ("--server", "http://127.0.0.1:9")):
        refused(run("gate", "--baseline", base / "config.json", *more, *ask), "name two models")
    refused(run("gate", base, tmp_path / "none", *ask), "none")
    refused(run("gate", base, sickened(good, tmp_path / "sick"), *ask), "sick.*moe_demo_sorting")
    assert names(tmp_path) == ["out", "sick"] and names(tmp_path / "out") == ["gate.xml"]
    report = ElementTree.parse(tmp_path / "out" / "gate.xml").getroot()
    assert [report[0].attrib[name] for name in ("tests", "errors", "failures")] == ["1", "1", "0"]
    (error,) = report.iter("error")
    assert "moe_demo_sorting" in error.attrib["message"]
    assert run("gate", base, good, *ask).status == 0 and names(tmp_path / "out") == REPORTS
    before = tree(tmp_path / "out")
    refused(run("gate", base, tmp_path / "none", *ask, "--overwrite"), "none")
    assert tree(tmp_path / "out") == before
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("keep")
    refused(run("gate", base, tmp_path / "none", *ask), "out")
    assert names(tmp_path / "out") == ["mine.txt"]


def gated_run(base: Path, out: Path, *more: Any) -> Result:
    return captured("compress", base, "-o", out, *CALIBRATION, "--limit", 100, "--max-drop", 0.05, "--json", *more)


def test_compress_leaves_what_passes_in_place_and_finds_it_when_it_is_repeated(base: Path, tmp_path: Path) -> None:
    ask = ("--experts", 14, "--gate", EASY)
    result = gated_run(base, tmp_path / "out", *ask)
    assert result.status == 0, result
    content = json.loads(result.out)
    assert content["verdict"] == "pass" and content["compression"]["experts"]["after"] == 14
    assert names(tmp_path) == ["out", "out.gate"] and names(tmp_path / "out.gate") == REPORTS
    assert read_gate(tmp_path / "out" / "gate.json") == read_gate(tmp_path / "out.gate")
    # and the gate of the finished folder says the same
    again = captured("gate", base, tmp_path / "out", "--tasks", EASY, "--limit", 100, "--max-drop", 0.05, "--json")
    assert json.loads(again.out)["tasks"] == content["tasks"] and json.loads(again.out)["reused_base"]
    before = tree(tmp_path)
    again = gated_run(base, tmp_path / "out", *ask)
    assert again.status == 0 and "is what this command asks for" in again.err, again
    assert json.loads(again.out)["tasks"] == content["tasks"] and tree(tmp_path) == before
    for other in (("--confidence", 0.9), ("--keep-failed",), ("--limit", 60)):
        done = gated_run(base, tmp_path / "out", *ask, *other)
        assert done.status == 2 and "out exists already; name another folder" in done.err


class Listener:
    def __init__(self, stop: str = "", number: int = 0) -> None:
        self.phases, self.stop, self.number = list[str](), stop, number

    def start(self, phase: str, total: int) -> None:
        self.phases.append(phase)
        if phase == self.stop and self.phases.count(phase) == self.number:
            raise KeyboardInterrupt

    def advance(self, detail: str) -> None: ...

    @property
    def judged(self) -> int:
        return self.phases.count("judge")


EXPORTER = """
def export(checkpoint, output, options, progress):
    output.mkdir()
    progress.start("listing", 1)
    (output / "names.txt").write_text("\\n".join(sorted(path.name for path in checkpoint.iterdir())))
"""


@pytest.fixture
def exporter(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path_factory.mktemp("site"), monkeypatch, "names", EXPORTER, group=EXPORTERS)


def gated_recipe(folder: Path, experts: int | None = 4, formats: str = "safetensors", **gate: Any) -> compressor.Recipe:
    gate = {"text": ["calibration.txt"], "text_samples": 16, "text_length": 16, **gate}
    prune = {"strategy": "model-centric", "experts": experts}
    content = {"model": str(folder / "model"), "steps": [{"prune": prune}], "gate": gate}
    return compressor.Recipe.of({**content, "output": {"formats": formats}})


@pytest.fixture
def tiny(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, for recipes name texts without folders, with a tiny model and text."""
    folder = tmp_path_factory.mktemp("tiny")
    small.save(folder / "model")
    small.text_file(folder)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(("max_flips", "status", "verdict"), [(1e-6, 1, "fail"), (0.49, 3, "inconclusive")])
def test_a_recipe_whose_gate_is_not_passed_ends_alike_in_python_and_by_command(
    run: Run, tiny: Path, tmp_path: Path, max_flips: float, status: int, verdict: str
) -> None:
    recipe = gated_recipe(tiny, max_flips=max_flips)
    with pytest.raises(compressor.GateFailedError, match=f"did not pass the gate .{verdict}. and was not") as failure:
        compressor.compress(recipe, tmp_path / "out")
    error = failure.value
    assert (error.status, error.result.verdict, error.outcome) == (status, verdict, None)
    assert [attempt.experts for attempt in error.attempts] == [4]
    assert names(tmp_path) == ["out.gate"] and sorted(path.name for path in error.reports) == REPORTS
    (tmp_path / "recipe.yaml").write_bytes(recipe_yaml(recipe))
    result = run("compress", tmp_path / "recipe.yaml", "-o", tmp_path / "by-command", "--json")
    assert result.status == status and names(tmp_path) == ["by-command.gate", "out.gate", "recipe.yaml"]
    reports = [json.loads((tmp_path / name / "gate.json").read_text()) for name in ("out.gate", "by-command.gate")]
    for report in reports:
        del report["seconds"], report["compressed"], report["model_index"]  # whose name is the output's
        del report["compressed_identity"]["weights"]  # with times
    assert reports[0] == reports[1]
    keeping = gated_recipe(tiny, max_flips=max_flips, keep_failed=True)
    with pytest.raises(compressor.GateFailedError, match="is kept all the same") as failure:
        compressor.compress(keeping, tmp_path / "kept")
    assert failure.value.status == status and failure.value.outcome is not None
    assert read_gate(tmp_path / "kept") == failure.value.outcome.gate


@pytest.mark.usefixtures("exporter")
def test_a_recipe_that_passes_is_the_same_in_python_and_by_command(run: Run, tiny: Path, tmp_path: Path) -> None:
    recipe = gated_recipe(tiny, formats="safetensors,names", max_flips=0.9)
    outcome = compressor.compress(recipe, tmp_path / "out")
    assert outcome.gate is not None and outcome.gate.verdict == "pass" and outcome.attempts[0].accepted
    assert "model.safetensors" in (tmp_path / "out" / "names" / "names.txt").read_text()
    assert names(tmp_path) == ["out", "out.gate"] and names(tmp_path / "out.gate") == REPORTS
    before = tree(tmp_path / "out")
    (tiny / "recipe.yaml").write_bytes(recipe_yaml(recipe))
    result = run("compress", "recipe.yaml", "-o", tmp_path / "out", "--json")
    assert result.status == 0 and "is what this command asks for" in result.err, result
    assert tree(tmp_path / "out") == before
    assert json.loads(result.out)["compression"]["experts"] == {"before": 8, "after": 4}


def test_a_gate_that_a_recipe_cannot_have_is_refused(tiny: Path, tmp_path: Path) -> None:
    onnx = gated_recipe(tiny, formats="keep-list", max_flips=0.9)
    with pytest.raises(compressor.CompressionError, match="--gate judges a safetensors output"):
        compressor.compress(onnx, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tiny / "model")
    recipe = gated_recipe(tiny, max_flips=0.9).model_copy(update={"model": given(model, small.tokenizer())})
    with pytest.raises(compressor.CompressionError, match="a gate loads the base from its files"):
        compressor.compress(recipe, tmp_path / "out")
    with pytest.raises(compressor.CompressionError, match="a recipe names its own steps"):
        compressor.compress(gated_recipe(tiny, max_flips=0.9), tmp_path / "out", ratio=0.5)
    assert names(tmp_path) == []


@pytest.mark.full
@pytest.mark.usefixtures("exporter")
def test_a_search_that_was_stopped_tries_nothing_twice(tiny: Path, tmp_path: Path) -> None:
    recipe = gated_recipe(tiny, None, "safetensors,names", max_flips=0.37, search=True)
    whole, out = tmp_path / "whole", tmp_path / "out"

    def search(folder: Path, stop: str = "", number: int = 0) -> tuple[compressor.Outcome | None, int]:
        """Return the outcome, None if the search was stopped, and how many models were judged."""
        listener = Listener(stop, number)
        try:
            return compressor.compress(recipe, folder, progress=listener), listener.judged
        except KeyboardInterrupt:
            return None, listener.judged

    first, judged = search(whole)
    assert first is not None and judged == 3
    assert [(attempt.experts, attempt.accepted) for attempt in first.attempts] == [(5, False), (7, True), (6, False)]
    assert first.experts_after == 7
    shutil.rmtree(cache_folder("trials"))
    assert search(out, "judge", 2) == (None, 2) and not out.exists()  # stopped while the second model is judged
    assert search(out, "listing", 1) == (None, 1) and not out.exists()  # that one passed and is not in its place
    second, judged = search(out)  # the third is tried, then the second made again for its place
    assert second is not None and judged == 2
    assert {each.experts: each.result.verdict for each in second.attempts} == {
        each.experts: each.result.verdict for each in first.attempts
    }
    assert tree(out).keys() == tree(whole).keys()
    for name in ("model.safetensors", "config.json", "compression.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    again, judged = search(out)
    assert again is not None and judged == 0 and again.gate == second.gate
    other = recipe.model_copy(update={"seed": 3})
    with pytest.raises(compressor.CompressionError, match="exists already"):
        compressor.compress(other, out)


@pytest.mark.full
def test_compress_leaves_nothing_that_fails_and_keeps_what_was_there(base: Path, tmp_path: Path) -> None:
    ask = ("--experts", 4, "--gate", TASKS)
    result = gated_run(base, tmp_path / "out", *ask)
    assert result.status == 1, result
    assert json.loads(result.out)["compression"] is None
    assert names(tmp_path) == ["out.gate"]
    shutil.copytree(base, tmp_path / "out")
    before = tree(tmp_path / "out")
    assert gated_run(base, tmp_path / "out", *ask, "--overwrite").status == 1
    assert tree(tmp_path / "out") == before and names(tmp_path) == ["out", "out.gate"]
    result = gated_run(base, tmp_path / "out", *ask, "--overwrite", "--keep-failed")
    assert result.status == 1
    assert json.loads((tmp_path / "out" / "config.json").read_text())["num_local_experts"] == 4
    assert read_gate(tmp_path / "out").verdict == "fail"


def test_a_search_that_finds_nothing_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(compressor.GateFailedError) as failure:
        compressor.compress(gated_recipe(tiny, None, max_flips=1e-6, search=True), tmp_path / "out")
    assert failure.value.status == 1 and names(tmp_path) == ["out.gate"]
    assert [attempt.experts for attempt in failure.value.attempts] == [5, 7]


@pytest.mark.parametrize("counts", [[2], list(range(2, 16)), list(range(4, 64, 4))])
def test_bisection_agrees_with_trying_all(counts: list[int]) -> None:
    for least in [*counts, 10**6]:
        attempts = list[Attempt]()
        count = next_count(counts, attempts)
        while count is not None:
            attempts.append(Attempt(count, gate(task()), count >= least))
            count = next_count(counts, attempts)
        tried = [attempt.experts for attempt in attempts]
        passed = [attempt.experts for attempt in attempts if attempt.accepted]
        assert min(passed, default=None) == next((count for count in counts if count >= least), None)
        assert len(tried) == len(set(tried)) <= len(counts).bit_length()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--experts", 8, "--keep-failed"), "a gate judges tasks"),
        (("--experts", 8, "--search"), "a gate judges tasks"),
        (("--experts", 8, "--search", "--gate", EASY), "leave out --experts"),
        (("--search", "--keep-failed", "--gate", EASY), "leave out --keep-failed"),
        (("--experts", 8, "--gate", "nothing_like_it"), "no task"),
        (("--experts", 99, "--gate", EASY), "99"),
        (("--gate", EASY, "--max-drop", 0.05), "--experts N or --ratio R"),
    ],
)
def test_bad_gated_requests_leave_nothing(
    run: Run, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[Any, ...], message: str
) -> None:
    no_stock_tasks(monkeypatch)
    refused(run("compress", base, "-o", tmp_path / "out", *CALIBRATION, "--json", *more), message)
    assert names(tmp_path) == []
