"""Measure what router calibration and distillation recover after `auto`, and after the best published choice alone.

    python -m scripts.benchmarks.distill MODEL --text train.jsonl --heldout valid.jsonl --work DIR [--experts 6 4]

For each number of experts the checkpoint that `auto` makes is written into a folder that is kept (`--work`), then moved
and trained in every way on the same text. Prints Markdown rows: the loss over the base's on held-out text, what was
recovered of `auto`'s with 1.96 paired standard errors over sequences, and seconds.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

import compressor
from scripts.benchmarks.frame import head, losses, options, row, timed, with_error

WAYS = ["routers", "routers bias", "router", "lora", "experts", "all", "routers and experts"]
CHOICES = ("gated-mass", "reap")


def moved(way: str, seed: int, start: Path, given: argparse.Namespace) -> Callable[[Path], Any]:
    """What writes the checkpoint `start` anew in one of the ways."""
    steps = list[compressor.Step]()
    if way.startswith("routers"):
        method = "bias" if way == "routers bias" else "router"
        steps.append(compressor.Routers(method, sequences=400, sequence_length=given.length))
    trained = {"steps": given.steps, "sequence_length": given.length}
    if not way.startswith("routers") or "and" in way:
        steps.append(compressor.Distill(way.split()[-1], **trained))
    return lambda out: compressor.compress(str(start), out, steps, calibration=given.text, base=given.model, seed=seed)


def main() -> None:
    """Make, move, train, judge, print."""
    training = {"experts": [6, 4], "ways": WAYS, "steps": 400, "seeds": 1}
    parser = options(__doc__, **training, length=256, samples=256, sequences=300)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--heldout", required=True)
    parser.add_argument("--work", type=Path, required=True)
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)

    def judged(folder: Path | str) -> Tensor:
        return losses(folder, given.heldout, given.sequences, given.length)

    def made(name: str, make: Callable[[Path], Any]) -> tuple[Path, float]:
        folder = given.work / name.replace(" ", "-")
        return folder, 0.0 if folder.exists() else timed(lambda: make(folder))[0]

    base = judged(given.model)
    print(f"base: {base.mean():.4f}", flush=True)
    head("experts", "way", "loss over the base", "recovered", "share", "seconds")
    for count in given.experts:
        plain = {"calibration": given.text, "samples": given.samples, "sequence_length": given.length}

        def cut(strategy: str, correct: str, count: int = count, plain: dict[str, Any] = plain) -> tuple[Path, float]:
            return made(
                f"{strategy}-{correct}-{count}",
                lambda out: compressor.compress(
                    given.model, out, experts=count, strategy=strategy, correct=correct, **plain
                ),
            )

        for strategy in CHOICES:
            folder, seconds = cut(strategy, "none")
            row(count, strategy, f"{(judged(folder) - base).mean():.4f}", "", "", f"{seconds:.0f}")
        start, seconds = cut("auto", "tune")
        before = judged(start)
        row(count, "auto, tune", f"{(before - base).mean():.4f}", "", "", f"{seconds:.0f}")
        for way in given.ways:
            for seed in range(given.seeds):
                name = f"{count} {way} {given.steps} {seed}"
                folder, seconds = made(name, moved(way, seed, start, given))
                found = judged(folder)
                share = float((before - found).mean() / (before - base).mean())
                shown = way + (f", seed {seed}" if given.seeds > 1 else "")
                lost = f"{(found - base).mean():.4f}"
                row(count, shown, lost, with_error(before - found), f"{share:.0%}", f"{seconds:.0f}")


if __name__ == "__main__":
    main()
