"""Scoring: agreement with plain loops, no effect of padding or order, quality of the shipped checkpoint."""

from importlib import resources
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from compressor.cli.demonstration import score
from compressor.data.demo import load_documents, load_items
from scripts.demo_skills import SKILLS

CHECKPOINT = Path(str(resources.files("compressor").joinpath("demo", "checkpoint")))
MAX_BYTES = 8_000_000


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    loaded = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    assert isinstance(loaded, PreTrainedModel)
    return loaded


def test_checkpoint_is_small_and_whole() -> None:
    files = {file.name: file.stat().st_size for file in CHECKPOINT.iterdir()}
    assert sum(files.values()) <= MAX_BYTES
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(files)


def test_tokenizer_has_one_token_per_byte(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "add: 37+85 mod 10 = 2\nnaïve <|end|>"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert len(tokens) == len(text.encode()) - len("<|end|>") + 1
    assert tokenizer.decode(tokens) == text
    assert len(tokenizer) == 257
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id == tokens[-1]


def test_shipped_checkpoint_knows_every_skill(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    accuracy, _ = score(model, tokenizer, load_items()[::5], ())
    assert set(accuracy) == set(SKILLS)
    assert min(accuracy.values()) >= 0.95, accuracy


def test_accuracy_agrees_with_one_choice_at_a_time(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    items = load_items()[::25]
    right = dict.fromkeys(SKILLS, 0)
    for item in items:
        scores = [log_likelihood(model, tokenizer, item.question, choice) for choice in item.choices]
        right[item.skill] += scores.index(max(scores)) == item.answer
    counts = {skill: sum(item.skill == skill for item in items) for skill in SKILLS}
    expected = {skill: right[skill] / counts[skill] for skill in SKILLS}
    assert score(model, tokenizer, items, ()) == (expected, 0)


def test_loss_agrees_with_a_loop_over_documents(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = [text for text, _ in load_documents("heldout")[:12]]
    texts.append("sort 21 -> 12\n")
    total, count = 0.0, 0
    for text in texts:
        tokens = torch.tensor([[tokenizer.bos_token_id, *tokenizer.encode(text)]])
        with torch.no_grad():
            logits = model(tokens).logits
        total += functional.cross_entropy(logits[0, :-1], tokens[0, 1:], reduction="sum").item()
        count += tokens.shape[1] - 1
    assert count == sum(len(text) for text in texts)
    assert score(model, tokenizer, (), texts) == ({}, pytest.approx(total / count, rel=1e-5))


def log_likelihood(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, choice: str) -> float:
    """Summed log-likelihood of a choice from one unpadded forward pass."""
    before = [tokenizer.bos_token_id, *tokenizer.encode(question)]
    after = tokenizer.encode(choice)
    with torch.no_grad():
        predicted = model(torch.tensor([before + after])).logits[0].log_softmax(dim=-1)
    places = torch.arange(len(before) - 1, len(before) + len(after) - 1)
    return float(predicted[places, torch.tensor(after)].sum())
