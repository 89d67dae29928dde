"""`moe-compress reference` as it is typed: what is kept, what is refused, and that nothing is left behind."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compressor.data.demo import demo_checkpoint
from compressor.pathways.reference import read_reference
from tests.support import small
from tests.support.command_line import Run, names, refused
from tests.support.eval_tasks import ask

SUM = {"prompt": "<|end|>add mod 10: 762+232 =", "answer": " 994", "choices": [" 994", " 992"]}
LINES = (
    SUM,
    {**SUM, "answer": " 992"},  # wrong
    {"prompt": SUM["prompt"], "answer": " 994"},  # which the model writes
    {"prompt": SUM["prompt"], "answer": " 99"},  # which it does not stop at
    {"prompt": "an answer that is missing"},
)


def data(folder: Path, *lines: Any) -> Path:
    path = folder / "asked.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_items_of_a_file_that_are_answered_right_are_kept(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "reference"
    with demo_checkpoint() as model:
        items = data(tmp_path, *LINES)
        done = run("reference", model, "--calibration", items, "-o", out, "--json")
        assert done.status == 0 and "1 of 5 items of" in done.err and "line 5: answer is missing" in done.err, done.err
        items = out / "items.jsonl"
        again = run("reference", model, "--calibration", items, "-o", tmp_path / "again", "--device", "cpu")
    content, found = json.loads(done.out), read_reference(out)
    assert content["kept"] == len(found.items) == content["asked"][0]["right"] < 4
    assert SUM["answer"] in {item.answer for item in found.items} and " 992" not in {x.answer for x in found.items}
    assert found.pathways.shape == (content["kept"], 4, 16) and content["facts"]["scores"] == ["softmax"] * 4
    torch.testing.assert_close(found.pathways.sum(-1), torch.ones(content["kept"], 4))
    assert again.status == 0 and "Written: " in again.out
    repeated = {**small.tree(tmp_path / "again"), "reference.json": ""}
    assert repeated == {**small.tree(out), "reference.json": ""}


def test_items_of_tasks_are_right_where_lm_eval_says_so(run: Run, tmp_path: Path) -> None:
    model = small.save(tmp_path / "model")  # random, so that it is right now and then
    done = run("reference", model, "--tasks", "moe_demo_facts,moe_demo_sorting", "--limit", "8", "-o", tmp_path / "out")
    assert done.status == 0, done.err
    scores = ask(model, "moe_demo_facts", "moe_demo_sorting", limit=8)
    right = {name: int(sum(entry.values)) for name, entry in scores.items()}
    kept = [item.task for item in read_reference(tmp_path / "out").items]
    assert {name: kept.count(name) for name in right} == right and 0 < len(kept) < 16


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "either --tasks with lm-eval tasks, or --calibration"),
        (("--tasks", "moe_demo_facts", "--calibration", "x.jsonl"), "either --tasks"),
        (("--tasks", "moe_demo_text"), "is not multiple choice"),
        (("--calibration", "none.jsonl"), "none.jsonl cannot be read"),
        (("--tasks", "moe_demo_facts", "--limit", "0"), "limit should be greater than or equal to 1, it is 0"),
        (("--calibration", "wrong.jsonl"), "answers none of 1 items right"),
        (
            ("--calibration", "right.jsonl", "--embedding", "all-MiniLM-L6-v2"),
            "cannot be loaded .* install sentence-tr",
        ),
        (("--calibration", "mixed.jsonl", "--strict"), "mixed.jsonl, line 2: answer is missing"),
        (("--calibration", "right.jsonl", "--device", "nowhere"), "device 'nowhere' cannot be used"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_leaves_nothing(
    words: tuple[str, ...], message: str, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    Path("wrong.jsonl").write_text(json.dumps(LINES[1]))
    Path("right.jsonl").write_text(json.dumps(LINES[0]))
    Path("mixed.jsonl").write_text("\n".join(json.dumps(line) for line in (LINES[0], {"prompt": "no answer"})))
    before = names(tmp_path)
    with demo_checkpoint() as model:
        refused(run("reference", model, *words, "-o", "out"), message)
    assert names(tmp_path) == before


def test_logits_that_are_not_finite_are_no_answers(run: Run, tmp_path: Path) -> None:
    model = small.save(tmp_path / "model")
    small.edit_tensors(model, lambda tensors: tensors["lm_head.weight"].fill_(3e38))
    words = ("--calibration", data(tmp_path, {"prompt": "a", "answer": "b"}), "-o", tmp_path / "out")
    refused(run("reference", model, *words), "logits that are not finite")


def test_sentence_transformers_embed_prompts(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        def __init__(self, name: str, trust_remote_code: bool) -> None:
            assert (name, trust_remote_code) == ("some/model", False)

        def encode(self, text: str) -> Any:
            return torch.tensor([len(text), 1.0, 2.0]).numpy()

    monkeypatch.setitem(sys.modules, "sentence_transformers", SimpleNamespace(SentenceTransformer=Fake))
    with demo_checkpoint() as model:
        words = ("--calibration", data(tmp_path, SUM), "--embedding", "some/model", "-o", tmp_path / "out")
        assert run("reference", model, *words).status == 0
    found = read_reference(tmp_path / "out", "some/model")
    assert found.embeddings.tolist() == [[len(SUM["prompt"]), 1.0, 2.0]] and found.facts.embedding == "some/model"
