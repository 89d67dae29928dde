"""Measure what router calibration and distillation recover after `auto`, and after the best published choice alone.

    python -m scripts.benchmark_distill MODEL --text train.jsonl --heldout valid.jsonl --experts 6,4 [--steps 400]

For each number of experts the checkpoint that `auto` makes is written into a folder that is kept (`--work`), then moved
and trained in every way on the same text. Prints Markdown rows: the loss over the base's on held-out text, what was
recovered of `auto`'s with 1.96 paired standard errors over sequences, and seconds.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import compressor
from compressor.checkpoint.source import locate
from compressor.data.batches import calibrate, load_tokenizer
from compressor.data.sources import parse_sources
from compressor.model.opened import open_model
from compressor.model.streaming import LayerVisitor, Pass

WAYS = ("routers", "routers bias", "router", "lora", "experts", "all", "routers and experts")
CHOICES = ("gated-mass", "reap")


class _Losses(LayerVisitor):
    """The loss of every sequence, in nats per token."""

    def __init__(self, batches: Sequence[Tensor]) -> None:
        self.batches, self.found = batches, list[Tensor]()

    @torch.no_grad()
    def finished(self, batch: int, output: Any) -> None:
        logits, tokens = output.logits[:, :-1].float(), self.batches[batch][:, 1:]
        self.found.append(cross_entropy(logits.transpose(1, 2), tokens, reduction="none").mean(1).double())


def losses(folder: str, heldout: str, sequences: int, length: int) -> Tensor:
    """Of a checkpoint on held-out text, [sequences]."""
    model = open_model(locate(folder), "auto", "cpu")
    batches = calibrate(
        parse_sources([heldout]), load_tokenizer(model.source.folder), samples=sequences, length=length, seed=0,
        vocab=model.vocabulary,
    ).batches  # fmt: skip
    seen = _Losses(batches)
    Pass(model, batches, to_end=True).run(seen)
    return torch.cat(seen.found)


def main() -> None:
    """Make, move, train, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--heldout", required=True)
    parser.add_argument("--experts", required=True)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--contrastive", type=float, default=0.0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--samples", type=int, default=256, help="sequences of the calibration")
    parser.add_argument("--sequences", type=int, default=300, help="held-out sequences")
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)

    def judged(folder: Path | str) -> Tensor:
        return losses(str(folder), args.heldout, args.sequences, args.length)

    def made(name: str, make: Callable[[Path], Any]) -> tuple[Path, float]:
        folder, begin = args.work / name.replace(" ", "-"), time.perf_counter()
        if not folder.exists():
            make(folder)
        return folder, time.perf_counter() - begin

    base = judged(args.model)
    print(f"base: {base.mean():.4f}", flush=True)
    print("| experts | way | loss over the base | recovered | share | seconds |\n" + "|---" * 6 + "|", flush=True)
    for count in map(int, args.experts.split(",")):
        plain = {"experts": count, "calibration": args.text, "samples": args.samples, "sequence_length": args.length}

        def cut(strategy: str, correct: str, count: int = count, plain: dict[str, Any] = plain) -> tuple[Path, float]:
            return made(f"{strategy}-{correct}-{count}", lambda out: compressor.compress(
                args.model, out, strategy=strategy, correct=correct, **plain
            ))  # fmt: skip

        for strategy in CHOICES:
            folder, seconds = cut(strategy, "none")
            row(count, strategy, judged(folder), None, base, seconds)
        start, seconds = cut("auto", "tune")
        before = judged(start)
        row(count, "auto, tune", before, None, base, seconds)
        for way in args.ways:
            for seed in range(args.seeds):
                run = carried_out(way, seed, start, args)
                folder, seconds = made(f"{count} {way} {args.steps} {args.contrastive} {seed}", run)
                row(count, way + (f", seed {seed}" if args.seeds > 1 else ""), judged(folder), before, base, seconds)


def carried_out(way: str, seed: int, start: Path, args: argparse.Namespace) -> Callable[[Path], Any]:
    """What writes the checkpoint `start` anew in one of the ways."""

    def run(out: Path) -> Any:
        steps = list[compressor.Step]()
        if way.startswith("routers"):
            steps.append(compressor.Routers("bias" if way == "routers bias" else "router"))
        if not way.startswith("routers") or "and" in way:
            steps.append(compressor.Distill(way.split()[-1], steps=args.steps, contrastive=args.contrastive))
        compressor.compress(str(start), out, steps, calibration=args.text, base=args.model, seed=seed)

    return run


def row(count: int, name: str, found: Tensor, before: Tensor | None, base: Tensor, seconds: float) -> None:
    """Print one line of the table."""
    lost = float((found - base).mean())
    if before is None:
        print(f"| {count} | {name} | {lost:.4f} | | | {seconds:.0f} |", flush=True)
        return
    gain = before - found
    error = 1.96 * float(gain.std()) / math.sqrt(len(gain))
    share = float(gain.mean() / (before - base).mean())
    print(
        f"| {count} | {name} | {lost:.4f} | {gain.mean():.4f} ± {error:.4f} | {share:.0%} | {seconds:.0f} |", flush=True
    )


if __name__ == "__main__":
    main()
