"""The command `text`, and the loss of a document, which is the same wherever it is measured."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from compressor.answers.lm_eval_adapter import lm_eval_model
from compressor.answers.tasks import EvaluationOptions
from compressor.checkpoint.source import locate
from compressor.data.batches import calibrate, evaluation_sets
from compressor.divergence.evaluator import Evaluator
from compressor.model.opened import open_model
from compressor.progress import Silent
from compressor.quality_gate.options import BehaviourOptions
from compressor.quality_gate.teacher_forced import text_sets
from tests.support import small
from tests.support.command_line import Run
from tests.support.texts import write

SENTENCE = "The quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = small.save(tmp_path_factory.mktemp("opened") / "model")
    tokenizer = small.tokenizer("{{ bos_token }}" + small.CHAT)
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.full
def test_a_documents_loss_is_the_stock_models_everywhere(model: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(SENTENCE, return_tensors="pt")["input_ids"]
    assert ids[0, 0] == 1
    stock = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    ended = torch.cat([ids, torch.tensor([[2]])], 1)
    with torch.no_grad():
        loss, ended_loss = (float(stock(rows, labels=rows).loss) for rows in (ids, ended))
    source = write(tmp_path, json.dumps({"text": SENTENCE}) + "\n", "text.jsonl")
    eight = write(tmp_path, (json.dumps({"text": SENTENCE}) + "\n") * 8, "eight.jsonl")
    length, vocabulary = ids.shape[1], small.VOCABULARY
    shared = {"length": length, "seed": 0, "vocab": vocabulary}
    (row,) = calibrate(str(source), tokenizer, samples=1, **shared).batches
    assert row.tolist() == ids.tolist()
    opened = open_model(locate(str(model)), "float32", "cpu")
    (heldout,) = evaluation_sets([str(source)], tokenizer, most=1, **shared)
    (named,) = text_sets(
        BehaviourOptions(text=(str(eight),), text_samples=8, text_length=length + 1), tokenizer, vocabulary
    )
    for sequences, expected in ((heldout, [loss]), (named, [ended_loss] * 8)):
        assert Evaluator(opened, [sequences]).measure(opened)[0].loss.tolist() == pytest.approx(expected, rel=1e-6)
    options = EvaluationOptions(tasks=("any",), dtype="float32", device="cpu")
    for streamed in (False, True):
        with lm_eval_model(locate(str(model)), options, streamed) as asked:
            asked.watch("task", Silent())
            (total,) = asked.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (SENTENCE,), 0)])
            (scored,) = asked.loglikelihood([Instance("loglikelihood", {}, (SENTENCE[:9], SENTENCE[9:]), 0)])
        assert -total / (length - 1) == pytest.approx(loss, rel=1e-6)
        with torch.no_grad():
            logs = stock(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert scored[0] == pytest.approx(float(logs[9:].sum()), rel=1e-6)


def test_text_shows_what_calibration_reads(run: Run, model: Path, tmp_path: Path) -> None:
    rows: list[Any] = [{"instruction": "Sort.", "input": f"{n} 1", "output": "1", "note": "x"} for n in range(9)]
    source = write(tmp_path, "\n".join([*map(json.dumps, rows), "{"]), "rows.jsonl")
    flags = ("--model", model, "--samples", 4, "--sequence-length", 16, "--documents", 2)
    (shown,) = json.loads(run("text", source, *flags, "--json").out)
    tokenizer = AutoTokenizer.from_pretrained(model)
    made = calibrate(str(source), tokenizer, samples=4, length=16, seed=0, vocab=small.VOCABULARY)
    assert shown["sha256"] == made.identity["sha256"]
    assert (shown["rows"], shown["left_out"]) == (9, 1) and "line 10 is not valid JSON" in shown["reasons"][0]
    assert shown["columns"] == ["input", "instruction", "output"] and shown["unread"] == ["note"]
    text = "".join(piece for piece, _ in shown["shown"][0])
    begin = text.index(" 1")
    assert text == f"<s><user>Sort.\n{text[begin - 1]} 1\n<assistant>1\n</s>"
    assert [piece for piece, special in shown["shown"][0] if special] == ["<s>", "</s>"]
    assert shown["opening"] == ["<s>"] and shown["lengths"] == [len(tokenizer(text)["input_ids"]) - 1] * 4
    result = run("text", source, *flags)
    assert result.status == 0 and "⟦<s>⟧|<|u|s|e|r|>" in result.out and "note" in result.err


def test_text_needs_no_model(run: Run, tmp_path: Path) -> None:
    source = write(tmp_path, json.dumps({"messages": [{"role": "user", "content": "hi there"}]}), "chat.jsonl")
    result = run("text", source)
    assert result.status == 0 and "user:|hi|there" in result.out and "digest" not in result.out
    missing = run("text", tmp_path / "missing.jsonl")
    assert missing.status == 2 and "does not exist" in missing.err


def test_text_beyond_the_models_positions_is_said(run: Run, model: Path, tmp_path: Path) -> None:
    positions = json.loads((model / "config.json").read_text())["max_position_embeddings"]
    source = write(tmp_path, small.TEXT, "text.txt")
    flags = ("--experts", 4, "--strategy", "count-guided", "--calibration", source, "--samples", 2)
    result = run("plan", model, "-o", tmp_path / "plan.json", *flags, "--sequence-length", positions + 1)
    sentence = f"sequences of {positions + 1} tokens go beyond the {positions} positions that the model was made for"
    assert result.status == 0 and result.err.count(sentence) == 1
    result = run("plan", model, "-o", tmp_path / "other.json", *flags, "--sequence-length", positions)
    assert result.status == 0 and "positions" not in result.err
