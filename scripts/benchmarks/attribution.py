"""Measure what routing attribution costs on a random model; every figure is a ratio within one run.

    python -m scripts.benchmarks.attribution [--experts 64] [--top-k 8] [--layers 8] [--hidden 1024] [--tokens 8192]

Prints the seconds of both passes of `attribute` over those of one plain calibration pass (streaming the same batches
through the stock layers and measuring nothing), and the peaks of anonymous memory above the start over the largest
decoder layer and, since hidden states and sub-scores weigh as much as a layer here, over the plain pass's.
"""

import tempfile

import torch

from compressor.attribution.measure import attribute
from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.memory import limit_caches
from compressor.model.opened import open_model
from compressor.model.streaming import Pass
from compressor.progress import Silent
from scripts.benchmarks.frame import measured, options, qwen3_moe, random_model


def main() -> None:
    """Print all ratios."""
    sizes = {"experts": 64, "top_k": 8, "layers": 8, "hidden": 1024, "intermediate": 512, "tokens": 8192, "length": 256}
    given = options(__doc__, **sizes, dtype="bfloat16").parse_args()
    limit_caches()
    config = qwen3_moe(
        given.hidden,
        given.intermediate,
        given.layers,
        given.experts,
        given.top_k,
        8192,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=given.hidden // 16,
        initializer_range=0.05,
    )
    with tempfile.TemporaryDirectory() as scratch:
        random_model(config).to(getattr(torch, given.dtype)).save_pretrained(scratch)
        model = open_model(locate(scratch))
        generator = torch.Generator().manual_seed(0)
        rows = torch.randint(0, model.vocabulary, (given.tokens // given.length, given.length), generator=generator)
        calibration = Calibration(tuple(rows.split(8)), {})

        def plain_pass(batches: tuple[torch.Tensor, ...]) -> None:
            Pass(model, batches, wanted=model.architecture.decoder_layers).run()

        plain_pass(calibration.batches[:1])  # warms up
        seconds, peak, _ = measured(lambda: plain_pass(calibration.batches))
        spent, high, found = measured(lambda: attribute(model, calibration, Silent()))
    passes = ", ".join(f"{name} {part / seconds:.2f}" for name, part in found.seconds.items())
    layer = model.largest_layer
    print(f"attribute / plain calibration pass: {spent / seconds:.2f} ({passes})")
    print(f"peak memory / largest layer: {high / layer:.2f} (plain pass {peak / layer:.2f})")
    print(f"sub-scores miss the logits by at most {max(entry.unexplained for entry in found.receivers):.1e}")


if __name__ == "__main__":
    main()
