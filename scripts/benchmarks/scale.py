"""Measure how memory and time of `compress` grow with the model, on synthetic Qwen3-MoE checkpoints of given sizes.

    python -m scripts.benchmarks.scale [--gigabytes 4 8 16 30] [--tokens 16384] [--folder DIR] [--export]

Each checkpoint (bfloat16, layers of 0.26 GB) is copied file by file, compressed to half of its experts by
model-centric and by reap with so many calibration tokens, and removed; --export writes model-centric's output as ONNX,
too, and --correct compresses by reap with ridge and with two steps of tune. Prints for each size the time over that of
the copy, the peak anonymous memory above a bare interpreter's over the largest layer, and over all sizes the slope of
log time over log size.

Pages of the source are dropped from the page cache before each step (--cache cold), or read into it (warm, for sizes
that fit). A copy reads the whole source and writes and flushes as much, one file at a time, of which one is kept.
"""

import math
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scripts.benchmarks.frame import (
    BARE,
    COMMAND,
    Child,
    Sizes,
    head,
    options,
    row,
    run_child,
    warm,
)

COLUMNS = (
    "GB",
    "step",
    "seconds over a copy",
    "CPU seconds over it",
    "memory over the largest layer",
    "over the model",
    "mapped pages over the largest layer",
    "read of the base over its bytes",
    "written over the output's bytes",
)
COUNTED = """import sys, pathlib
from compressor.checkpoint.reader import READ_BYTES
from compressor.cli.main import main
try:
    main()
finally:
    base = pathlib.Path(sys.argv[2])
    read = sum(count for (folder, _), count in READ_BYTES.items() if folder == base)
    print("\\n", read, pathlib.Path("/proc/self/io").read_text().split()[3])"""
LENGTH = 512
SIZES = Sizes(
    vocabulary=512
)  # so small that a checkpoint is its layers, and twice the bytes are twice the layers
KEPT = SIZES.experts // 2
TUNE = [
    "--correct",
    "tune",
    "--set",
    "prune.correct.steps=2",
]  # memory does not depend on the number of steps
CORRECTIONS = {"ridge": ["--correct", "ridge"], "tune": TUNE}


@dataclass(frozen=True, slots=True)
class Measured:
    """One size."""

    bytes: int
    largest: int  # bytes of the largest layer
    copy: float  # seconds
    steps: dict[str, Child]
    written: dict[str, float]  # bytes written over those of the output


