from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import kl_div
from transformers import AutoModelForCausalLM

import compressor
from compressor.checkpoint.source import locate
from compressor.data.batches import calibrate
from compressor.divergence import teacher_outputs as base_answers
from compressor.divergence.teacher_outputs import Distributions, read_base, top_divergence
from compressor.model.opened import open_model
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Silent
from tests.support.opened_models import batches, opened

DEMO = Path(compressor.__file__).parent / "demo" / "checkpoint"


@torch.no_grad()
def log_probabilities(stock: Any, tokens: Tensor) -> Tensor:
    found: Tensor = stock(input_ids=tokens, use_cache=False).logits.double().log_softmax(-1)
    return found


def full(original: Tensor, other: Tensor) -> Tensor:
    return kl_div(other.double().log_softmax(-1), original, reduction="none", log_target=True).sum(-1)


@pytest.mark.parametrize("name", ["mixtral", "gemma4"])
def test_the_likeliest_tokens_are_kept_and_the_mass_of_the_others(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock, (2, 1))
    answers = read_base(model, {"text": parts}, None, Silent(), tmp_path / "kept")["text"]
    for tokens, found in zip(parts, answers, strict=True):
        logs = log_probabilities(stock, tokens)
        best = logs.topk(base_answers.KEPT)
        assert torch.equal(found.tokens.long(), best.indices)
        torch.testing.assert_close(found.logs.double(), best.values, atol=1e-5, rtol=0)
        rest = 1 - best.values.exp().sum(-1)
        torch.testing.assert_close(found.others.double().exp(), rest, atol=1e-6, rtol=1e-3)


def test_divergence_and_its_gradient_are_the_full_ones_where_all_is_kept(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    (tokens,) = batches(stock, (2,))
    logs = log_probabilities(stock, tokens)
    other = (logs + 0.3 * torch.randn(logs.shape, generator=torch.Generator().manual_seed(0))).float().requires_grad_()
    expected = full(logs, other)
    (kept,) = read_base(model, {"text": [tokens]}, None, Silent(), tmp_path / "kept")["text"]
    found = top_divergence(kept, other)
    assert (found <= expected + 1e-5).all() and (found > 0.8 * expected).all()  # a little less
    assert top_divergence(kept, logs.float()).abs().max() < 1e-5  # nothing is as near as the same
    whole = logs.float().topk(logs.shape[-1])
    everything = Distributions(whole.indices.int(), whole.values, torch.full(tokens.shape, base_answers.LEAST))
    found = top_divergence(everything, other)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)
    gradients = [torch.autograd.grad(divergence.sum(), other)[0] for divergence in (found, expected)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-3)


def test_on_the_demos_text_what_is_kept_tells_the_divergence_within_a_hundredth(tmp_path: Path) -> None:
    """Of the demo model from one whose first router is all zeros."""
    model = open_model(locate(str(DEMO)), "float32", "cpu")
    text = calibrate("demo", load_tokenizer(DEMO), samples=8, length=128, seed=0, vocab=model.vocabulary)
    tokens = torch.cat(list(text.batches))
    (kept,) = read_base(model, {"text": [tokens]}, None, Silent(), tmp_path / "kept")["text"]
    stock = AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32)
    logs = log_probabilities(stock, tokens)
    stock.model.layers[0].mlp.gate.weight.data.zero_()
    other = log_probabilities(stock, tokens).float()
    expected = full(logs, other).mean()
    assert expected > 0.01 and float(top_divergence(kept, other).mean()) == pytest.approx(float(expected), rel=0.01)
