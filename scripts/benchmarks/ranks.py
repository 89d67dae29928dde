"""Measure what several ranks on this machine bring; every figure is a ratio within one run.

    python -m scripts.benchmarks.ranks MODEL TEXT [--ranks 1 2] [--experts N] [--samples 64] [--steps N]

Compresses by `reap` and `tune` with 1, 2 and more ranks of one thread each. Prints for each number how much faster the
plan and the correction are than on one rank, the peak of anonymous memory of the largest rank over that of one, whether
the plan is the same, and by how much weights differ. --steps shortens `tune`.
"""

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from scripts.benchmarks import frame
from tests.support import small


def compress(given: Any, size: int, out: Path) -> dict[str, Any]:
    """Run so many ranks, each a process; returns seconds by phase, the memory of the largest, and what stays."""
    words = f"compress {given.model} -o {out} --calibration {given.text} --strategy reap --correct tune --json"
    words += f" --experts {given.experts} --samples {given.samples} --sequence-length 256"
    words += f" --set prune.correct.steps={given.steps}" if given.steps else ""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(frame.free_port()), "WORLD_SIZE": str(size)}
    shared |= {"OMP_NUM_THREADS": "1", "MOE_COMPRESSOR_CACHE": f"{out}-cache"}
    environments = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    commands = [[*frame.COMMAND, *words.split()]] * size
    with ThreadPoolExecutor(size) as pool:
        children = list(pool.map(frame.run_child, commands, environments))
    steps = json.loads((out / "compression.json").read_text())["plan"]["steps"]
    (plan,) = [step["plan"] for step in steps if step["name"] == "prune"]
    kept = [(layer["module"], layer["groups"]) for layer in plan["layers"]]
    seconds = json.loads(children[0].output)["seconds"]
    return {**seconds, "memory": max(child.anonymous for child in children), "kept": kept, "out": out}


def difference(folder: Path, other: Path) -> float:
    """Return the largest difference of a tensor from its other self, over the largest value in it."""
    apart, references = 0.0, small.tensors_of(other)
    for name, value in small.tensors_of(folder).items():
        reference = references[name].float()
        scale = reference.abs().max().clamp_min(1e-12)
        apart = max(apart, float((value.float() - reference).abs().max() / scale))
    return apart


def main() -> None:
    """Print a line for each number of ranks."""
    parser = frame.options(__doc__, ranks=[1, 2], experts=4, samples=64, steps=0)
    parser.add_argument("model")
    parser.add_argument("text")
    given = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as scratch:
        one = compress(given, 1, Path(scratch) / "1")
        for size in sorted({1, *given.ranks}):
            run = one if size == 1 else compress(given, size, Path(scratch) / str(size))
            parts = [f"{name} {run[name]:.1f} s, faster by {one[name] / run[name]:.2f}" for name in ("plan", "correct")]
            same = "the same" if run["kept"] == one["kept"] else "ANOTHER"
            apart = f"{same} plan, weights {difference(run['out'], one['out']):.1e} apart"
            print(f"{size} ranks: {', '.join(parts)}; memory {run['memory'] / one['memory']:.2f}; {apart}", flush=True)


if __name__ == "__main__":
    frame.run(main)
