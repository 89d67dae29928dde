"""The work of a run as matrix products: a forward with sparse experts, a ridge refit, tuning, dense samples.

T tokens, K top-k, E experts, N kept ones, H hidden, I intermediate. Shapes come from the stock model on the meta
device, so an unknown architecture counts as what its matrices are; what no matrix product does is in the factors of
`compressor.forecasting.estimate`.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from compressor.data.batches import Calibration
from compressor.forecasting.machine import Product
from compressor.model.architecture import MoeLayer, layers_by_unit
from compressor.model.experts import projections
from compressor.model.opened import OpenModel
from compressor.steps.correct.refit import Correction
from compressor.steps.correct.ridge import PENALTIES, TOKENS, block_width, features_room, neuron_blocks, sweeps


@dataclass(frozen=True, slots=True)
class Text:
    """Sequences that run through the model, and how many of them at once."""

    sequences: int
    length: int
    batch: int

    @classmethod
    def of(cls, calibration: Calibration) -> "Text":
        """Calibration as it was read, which a short text does not fill, in sequences of their mean length."""
        sequences = sum(len(batch) for batch in calibration.batches)
        length = max(1, round(calibration.tokens / max(1, sequences)))
        return cls(sequences, length, max((len(batch) for batch in calibration.batches), default=1))

    @property
    def tokens(self) -> int:
        """Tokens in all."""
        return self.sequences * self.length


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """One layer's experts: how many, of which a token visits K, and H, I of their two matrices."""

    experts: int
    top_k: int
    hidden: int
    inner: int
    into: int  # rows of the matrices that lead in: 2I with a gate

    @classmethod
    def of(cls, model: OpenModel, layer: MoeLayer) -> "ExpertShape":
        """The shape of a layer of the stock model, without a weight."""
        view = projections(model.partial.model.get_submodule(layer.name), 0)
        hidden, inner = view.down.shape
        return cls(layer.experts, layer.top_k, hidden, inner, inner * (1 if view.gate is None else 2))

    @property
    def weights(self) -> int:
        """Elements of one expert's matrices."""
        return self.hidden * (self.inner + self.into)

    def applied(self, tokens: float, times: float, dtype: torch.dtype, count: int | None = None) -> list[Product]:
        """What `tokens` at once cost, each at its K experts, of `count` (by default all) that share them evenly."""
        count = count or self.experts
        reached = min(float(count), tokens * self.top_k)
        rows = tokens * self.top_k / reached
        return [
            Product(rows, self.hidden, self.into, times * reached, dtype),
            Product(rows, self.inner, self.hidden, times * reached, dtype),
        ]


def attention_widths(config: Any) -> tuple[int, int]:
    """Heads times the width of a query, and of a value, by the config; 0 where it names no heads."""
    text = config.get_text_config()
    heads = getattr(text, "num_attention_heads", None) or 0
    plain = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    latent = (getattr(text, "qk_nope_head_dim", None) or 0) + (getattr(text, "qk_rope_head_dim", None) or 0)
    return heads * (latent or plain), heads * (getattr(text, "v_head_dim", None) or plain)


def forward(model: OpenModel, text: Text, head: bool = False) -> Iterator[Product]:
    """One stock forward of the text through all decoder layers: every matrix, attention's two products, the experts.

    Attention counts in every layer with a child module that is causal, over whole sequences, as eager kernels do.
    """
    stock, dtype = model.partial.model, model.partial.dtype
    batch = max(1, min(text.batch, text.sequences))  # what reads the text refuses one of no sequence
    rows, times = float(batch * text.length), text.sequences / batch
    by_unit, widths = layers_by_unit(model.architecture.layers), attention_widths(model.config)
    for unit in model.architecture.units:
        layers = by_unit.get(unit, [])
        inside = tuple(f"{layer.name}." for layer in layers)
        for name, value in stock.get_submodule(unit).named_parameters(prefix=unit):
            if value.ndim == 2 and not name.startswith(inside):
                yield Product(rows, value.shape[1], value.shape[0], times, dtype)
        for module in stock.get_submodule(unit).modules():
            if all(widths) and hasattr(module, "is_causal"):
                yield Product(text.length, widths[0], text.length, text.sequences, dtype)
                yield Product(text.length, text.length, widths[1], text.sequences, dtype)
        for layer in layers:
            yield from ExpertShape.of(model, layer).applied(rows, times, dtype)
    output = stock.get_output_embeddings()
    if head and output is not None:
        yield Product(rows, output.weight.shape[1], output.weight.shape[0], times, dtype)


def dense(shape: ExpertShape, tokens: int, dtype: torch.dtype) -> list[Product]:
    """Every expert's output on sampled tokens."""
    return [
        Product(tokens, shape.hidden, shape.into, shape.experts, dtype),
        Product(tokens, shape.inner, shape.hidden, shape.experts, dtype),
    ]


def ridge(shape: ExpertShape, kept: int, fit: int, judged: int, layer_bytes: int) -> Iterator[Product]:
    """A layer's ridge refit: features, normal matrices and their factors, on all blocks of neurons, and the judging."""
    fit = min(fit, TOKENS)
    blocks = neuron_blocks(kept, shape.inner, block_width(layer_bytes))
    turns, others = sweeps(len(blocks)), len(blocks) > 1  # which are to see what a block takes away
    yield from shape.applied(fit + 3 * judged, 1.0, torch.float32, kept)  # residuals, and errors before and after
    for number, block in enumerate(blocks):
        width, reach = block[-1].columns.stop, min(1.0, shape.top_k / kept * len(block))  # of tokens: to its experts
        again = others and 4 * fit * reach * width > features_room(layer_bytes)
        tries = turns + (len(PENALTIES) - 1.0 if number == 0 else 0.0)  # later blocks take the first one's penalty
        yield Product(fit * shape.top_k / kept, shape.hidden, shape.into, len(block) * turns * (1.0 + again))
        yield Product(width, math.ceil(fit * reach), width, turns)
        yield Product(width, math.ceil(fit * reach), shape.hidden, turns * (1.0 + others))
        yield Product(judged * reach, width, shape.hidden, tries)
        yield Product(width / 6, width, width, tries, torch.float64)  # a Cholesky factor is a sixth of a product
        yield Product(width, width, shape.hidden, tries, torch.float64)


def tune(shape: ExpertShape, kept: int, fit: int, correction: Correction) -> list[Product]:
    """A layer's tuning steps, forward and back; the optimiser's updates are not among them."""
    once = shape.applied(min(correction.tokens, fit), float(correction.steps), torch.float32, kept)
    return [*once, *once, once[1]]  # gradients of both matrices, and of what the down projection is given
