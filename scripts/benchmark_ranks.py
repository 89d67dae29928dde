"""Measure what several ranks on this machine bring; every figure is a ratio within one run.

    python -m scripts.benchmark_ranks MODEL TEXT [--ranks 1 2] [--experts N] [--samples 64] [--correct tune] [--steps N]
    python -m scripts.benchmark_ranks --gigabytes 4.7 TEXT ...

Plans and applies the plan by 1, 2 and more ranks of one thread each, and prints for each number the seconds of the
pass that plans and of the correction over those of one rank (the launch and imports excluded), the processor's seconds
of the busiest rank and the peak of anonymous memory of the largest over those of one, and whether plan and weights are
the same. On a machine that others use, the processor's seconds tell how the work is shared. --steps shortens `tune`.
With --gigabytes the model is a synthetic checkpoint of that size, removed in the end.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from compressor.files import file_digest
from scripts.benchmark import save_tokenizer, write_synthetic

PHASES = ("plan", "correct")


def work(given: argparse.Namespace, out: Path) -> None:
    """What each rank does: one plan and its output; its figures are left in a file."""
    from compressor import apply
    from compressor.memory import limit_caches
    from compressor.planning.answering import plan_request
    from compressor.planning.request import Request
    from compressor.planning.run import open_run
    from compressor.ranks.together import together

    limit_caches()
    request = Request(
        experts=given.experts, strategy=given.strategy, correct=given.correct, calibration=[given.text],
        samples=given.samples, sequence_length=given.length,
    )  # fmt: skip
    with together() as ranks:
        begin = time.process_time()
        with open_run(given.model) as run:
            with run.clock.phase("plan"):
                plan, _ = plan_request(run, request)
            seconds, memory = dict(run.clock.seconds), run.peak.anonymous
        if given.steps and plan.correction is not None:
            plan = replace(plan, correction={**plan.correction, "steps": given.steps})
        made = apply(plan, out, model=given.model)
        seconds |= {name: value for name, value in made.seconds.items() if name != "open"}
        worked, most = time.process_time() - begin, max(memory, made.peak_memory)
        found = {"seconds": seconds, "work": worked, "memory": most}
        out.with_suffix(f".{ranks.rank}.json").write_text(json.dumps(found), encoding="utf-8")


def launched(size: int, model: str, scratch: Path) -> dict[str, Any]:
    """The figures of a run by so many ranks, with the bytes of its plan."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1]), "WORLD_SIZE": str(size)}
    out = scratch / f"by-{size}"
    more = {"OMP_NUM_THREADS": "1", "MOE_COMPRESSOR_CACHE": str(scratch / f"cache-{size}"), **place}
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "scripts.benchmark_ranks", model, *sys.argv[1:], "--out", str(out)],
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
    weights = {path.name: file_digest(path) for path in sorted(out.glob("*.safetensors"))}
    return {**found[0], **most, "plan": json.dumps(kept), "weights": weights}


def main() -> None:
    """Print a line for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("given", nargs="+", metavar="MODEL TEXT")
    parser.add_argument("--gigabytes", type=float, help="of a synthetic checkpoint in the place of MODEL")
    parser.add_argument("--steps", type=int, help="of tuning a layer (default: as many as `compress` takes)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    for name, default in (("experts", 4), ("samples", 64), ("length", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--strategy", default="reap")
    parser.add_argument("--correct", default="tune")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.out is not None:
        given.model, given.text = given.given[0], given.given[-1]
        work(given, given.out)
        return
    if len(given.given) != (1 if given.gigabytes else 2):
        parser.error("name a model and a text, or --gigabytes and a text")
    with tempfile.TemporaryDirectory() as scratch:
        model = given.given[0]
        if given.gigabytes:
            folder = Path(scratch) / "model"
            folder.mkdir()
            write_synthetic(folder, given.gigabytes)
            save_tokenizer(folder)
            model = str(folder)
        runs = {size: launched(size, model, Path(scratch)) for size in sorted({1, *given.ranks})}
    one = runs[1]
    for size, run in runs.items():
        times = ", ".join(
            f"{name} {run['seconds'].get(name, 0):.1f} s, faster by {one['seconds'][name] / run['seconds'][name]:.2f}"
            for name in PHASES
            if run["seconds"].get(name)
        )
        same = ", ".join(f"{'the same' if run[name] == one[name] else 'OTHER'} {name}" for name in ("plan", "weights"))
        shares = [f"{name} {run[name] / one[name]:.2f}" for name in ("work", "memory")]
        print(f"{size} ranks: {times}; of one rank's, each has at most {' and '.join(shares)}; {same}", flush=True)


if __name__ == "__main__":
    main()
