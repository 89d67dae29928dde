"""Prune by two strategies, and write a page for each with the routed tokens of every expert before and after.

python examples/routed_tokens.py MODEL TEXT EXPERTS
"""

import sys
from pathlib import Path

from compressor import compress, write_report

model, text, experts = sys.argv[1:]
for strategy in ("count-guided", "data-centric"):
    reading = {"calibration": text, "samples": 16, "sequence_length": 128}
    outcome = compress(
        model, strategy, experts=int(experts), strategy=strategy, correct="none", **reading
    )
    write_report(strategy, f"{strategy}.html", figures=Path(f"{strategy}-figures"))
    print(f"{strategy}: {outcome.experts_after} experts, {strategy}-figures/visits.png")
