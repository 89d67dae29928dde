"""Measure C3PO on a compressed checkpoint: at test time, and as a router calibration.

    python -m scripts.benchmarks.pathways SMALL --text train.jsonl --heldout valid.jsonl [--moved moved ...]

An item is 64 tokens of text and the token that follows. The reference set is what SMALL answers right of `--text`; the
items are of `--heldout`, right or wrong. Prints the log likelihood of the right answer on SMALL's own pathway, and what
each method adds to it with 1.96 paired standard errors, how many argmax tokens are right, and the cost in plain
forwards. The oracle knows the answer. `--moved` checkpoints answer as they are.
"""

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from compressor.answers.items import Item, is_greedy, likelihoods, positions, rows_of
from compressor.checkpoint.source import locate
from compressor.data.batches import calibrate, load_tokenizer
from compressor.data.sources import parse_sources
from compressor.model.opened import OpenModel, open_model
from compressor.pathways.answering import open_answering
from compressor.pathways.engine import PathwayModel
from compressor.pathways.optimisers import Neighbour, optimised
from compressor.pathways.options import OWN, Optimizer, PathwayOptions
from compressor.pathways.reference import build_reference, write_reference
from compressor.progress import Silent
from scripts.benchmarks.frame import head, options, row, with_error

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


def answers(folder: str, items: Sequence[Item], knowing: bool) -> tuple[torch.Tensor, int]:
    """Log likelihoods [n] of the answers on a checkpoint's own pathway, and how many it would write itself.

    `knowing` asks on the pathway that the right answer itself asks for.
    """
    way = PathwayOptions()
    opened = open_model(locate(folder), "float32", "cpu")
    tokenizer = load_tokenizer(opened.source.folder)
    model = PathwayModel(opened, min(way.layers, len(opened.architecture.layers)), way.tokens)
    model.load()
    found, right = [], 0
    for item in items:
        plain = model.run(rows_of(item, tokenizer, opened.vocabulary, positions(opened.config)))
        logits = plain.logits
        if knowing:
            own = plain.pathway[-model.late :]
            shift = optimised(model, own, [Neighbour(own, plain)], torch.ones(1), way)
            with torch.no_grad():
                logits = model.again(plain, shift)
        found.append(likelihoods(logits, plain.rows)[0])
        right += is_greedy(logits[:1], plain.rows[0])
    return torch.stack(found).double(), right


def main() -> None:
    """Ask, optimise, compare, print."""
    parser = options(__doc__, items=100, reference=300)
    parser.add_argument("model")
    parser.add_argument("--text", required=True, help="of which the reference set is made")
    parser.add_argument("--heldout", required=True)
    parser.add_argument("--moved", nargs="*", default=[])
    args = parser.parse_args()
    opened = open_model(locate(args.model), "float32", "cpu")
    items = text_items(opened, args.heldout, args.items, 1)
    before, right = answers(args.model, items, knowing=False)
    print(f"{len(items)} items: {before.mean():.3f} nats, {right} right")
    head("method", "gain in log p", "right answers", "plain forwards")

    def print_row(name: str, found: torch.Tensor, right: int, cost: str) -> None:
        row(name, with_error(found - before, "+.3f"), right, cost)

    with tempfile.TemporaryDirectory() as scratch:
        made, _ = build_reference(opened, text_items(opened, args.text, args.reference, 0), OWN, Silent())
        opened.partial.release("")
        write_reference(made, Path(scratch) / "reference", overwrite=False)
        print(f"({len(made.items)} items in the reference set)", flush=True)
        for method in METHODS:
            way = PathwayOptions(method)
            answering = open_answering(args.model, Path(scratch) / "reference", way, device="cpu", dtype="float32")
            found, greedy = zip(*(answering.answer(item.prompt, [item.answer])[0] for item in items), strict=True)
            print_row(method, torch.tensor(found, dtype=torch.float64), sum(greedy), f"{answering.cost:.1f}")
    print_row("oracle", *answers(args.model, items, knowing=True), "-")
    for folder in args.moved:
        print_row(Path(folder).name, *answers(folder, items, knowing=False), "1")


if __name__ == "__main__":
    main()
