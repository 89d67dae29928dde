"""`moe-compress gate` and `compress --gate` as a user runs them, on the demo checkpoint: verdicts, status, files."""

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor.cli import searching as gated
from compressor.data.demo import demo_checkpoint
from compressor.evaluation import evaluate as evaluating
from compressor.evaluation.gate_report import read_gate
from compressor.run_record import cache_folder
from tests.command_line import Result, Run, captured, names, refused
from tests.evaluations import no_stock_tasks
from tests.small import tree

pytestmark = pytest.mark.usefixtures("offline", "own_cache")

EASY = "moe_demo_sorting"  # which survives nearly everything
TASKS = f"{EASY},moe_demo_recall"
CALIBRATION = ("--calibration", "demo", "--samples", 32, "--sequence-length", 128, "--strategy", "count-guided")
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
    """The demo model with noise on its experts: none leaves the model, much of it ruins it."""
    shutil.copytree(base, folder)
    file = folder / "model.safetensors"
    tensors, generator = load_file(file), torch.Generator().manual_seed(0)
    for name, value in tensors.items():
        if "experts" in name:
            draw = torch.randn(value.shape, generator=generator) * noise * value.float().std()
            tensors[name] = (value.float() + draw).to(value.dtype)
    save_file(tensors, file, metadata={"format": "pt"})
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
def test_a_streamed_gate_says_the_same(run: Run, base: Path, good: Path, tmp_path: Path) -> None:
    found = []
    for how, streamed in (("--no-stream", []), ("--stream", ["base", "compressed"])):
        result = run(
            "gate", base, good, "--tasks", f"{EASY},moe_demo_text", "--limit", 12, "--dtype", "float32", how,
            "--inconclusive", "pass", "--cache-dir", tmp_path / how, "-o", tmp_path / f"gate{how}",
        )  # fmt: skip
        content = json.loads((tmp_path / f"gate{how}" / "gate.json").read_text())
        assert content["streamed"] == streamed and not content["reused_base"], result
        found.append([*content["tasks"], content["pooled"]])
        said = "With one layer in memory at a time: the base and the compressed model."
        assert (said in " ".join(result.out.split())) is bool(streamed)
    for plain, streamed in zip(*found, strict=True):
        assert plain.keys() == streamed.keys() and plain["verdict"] == streamed["verdict"]
        for name in ("base", "compressed", "drop", "lower", "upper"):
            assert streamed[name] == pytest.approx(plain[name], rel=1e-5, abs=1e-7)


@pytest.mark.full
def test_an_identical_copy_passes_and_a_gate_that_it_cannot_pass_is_refused(
    run: Run, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(base, tmp_path / "copy"))
    result = run("gate", base, copy, "--tasks", TASKS, "--limit", 150)  # by itself neither has enough items
    assert result.status == 0, result
    lines = [line.split("│") for line in result.out.splitlines() if line.startswith("│")]
    first = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in lines[:3]}
    alone = ["150", "0.03", "0.0198", "0.0427", "0.0562"]
    together = ["300", "0.01", "0.0099", "0.0262", "0.0367"]
    assert first == {EASY: alone, "moe_demo_recall": alone, "all together": together}
    monkeypatch.setattr(evaluating.Evaluation, "run", lambda *_: pytest.fail("a model was asked"))
    for more in (("--limit", 10), ("--max-drop", 0.001)):
        said = "20 items .*at least 299 items" if "--limit" in more else "400 items .*at least 2,995 items"
        refused(run("gate", base, copy, "--tasks", TASKS, "--json", *more), said)
        refused(
            captured("compress", base, "-o", tmp_path / "out", *CALIBRATION, "--search", "--gate", TASKS, *more),
            "items",
        )
    assert names(tmp_path) == ["copy"]


def test_a_dry_run_needs_no_models_and_says_what_the_gate_can_show(run: Run) -> None:
    result = run("gate", "--tasks", "moe_demo,moe_demo_text", "--limit", 70, "--dry-run", "--json")
    assert result.status == 0, result
    content = json.loads(result.out)
    assert [(each["task"], each["items"], each["max_drop"]) for each in (*content["tasks"], content["pooled"])] == [
        ("moe_demo", 350, 0.03), ("moe_demo_text", 70, 0.01), ("all together", 350, 0.01)
    ]  # fmt: skip
    assert content["tasks"][1]["shown"] is None and content["pooled"]["shown"][0] == pytest.approx(
        1 - 0.05 ** (1 / 350)
    )
    shown = run("gate", "--demo", "--limit", 9, "--dry-run")
    assert shown.status == 2 and re.search(r"all together +│ +45", shown.out) and "--limit 12" in shown.err


def test_a_dry_run_of_compress_says_what_its_gate_can_show(base: Path, tmp_path: Path) -> None:
    ask = ("--search", "--gate", TASKS, "--max-drop", 0.05, "--dry-run", "--json")
    content = json.loads(captured("compress", base, *CALIBRATION, *ask).out)
    assert content["gate"]["pooled"]["items"] == 400 and content["gate"]["confidence"] == pytest.approx(1 - 0.05 / 4)
    assert content["after"]["num_experts"] == 15  # the largest model that the search may try
    few = captured("compress", base, *CALIBRATION, *ask, "--limit", 10)
    assert few.status == 2 and re.search("20 items .*at least 86 items", few.err), few


