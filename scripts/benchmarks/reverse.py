"""Time of the streamed reverse pass over that of stock autograd with the whole model in memory, on the same batches.

    python -m scripts.benchmarks.reverse [--layers 8] [--hidden 512] [--experts 16] [--sequences 8] [--length 256]

A Mixtral of random weights is made in a temporary folder. Both ways give the gradients of every layer's parameters.
Reading the layers is timed apart, and the ratio is printed with and without it; so is the peak of memory over the
largest layer. Alternating runs, medians.
"""

import statistics
import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import MixtralConfig

from compressor.checkpoint.source import locate
from compressor.model.opened import OpenModel, open_model
from compressor.model.streaming import ReversePass, ReverseVisitor
from scripts.benchmarks.frame import measured, options, random_model, timed


class Everything(ReverseVisitor):
    """Asks for the gradients of all parameters of a layer, and looks at them before the layer goes."""

    def __init__(self, model: OpenModel) -> None:
        self.whole, self.norms = model.partial.model, dict[str, float]()

    def on_layer_loaded(self, decoder_layer: str) -> None:
        self.whole.get_submodule(decoder_layer).requires_grad_(True)

    def done(self, decoder_layer: str) -> None:
        for name, parameter in self.whole.get_submodule(decoder_layer).named_parameters():
            if parameter.grad is not None:
                self.norms[f"{decoder_layer}.{name}"] = float(parameter.grad.norm())


def loss(output: Any) -> Tensor:
    """Of a batch: the mean log probability of the first token id, which hangs on everything."""
    found: Tensor = output.logits.float().log_softmax(-1)[..., 0].mean()
    return found


def in_memory(stock: Any, batches: list[Tensor]) -> dict[str, float]:
    """The norm of every layer parameter's gradient by stock autograd."""
    stock.zero_grad()
    for batch in batches:
        loss(stock(input_ids=batch, use_cache=False)).backward()  # type: ignore[no-untyped-call]
    layers = stock.model.layers.named_parameters()
    return {f"model.layers.{name}": float(value.grad.norm()) for name, value in layers if value.grad is not None}


def reading(model: OpenModel) -> None:
    """Read every layer as the reverse pass does."""
    for decoder_layer in (
        *model.architecture.decoder_layers,
        *model.architecture.decoder_layers,
    ):  # once forward, once back
        model.partial.load(model.partial.keys_under(decoder_layer))
        for parameter in model.partial.model.get_submodule(decoder_layer).parameters():
            parameter.sum()  # touches every page of what may be mapped
        model.partial.release(decoder_layer)


def main() -> None:
    """Print all ratios."""
    given = options(__doc__, layers=8, hidden=512, experts=16, sequences=8, length=256, runs=3).parse_args()
    config = MixtralConfig(
        vocab_size=1024,
        hidden_size=given.hidden,
        intermediate_size=2 * given.hidden,
        num_hidden_layers=given.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=given.hidden // 8,
        num_local_experts=given.experts,
        num_experts_per_tok=2,
    )
    with tempfile.TemporaryDirectory() as place:
        stock = random_model(config)
        stock.save_pretrained(place)
        model = open_model(locate(place), "float32", "cpu")
        batches = list(torch.randint(0, 1024, (given.sequences, given.length)).split(1))
        seen, run = Everything(model), ReversePass(model, batches)
        expected = in_memory(stock, batches)
        _, peak, _ = measured(lambda: run.run(lambda batch, output: loss(output), seen))
        worst = max(abs(seen.norms[name] / value - 1) for name, value in expected.items() if value)
        ways = (
            lambda: in_memory(stock, batches),
            lambda: run.run(lambda batch, output: loss(output), seen),
            lambda: reading(model),
        )
        times = [[timed(way)[0] for way in ways] for _ in range(given.runs)]
    memory, streamed, read = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"largest relative difference of a gradient's norm: {worst:.1e}")
    print(f"streamed over in memory: {streamed / memory:.2f}; reading excluded: {(streamed - read) / memory:.2f}")
    print(f"peak memory of the streamed pass over the largest layer: {peak / model.largest_layer:.2f}")


if __name__ == "__main__":
    main()
