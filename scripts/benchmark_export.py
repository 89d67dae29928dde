"""Measure what exporting to ONNX holds in memory, verified in one piece and layer by layer, over the size of the model.

    python -m scripts.benchmark_export [--gigabytes 0.5] [--confined SHARE]

A synthetic checkpoint is exported in both ways, each in a process of its own. Printed are the seconds, the peak of
anonymous resident bytes beyond those after the imports, over the model's bytes in float32, and whether both wrote the
same bytes. With --confined, the address space of the export by layers is limited to what it has after the imports and
this share of the model.
"""

import argparse
import filecmp
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from compressor.memory import STATUS, PeakMemory
from scripts import benchmark

FILES = ("model.onnx", "model.onnx.data")
WIDTHS = 1024, 512  # of the model and of its experts: many layers in few bytes


def export_once(source: Path, out: Path, stream: bool, confined: int | None) -> None:
    """Export in this process, and print what it took as JSON."""
    import onnxruntime  # noqa: F401
    from transformers.exporters import exporter_onnx  # noqa: F401

    from compressor.memory import limit_caches
    from exporters.onnx import ExportOptions, export

    limit_caches()
    if confined is not None:
        size = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmSize"))
        limit = int(size.split()[1]) * 1024 + confined
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    begin = time.perf_counter()
    with PeakMemory() as memory:
        summary = export(source, out, ExportOptions(past=True, tokens=8, stream=stream))
    print(json.dumps({
        "seconds": time.perf_counter() - begin, "peak": memory.anonymous - memory.start,
        "difference": summary.verification.largest_difference,
    }))  # fmt: skip


def row(name: str, source: Path, out: Path, weights: int, confined: int | None) -> str:
    """A Markdown row for one way to export."""
    more = [] if confined is None else ["--limit", str(confined)]
    command = [sys.executable, "-m", "scripts.benchmark_export", "--source", str(source), "--out", str(out)]
    run = subprocess.run([*command, "--how", name, *more], stdout=subprocess.PIPE, text=True)
    if run.returncode:
        return f"| {name} | failed with exit status {run.returncode} | | |"
    told = json.loads(run.stdout.splitlines()[-1])
    return f"| {name} | {told['seconds']:.0f} | {told['peak'] / weights:.2f} | {told['difference']:.1e} |"


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--confined", type=float)
    for hidden in ("--source", "--out", "--how"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.how:
        export_once(Path(given.source), Path(given.out), given.how == "layers", given.limit)
        return
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        source.mkdir()
        benchmark.HIDDEN, benchmark.INTERMEDIATE = WIDTHS
        layers = benchmark.write_synthetic(source, given.gigabytes)
        benchmark.save_tokenizer(source)
        weights = 2 * sum(file.stat().st_size for file in source.glob("*.safetensors"))  # from bfloat16 to float32
        print(f"{layers} layers, {weights / 1e9:.2f} GB in float32\n")
        print("| how | s | peak / model | largest difference |\n|---|---|---|---|")
        limit = None if given.confined is None else int(given.confined * weights)
        for name in ("layers", "whole"):
            out = Path(scratch) / name
            print(row(name, source, out, weights, limit if name == "layers" else None), flush=True)
        one, two = Path(scratch) / "layers", Path(scratch) / "whole"
        if one.is_dir() and two.is_dir():
            same = all(filecmp.cmp(one / name, two / name, shallow=False) for name in FILES)
            print(f"\nthe same files: {same}")


if __name__ == "__main__":
    main()
