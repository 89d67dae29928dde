"""Measure what `auto` and the corrections cost on a synthetic checkpoint; every figure is a ratio within one run.

    python -m scripts.benchmarks.correction [--gigabytes 1.3] [--steps 3] [--tokens 4096]

Prints, over the largest decoder layer, the peak of anonymous memory above the start for planning by each strategy and
for `ridge` and `tune` (few steps: memory does not depend on their number), and the seconds of planning by each strategy
over those of `count-guided`, on random text.
"""

import random
import tempfile
from pathlib import Path

from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration, calibrate, load_tokenizer
from compressor.entry_points import STRATEGIES, names
from compressor.memory import limit_caches
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Silent
from compressor.recipe.plan import ExpertPlan
from compressor.recipe.registry import load_strategy
from compressor.steps.correct.options import Correct
from compressor.steps.correct.sequential import LayerWork, compress_sequentially
from compressor.steps.prune.planning import Planner, PruneSpec
from scripts.benchmarks.frame import Sizes, measured, options


def planning_report(model: OpenModel, calibration: Calibration, keep: int, layer: int) -> ExpertPlan:
    """Planning by every strategy over the cheapest calibrated one."""
    found = {}
    for name in ["count-guided", *sorted(set(names(STRATEGIES)) - {"count-guided"})]:
        spec = PruneSpec(load_strategy(name), keep)
        found[name] = measured(lambda spec=spec: Planner(model, calibration, Silent()).plans([spec])[0].plan)
        seconds, peak, _ = found[name]
        ratio = seconds / found["count-guided"][0]
        print(f"planning by {name:14} {ratio:6.2f} times count-guided, peak {peak / layer:.2f} layers", flush=True)
    plan: ExpertPlan = found["count-guided"][2]
    return plan


def main() -> None:
    """Plan by everything, correct in every way."""
    given = options(__doc__, gigabytes=1.3, steps=3, tokens=4096).parse_args()
    limit_caches()
    with tempfile.TemporaryDirectory() as scratch:
        folder, text, draw = Path(scratch) / "model", Path(scratch) / "text.txt", random.Random(0)
        Sizes().write(folder, given.gigabytes)
        text.write_text("\n\n".join(" ".join(str(draw.random()) for _ in range(50)) for _ in range(2000)))
        model = open_model(locate(str(folder)))
        layer, keep = model.largest_layer, model.architecture.experts // 2
        samples, vocabulary = given.tokens // 128, model.vocabulary
        calibration = calibrate(
            str(text), load_tokenizer(folder), samples=samples, length=128, seed=0, vocab=vocabulary, heldout=0.125
        )
        print(f"largest layer {layer / 1e9:.2f} GB, {keep} of {2 * keep} experts kept, {calibration.tokens} tokens")
        plans = {entry.module: entry for entry in planning_report(model, calibration, keep, layer).layers}
        for correction in (Correct("none"), Correct("ridge"), Correct("tune", steps=given.steps, tokens=512)):
            work = LayerWork(keep, lambda stats: plans[stats.layer.name], correction=correction)
            _, peak, _ = measured(lambda work=work: compress_sequentially(model, work, calibration, Silent()))
            print(f"correcting by {correction.method:6} peak {peak / layer:.2f} layers", flush=True)


if __name__ == "__main__":
    main()
