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
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from scripts.benchmarks import frame


def work(given: argparse.Namespace, out: Path) -> None:
    """Do what each rank does: one plan and its output; its figures are left in a file."""
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
        begin, start = time.process_time(), time.perf_counter()
        with PeakMemory() as peak:
            decided = plan(recipe)
        seconds = {"plan": time.perf_counter() - start}
        made = apply(decided, out, model=given.model)
        seconds["correct"] = made.seconds.get("correct", 0.0)
        memory = max(peak.anonymous, made.peak_memory)
        found = {**seconds, "work": time.process_time() - begin, "memory": memory}
        out.with_suffix(f".{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")


def launch(size: int, scratch: Path) -> dict[str, Any]:
    """Run so many ranks, each a process; returns their figures, with the experts that stay."""
    out = scratch / f"ranks-{size}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    shared |= {"OMP_NUM_THREADS": "1", "MOE_COMPRESSOR_CACHE": str(scratch / f"cache-{size}")}
    command = [sys.executable, "-m", "scripts.benchmarks.ranks", *sys.argv[1:], "--out", str(out)]
    started = []
    for rank in range(size):
        environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        started.append(subprocess.Popen(command, env=environment))
    statuses = [process.wait() for process in started]
    if any(statuses):
        raise SystemExit(f"{size} ranks did not come to an end")
    found = [json.loads(out.with_suffix(f".{rank}.json").read_text()) for rank in range(size)]
    steps = json.loads((out / "compression.json").read_text())["plan"]["steps"]
    (decided,) = [step["plan"] for step in steps if step["name"] == "prune"]
    kept = [[layer["module"], layer["groups"]] for layer in decided["layers"]]
    most = {name: max(figures[name] for figures in found) for name in ("memory", "work")}
    return {**found[0], **most, "kept": kept, "out": out}


def difference(folder: Path, other: Path) -> float:
    """Return the largest difference of a tensor from its other self, over the largest value in it."""
    apart = 0.0
    for path in folder.glob("*.safetensors"):
        tensors = load_file(other / path.name)
        for name, value in load_file(path).items():
            reference = tensors[name].float()
            scale = reference.abs().max().clamp_min(1e-12)
            apart = max(apart, float((value.float() - reference).abs().max() / scale))
    return apart


def main() -> None:
    """Print a line for each number of ranks."""
    sizes = {"experts": 4, "samples": 64, "length": 256, "strategy": "reap", "correct": "tune"}
    parser = frame.options(__doc__, ranks=[1, 2], steps=0, out=None, **sizes)
    parser.add_argument("model")
    parser.add_argument("text")
    given = parser.parse_intermixed_args()
    if given.out is not None:
        work(given, Path(given.out))
        return
    with tempfile.TemporaryDirectory() as scratch:
        one = launch(1, Path(scratch))
        for size in sorted({1, *given.ranks}):
            run = one if size == 1 else launch(size, Path(scratch))
            parts = []
            for name in ("plan", "correct"):
                if run[name]:
                    faster = one[name] / run[name]
                    parts.append(f"{name} {run[name]:.1f} s, faster by {faster:.2f}")
            shares = [f"{name} {run[name] / one[name]:.2f}" for name in ("work", "memory")]
            same = "the same" if run["kept"] == one["kept"] else "ANOTHER"
            apart = f"{same} plan, weights {difference(run['out'], one['out']):.1e} apart"
            least = f"of one rank's, each has at most {' and '.join(shares)}"
            print(f"{size} ranks: {', '.join(parts)}; {least}; {apart}", flush=True)


if __name__ == "__main__":
    frame.run(main)
