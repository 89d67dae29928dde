"""Read many mutated files as tests/compressor/test_damaged_files.py makes and judges them, for longer than a test may.

    python -m scripts.fuzz [--cases 100000] [--seed 0] [--seconds 3600]

Prints for each kind how many were read, accepted and refused, and the slowest by the processor's time. What ends in
anything but a `CompressionError` is printed once for each place that it comes from, and makes the exit status 1.
"""

import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from transformers.utils import logging

from scripts.benchmarks import frame
from tests.compressor import test_damaged_files

ROUND = 500  # cases of a kind before it is another's turn
SHOWN = 2_000  # bytes of a failing file


def read_files(test: Any, counts: Counter[str], failures: dict[str, str], cases: int, seed: int) -> float:
    """Read so many files of the kind that a test of tests/compressor/test_damaged_files.py reads; returns the slowest."""
    reads: Callable[[bytes], None] = test.hypothesis.inner_test
    generating = {"database": None, "deadline": None, "phases": [Phase.generate]}
    slowest = 0.0

    @hypothesis.seed(seed)
    @settings(max_examples=cases, suppress_health_check=list(HealthCheck), **generating)
    @given(test_damaged_files.mutated(test_damaged_files.SOUND[test]))
    def read(raw: bytes) -> None:
        nonlocal slowest
        test_damaged_files.REFUSALS.clear()
        begin = time.process_time()
        counts["cases"] += 1
        try:
            reads(raw)
            # Where a file is read in several ways, all of them have to accept it.
            counts["refused" if test_damaged_files.REFUSALS else "accepted"] += 1
        except Exception as error:  # any is a finding
            counts["failed"] += 1
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{test.__name__}: {type(error).__name__} at {last.filename}:{last.lineno}"
            failures.setdefault(place, f"{traceback.format_exc()}{len(raw):,} bytes, {raw[:SHOWN]!r}")
        slowest = max(slowest, time.process_time() - begin)

    read()
    return slowest


def main() -> int:
    """Print the table and the findings; returns the exit status."""
    asked = frame.options(__doc__, cases=100_000, seed=0, seconds=3600.0).parse_args()
    logging.set_verbosity_error()  # of transformers, which has much to say of odd configs
    tallies, slowest = {test: Counter[str]() for test in test_damaged_files.SOUND}, defaultdict[Any, float](float)
    failures: dict[str, str] = {}
    share, end = -(-asked.cases // len(tallies)), time.monotonic() + asked.seconds
    for done in range(0, share, ROUND):
        for test, counts in tallies.items():
            if time.monotonic() < end:
                cases = min(ROUND, share - done)
                spent = read_files(test, counts, failures, cases, asked.seed + done // ROUND)
                slowest[test] = max(slowest[test], spent)
    columns = ("cases", "accepted", "refused", "failed")
    print(f"{'kind':14}", *(f"{name:>10}" for name in (*columns, "slowest, s")))
    for test, counts in tallies.items():
        kind = test.__name__.removeprefix("test_")
        print(f"{kind:14}", *(f"{counts[name]:10}" for name in columns), f"{slowest[test]:10.3f}")
    for place, shown in failures.items():
        print(f"\n{place}\n{shown}")
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
