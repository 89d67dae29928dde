"""Compare numbers of experts on held-out text, and compress to the smallest that costs no more than LIMIT nats a token.

python examples/choose_by_loss.py MODEL TEXT OUT LIMIT COUNT [COUNT ...]
"""

import sys

from compressor import compare, compress

model, text, out, limit, *counts = sys.argv[1:]
options = {"calibration": text, "samples": 32, "sequence_length": 128}
comparison = compare(
    model,
    experts=[int(count) for count in counts],
    strategies=["energy"],
    corrections=["ridge"],
    random_seeds=1,
    calibration=text,
)
