"""Measure what splitting experts before pruning saves at equal bytes, and what it costs in speed.

    python -m scripts.benchmarks.split MODEL --text train.jsonl --heldout valid.jsonl -o work [--parts 1 2 4]

For every number of parts the model is split, and every strategy's plan at every share of the experts is carried out
without a correction and with each. Prints the loss over the base's on the held-out text, with 1.96 paired standard
errors over sequences. Then how long a split model takes over the unsplit one, without pruning, in torch and in ONNX
Runtime.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from compressor import Split, compress
from compressor.checkpoint.source import locate
from compressor.data.batches import calibrate, evaluation_sets, load_tokenizer
from compressor.divergence.evaluator import Evaluator
from compressor.memory import limit_caches
from compressor.model.opened import open_model
from compressor.pipeline.resolve import HELDOUT
from compressor.progress import Silent
from compressor.recipe.registry import load_strategy
from compressor.recipe.step import TextOptions
from compressor.steps.correct.options import Correct
from compressor.steps.correct.sequential import LayerWork, compress_sequentially
from compressor.steps.prune.planning import Planner, PruneSpec
from exporters.onnx import ExportOptions, export
from scripts.benchmarks import onnx
from scripts.benchmarks.frame import head, options, row, with_error


def checkpoint(parts: int, args: argparse.Namespace) -> str:
    """The model split into so many parts, made where it is not there yet."""
    folder = args.out / f"split-{parts}"
    if parts > 1 and not folder.exists():
        text = TextOptions(data=(args.text,), samples=args.samples, sequence_length=args.length)
        compress(args.model, folder, [Split(parts, calibration=text)], dtype=args.dtype)
    return str(folder if parts > 1 else args.model)


def loss_rows(parts: int, base: Tensor | None, args: argparse.Namespace) -> Tensor:
    """Print a row for every plan of one number of parts; return the losses [sequences] of the model itself."""
    model = open_model(locate(checkpoint(parts, args)), args.dtype, "cpu")
    tokenizer, vocabulary = load_tokenizer(model.source.folder), model.vocabulary
    data = calibrate(
        args.text, tokenizer, samples=args.samples, length=args.length, seed=0, vocab=vocabulary, heldout=HELDOUT
    )
    sets = evaluation_sets([args.heldout], tokenizer, length=args.length, seed=0, vocab=vocabulary, most=args.sequences)
    evaluator = Evaluator(model, sets)
    whole = evaluator.measure(model)[0].loss
    base = whole if base is None else base
    row(1, "", "", parts, with_error(whole - base))
    kept = {share: round(model.architecture.experts * share) for share in args.shares}
    specs = [PruneSpec(load_strategy(name), count) for count in kept.values() for name in args.strategies]
    for number, planned in enumerate(Planner(model, data, Silent()).plans(specs)):
        layers = {layer.module: layer for layer in planned.plan.layers}
        for method in args.corrections:
            correction = Correct(method)
            work = LayerWork(planned.plan.experts, lambda at, own=layers: own[at.layer.name], correction=correction)
            with evaluator.measuring(model.partial.model) as probe:
                compress_sequentially(model, work, data if method != "none" else None, Silent(), probe=probe)
            share = args.shares[number // len(args.strategies)]
            row(share, planned.plan.strategy, method, parts, with_error(probe.figures[0].loss - base))
    return base


def forward_report(args: argparse.Namespace) -> None:
    """Print seconds of a split model over those of the unsplit one; the sides take turns."""
    steps: dict[str, dict[str, Any]] = {}
    for parts in args.parts:
        folder, graph = Path(checkpoint(parts, args)), args.out / f"onnx-{parts}"
        if not graph.exists():
            export(folder, graph, ExportOptions(tokens=8))
        steps[f"onnx {parts}"] = onnx.graph_steps(graph, 1, onnx.CACHED)
        for name in onnx.TORCH:
            steps[f"{name} {parts}"] = onnx.torch_side(folder, name, onnx.CACHED)
    columns = {
        (side, step): onnx.typical(
            {name: own[step] for name, own in steps.items() if name.startswith(names)}, runs, 0.5
        )
        for step, runs in (("decode", args.runs), ("prefill", max(1, args.runs // 8)))
        for side, names in (("torch", onnx.TORCH), ("ONNX Runtime", ("onnx",)))
    }
    head("parts", *(f"{side} {step}" for side, step in columns))
    fastest = [
        [min(value for name, value in found.items() if name.endswith(f" {parts}")) for found in columns.values()]
        for parts in args.parts
    ]
    for parts, seconds in zip(args.parts, fastest, strict=True):
        row(parts, *(own / first for own, first in zip(seconds, fastest[0], strict=True)))


def main() -> None:
    """Split, plan, carry out, evaluate, print."""
    cells = {"parts": [1, 2, 4], "shares": [0.75, 0.5], "strategies": ["gated-mass", "count-guided", "auto"]}
    cells["corrections"] = ["none", "ridge", "tune"]
    parser = options(__doc__, **cells, samples=128, length=512, sequences=51, dtype="float32", runs=16)
    parser.add_argument("model")
    parser.add_argument("--text", required=True, help="to split, plan and correct with")
    parser.add_argument("--heldout", required=True, help="to evaluate on")
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    limit_caches()
    logging.disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    head("kept", "strategy", "correction", "parts", "loss over the base's")
    base = None
    for parts in args.parts:
        base = loss_rows(parts, base, args)
    if args.runs:
        forward_report(args)


if __name__ == "__main__":
    main()
