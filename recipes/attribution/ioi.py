"""Heads on indirect object identification (IOI): whose words they read when they steer the last token's routing.

"Understanding Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs" (ICLR 2026), on the task of Wang et al.
2023, arXiv:2211.00593: "When Mary and John went to the store, John gave a drink to" -> Mary. The roles of keys are IO
(Mary), S1 and S2 (the first and second John), END (the last token), start (the first token), and other words.

Needs: as it stands the demo model, offline, a CPU and a minute; it is no model of language, so its table shows no more
than the method. On GPT-like models: `python recipes/attribution/ioi.py allenai/OLMoE-1B-7B-0924`, minutes on a GPU.
Environment: MODEL, PROMPTS (number), TOP (heads), OUT (a JSON file). A head's score is the variance of its sub-scores
over the experts, summed over the later routers; by role, it is that of the last query alone.
"""

import json
import os
import random
import sys
from collections import Counter
from pathlib import Path

import torch

from compressor.attribution.measure import attribute
from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.model.opened import open_model
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Silent

DEMO = Path(__file__).parents[2] / "compressor" / "demo" / "checkpoint"
NAMES = ("Mary", "John", "Tom", "Anna", "James", "Sarah", "Paul", "Kate", "Mark", "Alice")
PLACES = ("store", "park", "school", "office")
THINGS = ("drink", "book", "ring", "letter")
ROLES = ("IO", "S1", "S2", "END", "start", "other")


def prompt(draw: random.Random) -> tuple[str, dict[str, range]]:
    """Return a prompt whose answer is the first name, and the characters of its roles."""
    given, subject = draw.sample(NAMES, 2)
    place, thing = draw.choice(PLACES), draw.choice(THINGS)
    text = f"When {given} and {subject} went to the {place}, {subject} gave a {thing} to"
    starts = {"IO": text.index(given), "S1": text.index(subject), "S2": text.rindex(subject)}
    return text, {
        role: range(start, start + len(given if role == "IO" else subject))
        for role, start in starts.items()
    }


def roles_of(offsets: list[tuple[int, int]], spans: dict[str, range]) -> list[str]:
    """Return the role of each token by its characters; a token may begin with the space before a word."""
    roles = ["other"] * len(offsets)
    for number, (start, end) in enumerate(offsets):
        for role, span in spans.items():
            if start < span.stop and end > span.start:
                roles[number] = role
    roles[0] = "start"
    roles[-1] = "END"
    return roles


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("MODEL", str(DEMO))
    model = open_model(locate(name), "auto", "auto")
    tokenizer = load_tokenizer(model.source.folder)
    draw = random.Random(0)
    batches, roles = [], []
    for _ in range(int(os.environ.get("PROMPTS", "16"))):
        text, spans = prompt(draw)
        encoded = tokenizer(text, return_offsets_mapping=True)
        batches.append(torch.tensor([encoded["input_ids"]]))
        roles.append(roles_of(encoded["offset_mapping"], spans))
    top = int(os.environ.get("TOP", "10"))
    found = attribute(
        model, Calibration(tuple(batches), {"source": "IOI"}), Silent(), keys=len(batches), top=top
    )
    totals = {(head.module, head.number): head.total_influence for head in found.of_kind("head")}
    sums: dict[tuple[str, int], Counter[str]] = {}
    labels = {}
    for split in found.per_key:
        head = split.module, split.head
        labels[head] = f"L{split.layer}H{split.head}"
        for role, score in zip(roles[split.sequence], split.last, strict=True):
            sums.setdefault(head, Counter())[role] += score / len(batches)
    rows = []
    for head in sorted(sums, key=lambda head: -totals[head]):
        rows.append(
            {
                "head": labels[head],
                "score": totals[head],
                **{role: sums[head][role] for role in ROLES},
            }
        )
    print("  ".join(f"{column:>9}" for column in ("head", "score", *ROLES)))
    for row in rows:
        print(
            "  ".join(
                f"{value:>9}" if isinstance(value, str) else f"{value:>9.3g}"
                for value in row.values()
            )
        )
    if "OUT" in os.environ:
        Path(os.environ["OUT"]).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
