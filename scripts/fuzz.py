"""Read many mutated files as tests/compressor/test_damaged_files.py makes and judges them, for longer than a test may.

    python -m scripts.fuzz [--cases 100000] [--seed 0] [--seconds 3600]

The cases are divided among the kinds of files. For each kind it prints how many were read, accepted and refused, what
the slowest took and how many a second were read, by the processor's time. What ends in anything but a
`CompressionError` is printed once for each place that it comes from, with the file that did it, and makes the exit
status 1.
"""

import argparse
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings
from transformers.utils import logging

from tests.compressor import test_damaged_files

ROUND = 500  # cases of a kind before it is another's turn
SHOWN = 2_000  # bytes of a failing file


@dataclass(slots=True)
class Tally:
    """What became of one kind's files."""

    cases: int = 0
    accepted: int = 0
    failed: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    failures: dict[str, tuple[bytes, str]] = field(default_factory=dict)  # file and traceback by place

    def row(self, kind: str) -> str:
        """Return a line of the table."""
        refused, rate = self.cases - self.accepted - self.failed, self.cases / (self.seconds or 1.0)
        numbers = f"{self.cases:9,}{self.accepted:10,}{refused:9,}{self.failed:8,}"
        return f"{kind:14}{numbers}{self.slowest:13.3f}{rate:10.0f}"


def read(raw: bytes, reads: Callable[[bytes], None], tally: Tally) -> None:
    """Read one file; where it is read in several ways, all of them have to accept it."""
    test_damaged_files.REFUSALS.clear()
    begin = time.process_time()
    try:
        reads(raw)
        tally.accepted += not test_damaged_files.REFUSALS
    except Exception as error:  # any is a finding
        tally.failed += 1
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{type(error).__name__} at {last.filename}:{last.lineno}"
        tally.failures.setdefault(place, (raw, traceback.format_exc()))
    spent = time.process_time() - begin
    tally.cases += 1
    tally.seconds += spent
    tally.slowest = max(tally.slowest, spent)


def read_files(test: Callable[[bytes], None], tally: Tally, cases: int, seed: int) -> None:
    """Read so many files of the kind that a test of tests/compressor/test_damaged_files.py reads."""
    reads = test.hypothesis.inner_test  # type: ignore[attr-defined]
    generating = {"database": None, "deadline": None, "phases": [Phase.generate]}

    @hypothesis.seed(seed)
    @settings(max_examples=cases, suppress_health_check=list(HealthCheck), **generating)
    @given(test_damaged_files.mutated(test_damaged_files.SOUND[test]))
    def read_all(raw: bytes) -> None:
        read(raw, reads, tally)

    read_all()


def main() -> int:
    """Print the table and the findings; returns the exit status."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--cases", type=int, default=100_000, help="of all kinds together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="begin no round later")
    asked = parser.parse_args()
    logging.set_verbosity_error()  # of transformers, which has much to say of odd configs
    tallies = {test: Tally() for test in test_damaged_files.SOUND}
    share, end = -(-asked.cases // len(tallies)), time.monotonic() + asked.seconds
    for done in range(0, share, ROUND):
        for test, tally in tallies.items():
            if time.monotonic() < end:
                read_files(test, tally, min(ROUND, share - done), asked.seed + done // ROUND)
    columns = f"{'cases':>9}{'accepted':>10}{'refused':>9}{'failed':>8}{'slowest, s':>13}{'a second':>10}"
    print(f"{'kind':14}{columns}")
    for test, tally in tallies.items():
        print(tally.row(test.__name__.removeprefix("test_")))
    for test, tally in tallies.items():
        for place, (raw, trace) in tally.failures.items():
            print(f"\n{test.__name__}: {place}\n{trace}{len(raw):,} bytes, {raw[:SHOWN]!r}")
    return int(any(tally.failed for tally in tallies.values()))


if __name__ == "__main__":
    raise SystemExit(main())
