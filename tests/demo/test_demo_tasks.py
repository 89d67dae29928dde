"""The demo's lm-eval tasks: the shipped items as they are, scored as the demo's own evaluation scores them."""

import os
import shutil
from importlib import resources
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from compressor.answers.scores import ItemScores
from compressor.answers.tasks import EvaluationOptions, EvaluationTask, resolve_tasks
from compressor.cli.demonstration import score
from compressor.data.demo import load_documents, load_items
from compressor.progress import Silent
from scripts.demo_skills import SKILLS
from tests.support import small
from tests.support.eval_tasks import evaluate

CHECKPOINT = Path(str(resources.files("compressor").joinpath("demo", "checkpoint")))
PER_SKILL = 12


@pytest.fixture(scope="module")
def worse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("worse") / "model"
    shutil.copytree(CHECKPOINT, folder)
    generator = torch.Generator().manual_seed(0)

    def shake(tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * 0.45
            tensor += noise.to(tensor.dtype)

    small.edit_tensors(folder, shake)
    return folder


@pytest.fixture(scope="module")
def options() -> EvaluationOptions:
    return EvaluationOptions(tasks=("moe_demo",), limit=PER_SKILL, dtype="float32")


@pytest.fixture(scope="module")
def tasks(options: EvaluationOptions) -> tuple[EvaluationTask, ...]:
    return resolve_tasks(options)


@pytest.fixture(scope="module")
def worse_scores(worse: Path, options: EvaluationOptions, tasks: tuple[EvaluationTask, ...]) -> ItemScores:
    return evaluate(str(worse), None, options, Silent(), tasks)["moe_demo"]


def test_every_item_is_right_or_wrong_as_the_demo_finds(worse: Path, worse_scores: ItemScores) -> None:
    model = AutoModelForCausalLM.from_pretrained(worse, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(worse)
    found = {item.id: item.score for item in worse_scores.items}
    items = load_items()
    for skill in SKILLS:
        asked = [item for item in items if item.skill == skill][:PER_SKILL]
        expected = [score(model, tokenizer, [item], ())[0][skill] for item in asked]
        assert [found[f"moe_demo_{skill}/{number}"] for number in range(PER_SKILL)] == expected
    assert 0.2 < sum(worse_scores.values) / len(worse_scores.values) < 0.95  # both answers occur


def test_a_group_has_the_items_of_its_skills(worse_scores: ItemScores) -> None:
    assert (worse_scores.task, worse_scores.metric, worse_scores.kind) == ("moe_demo", "acc", "score")
    ids = [item.id for item in worse_scores.items]
    assert ids == [f"moe_demo_{skill}/{n}" for skill in SKILLS for n in range(PER_SKILL)]
    assert {item.weight for item in worse_scores.items} == {1.0}


def test_the_shipped_model_is_right_on_the_same_items(
    worse_scores: ItemScores, options: EvaluationOptions, tasks: tuple[EvaluationTask, ...]
) -> None:
    scores = evaluate(str(CHECKPOINT), None, options, Silent(), tasks)["moe_demo"]
    assert set(scores.values) == {1.0}
    assert [item.id for item in scores.items] == [item.id for item in worse_scores.items]
    assert scores.version == worse_scores.version


def test_tasks_hold_the_shipped_data_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    group, text = resolve_tasks(EvaluationOptions(tasks=("moe_demo", "moe_demo_text")))
    items = load_items()
    for skill in SKILLS:
        docs = list(group.parts[f"moe_demo_{skill}"].eval_docs)
        expected = [(item.question, list(item.choices), item.answer) for item in items if item.skill == skill]
        assert [(doc["question"], doc["choices"], doc["answer"]) for doc in docs] == expected
    assert [doc["text"] for doc in text.parts["moe_demo_text"].eval_docs] == [t for t, _ in load_documents("heldout")]
    assert os.listdir(tmp_path) == []


def test_few_shot_examples_read_as_a_training_document(tasks: tuple[EvaluationTask, ...]) -> None:
    task = tasks[0].parts["moe_demo_recall"]
    task.set_fewshot_seed(0)
    question = next(item.question for item in load_items() if item.skill == "recall")
    text = task.fewshot_context({"question": question, "choices": ["abc"], "answer": 0}, num_fewshot=2)
    right = {f"{item.question}{item.choices[item.answer]}" for item in load_items()}
    *shown, last = text.removeprefix("<|end|>").split("\n")
    assert text.startswith("<|end|>")
    assert len(shown) == 2 and set(shown) <= right
    assert last == question
