"""Measure what several ranks on this machine bring; every figure is a ratio within one run.

    python -m scripts.benchmarks.ranks MODEL TEXT [--ranks 1 2] [--experts N] [--samples 64] [--steps N]

Plans and applies the plan by 1, 2 and more ranks of one thread each. Prints for each number the seconds of the pass
that plans and of the correction over those of one rank (the launch and imports excluded), the processor's seconds of
the busiest rank and the peak of anonymous memory of the largest over those of one, whether the plan is the same, and by
how much weights differ. --steps shortens `tune`.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors import safe_open

from scripts.benchmarks.frame import options

PHASES = ("plan", "correct")


def work(given: argparse.Namespace, out: Path) -> None:
    """What each rank does: one plan and its output; its figures are left in a file."""
    from compressor import apply
    from compressor.api import make_recipe, plan
    from compressor.distributed import process_group
    from compressor.memory import PeakMemory, limit_caches
    from compressor.steps.correct.options import Correct
    from compressor.steps.prune.options import Prune

    limit_caches()
    correct = Correct(given.correct, **({"steps": given.steps} if given.steps else {}))
    prune = Prune(given.strategy, experts=given.experts, correct=correct)
    recipe = make_recipe(given.model, [prune], [given.text], given.samples, given.length)
    with process_group() as ranks:
        begin = time.process_time()
        with PeakMemory() as peak:
            start_of_plan = time.perf_counter()
            decided = plan(recipe)
            seconds = {"plan": time.perf_counter() - start_of_plan}
        made = apply(decided, out, model=given.model)
        seconds |= {
            name: value for name, value in made.seconds.items() if name not in ("open", "plan")
        }
        worked, most = time.process_time() - begin, max(peak.anonymous, made.peak_memory)
        found = {"seconds": seconds, "work": worked, "memory": most}
        out.with_suffix(f".{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")


def start(size: int, scratch: Path, name: str) -> list[subprocess.Popen[bytes]]:
    """So many ranks of one run, each a process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(probe.getsockname()[1]),
            "WORLD_SIZE": str(size),
        }
    more = {"OMP_NUM_THREADS": "1", "MOE_COMPRESSOR_CACHE": str(scratch / f"cache-{name}"), **place}
    return [
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "scripts.benchmarks.ranks",
                *sys.argv[1:],
                "--out",
                str(scratch / name),
            ],
            env={**os.environ, **more, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(size)
    ]


def launched(size: int, scratch: Path) -> dict[str, Any]:
    """The figures of a run by so many ranks, with its plan and the digests of its weights."""
    one, out = scratch / "ranks-1", scratch / f"ranks-{size}"
    shutil.rmtree(out, ignore_errors=True)
    started = start(size, scratch, out.name)
    statuses = [process.wait() for process in started]
    if any(statuses):
        raise SystemExit(f"{size} ranks did not come to an end")
    found = [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in range(size)]
    plan = json.loads((out / "compression.json").read_text())["plan"]
    off = max(difference(path, one / path.name) for path in out.glob("*.safetensors"))
    if size > 1:  # the outputs of all others are compared with that of one
        shutil.rmtree(out)
    (decided,) = [step["plan"] for step in plan["steps"] if step["name"] == "prune"]
    kept = [[layer["module"], layer["groups"]] for layer in decided["layers"]]
    most = {name: max(each[name] for each in found) for name in ("memory", "work")}
    return {**found[0], **most, "size": size, "plan": json.dumps(kept), "off": off}


def difference(path: Path, other: Path) -> float:
    """The largest difference of a tensor from its other self, over the largest value in it."""
    with safe_open(path, "pt") as first, safe_open(other, "pt") as second:
        pairs = (
            (first.get_tensor(key).float(), second.get_tensor(key).float())
            for key in list(first.keys())
        )
        return max(
            float((one - two).abs().max() / two.abs().max().clamp_min(1e-12)) for one, two in pairs
        )


def main() -> None:
    """Print a line for each number of ranks."""
    sizes = {"experts": 4, "samples": 64, "length": 256, "strategy": "reap", "correct": "tune"}
    parser = options(__doc__, ranks=[1, 2], **sizes)
    parser.add_argument("model")
    parser.add_argument("text")
    parser.add_argument(
        "--steps", type=int, help="of tuning a layer (default: as many as `compress` takes)"
    )
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_intermixed_args()
    if given.out is not None:
        work(given, given.out)
        return
    with tempfile.TemporaryDirectory() as scratch:
        one = launched(1, Path(scratch))
        for size in sorted({1, *given.ranks}):
            run = one if size == 1 else launched(size, Path(scratch))
            print(f"{size} ranks: {told(one, run)}", flush=True)


def told(one: dict[str, Any], run: dict[str, Any]) -> str:
    """A run's line: seconds over those of one rank, work and memory."""

    def phase(name: str) -> str:
        seconds = run["seconds"][name]
        return f"{name} {seconds:.1f} s, faster by {one['seconds'][name] / seconds:.2f}"

    times = ", ".join(phase(name) for name in PHASES if run["seconds"].get(name))
    same = f"{'the same' if run['plan'] == one['plan'] else 'ANOTHER'} plan, weights {run['off']:.1e} apart"
    shares = [f"{name} {run[name] / one[name]:.2f}" for name in ("work", "memory")]
    return f"{times}; of one rank's, each has at most {' and '.join(shares)}; {same}"


if __name__ == "__main__":
    main()
