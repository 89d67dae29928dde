"""Measure what `auto` and the corrections cost on a synthetic checkpoint; every figure is a ratio within one run.

    python scripts/benchmark_correction.py [--gigabytes 1.3] [--steps 3]

Prints, over the largest decoder layer, the peak of anonymous memory above the start for planning by `auto` and for
`ridge` and `tune` (few steps: memory does not depend on their number), and the seconds of planning by each strategy
over those of `count-guided`, on random text.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration, calibrate, load_tokenizer
from compressor.memory import PeakMemory, limit_caches
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Silent
from compressor.recipe.plan import CompressionPlan
from compressor.recipe.registry import STRATEGIES, load_strategy, names
from compressor.steps.correct.in_order import LayerWork, compress_in_order
from compressor.steps.correct.step import Correct
from compressor.steps.prune.planning import Planner, Wish
from scripts.benchmark import save_tokenizer, write_synthetic


def layer_bytes(model: OpenModel) -> int:
    """Bytes of the largest decoder layer, loaded."""
    sizes = dict.fromkeys(model.architecture.units, 0)
    for key, value in model.partial.empty.items():
        for unit in sizes:
            if key.startswith(f"{unit}."):
                sizes[unit] += value.nbytes
    return max(sizes.values())


def measured(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Seconds, peak bytes above the start, and the result."""
    with PeakMemory() as peak:
        begin = time.perf_counter()
        result = work()
        seconds = time.perf_counter() - begin
    return seconds, peak.anonymous - peak.start, result


def planning_report(model: OpenModel, calibration: Calibration, keep: int, layer: int) -> CompressionPlan:
    """Planning by every strategy over the cheapest calibrated one."""
    found = {}
    for name in ["count-guided", *sorted(set(names(STRATEGIES)) - {"count-guided"})]:
        strategy = load_strategy(name)
        found[name] = measured(
            lambda strategy=strategy: Planner(model, calibration, Silent()).plans([Wish(strategy, keep, {})])[0].plan
        )
        seconds, peak, _ = found[name]
        ratio = seconds / found["count-guided"][0]
        print(f"planning by {name:14} {ratio:6.2f} times count-guided, peak {peak / layer:.2f} layers", flush=True)
    plan: CompressionPlan = found["count-guided"][2]
    return plan


def correction_report(
    model: OpenModel, calibration: Calibration, plan: CompressionPlan, layer: int, steps: int
) -> None:
    """Memory of the corrections."""
    plans = {entry.module: entry for entry in plan.layers}
    for correction in (Correct("none"), Correct("ridge"), Correct("tune", steps=steps, tokens=512)):
        work = LayerWork(plan.experts, lambda stats: plans[stats.layer.name], correction=correction)
        _, peak, _ = measured(lambda work=work: compress_in_order(model, work, calibration, Silent()))
        print(f"correcting by {correction.method:6} peak {peak / layer:.2f} layers", flush=True)


def main() -> None:
    """Run all reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=1.3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=4096, help="calibration tokens")
    given = parser.parse_args()
    limit_caches()
    with tempfile.TemporaryDirectory() as scratch:
        folder, text = Path(scratch) / "model", Path(scratch) / "text.txt"
        folder.mkdir()
        write_synthetic(folder, given.gigabytes)
        save_tokenizer(folder)
        draw = random.Random(0)
        text.write_text("\n\n".join(" ".join(str(draw.random()) for _ in range(50)) for _ in range(2000)))
        model = open_model(locate(str(folder)))
        layer = layer_bytes(model)
        calibration = calibrate(
            str(text), load_tokenizer(folder), samples=given.tokens // 128, length=128, seed=0,
            vocab=model.vocabulary, heldout=0.125,
        )  # fmt: skip
        keep = model.architecture.experts // 2
        print(f"largest layer {layer / 1e9:.2f} GB, {keep} of {2 * keep} experts kept, {calibration.tokens} tokens")
        plan = planning_report(model, calibration, keep, layer)
        correction_report(model, calibration, plan, layer, given.steps)


if __name__ == "__main__":
    main()
