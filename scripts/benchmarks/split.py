"""Measure what splitting experts before pruning saves at equal bytes, and what it costs in speed.

    python -m scripts.benchmarks.split MODEL --text train.jsonl --heldout valid.jsonl -o work [--parts 1 2 4]

For every number of parts the model is split, and every strategy's plan at every share of the experts is carried out
without a correction and with each. Prints the loss over the base's on the held-out text, with 1.96 paired
standard errors over sequences; `auto` is made into a plan once, whatever the correction. Then how long a split model
takes over the unsplit one, without pruning, in torch and in ONNX Runtime. Plans that come out alike are judged once.

What is found goes to `work/found.jsonl` as it comes, so that a run that was stopped goes on, and to `work/table.md`.
"""

import argparse
import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from compressor import Split, compress
from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration, calibrate, evaluation_sets, load_tokenizer
from compressor.evaluation.evaluator import Evaluator
from compressor.memory import limit_caches
from compressor.model.opened import OpenModel, open_model
from compressor.pipeline.task import HELDOUT
from compressor.progress import Silent
from compressor.recipe.plan import CompressionPlan
from compressor.recipe.registry import load_strategy
from compressor.recipe.step import TextOptions
from compressor.steps.correct.in_order import LayerWork, compress_in_order
from compressor.steps.correct.step import Correct
from compressor.steps.prune.planning import Planner, PruneSpec
from exporters.onnx import ExportOptions, export
from scripts.benchmarks import onnx
from scripts.benchmarks.frame import head, options, row, with_error

STRATEGIES = ("gated-mass", "count-guided", "auto")
CORRECTIONS = ("none", "ridge", "tune")
FORWARD = ("parts", "torch decode", "torch prefill", "ONNX Runtime decode", "prefill")


@dataclass(frozen=True, slots=True)
class Case:
    """One cell of the table."""

    share: float
    strategy: str
    correction: str
    parts: int


class Found:
    """Losses of every sequence by what was judged, kept in a file line by line."""

    def __init__(self, path: Path) -> None:
        self.path, self.losses = path, dict[str, Tensor]()
        if path.exists():
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                self.losses[entry["key"]] = torch.tensor(entry["losses"], dtype=torch.float64)

    def add(self, key: str, losses: Tensor) -> Tensor:
        """Keep what was found."""
        self.losses[key] = losses
        with self.path.open("a") as file:
            file.write(json.dumps({"key": key, "losses": losses.tolist()}) + "\n")
        return losses


def carried_out(
    model: OpenModel, evaluator: Evaluator, plan: CompressionPlan, method: str, data: Calibration
) -> Tensor:
    """What a plan's model loses of every sequence, corrected by the method; nothing is written."""
    plans = {layer.module: layer for layer in plan.layers}
    work = LayerWork(plan.experts, lambda stats: plans[stats.layer.name], correction=Correct(method))
    with evaluator.measuring(model.partial.model) as riding:
        compress_in_order(model, work, data if method != "none" else None, Silent(), riding=riding)
    return riding.figures[0].loss


def digest(plan: CompressionPlan) -> str:
    """Tells what a plan does from what another does."""
    content = repr([(layer.module, layer.groups) for layer in plan.layers])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def checkpoint(parts: int, args: argparse.Namespace) -> str:
    """The model split into so many parts, made where it is not there yet."""
    if parts == 1:
        return str(args.model)
    folder = args.out / f"split-{parts}"
    text = TextOptions(data=(args.text,), samples=args.samples, sequence_length=args.length)
    compress(args.model, folder, [Split(parts, calibration=text)], dtype=args.dtype)
    return str(folder)


