"""Measure what answering a gate's items costs with one layer in memory at a time, and that a small machine can do it.

    python -m scripts.benchmarks.gate_stream [MODEL ...] [--tasks TASKS] [--items N] [--rounds R]
    python -m scripts.benchmarks.gate_stream --confined [--folder DIR] [--gigabytes 4.2] [--search]

The first answers the same items in memory and streamed, and prints the CPU seconds of both from a request's text to
its answer, without loading and reading, their ratio, and the largest difference of an item's result; without a MODEL on
the demo model. The second makes a synthetic checkpoint, compresses it and gates both, or with --search compresses under
a gate, in processes whose address space is limited below the model's size.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

from compressor.answers.lm_eval_models import WatchedModel
from compressor.answers.lm_eval_run import ItemScores, TaskEvaluation
from compressor.answers.tasks import EvaluationOptions, resolve_tasks
from compressor.checkpoint.source import locate
from compressor.data.demo import demo_checkpoint
from compressor.model.loading import PartialModel
from compressor.progress import Silent
from scripts.benchmarks.frame import COMMAND, Sizes, head, options, row, run_child

TASKS = "moe_demo_sorting,moe_demo_recall,moe_demo_facts,moe_demo_text"
LIMIT_SHARE = 0.8  # of the model's size: all the address space that a process may have, its libraries' included
MARGIN = ["--limit", "8", "--max-drop", "0.5"]
# arrow would set aside a gigabyte of addresses that it does not use
LEAN = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OPENBLAS_NUM_THREADS": "1"}


@contextmanager
def cpu_seconds(owner: Any, name: str) -> Iterator[list[float]]:
    """CPU seconds of every call of a function while the block runs."""
    own, found = getattr(owner, name), list[float]()

    def timed(*arguments: Any, **named: Any) -> Any:
        begin = time.process_time()
        try:
            return own(*arguments, **named)
        finally:
            found.append(time.process_time() - begin)

    with patch.object(owner, name, timed):
        yield found


def compare(model: str, tasks: str, items: int, rounds: int) -> None:
    """Print a row: items, CPU seconds in memory and streamed at their least, their ratio, the largest difference."""
    asked = EvaluationOptions(tasks=tuple(tasks.split(",")), limit=items, device="cpu", dtype="float32")
    source, resolved = locate(model), resolve_tasks(asked)
    least: dict[bool, float] = {}
    results: dict[bool, dict[str, ItemScores]] = {}
    for streamed in (False, True) * rounds:
        with ExitStack() as stack:
            answering = [
                stack.enter_context(cpu_seconds(WatchedModel, name))
                for name in ("loglikelihood", "loglikelihood_rolling")
            ]
            reading = stack.enter_context(cpu_seconds(PartialModel, "load"))
            results[streamed] = TaskEvaluation(source, resolved, asked, streamed=streamed).run(Silent())
        spent = sum(map(sum, answering)) - sum(reading)
        least[streamed] = min(least.get(streamed, spent), spent)
    pairs = [(results[False][task].values, results[True][task].values) for task in results[False]]
    differing = max(abs(a - b) for one, other in pairs for a, b in zip(one, other, strict=True))
    memory, stream = least[False], least[True]
    items = sum(len(one) for one, _ in pairs)
    row(source.label, items, f"{memory:.1f}", f"{stream:.1f}", stream / memory, f"{differing:.2g}")


def confined_report(folder: Path, scratch: Path, gigabytes: float, search: bool) -> None:
    """Compress and gate, or search, under the limit."""
    Sizes().write(folder, gigabytes)
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    limit, out = int(LIMIT_SHARE * size), scratch / "out"
    print(f"model of {size / 1e9:.2f} GB, {limit / 1e9:.2f} GB of address space")
    compress = [
        "compress",
        str(folder),
        "-o",
        str(out),
        "--strategy",
        "count-guided",
        "--correct",
        "none",
        "--resident",
        "no",
    ]
    compress += ["--calibration", "demo", "--samples", "4", "--sequence-length", "64"]
    if search:
        gate = ["--search", "--gate", "moe_demo_sorting", *MARGIN, "--inconclusive", "pass"]
        runs = {"compress --search": [*compress, *gate]}
    else:
        gate = ["gate", str(folder), str(out), "--tasks", "moe_demo_sorting", *MARGIN]
        runs = {"compress": [*compress, "--experts", "18"], "gate": gate, "gate --no-stream": [*gate, "--no-stream"]}
    for name, arguments in runs.items():
        kept = scratch / ("other" if name == "gate --no-stream" else "cache")  # where no answers are stored
        child = run_child([*COMMAND, *arguments, "--json"], limit, {**LEAN, "MOE_COMPRESSOR_CACHE": str(kept)})
        told = child.told
        more = "" if told is None else f", {told.get('verdict')}, streamed {told.get('streamed')}"
        more += f", tried {len(told['attempts'])}" if told and "attempts" in told else ""
        peak = (child.anonymous + child.mapped) / 1e9
        print(f"{name}: exit status {child.status}, {child.seconds:.0f} s, at most {peak:.2f} GB resident{more}")


def main() -> None:
    """Print the rows, or what was done under the limit."""
    parser = options(__doc__, tasks=TASKS, items=60, rounds=3, confined=False, search=False, gigabytes=4.2)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--folder", type=Path, help="where the synthetic checkpoint is made, or lies already (kept)")
    given = parser.parse_args()
    if given.confined:
        with tempfile.TemporaryDirectory() as scratch:
            folder = given.folder or Path(scratch) / "model"
            confined_report(folder, Path(scratch), given.gigabytes, given.search)
        return
    head("model", "items", "in memory, CPU s", "streamed, CPU s", "ratio", "largest difference")
    with demo_checkpoint() if not given.models else nullcontext() as demo:
        for model in given.models or [str(demo)]:
            compare(model, given.tasks, given.items, given.rounds)


if __name__ == "__main__":
    main()
