"""Compare numbers of experts on held-out text, and compress to the smallest that costs at most LIMIT nats a token.

python examples/choose_by_loss.py MODEL TEXT OUT LIMIT COUNT [COUNT ...]
"""

import sys

from compressor import TextOptions, compare, compress

model, text, out, limit, *counts = sys.argv[1:]
reading = {"calibration": text, "samples": 32, "sequence_length": 128}
choice = {"strategy": "energy", "correct": "ridge"}
comparison = compare(
    model,
    experts=[int(count) for count in counts],
    strategies=[choice["strategy"]],
    corrections=[choice["correct"]],
    random_seeds=1,
    calibration=TextOptions(data=text, samples=32, sequence_length=128),
)
base, *rows = comparison.rows
cheap = [row for row in rows if row.variant.seed is None and row.loss - base.loss <= float(limit)]
if not cheap:
    sys.exit(f"none of {', '.join(counts)} experts costs at most {limit} nats")
best = min(cheap, key=lambda row: row.variant.bytes)
print(f"{best.variant.experts} experts cost {best.loss - base.loss:.3f} nats")
compress(model, out, experts=best.variant.experts, **choice, **reading)
