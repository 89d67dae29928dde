"""Measure constants in the place of dropped experts, even and uneven, beside drops that stock transformers loads.

    python scripts/benchmark_constants.py MODEL --experts 6,4 --calibration train.jsonl --evaluate valid.jsonl

Prints the increase of the loss over the original's, in nats per token, a row for each way and correction and a column
for each number of experts that is kept in each layer, on average where layers keep different numbers.
"""

import argparse
from collections.abc import Iterable

import compressor
from compressor.comparison.rows import Comparison, Row
from compressor.memory import limit_caches

CORRECTIONS = "none,constants,ridge,tune"


def table(found: Comparison, counts: Iterable[int]) -> str:
    """The comparison as Markdown; random drops left out."""
    columns = list(counts)
    by_way: dict[tuple[str, str], dict[int, Row]] = {}
    for row in found.rows[1:]:
        if not row.is_random:
            by_way.setdefault((row.name, row.correction), {})[row.experts] = row
    heads = ("way", "correction", *(f"{count} experts" for count in columns))
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for (name, correction), rows in by_way.items():
        cells = [f"{found.increase(rows[count]):.4f}" if count in rows else "" for count in columns]
        lines.append(f"| {name} | {correction} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--experts", default="6,4")
    parser.add_argument("--strategies", default="gated-mass,auto")
    parser.add_argument("--correct", default=CORRECTIONS)
    parser.add_argument("--calibration", default="demo")
    parser.add_argument("--evaluate", default="demo")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--evaluation-samples", type=int, default=100)
    given = parser.parse_args()
    limit_caches()
    counts = [int(count) for count in given.experts.split(",")]
    found = compressor.compare(
        given.model, experts=counts, strategies=given.strategies.split(","), corrections=given.correct.split(","),
        calibration=given.calibration, samples=given.samples, sequence_length=given.sequence_length, constants=True,
        evaluate=[given.evaluate], evaluation_samples=given.evaluation_samples, random_seeds=0,
    )  # fmt: skip
    print(f"original: loss {found.original.loss:.4f} on {sum(found.evaluation.values()):,} tokens", flush=True)
    print(table(found, counts))


if __name__ == "__main__":
    main()
