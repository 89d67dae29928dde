"""Measure what `quantize` costs on a random Qwen3-MoE checkpoint; every figure is a ratio within one run.

    python -m scripts.benchmarks.quantize [--gigabytes 1] [--tokens 32768] [--schemes int4 fp8 nvfp4] [--no-gptq]

Rounding to nearest in each scheme, over a copy of the checkpoint: reading its files, and writing and flushing as much;
first without the verification of the output, then with it. GPTQ in int4, over a pass of the same text through the
model. And of each the peak of anonymous memory above the start, over the largest decoder layer.
"""

import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compressor import Outcome, Quantize, Recipe
from compressor.checkpoint.source import locate
from compressor.data.batches import calibrate, load_tokenizer
from compressor.memory import limit_caches
from compressor.model.opened import open_model
from compressor.model.streaming import LayerVisitor, Pass
from compressor.pipeline.run import Delivery, run
from compressor.progress import Silent
from compressor.recipe.step import TextOptions
from compressor.steps.quantize.writing import Writer
from scripts.benchmarks.frame import Sizes, head, measured, options, row, timed, warm
from scripts.benchmarks.scale import copy_seconds

SIZES = Sizes(hidden=2048, inner=768, experts=32, top_k=4, vocabulary=512)  # experts as those of Qwen3-30B-A3B
LENGTH = 512


@contextmanager
def verifying() -> Iterator[list[float]]:
    """Seconds of every verification while this lasts."""
    own, seconds = Writer._verify, list[float]()

    def verify(self: Writer, *args: Any) -> None:
        seconds.append(timed(lambda: own(self, *args))[0])

    Writer._verify = verify  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        Writer._verify = own  # type: ignore[method-assign]


def quantized(folder: Path, out: Path, step: Quantize, text: TextOptions | None = None) -> tuple[float, float, Outcome]:
    """Seconds of a run, peak memory and outcome; the output is removed."""
    recipe = Recipe(model=str(folder), steps=(step,), calibration=text or TextOptions())
    seconds, peak, outcome = measured(lambda: run(recipe, Delivery(out, device="cpu")))
    shutil.rmtree(out)
    return seconds, peak, outcome


def main() -> None:
    """Write the checkpoint, copy it, quantise it."""
    parser = options(__doc__, gigabytes=1.0, tokens=32_768, schemes=["int4", "fp8", "nvfp4"], no_gptq=False)
    given = parser.parse_args()
    limit_caches()
    with tempfile.TemporaryDirectory() as scratch:
        folder, out, text = (Path(scratch) / name for name in ("model", "out", "text.txt"))
        layers = SIZES.write(folder, given.gigabytes)
        model = open_model(locate(str(folder)), device="cpu")
        layer = model.largest_layer
        warm(folder)
        copy = min(copy_seconds(folder, Path(scratch) / "copy") for _ in range(2))
        print(f"{layers} layers of {layer / 1e9:.2f} GB\n")
        head("step", "seconds over a copy", "with verification", "over a calibration pass", "memory over a layer")
        for scheme in given.schemes:
            with verifying() as verified:
                seconds, peak, _ = quantized(folder, out, Quantize(scheme=scheme))
            row(f"{scheme} rtn", (seconds - sum(verified)) / copy, seconds / copy, "", peak / layer)
        if given.no_gptq:
            return
        draw = random.Random(0)
        text.write_text("\n\n".join(" ".join(str(draw.random()) for _ in range(50)) for _ in range(4000)))
        chosen = TextOptions(data=(str(text),), samples=given.tokens // LENGTH, sequence_length=LENGTH)
        tokenizer = load_tokenizer(folder)
        batches = calibrate(
            str(text), tokenizer, samples=given.tokens // LENGTH, length=LENGTH, seed=0, vocab=model.vocabulary
        ).batches
        one, peak, _ = measured(lambda: Pass(model, batches, Silent()).run(LayerVisitor()))
        row("pass", one / copy, "", 1.0, peak / layer)
        seconds, peak, outcome = quantized(folder, out, Quantize(scheme="int4", method="gptq"), chosen)
        row("int4 gptq", "", seconds / copy, outcome.seconds["quantize"] / one, peak / layer)


if __name__ == "__main__":
    main()
