"""Grades of items on optimised pathways, against the stock model, and with WinoGrande as lm-eval reads it."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval
import pytest
import torch
import transformers

import compressor
from compressor.answers.items import item_lines
from compressor.answers.tasks import EvaluationOptions, task_items
from compressor.errors import CompressionError
from compressor.pathways import lm_eval_model
from compressor.pathways.answering import open_answering
from compressor.pathways.options import PathwayOptions
from tests.support import small
from tests.support.command_line import Run
from tests.support.doc_pages import ROOT
from tests.support.eval_tasks import no_stock_tasks
from tests.support.recipes import run_recipe

SENTENCES = [
    {"sentence": f"{name} met {other}, so _ was {mood}.", "option1": name, "option2": other, "answer": answer}
    for name, other in (("ann", "bo"), ("carl", "dee"), ("ed", "flo"))
    for mood in ("glad", "late")
    for answer in "12"
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, and lm-eval's own WinoGrande whose data is a small file."""
    small.save(tmp_path / "model")
    stock = Path(lm_eval.__file__).parent / "tasks" / "winogrande"
    tasks = shutil.copytree(stock, tmp_path / "tasks")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in SENTENCES))
    files = f"dataset_path: json\ndataset_kwargs:\n  cache_dir: {tmp_path / 'cache'}\n  data_files:\n"
    files += "".join(f"    {split}: {tmp_path / 'rows.jsonl'}\n" for split in ("train", "validation"))
    definition = (tasks / "default.yaml").read_text().replace("dataset_path: allenai/winogrande\n", files)
    (tasks / "default.yaml").write_text(definition.replace("dataset_name: winogrande_xl\n", ""))
    no_stock_tasks(monkeypatch)
    return tmp_path


@torch.no_grad()
def stock_choices(folder: Path) -> list[int]:
    """Which option the stock model takes, by the likelihood of what follows the blank."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "model")
    taken = []
    for row in SENTENCES:
        before, after = row["sentence"].split("_")
        scores = []
        for option in (row["option1"], row["option2"]):
            start = len(tokenizer.encode(before + option))
            tokens = torch.tensor([tokenizer.encode(before + option + after)])
            logs = model(tokens).logits[0].log_softmax(-1)
            scores.append(float(sum(logs[place - 1, tokens[0, place]] for place in range(start, tokens.shape[1]))))
        taken.append(scores.index(max(scores)))
    return taken


@pytest.mark.full
def test_winogrande_is_a_reference_set_and_a_column(folder: Path, run: Run) -> None:
    asked = ("--tasks", "winogrande", "--include-path", folder / "tasks", "--device", "cpu")
    made = run("reference", folder / "model", "-o", folder / "reference", *asked)
    assert made.status == 0, made.err
    right = [int(row["answer"]) - 1 == choice for row, choice in zip(SENTENCES, stock_choices(folder), strict=True)]
    lines = [json.loads(line) for line in (folder / "reference" / "items.jsonl").read_text().splitlines()]
    filled = [(row["sentence"].split("_")[0] + row[f"option{row['answer']}"]) for row in SENTENCES]
    assert [line["prompt"] for line in lines] == [
        text for text, is_right in zip(filled, right, strict=True) if is_right
    ]
    settings = ("--set", "optimizer=kernel,oracle", "--set", "share=1", "--set", "layers=1,first:1", "--json")
    recipe = (ROOT / "recipes" / "c3po.py", folder, "custom", folder / "model", "--reference-tasks", "winogrande")
    told = run_recipe(*recipe, "--out", folder, *asked, *settings)
    plain, first, other, *oracles = json.loads(told)
    assert plain["accuracy"] == {"winogrande": pytest.approx(sum(right) / len(right))}
    chosen = {name: first["settings"][name] for name in ("optimizer", "share", "layers")}
    assert chosen == {"optimizer": "kernel", "share": 1, "layers": 1}
    for score, layers in ((first, 1), (other, "first:1")):
        options = PathwayOptions("kernel", share=1.0, layers=layers)
        model = open_answering(str(folder / "model"), folder / "reference", options, device="cpu")
        now, nats = [], 0.0
        for row in SENTENCES:
            before, after = row["sentence"].split("_")
            scores = [model.answer(before + row[f"option{n}"], [after])[0][0] for n in "12"]
            nats += scores[int(row["answer"]) - 1] / len(SENTENCES)
            now.append(scores.index(max(scores)) == int(row["answer"]) - 1)
        changes = torch.tensor(now).double() - torch.tensor(right).double()
        assert score["accuracy"] == {"winogrande": pytest.approx(sum(now) / len(now))}
        assert score["gain"] == pytest.approx(float(changes.mean()))
        assert score["likelihood"] == pytest.approx(nats)
        assert score["standard_error"] == pytest.approx(float(changes.std()) / len(changes) ** 0.5)
        assert score["coverage"] == sorted(score["coverage"]) and score["coverage"][-1] == pytest.approx(1)
    assert all(oracle["likelihood"] > plain["likelihood"] for oracle in oracles)


def test_items_with_contexts_are_read_as_they_were_written(folder: Path) -> None:
    items = task_items(EvaluationOptions(tasks=("winogrande",), include_path=folder / "tasks"))
    (folder / "items.jsonl").write_text(item_lines(items))
    compressor.reference(str(folder / "model"), folder / "one", calibration=folder / "items.jsonl", device="cpu")
    kept = [json.loads(line) for line in (folder / "one" / "items.jsonl").read_text().splitlines()]
    assert kept and all(line["prompt"] in line["contexts"] and len(line["contexts"]) == 2 for line in kept)


def test_the_oracle_is_kept_from_whoever_knows_no_answers(folder: Path) -> None:
    asked = {"tasks": ["winogrande"], "include_path": folder / "tasks", "device": "cpu"}
    model, reference = str(folder / "model"), folder / "reference"
    compressor.reference(model, reference, **asked)
    oracle = open_answering(model, reference, PathwayOptions("oracle"), device="cpu")
    with pytest.raises(CompressionError, match=r"the oracle has to know the answers; recipes/c3po\.py"):
        oracle.answer("a", ["b"])
    with pytest.raises(CompressionError, match="lm-eval does not say which answer is right"):
        lm_eval_model.PathwayLM(model, str(reference), optimizer="oracle")


@pytest.mark.parametrize("trusted", [False, True])
def test_code_of_an_embedding_model_is_run_only_if_asked(
    trusted: bool, folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: dict[str, Any] = {}

    def sentence_transformer(name: str, **options: Any) -> Any:
        loaded.update(options, name=name)
        return SimpleNamespace(encode=lambda text: [float(len(text)), 1.0])

    package = SimpleNamespace(SentenceTransformer=sentence_transformer, __spec__=None)
    monkeypatch.setitem(sys.modules, "sentence_transformers", package)  # type: ignore[arg-type]
    more = ("--trust-remote-code",) if trusted else ()
    asked = ("--tasks", "winogrande", "--include-path", folder / "tasks", "--device", "cpu", "--embedding", "org/code")
    assert run("reference", folder / "model", "-o", folder / "reference", *asked, *more).status == 0
    assert loaded == {"name": "org/code", "trust_remote_code": trusted}
