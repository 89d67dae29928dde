"""The reverse pass: every layer's gradients are those of autograd on the whole stock model in memory."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.model.opened import OpenModel
from compressor.model.streaming import ReversePass, ReverseVisitor
from tests.compressor.model.test_streaming import loaded, loaded_units
from tests.support import zoo
from tests.support.audit import paths_of
from tests.support.opened_models import batches, opened

REFUSED = {  # more than one hidden state goes from layer to layer, or to the head
    "zaya": r"model\.layers\.1 is given more of earlier layers than their hidden states",
    "mistral_large4": r"model\.language_model\.layers\.2 is given more of earlier layers",  # their keys and values
    "inkling2_loop": r"model\.layers\.2 is given more of earlier layers than their hidden states",
    "inkling2": "its output depends on more than the last layer's hidden states",
    "diffusion_gemma": r"model\.encoder\.language_model\.layers\.0\.\S+ shares its weights with another layer",
}
EVERY = pytest.mark.parametrize("name", zoo.sweep())


def loss(batch: int, output: Any) -> Tensor:
    """Anything that hangs on all positions, and on the batch."""
    scores = output.logits.float().log_softmax(-1)
    return (batch + 1) * (scores[..., 0] - scores[..., 1].square()).sum()


class Gathering(ReverseVisitor):
    """Keeps the gradients of all parameters of every layer, and how much was loaded on the way back."""

    def __init__(self, model: OpenModel) -> None:
        self.model, self.whole = model, model.partial.model
        self.found: dict[str, Tensor | None] = {}
        self.most = 0

    def on_layer_loaded(self, decoder_layer: str) -> None:
        self.whole.get_submodule(decoder_layer).requires_grad_(True)

    def before_reverse(self, decoder_layer: str, batch: int) -> None:
        self.most = max(self.most, len(loaded_units(self.model)))

    def on_reverse_end(self, decoder_layer: str) -> None:
        for name, parameter in self.whole.get_submodule(decoder_layer).named_parameters():
            self.found[f"{decoder_layer}.{name}"] = parameter.grad


def check_equal(stock: Any, model: OpenModel, parts: Sequence[Tensor], **options: Any) -> None:
    gathering = Gathering(model)
    losses = ReversePass(model, parts, **options).run(loss, gathering)
    assert loaded(model.partial) == set() and gathering.most == 1
    stock.requires_grad_(True)
    for number, tokens in enumerate(parts):
        value = loss(number, stock(input_ids=tokens, use_cache=False))
        value.backward()  # type: ignore[no-untyped-call]
        assert losses[number] == pytest.approx(float(value.detach()), rel=1e-5)
    whole = dict(stock.named_parameters())
    assert {name.split(".layers.")[0] for name in gathering.found}
    for name, gradient in gathering.found.items():
        expected = whole[name].grad
        if expected is None or gradient is None:  # of an expert without a token, say
            assert all(value is None or not value.any() for value in (expected, gradient)), name
        else:
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max()), msg=name)
    assert any(value is not None and value.any() for value in gathering.found.values())


@EVERY
def test_gradients_are_those_of_autograd_on_the_whole_model(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    if name in REFUSED:
        with pytest.raises(CompressionError, match=f"^{type(stock).__name__}: {REFUSED[name]}.*layer by layer"):
            ReversePass(model, batches(stock)).run(loss, Gathering(model))
        assert loaded(model.partial) == set()
    else:
        check_equal(stock, model, batches(stock, (2, 1)))


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss", "qwen3_next", "gemma4"])
def test_batches_whose_calls_wait_in_files(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    parts = batches(stock, (2, 1, 1))
    with paths_of("tempfile.mkstemp") as spilled:
        check_equal(stock, model, parts, activation_budget=0)
    assert len(spilled) >= len(parts) * 2 * len(model.architecture.decoder_layers)