@pytest.mark.parametrize(("treat", "status"), [("pass", 0), ("fail", 1), (None, 3)])
def test_an_undecided_gate_counts_as_it_is_told(
    run: Run, base: Path, good: Path, treat: str | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answered(self: evaluating.Evaluation, progress: Any) -> dict[str, evaluating.ItemScores]:
        lost = 3 if self.source.folder == good else 0
        values, ids = [0.0] * lost + [1.0] * (60 - lost), tuple(map(str, range(60)))
        return {EASY: evaluating.ItemScores(EASY, "acc", "1", "score", ids, tuple(values))}

    monkeypatch.setattr(evaluating.Evaluation, "run", answered)
    how = () if treat is None else ("--inconclusive", treat)
    result = run("gate", base, good, "--tasks", EASY, "--limit", 60, "--max-drop", 0.05, "--json", *how)
    content = json.loads(result.out)
    assert content["verdict"] == "inconclusive" and content["pooled"]["lost"] == 3 and content["written"] == []
    assert result.status == status, result


@pytest.mark.full
def test_a_perplexity_is_gated_too(run: Run, base: Path, good: Path, ruined: Path) -> None:
    found = []
    for model in (good, ruined):
        result = run("gate", base, model, "--tasks", "moe_demo_text", "--limit", 60, "--max-drop", 0.05, "--json")
        content = json.loads(result.out)
        task = content["tasks"][0]
        assert content["pooled"] is None and task["decides"] and task["max_drop"] == 0.05
        ratio = task["perplexity_ratio"]
        assert task["drop"] == pytest.approx(ratio[0] - 1, abs=1e-9) and ratio[1] < ratio[0] < ratio[2]
        assert task["compressed"] / task["base"] == pytest.approx(ratio[0])
        found.append(result.status)
    assert found == [0, 1]


@pytest.mark.full
def test_stored_base_results_are_reused_and_a_changed_base_is_not(
    run: Run, base: Path, good: Path, tmp_path: Path
) -> None:
    ask = ("--tasks", EASY, "--max-drop", 0.3, "--limit", 12, "--json")
    other = Path(shutil.copytree(base, tmp_path / "base"))
    first, second = (json.loads(run("gate", other, good, *ask).out) for _ in range(2))
    assert not first["reused_base"] and second["reused_base"]
    assert first["tasks"] == second["tasks"]
    assert not json.loads(run("gate", other, good, *ask, "--limit", 13).out)["reused_base"]
    (other / "generation_config.json").write_text('{"do_sample": false}')
    assert not json.loads(run("gate", other, good, *ask).out)["reused_base"]


def test_the_job_summary_gets_the_report(
    run: Run, base: Path, good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "summary.md"
    page.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    run("gate", base, good, "--tasks", EASY, "--limit", 12, "--max-drop", 0.3)
    assert page.read_text().startswith("before\n") and EASY in page.read_text()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--tasks", "moe_demo_sortin"), "no task 'moe_demo_sortin'.*moe_demo_sorting"),
        (("--tasks", ","), "--tasks names none"),
        (("--tasks", f"{EASY},{EASY}"), "named twice"),
        (("--max-drop", -0.1), "max_drop is -0.1"),
        (("--max-drop", "nan"), "max_drop is nan"),
        (("--max-drop", "inf"), "--max-drop inf"),
        (("--max-task-drop", -1), "max_task_drop is -1"),
        (("--confidence", 1), "confidence is 1"),
        (("--confidence", 0.5), "confidence is 0.5"),
        (("--limit", 0), "limit is 0"),
        (("--batch-size", "many"), "--batch-size many"),
        (("--inconclusive", "maybe"), "inconclusive is 'maybe'; input should be 'pass' or 'fail'"),
        (("--include-path", "nowhere"), "nowhere is not a folder"),
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
    refused(run("gate", base, tmp_path / "none", *ask), "none")
    sick = Path(shutil.copytree(good, tmp_path / "sick"))
    tensors = load_file(sick / "model.safetensors")
    tensors["lm_head.weight" if "lm_head.weight" in tensors else "model.norm.weight"].fill_(float("nan"))
    save_file(tensors, sick / "model.safetensors", metadata={"format": "pt"})
    refused(run("gate", base, sick, *ask), "sick.*moe_demo_sorting")
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
    assert json.loads(again.out)["tasks"] == content["tasks"]
    before = tree(tmp_path)
    again = gated_run(base, tmp_path / "out", *ask)
    assert again.status == 0 and "is what this command asks for" in again.err, again
    assert json.loads(again.out)["tasks"] == content["tasks"] and tree(tmp_path) == before
    for other in (("--confidence", 0.9), ("--keep-failed",), ("--limit", 60)):
        done = gated_run(base, tmp_path / "out", *ask, *other)
        assert done.status == 2 and "out exists already; name another folder" in done.err


@pytest.mark.full
def test_a_search_that_was_stopped_tries_nothing_twice(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ("--search", "--gate", "moe_demo_recall", "--limit", 40, "--correct", "none", "--inconclusive", "pass")
    monkeypatch.setattr(gated, "possible_counts", lambda source, request: [3, 4, 5, 6, 14])
    tried, asked, stop_at = list[int](), list[int](), dict[str, int]()

    def stopping(name: str, note: Any) -> None:
        own = getattr(gated, name)

        def rigged(*arguments: Any, **named: Any) -> Any:
            note(*arguments)
            stop_at[name] = stop_at.get(name, 0) - 1
            if not stop_at[name]:
                raise KeyboardInterrupt
            return own(*arguments, **named)

        monkeypatch.setattr(gated, name, rigged)

    stopping("run_gate", lambda *_: tried.append(len(tried)))
    stopping("record_request", lambda *_: None)  # of a model that has passed, which is about to be put in place
    run = evaluating.Evaluation.run
    monkeypatch.setattr(
        evaluating.Evaluation, "run", lambda self, *a: (asked.append(len(self.missing)), run(self, *a))[1]
    )
    out, whole = tmp_path / "out", tmp_path / "whole"

    def search(folder: Path, *more: Any, **stops: int) -> tuple[Result, int, int]:
        """What came of it, how many models were judged, and how many tasks were asked."""
        stop_at.clear()
        stop_at.update(stops)
        tried.clear()
        asked.clear()
        return gated_run(base, folder, *ask, *more), len(tried), sum(asked)

    first, judged, tasks = search(whole)
    content = json.loads(first.out)
    assert first.status == 0 and [each["experts"] for each in content["attempts"]] == [5, 14, 6]
    assert judged == 3 and tasks in (3, 4)  # one for each model, unless the base's is stored
    shutil.rmtree(cache_folder("trials"))
    assert search(out, run_gate=2)[1] == 2 and not out.exists()  # stopped while the second model is judged
    stopped, judged, tasks = search(out, record_request=1)  # stopped when that one has passed, and is not in its place
    assert (stopped.status, judged, tasks) == (130, 1, 0) and not out.exists()  # its answers are known by its content
    third = search(out, run_gate=2)  # the third is tried, then the second made again for its place
    assert (third[0].status, third[1]) == (130, 2) and not out.exists()
    second, judged, tasks = search(out)
    assert (second.status, judged, tasks) == (0, 1, 0)
    told = json.loads(second.out)
    assert {each["experts"]: each["verdict"] for each in told["attempts"]} == {
        each["experts"]: each["verdict"] for each in content["attempts"]
    }
    assert told["tasks"] == content["tasks"] and tree(out).keys() == tree(whole).keys()
    for name in ("model.safetensors", "config.json", "compression.json"):
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    again, judged, tasks = search(out)
    assert (again.status, judged, tasks) == (0, 0, 0) and "is what this command asks for" in again.err
    refused(gated_run(base, out, *ask, "--seed", 3), "exists already")


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


@pytest.mark.full
def test_search_finds_the_smallest_that_passes(base: Path, tmp_path: Path) -> None:
    result = gated_run(base, tmp_path / "out", "--search", "--correct", "ridge", "--gate", EASY)
    assert result.status == 0, result
    content = json.loads(result.out)
    tried = {attempt["experts"]: attempt["accepted"] for attempt in content["attempts"]}
    kept = json.loads((tmp_path / "out" / "config.json").read_text())["num_local_experts"]
    assert kept == min(count for count, accepted in tried.items() if accepted)
    assert kept == 2 or tried[kept - 1] is False  # top-k is 2
    assert len(tried) <= 4  # of 14 counts
    assert content["confidence"] == pytest.approx(1 - 0.05 / 4)


@pytest.mark.full
def test_a_search_that_finds_nothing_leaves_nothing(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gated, "possible_counts", lambda source, request: [3, 4])
    result = gated_run(base, tmp_path / "out", "--search", "--gate", "moe_demo_recall")
    assert result.status == 1, result
    assert names(tmp_path) == ["out.gate"]
    assert [attempt["experts"] for attempt in json.loads(result.out)["attempts"]] == [4]


@pytest.mark.parametrize("counts", [[2], list(range(2, 16)), list(range(4, 64, 4))])
def test_bisection_agrees_with_trying_all(counts: list[int]) -> None:
    for least in [*counts, 10**6]:
        asked: list[int] = []
        found = gated.smallest(counts, lambda n, asked=asked, least=least: asked.append(n) or n >= least)  # type: ignore[func-returns-value]
        assert found == next((count for count in counts if count >= least), None)
        assert len(asked) == len(set(asked)) <= len(counts).bit_length()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--experts", 8, "--keep-failed"), "goes with --gate"),
        (("--experts", 8, "--search"), "goes with --gate"),
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