def compress_command(folder: Path, out: Path, strategy: str) -> list[str]:
    """Return the command that compresses to half of the experts in a process of its own."""
    flags = ["--experts", str(KEPT), "--strategy", strategy, "--resident", "no", "--json"]
    return [sys.executable, "-c", COUNTED, "compress", str(folder), "-o", str(out), *flags]


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Least-squares slope of log seconds over log sizes; nan for a single size."""
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
    """Seconds to read every file of a checkpoint, and to write and flush a copy, each removed before the next."""
    seconds = 0.0
    for file in sorted(folder.glob("*.safetensors")):
        begin = time.perf_counter()
        with file.open("rb") as source, target.open("wb") as sink:
            shutil.copyfileobj(
                source, sink, 2**24
            )  # not copy_file_range, which copies nothing on some file systems
            sink.flush()
            os.fsync(sink.fileno())
        seconds += time.perf_counter() - begin
        target.unlink()
    return seconds


def random_text(tokens: int) -> str:
    """Random words of so many bytes, which are the tokens of the synthetic checkpoint, and some more."""
    draw = random.Random(0)
    words = [
        "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9)))
        for _ in range(tokens // 5)
    ]
    return "\n\n".join(" ".join(words[begin : begin + 100]) for begin in range(0, len(words), 100))


def watched(command: list[str], bare: Child) -> Child:
    """Run a command to its end; what it took is less what the bare interpreter takes."""
    seen = run_child(command)
    if seen.status:
        sys.exit(f"{' '.join(command)} ended with status {seen.status}")
    above = {
        name: max(getattr(seen, name) - getattr(bare, name), 1e-3) for name in ("seconds", "cpu")
    }
    return replace(seen, **above, anonymous=seen.anonymous - bare.anonymous)


def measure(
    gigabytes: float, tokens: int, scratch: Path, steps: Sequence[str], cold: bool
) -> Measured:
    """Make a checkpoint, copy it, and carry out the steps, each printed when it is done."""
    from compressor import inspect

    folder, text, out = (scratch / name for name in ("model", "text.txt", "out"))
    SIZES.write(folder, gigabytes)
    text.write_text(random_text(tokens))
    ready = drop_pages if cold else warm
    report, samples = inspect(str(folder)), str(max(1, tokens // LENGTH))
    ready(folder)
    measured = Measured(
        report.bytes, report.largest_layer_bytes, copy_seconds(folder, scratch / "copy"), {}, {}
    )
    bare = min((run_child(BARE) for _ in range(2)), key=lambda seen: seen.seconds)
    for name in steps:
        strategy = "model-centric" if name == "model-centric" else "reap"
        correction = CORRECTIONS.get(name, ["--correct", "none"])
        command = [*compress_command(folder, out, strategy), *correction, "--device", "cpu"]
        if strategy == "reap":
            command += [
                "--calibration",
                str(text),
                "--samples",
                samples,
                "--sequence-length",
                str(min(LENGTH, tokens)),
            ]
        if name == "export":
            command = [
                *COMMAND,
                "export",
                str(scratch / "kept"),
                "-o",
                str(out),
                "--dtype",
                "fp16",
                "--json",
            ]
        ready(folder)
        measured.steps[name] = watched(command, bare)
        if name != "export":
            nbytes = sum(file.stat().st_size for file in out.glob("*.safetensors"))
            measured.written[name] = int(measured.steps[name].output.split()[-1]) / nbytes
        row(*cells(name, measured))
        if name == "model-centric":
            out.rename(scratch / "kept")
        else:
            shutil.rmtree(out)
    return measured


def cells(name: str, found: Measured) -> tuple[str | float, ...]:
    """A line of the table."""
    step = found.steps[name]
    memory = (
        step.anonymous / found.largest,
        step.anonymous / found.bytes,
        step.mapped / found.largest,
    )
    moved = (
        (int(step.output.split()[-2]) / found.bytes, found.written[name])
        if name in found.written
        else ()
    )
    return (
        f"{found.bytes / 1e9:.1f}",
        name,
        step.seconds / found.copy,
        step.cpu / found.copy,
        *memory,
        *moved,
    )


def slopes(measured: Sequence[Measured]) -> str:
    """How the seconds of the copy and of every step, and its CPU seconds, grow with the bytes."""
    sizes = [found.bytes for found in measured]
    shown = [f"copy {slope(sizes, [found.copy for found in measured]):.2f}"]
    for name in measured[0].steps:
        steps = [found.steps[name] for found in measured]
        wall, cpu = (
            slope(sizes, [step.seconds for step in steps]),
            slope(sizes, [step.cpu for step in steps]),
        )
        shown.append(f"{name} {wall:.2f} (CPU seconds {cpu:.2f})")
    return f"slope of log seconds over log bytes: {', '.join(shown)}"


def main() -> None:
    """Measure every size and print the table."""
    parser = options(
        __doc__, gigabytes=[4.0, 8.0, 16.0, 30.0], tokens=16_384, export=False, correct=False
    )
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoints are made (default: the temporary folder)"
    )
    parser.add_argument(
        "--cache", choices=("cold", "warm"), default="cold", help="the page cache before each step"
    )
    args = parser.parse_args()
    print(f"page cache {args.cache}; {args.tokens} tokens for reap")
    head(*COLUMNS)
    measured = list[Measured]()
    for gigabytes in args.gigabytes:
        with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
            os.environ["MOE_COMPRESSOR_CACHE"] = f"{scratch}/cache"
            steps = [
                "model-centric",
                "reap",
                *["export"] * args.export,
                *[*CORRECTIONS] * args.correct,
            ]
            measured.append(
                measure(gigabytes, args.tokens, Path(scratch), steps, args.cache == "cold")
            )
    print(slopes(measured))


if __name__ == "__main__":
    main()