def cases(parts: int, found: Found, args: argparse.Namespace) -> Iterator[tuple[Case, Tensor]]:
    """Every cell of one number of parts, the quick ones first."""
    model = open_model(locate(checkpoint(parts, args)), args.dtype, "cpu")
    tokenizer, vocabulary = load_tokenizer(model.source.folder), model.vocabulary
    data = calibrate(
        args.text, tokenizer, samples=args.samples, length=args.length, seed=0, vocab=vocabulary, heldout=HELDOUT
    )
    sets = evaluation_sets([args.heldout], tokenizer, length=args.length, seed=0, vocab=vocabulary, most=args.sequences)
    evaluator = Evaluator(model, sets)
    whole = evaluator.keep().loss
    if f"{parts} whole" not in found.losses:
        found.add(f"{parts} whole", whole)
    specs = [
        PruneSpec(load_strategy(name), round(model.architecture.experts * share), {})
        for share in args.shares for name in args.strategies
    ]  # fmt: skip
    made = Planner(model, data, Silent()).plans(specs)
    seconds = dict.fromkeys(args.strategies, 0.0)
    for planned in made:
        seconds[specs[planned.spec].strategy.name] += planned.seconds
    told = ", ".join(f"{name} {spent:.1f} s" for name, spent in seconds.items())
    print(f"{parts} parts: {sum(batch.numel() for batch in evaluator.batches)} tokens; {told}", flush=True)
    for method in args.corrections:
        for planned in made:
            share = args.shares[planned.spec // len(args.strategies)]
            key = f"{parts} {planned.plan.experts} {method} {digest(planned.plan)}"
            losses = found.losses.get(key)
            if losses is None:
                losses = found.add(key, carried_out(model, evaluator, planned.plan, method, data))
            yield Case(share, planned.plan.strategy, method, parts), losses


def cell(losses: Tensor | None, base: Tensor) -> str:
    """The mean over the base's, and how far it may be off."""
    return "-" if losses is None else with_error(losses - base)


def table(known: dict[Case, Tensor], found: Found, args: argparse.Namespace) -> str:
    """What is known so far, as Markdown."""
    base = found.losses["1 whole"]
    whole = [cell(found.losses.get(f"{parts} whole"), base) for parts in args.parts]
    head = ["kept", "correction", "strategy", *(f"{parts} parts" for parts in args.parts)]
    lines = [head, ["---"] * len(head), ["1", "", "", *whole]]
    for share in args.shares:
        for method in args.corrections:
            for name in args.strategies:
                cells = [cell(known.get(Case(share, name, method, parts)), base) for parts in args.parts]
                lines.append([f"{share:g}", method, name, *cells])
    return f"Loss of the base: {base.mean():.4f}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def forward_report(args: argparse.Namespace) -> None:
    """Print seconds of a split model over those of the unsplit one; the sides take turns."""
    steps: dict[str, dict[str, Any]] = {}
    for parts in args.parts:
        folder, graph = Path(checkpoint(parts, args)), args.out / f"onnx-{parts}-{args.samples}"
        if not graph.exists():
            export(folder, graph, ExportOptions(tokens=8))
        steps[f"onnx {parts}"] = onnx.graph_steps(graph, 1, onnx.CACHED)
        for name in onnx.TORCH:
            steps[f"{name} {parts}"] = onnx.torch_side(folder, name, onnx.CACHED)
    seconds = {
        step: onnx.typical({name: side[step] for name, side in steps.items()}, runs, 0.5)
        for step, runs in (("decode", args.runs), ("prefill", max(1, args.runs // 8)))
    }

    def of(side: str, step: str, parts: int) -> float:
        names = onnx.TORCH if side == "torch" else ("onnx",)
        return min(seconds[step][f"{name} {parts}"] for name in names)

    head(*FORWARD)
    for parts in args.parts:
        sides = [(side, step) for side in ("torch", "onnx") for step in ("decode", "prefill")]
        row(parts, *(of(side, step, parts) / of(side, step, args.parts[0]) for side, step in sides))


def main() -> None:
    """Split, plan, carry out, judge, print."""
    cells = {
        "parts": [1, 2, 4],
        "shares": [0.75, 0.5],
        "strategies": list(STRATEGIES),
        "corrections": list(CORRECTIONS),
    }
    parser = options(__doc__, **cells, samples=128, length=512, sequences=51, dtype="float32", runs=16)
    parser.add_argument("model")
    parser.add_argument("--text", required=True, help="to split, plan and correct with")
    parser.add_argument("--heldout", required=True, help="to judge on")
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    limit_caches()
    logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    found, known = Found(args.out / "found.jsonl"), dict[Case, Tensor]()
    for parts in args.parts:
        begin = time.perf_counter()
        for case, losses in cases(parts, found, args):
            known[case] = losses
            more = cell(losses, found.losses["1 whole"])
            print(f"{case.parts} parts, {case.share:g}, {case.strategy}, {case.correction}: {more}", flush=True)
            (args.out / "table.md").write_text(table(known, found, args))
        print(f"{parts} parts: {time.perf_counter() - begin:.0f} s", flush=True)
    print(table(known, found, args))
    if args.runs:
        forward_report(args)


if __name__ == "__main__":
    main()
