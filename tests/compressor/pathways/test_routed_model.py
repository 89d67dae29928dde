import json
from pathlib import Path
from typing import Any

import lm_eval
import pytest
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager

import compressor
from compressor.answers.items import Item, item_lines
from compressor.answers.lm_eval_adapter import lm_eval_model
from compressor.answers.tasks import EvaluationOptions, resolve_tasks, task_items
from compressor.checkpoint.source import locate
from compressor.pathways.answering import open_answering
from compressor.pathways.lm_eval_model import PathwayLM
from compressor.pathways.options import PathwayOptions
from compressor.progress import Silent
from tests.support import small
from tests.support.eval_tasks import CHOICE

MOST = 24  # tokens that the model takes, which are letters
LONG = "the quick brown fox jumps over"  # 30 letters
ASKED = (
    ("one", " a"), ("one", " bcd"), ("two ", "x"), ("", "xy"),  # short
    (LONG, " a"), (LONG, " b"),  # cut alike
    ("again " + LONG, " a"), ("again " + LONG, " bcd"),  # cut differently
    ("one", " " + "z" * (MOST - 1)),  # whose answer leaves one token of the prompt
)  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routed")
    small.save(folder / "model", max_position_embeddings=MOST)
    items = [Item(f"{n} or {n}", answer, (" a", " b")) for n in range(3) for answer in (" a", " b")]
    (folder / "asked.jsonl").write_text(item_lines(items))
    compressor.reference(str(folder / "model"), folder / "reference", calibration=folder / "asked.jsonl", device="cpu")
    return folder


def routed(place: Path, share: float) -> PathwayLM:
    folders = str(place / "model"), str(place / "reference")
    return PathwayLM(*folders, device="cpu", optimizer="kernel", share=share)


def asked() -> list[Instance]:
    return [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(ASKED)]


def test_without_a_move_answers_are_those_of_lm_evals_own_model(place: Path) -> None:
    options = EvaluationOptions(tasks=("sums",), device="cpu", batch_size=1)
    with lm_eval_model(locate(str(place / "model")), options) as stock:
        stock.watch("sums", Silent())
        expected = stock.loglikelihood(asked())
    model = routed(place, 0.0)
    found = model.loglikelihood(asked())
    assert [answer[0] for answer in found] == pytest.approx([answer[0] for answer in expected], abs=1e-4)
    assert [answer[1] for answer in found] == [answer[1] for answer in expected]
    assert 1 < model.answering.cost < 2
    moved = [abs(a[0] - b[0]) for a, b in zip(routed(place, 1.0).loglikelihood(asked()), found, strict=True)]
    assert moved[6:8] == [0, 0] and min(moved[:6] + moved[8:]) > 1e-6  # one by one, what is cut differently stays


def test_choices_with_prompts_of_their_own_have_pathways_of_their_own(place: Path, tmp_path: Path) -> None:
    data, folder = tmp_path / "blanks.jsonl", tmp_path / "tasks"
    rows = [{"right": n % 2, "names": [f"{n} and Ann", f"{n} and Bo"], "rest": "sat down"} for n in range(4)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder.mkdir()
    text = CHOICE.format(name="blanks", data=data, cache=tmp_path / "cache", better="true")
    text = text.replace("to_text: question", "to_text: right").replace("to_choice: choices", "to_choice: names")
    (folder / "blanks.yaml").write_text(text.replace("to_target: answer", "to_target: rest"))
    options = EvaluationOptions(tasks=("blanks",), include_path=folder)
    assert [(item.contexts[item.right], item.right) for item in task_items(options)] == [
        (row["names"][row["right"]], row["right"]) for row in rows
    ]
    (task,) = resolve_tasks(options)
    found: Any = lm_eval.simple_evaluate(
        model=routed(place, 1.0), tasks=[task.loaded], task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )  # fmt: skip
    moved = PathwayOptions("kernel", share=1.0)
    opened = open_answering(str(place / "model"), place / "reference", moved, device="cpu")
    expected = []
    for row in rows:
        one, two = (opened.answer(name, [" sat down"])[0][0] for name in row["names"])
        expected.append(float((two > one) == row["right"]))
    assert [sample["acc"] for sample in found["samples"]["blanks"]] == expected
