"""Measure how memory and time of `compress` grow with the model, on synthetic Qwen3-MoE checkpoints of given sizes.

    python -m scripts.benchmarks.scale [--gigabytes 4 8 16 30] [--tokens 16384] [--folder DIR] [--export] [--correct]

Each checkpoint (bfloat16, layers of 0.26 GB) is copied file by file, compressed to half of its experts by
model-centric and by reap with so many calibration tokens, and removed; --export writes model-centric's output as ONNX,
too, and --correct compresses by reap with ridge and with two steps of tune. Prints for each size the time over that of
the copy and the peak anonymous memory above a bare interpreter's over the largest layer, and over all sizes the slope
of log time over log size.

Pages of the source are dropped from the page cache before each step. A copy reads the whole source and writes and
flushes as much, one file at a time, of which one is kept.
"""

import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from scripts.benchmarks import frame

LENGTH = 512
EXPERTS = 20
HIDDEN, INNER = 2048, 1024
SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * INNER,
    "moe_intermediate_size": INNER,
    "num_experts": EXPERTS,
    "num_experts_per_tok": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": False,
    "vocab_size": 512,  # so small that a checkpoint is its layers
}
STEPS = {
    "model-centric": "--strategy model-centric --correct none",
    "reap": "--strategy reap --correct none",
    "ridge": "--strategy reap --correct ridge",
    # Memory does not depend on the number of steps.
    "tune": "--strategy reap --correct tune --set prune.correct.steps=2",
}


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Return the least-squares slope of log seconds over log sizes; nan for a single size."""
    if len(sizes) < 2:
        return math.nan
    return statistics.linear_regression([*map(math.log, sizes)], [*map(math.log, seconds)]).slope


def drop_pages(folder: Path) -> None:
    """Let the system forget what it keeps of these files in memory."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())  # pages that are not on the disk yet are not dropped
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy_seconds(folder: Path, target: Path) -> float:
    """Return the seconds to read every file of a checkpoint, and to write and flush a copy of each."""
    seconds = 0.0
    for file in sorted(folder.glob("*.safetensors")):
        begin = time.perf_counter()
        with file.open("rb") as source, target.open("wb") as sink:
            # Not copy_file_range, which copies nothing on some file systems.
            shutil.copyfileobj(source, sink, 2**24)
            sink.flush()
            os.fsync(sink.fileno())
        seconds += time.perf_counter() - begin
        target.unlink()
    return seconds


def measure(
    gigabytes: float, tokens: int, scratch: Path, steps: Sequence[str], rows: frame.Rows
) -> tuple[int, dict[str, float]]:
    """Make a checkpoint and carry out the steps, each printed when it is done; returns bytes, and seconds by step."""
    from compressor import inspect

    folder, text, out = (scratch / name for name in ("model", "text.txt", "out"))
    layers = int(gigabytes * 1e9 / (EXPERTS * 3 * HIDDEN * INNER * 2)) + 1
    frame.write_layers(folder, layers, **SIZES)
    text.write_text(frame.random_text(tokens))
    drop_pages(folder)
    report = inspect(str(folder))
    seconds = {"copy": copy_seconds(folder, scratch / "copy")}
    bare = min((frame.run_child(frame.BARE) for _ in range(2)), key=lambda child: child.seconds)
    reading = f"--calibration {text} --samples {max(1, tokens // LENGTH)} --sequence-length {LENGTH}"
    for name in steps:
        words = f"compress {folder} -o {out} --experts {EXPERTS // 2} --resident no --device cpu --json"
        if name == "export":
            words = f"export {scratch / 'kept'} -o {out} --dtype fp16 --json"
        else:
            words += f" {STEPS[name]}" + ("" if name == "model-centric" else f" {reading}")
        drop_pages(folder)
        child = frame.run_child([*frame.COMMAND, *words.split()])
        seconds[name] = max(child.seconds - bare.seconds, 1e-3)
        memory = (child.anonymous - bare.anonymous) / report.largest_layer_bytes
        rows.add(f"{report.bytes / 1e9:.1f}", name, seconds[name] / seconds["copy"], memory)
        if name == "model-centric":
            out.rename(scratch / "kept")
        else:
            shutil.rmtree(out)
    return report.bytes, seconds


def main() -> None:
    """Measure every size and print the table."""
    sizes = {"gigabytes": [4.0, 8.0, 16.0, 30.0], "tokens": 16_384}
    parser = frame.options(__doc__, **sizes, export=False, correct=False, folder=None)
    given = parser.parse_args()
    steps = ["model-centric", "reap"]
    steps += ["export"] if given.export else []
    steps += ["ridge", "tune"] if given.correct else []
    rows = frame.Rows("GB", "step", "seconds over a copy", "memory over the largest layer")
    measured = list[tuple[int, dict[str, float]]]()
    for gigabytes in given.gigabytes:
        with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
            os.environ["MOE_COMPRESSOR_CACHE"] = f"{scratch}/cache"
            measured.append(measure(gigabytes, given.tokens, Path(scratch), steps, rows))
    nbytes = [size for size, _ in measured]
    for name in ("copy", *steps):
        growth = slope(nbytes, [seconds[name] for _, seconds in measured])
        print(f"{name}: slope of log seconds over log bytes {growth:.2f}")


if __name__ == "__main__":
    frame.run(main)
