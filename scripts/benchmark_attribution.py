"""Measure what routing attribution costs on a random model; every figure is a ratio within one run.

    python scripts/benchmark_attribution.py [--experts 64] [--top-k 8] [--layers 8] [--hidden 1024] [--tokens 8192]

Prints the seconds of both passes of `attribute` over those of one plain calibration pass (streaming the same batches
through the stock layers and measuring nothing), and the peaks of anonymous memory above the start over the largest
decoder layer and, since hidden states and sub-scores weigh as much as a layer here, over the plain pass's.
"""

import argparse
import tempfile
from pathlib import Path

import torch

from compressor.attribution.measure import attribute
from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.memory import limit_caches
from compressor.model.opened import OpenModel, open_model
from compressor.model.streaming import Pass
from compressor.progress import Silent
from scripts.benchmark_correction import layer_bytes, measured

BATCH = 8


def save_random(folder: Path, given: argparse.Namespace) -> None:
    """Write a random Qwen3-MoE model in float32 or bfloat16."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=given.hidden, intermediate_size=given.hidden, moe_intermediate_size=given.intermediate,
        num_hidden_layers=given.layers, num_attention_heads=16, num_key_value_heads=4, head_dim=given.hidden // 16,
        num_experts=given.experts, num_experts_per_tok=given.top_k, vocab_size=8192, initializer_range=0.05,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).to(getattr(torch, given.dtype)).save_pretrained(folder)


def plain_pass(model: OpenModel, batches: tuple[torch.Tensor, ...]) -> None:
    """Stream the batches through all layers and measure nothing."""
    Pass(model, batches, wanted=model.architecture.units).run()


def main() -> None:
    """Print all ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (
        ("experts", 64), ("top-k", 8), ("layers", 8), ("hidden", 1024), ("intermediate", 512), ("tokens", 8192),
        ("length", 256),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dtype", default="bfloat16")
    given = parser.parse_args()
    limit_caches()
    with tempfile.TemporaryDirectory() as scratch:
        save_random(Path(scratch), given)
        model = open_model(locate(scratch))
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(0, model.vocabulary, (given.tokens // given.length, given.length), generator=generator)
        calibration = Calibration(tuple(rows.split(BATCH)), {})
        plain_pass(model, calibration.batches[:1])  # warms up
        seconds, peak, _ = measured(lambda: plain_pass(model, calibration.batches))
        spent, high, found = measured(lambda: attribute(model, calibration, Silent()))
    passes = ", ".join(f"{name} {part / seconds:.2f}" for name, part in found.seconds.items())
    layer = layer_bytes(model)
    print(f"attribute / plain calibration pass: {spent / seconds:.2f} ({passes})")
    print(f"peak memory / largest layer: {high / layer:.2f} (plain pass {peak / layer:.2f})")
    print(f"sub-scores miss the logits by at most {max(entry.unexplained for entry in found.receivers):.1e}")


if __name__ == "__main__":
    main()
