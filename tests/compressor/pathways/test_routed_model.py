"""What lm-eval asks of a routed model: unmoved the stock model's answers, long items cut as lm-eval cuts them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance

import compressor
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.evaluation.evaluate import Evaluation, ItemScores, Spent
from compressor.evaluation.items import Item, item_lines
from compressor.evaluation.model import AnswerWatch, loaded_model
from compressor.evaluation.tasks import EvaluationOptions, resolve_tasks, task_items
from compressor.pathways.answering import open_answering, refuse_other_tasks, routed_answerer
from compressor.pathways.engine import PathwayModel
from compressor.pathways.options import PathwayOptions, Routing
from compressor.pathways.reference import trusted_reference
from compressor.progress import Progress, Silent
from tests import small
from tests.evaluations import CHOICE, Steps, own_tasks

MOST = 24  # tokens that the model takes, which are letters
UNMOVED, MOVED = PathwayOptions("kernel", share=0.0), PathwayOptions("kernel", share=1.0)
LONG = "the quick brown fox jumps over"  # 30 letters
ASKED = (
    ("one", " a"), ("one", " bcd"), ("two ", "x"), ("", "xy"),  # short
    (LONG, " a"), (LONG, " b"),  # cut alike
    ("again " + LONG, " a"), ("again " + LONG, " bcd"),  # cut differently
    ("one", " " + "z" * (MOST - 1)),  # whose answer leaves one token of the prompt
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model that takes few tokens, with a reference set; its pathways are not those of what is asked."""
    folder = tmp_path_factory.mktemp("routed")
    small.save(folder / "model", max_position_embeddings=MOST)
    items = [Item(f"{n} or {n}", answer, (" a", " b")) for n in range(3) for answer in (" a", " b")]
    (folder / "asked.jsonl").write_text(item_lines(items))
    compressor.reference(str(folder / "model"), folder / "reference", calibration=folder / "asked.jsonl", device="cpu")
    return folder


def options(*tasks: str, **settings: Any) -> EvaluationOptions:
    return EvaluationOptions(tasks or ("sums",), device="cpu", **settings)


def asked(pairs: tuple[tuple[str, str], ...]) -> list[Instance]:
    return [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]


def routed(
    place: Path, how: PathwayOptions, pairs: tuple[tuple[str, str], ...] = ASKED
) -> tuple[list[tuple[float, bool]], Spent]:
    routing = Routing(place / "reference", how)
    source = locate(str(place / "model"))
    with routed_answerer(routing, trusted_reference(routing), source, options()).load(source, options()) as model:
        model.watch(AnswerWatch("model", "sums", Silent()))
        return model.loglikelihood(asked(pairs)), model.spent


def test_without_a_move_answers_are_those_of_lm_evals_own_model(place: Path) -> None:
    with loaded_model(locate(str(place / "model")), options(batch_size=1)) as stock:
        stock.watch(AnswerWatch("model", "sums", Silent()))
        expected = stock.loglikelihood(asked(ASKED))
    found, spent = routed(place, UNMOVED)
    assert [answer[0] for answer in found] == pytest.approx([answer[0] for answer in expected], abs=1e-4)
    assert [answer[1] for answer in found] == [answer[1] for answer in expected]
    assert spent.left_plain == 1 and spent.plain_work < spent.work < 2 * spent.plain_work
    moved = [abs(a[0] - b[0]) for a, b in zip(routed(place, MOVED)[0], found, strict=True)]
    assert moved[6:8] == [0, 0] and min(moved[:6] + moved[8:]) > 1e-6  # one by one, what is cut differently stays


def scores(place: Path, folder: Path, how: PathwayOptions | None, task: str, progress: Progress) -> ItemScores:
    wanted, source = options(task, include_path=folder, limit=4), locate(str(place / "model"))
    routing = Routing(place / "reference", how or UNMOVED)
    answerer = routed_answerer(routing, trusted_reference(routing), source, wanted)
    tasks = resolve_tasks(wanted)
    refuse_other_tasks(tasks)
    return Evaluation(source, tasks, wanted, answerer if how else None).run(progress)[task]


@pytest.mark.full
def test_a_routed_model_is_watched_as_a_plain_one(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, plain, other = own_tasks(tmp_path), Steps(), Steps()
    before, after = scores(place, folder, None, "sums", plain), scores(place, folder, UNMOVED, "sums", other)
    assert before.values == after.values and before.spent is None and after.spent is not None
    assert (plain.phases, plain.advanced) == (other.phases, other.advanced) and plain.phases[-1][1] == 8
    own = PathwayModel.again
    monkeypatch.setattr(PathwayModel, "again", lambda self, run, shift: own(self, run, shift) + torch.nan * shift.sum())
    monkeypatch.setattr(PathwayModel, "_check", lambda self, run: None)
    with pytest.raises(CompressionError, match=r"^model gives a log-likelihood of nan on task 'sums'"):
        scores(place, folder, MOVED, "sums", Silent())


def test_choices_with_prompts_of_their_own_have_pathways_of_their_own(place: Path, tmp_path: Path) -> None:
    """As winogrande asks them."""
    data, folder = tmp_path / "blanks.jsonl", tmp_path / "tasks"
    rows = [{"right": n % 2, "names": [f"{n} and Ann", f"{n} and Bo"], "rest": "sat down"} for n in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.mkdir()
    text = CHOICE.format(name="blanks", data=data, cache=tmp_path / "cache", better="true")
    text = text.replace("to_text: question", "to_text: right").replace("to_choice: choices", "to_choice: names")
    (folder / "blanks.yaml").write_text(text.replace("to_target: answer", "to_target: rest"))
    with pytest.raises(CompressionError, match="asks each choice with a context of its own"):
        task_items(options("blanks", include_path=folder))
    found = scores(place, folder, MOVED, "blanks", Silent())
    opened = open_answering(str(place / "model"), place / "reference", MOVED, device="cpu")
    expected = []
    for row in rows:
        one, two = (opened.answer(name, [" sat down"])[0][0] for name in row["names"])
        expected.append(float((two > one) == row["right"]))
    assert list(found.values) == expected and found.spent is not None and found.spent.left_plain == 0
