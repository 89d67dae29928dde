"""Measure what answering a gate's items costs with one layer in memory at a time, and that a small machine can do it.

    python -m scripts.benchmark_gate_stream [MODEL ...] [--tasks TASKS] [--items N] [--rounds R]
    python -m scripts.benchmark_gate_stream --confined [--folder DIR] [--gigabytes 4.2] [--search]

The first answers the same items in memory and streamed, and prints the CPU seconds of both from a request's text to
its answer, without loading and reading, their ratio, and the largest difference of an item's result; without a MODEL on
the demo model. The second makes a synthetic checkpoint, compresses it and gates both, or with --search compresses under
a gate, in processes whose address space is limited below the model's size.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from compressor.checkpoint.source import locate
from compressor.demo.evaluation import demo_checkpoint
from compressor.evaluation.evaluate import run_tasks
from compressor.evaluation.model import WatchedModel
from compressor.evaluation.scores import ItemScores
from compressor.evaluation.tasks import EvaluationOptions, resolve_tasks
from compressor.model.loading import PartialModel
from compressor.progress import Silent
from scripts.benchmark import save_tokenizer, write_synthetic

TASKS = "moe_demo_sorting,moe_demo_recall,moe_demo_facts,moe_demo_text"
LIMIT_SHARE = 0.8  # of the model's size: all the address space that a process may have, its libraries' included
LITTLE = ("--tasks", "moe_demo_sorting", "--limit", "4", "--max-drop", "0.5")


class Watch:
    """CPU seconds of every call of a function while the block runs."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name, self.own, self.seconds = owner, name, getattr(owner, name), 0.0

    def __enter__(self) -> "Watch":
        def timed(*arguments: Any, **named: Any) -> Any:
            begin = time.process_time()
            try:
                return self.own(*arguments, **named)
            finally:
                self.seconds += time.process_time() - begin

        setattr(self.owner, self.name, timed)
        return self

    def __exit__(self, *fault: object) -> None:
        setattr(self.owner, self.name, self.own)


def cost(model: str, tasks: str, items: int, rounds: int) -> str:
    """A Markdown row: items, CPU seconds in memory and streamed at their least, their ratio, the largest difference."""
    options = EvaluationOptions(tuple(tasks.split(",")), limit=items, device="cpu", dtype="float32")
    source, resolved = locate(model), resolve_tasks(options)
    least: dict[bool, float] = {}
    results: dict[bool, dict[str, ItemScores]] = {}
    for _ in range(rounds):
        for streamed in (False, True):
            with (
                Watch(WatchedModel, "loglikelihood") as choices,
                Watch(WatchedModel, "loglikelihood_rolling") as texts,
                Watch(PartialModel, "load") as reading,
            ):
                results[streamed] = run_tasks(source, resolved, options, Silent(), streamed=streamed)
            spent = choices.seconds + texts.seconds - reading.seconds
            least[streamed] = min(least.get(streamed, spent), spent)
    pairs = [(results[False][task], results[True][task]) for task in results[False]]
    differing = max(abs(a - b) for one, other in pairs for a, b in zip(one.values, other.values, strict=True))
    count = sum(len(one.values) for one, _ in pairs)
    return (
        f"| {source.label} | {count} | {least[False]:.1f} | {least[True]:.1f} | {least[True] / least[False]:.2f} | "
        f"{differing:.2g} |"
    )


def confined(arguments: list[str], limit: int, cache: Path) -> tuple[int, float, Any, float]:
    """Exit status, seconds, what the command printed as JSON, and its peak of resident bytes, mapped files included."""

    def confine() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))

    # arrow would set aside a gigabyte of addresses that it does not use
    more = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OPENBLAS_NUM_THREADS": "1", "MOE_COMPRESSOR_CACHE": str(cache)}
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "compressor", *arguments, "--json"], stdout=subprocess.PIPE, text=True,
        env={**os.environ, **more}, preexec_fn=confine,
    )  # fmt: skip
    told = process.communicate()[0]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return process.returncode, time.perf_counter() - begin, json.loads(told) if told else None, peak


def confined_report(folder: Path, scratch: Path, gigabytes: float, search: bool) -> None:
    """Compress and gate, or search, under the limit."""
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_synthetic(folder, gigabytes)
        save_tokenizer(folder)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    limit, out, cache = int(LIMIT_SHARE * size), scratch / "out", scratch / "cache"
    print(f"model of {size / 1e9:.2f} GB, {limit / 1e9:.2f} GB of address space")
    how = ["--strategy", "count-guided", "--correct", "none", "--calibration", "demo", "--samples", "4"]
    how += ["--sequence-length", "64"]
    compress = ["compress", str(folder), "-o", str(out), *how]
    if search:
        _, *margin = LITTLE
        runs = {"compress --search": [*compress, "--search", "--gate", *margin, "--inconclusive", "pass"]}
    else:
        runs = {"compress": [*compress, "--experts", "18"], "gate": ["gate", str(folder), str(out), *LITTLE]}
        runs["gate --no-stream"] = [*runs["gate"], "--no-stream"]
    for name, arguments in runs.items():
        kept = cache if name != "gate --no-stream" else scratch / "other"  # where no answers are stored
        status, seconds, told, peak = confined(arguments, limit, kept)
        more = "" if told is None else f", {told.get('verdict')}, streamed {told.get('streamed')}"
        more += f", tried {len(told['attempts'])}" if told and "attempts" in told else ""
        print(f"{name}: exit status {status}, {seconds:.0f} s, at most {peak / 1e9:.2f} GB resident{more}")


def main() -> None:
    """Print the rows, or what was done under the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--items", type=int, default=60, help="of each task")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--confined", action="store_true")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--folder", type=Path, help="where the synthetic checkpoint is made, or lies already (kept)")
    parser.add_argument("--gigabytes", type=float, default=4.2)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        if args.confined:
            confined_report(args.folder or scratch / "model", scratch, args.gigabytes, args.search)
            return
        print("| model | items | in memory, CPU s | streamed, CPU s | ratio | largest difference |")
        print("|---|---|---|---|---|---|")
        with demo_checkpoint() if not args.models else nullcontext() as demo:
            for model in args.models or [str(demo)]:
                print(cost(model, args.tasks, args.items, args.rounds), flush=True)


if __name__ == "__main__":
    main()
