"""Measure what exporting to ONNX holds in memory, verified in memory and mapped, over the size of the model.

    python -m scripts.benchmarks.export [--gigabytes 0.5]

A synthetic checkpoint is exported in both ways, each in a process of its own. Printed are the seconds, the peak of
anonymous resident bytes beyond those after the imports, over the model's bytes in float32, and whether both wrote the
same bytes.
"""

import argparse
import filecmp
import json
import sys
import tempfile
from pathlib import Path

from scripts.benchmarks.frame import Sizes, head, measured, options, row, run_child

FILES = ("model.onnx", "model.onnx.data")
SIZES = Sizes(hidden=1024, inner=512)  # many layers in few bytes


def export_once(source: Path, out: Path, stream: bool) -> None:
    """Export in this process, and print what it took as JSON."""
    import onnxruntime  # noqa: F401
    from transformers.exporters import exporter_onnx  # noqa: F401

    from compressor.memory import limit_caches
    from exporters.onnx import ExportOptions, export

    limit_caches()
    seconds, peak, made = measured(lambda: export(source, out, ExportOptions(past=True, tokens=8, stream=stream)))
    print(json.dumps({"seconds": seconds, "peak": peak, "difference": made.verification.largest_difference}))


def main() -> None:
    """Print the rows."""
    parser = options(__doc__, gigabytes=0.5)
    parser.add_argument("--once", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        place, folder, way = given.once
        export_once(Path(place), Path(folder), way == "mapped")
        return
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source"
        layers = SIZES.write(source, given.gigabytes)
        weights = 2 * sum(file.stat().st_size for file in source.glob("*.safetensors"))  # from bfloat16 to float32
        print(f"{layers} layers, {weights / 1e9:.2f} GB in float32\n")
        head("how", "s", "peak / model", "largest difference")
        outs = {name: Path(scratch) / name for name in ("mapped", "whole")}
        for name, out in outs.items():
            child = run_child(
                [sys.executable, "-m", "scripts.benchmarks.export", "--once", str(source), str(out), name]
            )
            if child.status:
                row(name, f"failed with exit status {child.status}", "", "")
            else:
                told = child.told
                row(name, f"{told['seconds']:.0f}", told["peak"] / weights, f"{told['difference']:.1e}")
        if all(out.is_dir() for out in outs.values()):
            same = all(filecmp.cmp(outs["mapped"] / name, outs["whole"] / name, shallow=False) for name in FILES)
            print(f"\nthe same files: {same}")


if __name__ == "__main__":
    main()
