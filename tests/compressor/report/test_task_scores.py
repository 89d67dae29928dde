import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from numpy.typing import NDArray
from scipy.stats import binomtest, ttest_rel

from compressor.answers.scores import AnsweredItem, ItemScores
from compressor.answers.tasks import quiet_lm_eval
from compressor.data.demo import demo_checkpoint
from compressor.document.markdown import markdown
from compressor.report.comparison import with_differences
from compressor.report.comparison_report import comparison_figure
from compressor.report.comparison_rows import Row
from tests.support.command_line import Run, refused, succeeded
from tests.support.comparison_results import base, comparison, row
from tests.support.eval_tasks import no_stock_tasks
from tests.support.rendered_figures import axes_of
from tests.support.report_data import table

DEMO = Path(__file__).parents[3] / "compressor" / "demo"
RECALL, SORTING = "moe_demo_recall", "moe_demo_sorting"
TEXT = ("--calibration", "demo", "--samples", 16, "--sequence-length", 128)
LIMIT = 30

pytestmark = pytest.mark.usefixtures("offline")


def lm_eval_scores(model: Path, task: str) -> list[float]:
    """The accuracies of the items as lm-eval alone has them."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    with quiet_lm_eval():
        result: Any = lm_eval.simple_evaluate(
            model="hf", model_args={"pretrained": str(model), "device": "cpu", "dtype": "auto"}, tasks=[task],
            limit=LIMIT, task_manager=TaskManager(include_path=str(DEMO / "tasks"), include_defaults=False),
            bootstrap_iters=0,
        )  # fmt: skip
    return [sample["acc"] for sample in result["samples"][task]]


@pytest.mark.full
def test_rows_score_as_the_compressed_model_does_in_lm_eval_and_in_the_gate(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_COMPRESSOR_CACHE", str(tmp_path / "cache"))
    tasks = ("--tasks", f"{RECALL},{SORTING}", "--limit", LIMIT)
    with demo_checkpoint() as model:
        ways = ("--experts", 8, "--strategies", "count-guided", "--correct", "none,ridge", "--random-seeds", 1)
        command = ("compare", model, *ways, *TEXT, *tasks)
        content = json.loads(succeeded(run(*command, "-o", tmp_path / "whole", "--json")).out)
        smaller = tmp_path / "smaller"
        options = ("--experts", 8, "--strategy", "count-guided", "--correct", "ridge", "--no-evaluate")
        succeeded(run("compress", model, "-o", smaller, *options, *TEXT))
        gate = json.loads(run("gate", model, smaller, *tasks, "--max-drop", 0.2, "--json").out)
        rows = {entry["label"]: entry for entry in content["rows"]}
        for task, known in zip((RECALL, SORTING), gate["tasks"], strict=True):
            assert content["items"][task] == [str(number) for number in range(LIMIT)]
            assert rows["base"]["answers"][task] == lm_eval_scores(model, task)
            ridge = rows["count-guided + ridge"]
            assert ridge["answers"][task] == lm_eval_scores(smaller, task)
            for name in ("compressed", "drop", "lower", "upper", "lost", "gained"):
                assert ridge["tasks"][task][name] == known[name]
        assert ridge["tasks"]["all together"]["upper"] == gate["pooled"]["upper"]
        again = run(*command, "-o", tmp_path / "again")
        assert succeeded(again) and "Evaluating" not in again.err  # all results are known
        streamed = run(*command, "--stream", "--cache-dir", tmp_path / "other", "-o", tmp_path / "streamed")
        assert succeeded(streamed) and "layer by l" in streamed.err
    written = [json.loads((tmp_path / name / "comparison.json").read_text()) for name in ("whole", "streamed")]
    assert [entry["answers"] for entry in written[0]["rows"]] == [entry["answers"] for entry in written[1]["rows"]]


def test_tasks_that_cannot_be_are_refused(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_stock_tasks(monkeypatch)
    (tmp_path / "nothing").mkdir()
    plain = ("compare", tmp_path / "nothing", "--strategies", "reap", "-o", tmp_path / "out")
    command = (*plain, "--experts", 4)
    refused(run(*command, "--tasks", "moe_demo_sorts"), "there is no task 'moe_demo_sorts'.*did you mean moe_demo_sort")
    refused(run(*plain, "--tasks", SORTING, "--sizes"), "leave out number formats and --format")
    refused(run(*command, "--tasks", SORTING, "--format", "mone"), "leave out number formats and --format")
    refused(run(*command, "--limit", 3), "--limit is of tasks; name --tasks, too")


def answers(name: str, values: NDArray[Any], kind: Any = "score") -> ItemScores:
    items = tuple(AnsweredItem(str(number), float(value)) for number, value in enumerate(values))
    return ItemScores(name, "acc", "1", kind, items)


def made() -> tuple[Row, ...]:
    """A base that is right on 80 of 100 items; rows that flip none, 3 or 40 of them; scores that move a little."""
    right = np.arange(100) < 80
    drops = np.linspace(-0.1, 0.3, 100)
    rows = [base(answers=(answers("quiz", right), answers("rated", 0.5 + 0 * drops)))]
    for name, flips in (("reap", 0), ("auto", 3), ("hc-smoe", 40)):
        for experts in (12, 8):
            lost = right & (np.arange(100) >= flips)
            rows.append(row(name, experts, 2.0, answers=(answers("quiz", lost), answers("rated", 0.5 - drops))))
    return with_differences(rows)


def test_bounds_are_scipys_where_it_has_them() -> None:
    rows = made()
    quiz, rated = rows[1].tasks["quiz"], rows[1].tasks["rated"]
    bound = binomtest(0, 100, alternative="less").proportion_ci(0.95).high
    assert (quiz.drop, quiz.lower, quiz.upper) == (0, pytest.approx(-bound), pytest.approx(bound))
    scores = [[item.score for item in entry.answers[1].items] for entry in rows[:2]]
    interval = ttest_rel(*scores).confidence_interval(0.9)  # each bound with confidence 95%
    assert (rated.lower, rated.upper) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert rows[5].tasks["quiz"].mcnemar == pytest.approx(binomtest(40, 40).pvalue)
    assert list(rows[1].tasks) == ["quiz", "rated", "all together"]


def test_the_table_has_differences_and_what_is_no_worse_than_the_best_in_bold() -> None:
    shown = {
        (cells["model"], cells["experts"]): cells["quiz"] for cells in table(markdown(comparison(made()).document()))
    }
    assert shown["base", "16"] == "0.8000"
    for experts in ("12", "8"):
        assert shown["reap", experts].startswith("**0.8000 +0.0000 ") and shown["auto", experts].startswith("**0.7700")
        assert shown["hc-smoe", experts].startswith("0.4000 -0.4000 ")  # the sign is that of the score's change


def points(axes: Axes) -> set[tuple[Any, ...]]:
    return {tuple(zip(line.get_xdata(), line.get_ydata(), strict=True)) for line in axes.lines}


def test_curves_are_scores_over_experts_between_their_bounds() -> None:
    rows = made()
    quiz, *others, loss = axes_of(comparison_figure(comparison(rows)))
    assert len(others) == 2 and "nats" in loss.get_ylabel() and quiz.get_title() == "quiz"
    expected = {((0.0, 0.8), (1.0, 0.8))}  # the base's level from edge to edge
    for score in (0.8, 0.77, 0.4):
        expected.add(((16.0, 0.8), (12.0, score), (8.0, score)))
    found = {tuple((float(x), round(float(y), 9)) for x, y in line) for line in points(quiz)}
    assert found == expected
    corners = [path.vertices for band in quiz.collections for path in band.get_paths()]
    heights = {round(float(y), 9) for part in corners for _, y in np.asarray(part)}
    bounds = [bound for entry in rows[1:] for bound in (entry.tasks["quiz"].lower, entry.tasks["quiz"].upper)]
    assert heights == {0.8, *(round(0.8 - bound, 9) for bound in bounds)}
