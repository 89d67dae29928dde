import json
import sys
from pathlib import Path
from typing import Any

import pytest

import compressor
from compressor.answers.items import Item, item_lines, likelihoods
from compressor.errors import CompressionError
from compressor.pathways import lm_eval_model
from compressor.pathways.answering import open_answering
from compressor.pathways.options import PathwayOptions
from tests.support import small
from tests.support.eval_tasks import no_stock_tasks, own_tasks

PROMPT, CHOICES = "What is blue", (" sky", " sea!", " grass")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("c3po")
    small.save(folder / "model")
    items = [
        Item(f"{text} {n}", answer, (" a", " b")) for n, text in enumerate(["one", "to"]) for answer in (" a", " b")
    ]
    (folder / "asked.jsonl").write_text(item_lines([*items, *(Item(f"{PROMPT}", x, CHOICES) for x in CHOICES)]))
    compressor.reference(str(folder / "model"), folder / "reference", calibration=folder / "asked.jsonl", device="cpu")
    return folder


def answered(place: Path, **options: Any) -> tuple[list[float], list[float], float]:
    opened = open_answering(str(place / "model"), place / "reference", PathwayOptions(**options), device="cpu")
    found, cost = [likelihood for likelihood, _ in opened.answer(PROMPT, CHOICES)], opened.cost
    plain = opened.run(Item(PROMPT, CHOICES[0], CHOICES))
    return found, likelihoods(plain.logits, plain.rows).tolist(), cost


@pytest.mark.parametrize("optimizer", ["mode", "kernel", "ngd"])
def test_answers_change_with_the_pathway(optimizer: Any, place: Path) -> None:
    found, plain, _ = answered(place, optimizer=optimizer)
    assert max(abs(a - b) for a, b in zip(found, plain, strict=True)) > 1e-4


def test_cost_is_told_in_plain_forwards(place: Path) -> None:
    found, plain, cost = answered(place, radius=1e-6)
    assert found == plain and cost == 2  # no neighbour within reach: the late layers, which are all, once more
    assert answered(place, optimizer="mode", layers=1)[2] == 1.5  # one of two layers once more
    assert answered(place, optimizer="ngd", layers=1)[2] > answered(place, optimizer="kernel", layers=1)[2] > 1.5


def test_what_does_not_belong_together_is_refused(place: Path, tmp_path: Path) -> None:
    model, reference = str(place / "model"), place / "reference"
    with pytest.raises(CompressionError, match="are embedded by 'own', not 'some/model'"):
        open_answering(model, reference, PathwayOptions(), embedding="some/model")
    small.save(tmp_path / "other")
    small.edit_tensors(tmp_path / "other", lambda tensors: [value.mul_(2) for value in tensors.values()])
    with pytest.raises(CompressionError, match=r"is of another model \(model\) or tokenizer than other"):
        open_answering(str(tmp_path / "other"), reference, PathwayOptions())
    with pytest.raises(CompressionError, match=r"reference\.json cannot be read"):
        open_answering(model, place, PathwayOptions())


def arguments(place: Path, *more: str) -> str:
    return ",".join([f"pretrained={place / 'model'}", f"reference={place / 'reference'}", *more])


def evaluated(place: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, *more: str) -> Any:
    words = ("--model", "moe-c3po", "--model_args", arguments(place, *more), "--tasks", "sums", "--limit", "3",
             "--device", "cpu", "--include_path", str(own_tasks(folder)), "--output_path", str(folder / "results.json"))  # fmt: skip # noqa: E501
    no_stock_tasks(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["lm_eval", *words])
    lm_eval_model.main()
    (written,) = folder.glob("results*.json")
    return json.loads(written.read_text())


def test_lm_eval_runs_the_model_by_its_name(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = evaluated(place, tmp_path, monkeypatch, "optimizer=kernel", "share=1", "neighbours=2", "layers=1")
    options = PathwayOptions("kernel", share=1.0, neighbours=2, layers=1)
    opened = open_answering(str(place / "model"), place / "reference", options)
    right = 0
    for n in range(3):
        answers = opened.answer(f"{n} and {n}:", (f" {2 * n}", f" {2 * n + 1}"))
        right += answers[0] > answers[1]
    assert found["results"]["sums"]["acc,none"] == pytest.approx(right / 3)


def test_a_fault_within_lm_eval_is_one_sentence(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        evaluated(place, tmp_path, monkeypatch, "optimizer=adam")
    assert stop.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("Error: model_args.optimizer should be 'mode'")


def test_other_arguments_and_tasks_than_multiple_choice_are_refused(place: Path) -> None:
    create, more = lm_eval_model.PathwayLM.create_from_arg_string, {"batch_size": 1, "device": "cpu"}
    for odd, message in (
        ("neighbours=few", "model_args.neighbours should be a whole number"),
        ("peft=x", "model_args has an unknown field 'peft'"),
    ):
        with pytest.raises(CompressionError, match=message):
            create(arguments(place, odd), more)
    model = create(arguments(place), more)
    for ask in (model.loglikelihood_rolling, model.generate_until):
        with pytest.raises(CompressionError, match="answers multiple choice alone"):
            ask([])
