"""Measure constants in the place of dropped experts, even and uneven, beside drops that stock transformers loads.

    python -m scripts.benchmarks.constants MODEL --experts 6 4 --calibration train.jsonl --evaluate valid.jsonl

Prints the increase of the loss over the base's, in nats per token, a row for each way and correction and a column
for each number of experts that is kept in each layer, on average where layers keep different numbers.
"""

import compressor
from compressor.memory import limit_caches
from compressor.recipe.step import TextOptions
from compressor.report.comparison_report import Row
from scripts.benchmarks.frame import head, options, row


def main() -> None:
    """Compare, and print the table."""
    texts = {"calibration": "demo", "evaluate": "demo", "samples": 128, "sequence_length": 512}
    ways = {"strategies": ["gated-mass", "auto"], "correct": ["none", "ridge", "tune"]}
    parser = options(__doc__, experts=[6, 4], **ways, **texts, evaluation_samples=100)
    parser.add_argument("model")
    given = parser.parse_args()
    limit_caches()
    text = TextOptions(data=(given.calibration,), samples=given.samples, sequence_length=given.sequence_length)
    found = compressor.compare(
        given.model,
        experts=given.experts,
        strategies=given.strategies,
        corrections=given.correct,
        calibration=text,
        constants=True,
        evaluate=[given.evaluate],
        evaluation_samples=given.evaluation_samples,
        random_seeds=0,
    )
    print(f"base: loss {found.base.loss:.4f} on {sum(found.evaluation.values()):,} tokens", flush=True)
    by_way: dict[tuple[str, str], dict[int, Row]] = {}
    for each in found.rows[1:]:
        by_way.setdefault((each.name, each.correction), {})[each.experts] = each
    head("way", "correction", *(f"{count} experts" for count in given.experts))
    for way, rows in by_way.items():
        row(*way, *(f"{rows[count].loss - found.base.loss:.4f}" if count in rows else "" for count in given.experts))


if __name__ == "__main__":
    main()
