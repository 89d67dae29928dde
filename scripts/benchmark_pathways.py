"""Measure C3PO on a compressed checkpoint: at test time, and as a router calibration.

    python -m scripts.benchmark_pathways SMALL --text train.jsonl --heldout valid.jsonl [--moved moved ...]

An item is 64 tokens of text and the token that follows. The reference set is what SMALL answers right of `--text`; the
items are of `--heldout`, right or wrong. Prints the log likelihood of the right answer on SMALL's own pathway, and what
each method adds to it with 1.96 paired standard errors, how many likeliest tokens are right, and the cost in plain
forwards. The oracle is told the answer. `--moved` checkpoints answer as they are.
"""

import argparse
import math
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from compressor.checkpoint.source import locate
from compressor.data.batches import calibrate, load_tokenizer
from compressor.data.sources import parse_sources
from compressor.evaluation.items import Item, is_greedy, likelihoods, positions, rows_of
from compressor.model.opened import OpenModel, open_model
from compressor.pathways.answering import open_answering
from compressor.pathways.engine import PathwayModel
from compressor.pathways.optimisers import oracle
from compressor.pathways.options import OWN, Optimizer, PathwayOptions
from compressor.pathways.reference import build_reference, write_reference
from compressor.progress import Silent

PROMPT = 64  # tokens
METHODS: tuple[Optimizer, ...] = ("mode", "kernel", "ngd")


def text_items(model: OpenModel, source: str, count: int, seed: int) -> list[Item]:
    """Items of text, one a sequence, as many as can be written as text and read again."""
    tokenizer, draw = load_tokenizer(model.source.folder), random.Random(seed)
    read = calibrate(
        parse_sources([source]), tokenizer, samples=count, length=2 * PROMPT, seed=seed, vocab=model.vocabulary
    )
    found = []
    for sequence in torch.cat(list(read.batches)).tolist():
        place = draw.randrange(PROMPT, len(sequence))
        prompt, whole = (tokenizer.decode(sequence[place - PROMPT : end]) for end in (place, place + 1))
        if whole.startswith(prompt) and whole[len(prompt) :].strip() and prompt.strip():
            found.append(Item(prompt, whole[len(prompt) :]))
    return found


def plain_answers(folder: str, items: Sequence[Item]) -> tuple[torch.Tensor, int]:
    """Log likelihoods [n] of the answers on a checkpoint's own pathway, and how many it would write itself."""
    found, right = oracle_answers(folder, items, PathwayOptions(), moved=False)
    return found, right


def oracle_answers(
    folder: str, items: Sequence[Item], options: PathwayOptions, moved: bool = True
) -> tuple[torch.Tensor, int]:
    """The same on the pathway that the right answer itself asks for."""
    opened = open_model(locate(folder), "float32", "cpu")
    tokenizer = load_tokenizer(opened.source.folder)
    model = PathwayModel(opened, min(options.layers, len(opened.architecture.layers)), options.tokens)
    model.load()
    found, right = [], 0
    for item in items:
        plain = model.run(rows_of(item, tokenizer, opened.vocabulary, positions(opened.config)))
        logits = plain.logits
        if moved:
            shift = oracle(model, plain, 0, plain.pathway[-model.late :], options).detach()
            with torch.no_grad():
                logits = model.again(plain, shift)
        found.append(likelihoods(logits, plain.rows)[0])
        right += is_greedy(logits[:1], plain.rows[0])
    return torch.stack(found).double(), right


def main() -> None:
    """Ask, optimise, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--heldout", required=True)
    parser.add_argument("--moved", nargs="*", default=[])
    parser.add_argument("--items", type=int, default=100)
    parser.add_argument("--reference", type=int, default=300, help="items that the reference set is drawn from")
    args = parser.parse_args()
    opened = open_model(locate(args.model), "float32", "cpu")
    items = text_items(opened, args.heldout, args.items, 1)
    before, right = plain_answers(args.model, items)
    print(f"{len(items)} items: {before.mean():.3f} nats, {right} right")
    print("| method | gain in log p | right answers | plain forwards |\n|---|---|---|---|", flush=True)

    def row(name: str, found: torch.Tensor, right: int, cost: str) -> None:
        gain = found - before
        error = 1.96 * float(gain.std()) / math.sqrt(len(gain))
        print(f"| {name} | {gain.mean():+.3f} ± {error:.3f} | {right} | {cost} |", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        made, _ = build_reference(opened, text_items(opened, args.text, args.reference, 0), OWN, Silent())
        opened.partial.release("")
        write_reference(made, Path(scratch) / "reference", overwrite=False)
        print(f"({len(made.items)} items in the reference set)", flush=True)
        for method in METHODS:
            options = PathwayOptions(method)
            answering = open_answering(args.model, Path(scratch) / "reference", options, device="cpu", dtype="float32")
            answers = [answering.answer(item.prompt, [item.answer])[0] for item in items]
            found = torch.tensor([answer.likelihood for answer in answers], dtype=torch.float64)
            row(method, found, sum(answer.greedy for answer in answers), f"{answering.cost:.1f}")
    row("oracle", *oracle_answers(args.model, items, PathwayOptions()), "-")
    for folder in args.moved:
        row(Path(folder).name, *plain_answers(folder, items), "1")


if __name__ == "__main__":
    main()
