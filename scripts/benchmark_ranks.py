"""Measure what several ranks on this machine bring; every figure is a ratio within one run.

    python scripts/benchmark_ranks.py MODEL TEXT [--ranks 1 2] [--experts N] [--samples 64] [--correct tune]

Runs `plan` and `compress` by 1, 2 and more ranks of one thread each, and prints for each number the seconds of the
calibration pass and of the correction over those of one rank (the launch and imports excluded), the processor's seconds
of the busiest rank and the peak of anonymous memory of the largest over those of one, and whether the plans are the
same. On a machine that others use, the processor's seconds tell how the work is shared.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PHASES = ("plan", "correct")


def work(given: argparse.Namespace, out: Path) -> None:
    """What each rank does: one compression, whose figures it leaves in a file."""
    from compressor import compress
    from compressor.memory import limit_caches
    from compressor.planning.request import Request
    from compressor.ranks.together import together

    limit_caches()
    request = Request(
        experts=given.experts, strategy=given.strategy, correct=given.correct, calibration=[given.text],
        samples=given.samples, sequence_length=given.length,
    )  # fmt: skip
    with together() as ranks:
        begin = time.process_time()
        made = compress(given.model, out, request)
        found = {"seconds": dict(made.seconds), "work": time.process_time() - begin, "memory": made.peak_memory}
        out.with_suffix(f".{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")


def launched(size: int, scratch: Path) -> dict[str, Any]:
    """The figures of a run by so many ranks, with the bytes of its plan."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(size)}
    out = scratch / f"by-{size}"
    more = {"OMP_NUM_THREADS": "1", "MOE_COMPRESSOR_CACHE": str(scratch / f"cache-{size}"), **place}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--out", str(out)],
            env={**os.environ, **more, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]
    if any(process.wait() for process in started):
        raise SystemExit(f"{size} ranks did not come to an end")
    found = [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in range(size)]
    plan = json.loads((out / "compression.json").read_text())["plan"]
    kept = [[layer["module"], layer["groups"]] for layer in plan["layers"]]
    most = {name: max(each[name] for each in found) for name in ("memory", "work")}
    return {**found[0], **most, "plan": json.dumps(kept)}


def main() -> None:
    """Print a line for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    for name, default in (("experts", 4), ("samples", 64), ("length", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--strategy", default="reap")
    parser.add_argument("--correct", default="tune")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.out is not None:
        work(given, given.out)
        return
    with tempfile.TemporaryDirectory() as scratch:
        runs = {size: launched(size, Path(scratch)) for size in sorted({1, *given.ranks})}
    one = runs[1]
    for size, run in runs.items():
        times = ", ".join(
            f"{name} {run['seconds'].get(name, 0):.1f} s, faster by {one['seconds'][name] / run['seconds'][name]:.2f}"
            for name in PHASES
            if run["seconds"].get(name)
        )
        same = "the same plan" if run["plan"] == one["plan"] else "ANOTHER PLAN"
        shares = [f"{name} {run[name] / one[name]:.2f}" for name in ("work", "memory")]
        print(f"{size} ranks: {times}; of one rank's, each has at most {' and '.join(shares)}; {same}", flush=True)


if __name__ == "__main__":
    main()
