"""Measure how memory and time of `compress` grow with the model, on synthetic Qwen3-MoE checkpoints of given sizes.

    python -m scripts.benchmarks.scale [--gigabytes 4 8 16 30] [--tokens 16384] [--folder DIR] [--export]

Each checkpoint (bfloat16, layers of 0.26 GB, made layer by layer) is copied file by file, compressed to half of its
experts by model-centric and by reap with so many calibration tokens, and removed. Prints for each size the time over
that of the copy, the peak anonymous memory above a bare interpreter's over the largest layer, and over all sizes the
slope of log time over log size. With --export, model-centric's output is written as ONNX (fp16), too.

Pages of the source are dropped from the page cache before each step (--cache cold), or read into it (warm, for sizes
that fit). A copy reads the whole source and writes and flushes as much, one file at a time, of which one is kept.
"""

import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from compressor.errors import CompressionError
from compressor.formatting import human_bytes
from scripts.benchmark import compress_command
from scripts.benchmarks.frame import BARE, COMMAND, Child, Sizes, head, options, row, run_child, warm

COLUMNS = (
    "GB",
    "step",
    "seconds over a copy",
    "CPU seconds over it",
    "memory over the largest layer",
    "over the model",
    "mapped pages over the largest layer",
)
STEPS = ("model-centric", "reap", "export")
LENGTH = 512
SIZES = Sizes(vocabulary=512)  # so small that a checkpoint is its layers, and twice the bytes are twice the layers
OUTPUT_SHARE = 0.55  # of the source, that half of the experts and everything else take at the most
SPARE = 3e9  # bytes of the disk: what a checkpoint exceeds its size by, a file's copy, and some that is left alone
BLOCK = 2**24
LEAST = 1e-3  # seconds, so that there is a logarithm


@dataclass(frozen=True, slots=True)
class Measured:
    """One size."""

    bytes: int
    largest: int  # bytes of the largest layer
    copy: float  # seconds
    steps: dict[str, Child]


def needed(gigabytes: float, export: bool) -> float:
    """Bytes that the disk must have: the source, what is made of it, and some to spare."""
    return gigabytes * 1e9 * (1 + OUTPUT_SHARE * (1 + export)) + SPARE


def check_room(folder: Path, gigabytes: Sequence[float], export: bool) -> None:
    """Raise `CompressionError` where the largest size does not fit on the disk."""
    wanted, free = needed(max(gigabytes), export), shutil.disk_usage(folder).free
    if wanted > free:
        raise CompressionError(
            f"{max(gigabytes):g} GB need {human_bytes(int(wanted))} in {folder} for the checkpoint and what is made of "
            f"it, but {human_bytes(free)} are free; make room, or give smaller --gigabytes or another --folder"
        )


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Least-squares slope of log seconds over log sizes; nan for a single size."""
    xs, ys = [math.log(size) for size in sizes], [math.log(second) for second in seconds]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((each - x) ** 2 for each in xs)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / spread if spread else math.nan


def drop_pages(folder: Path) -> None:
    """Let the system forget what it keeps of these files in memory."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())  # pages that are not on the disk yet are not dropped
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def copy_seconds(folder: Path, scratch: Path) -> float:
    """Seconds to read every file of a checkpoint, and to write and flush a copy, each removed before the next."""
    seconds, target = 0.0, scratch / "copy"
    for file in sorted(folder.glob("*.safetensors")):
        begin = time.perf_counter()
        with file.open("rb") as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink, BLOCK)  # not copy_file_range, which copies nothing on some file systems
            sink.flush()
            os.fsync(sink.fileno())
        seconds += time.perf_counter() - begin
        target.unlink()
    return seconds


def write_text(file: Path, tokens: int) -> None:
    """Random words of so many bytes, which are the tokens of the synthetic checkpoint, and some more."""
    draw = random.Random(0)
    words, length = list[str](), 0
    while length < tokens * 1.1 + 1000:
        words.append("".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(2, 9))))
        length += len(words[-1]) + 1
    file.write_text("\n\n".join(" ".join(words[begin : begin + 100]) for begin in range(0, len(words), 100)))


def watched(command: list[str], bare: Child | None = None) -> Child:
    """Run a command, less what the bare interpreter takes; raises `CompressionError` if it fails."""
    seen = run_child(command)
    if seen.status:
        raise CompressionError(f"{' '.join(command)} ended with status {seen.status}")
    if bare is None:
        return seen
    seconds, cpu = (max(own - none, LEAST) for own, none in ((seen.seconds, bare.seconds), (seen.cpu, bare.cpu)))
    return replace(seen, seconds=seconds, cpu=cpu, anonymous=seen.anonymous - bare.anonymous)


def measure(gigabytes: float, tokens: int, scratch: Path, steps: Sequence[str], cold: bool) -> Measured:
    """Make a checkpoint, copy it, carry out the steps, each printed when it is done, and remove everything."""
    from compressor import inspect

    folder, text = scratch / "model", scratch / "text.txt"
    SIZES.write(folder, gigabytes)
    write_text(text, tokens)
    ready = drop_pages if cold else warm
    report = inspect(str(folder))
    samples = max(1, tokens // LENGTH)
    calibrated = ["--calibration", str(text), "--samples", str(samples), "--sequence-length", str(min(LENGTH, tokens))]
    ready(folder)
    copy = copy_seconds(folder, scratch)
    bare = min((watched(BARE) for _ in range(2)), key=lambda seen: seen.seconds)
    measured = Measured(report.bytes, report.largest_layer_bytes, copy, {})
    told = f"# copy {copy:.1f} s, largest layer {measured.largest / 1e6:.0f} MB"
    print(told, file=sys.stderr, flush=True)
    out = scratch / "out"
    for name in (name for name in STEPS if name in steps):
        if name == "export":
            command = [*COMMAND, "export", str(scratch / "kept"), "-o", str(out), "--dtype", "fp16", "--json"]
        else:
            command = [*compress_command(folder, out, name), "--correct", "none", "--device", "cpu"]
            command += calibrated if name == "reap" else []
        ready(folder)
        measured.steps[name] = watched(command, bare)
        row(*cells(name, measured))
        if name == "model-centric" and "export" in steps:
            out.rename(scratch / "kept")
        else:
            shutil.rmtree(out)
    for made in (folder, scratch / "kept"):
        shutil.rmtree(made, ignore_errors=True)
    return measured


def cells(name: str, found: Measured) -> tuple[str | float, ...]:
    """A line of the table."""
    step = found.steps[name]
    memory = (step.anonymous / found.largest, step.anonymous / found.bytes, step.mapped / found.largest)
    return f"{found.bytes / 1e9:.1f}", name, step.seconds / found.copy, step.cpu / found.copy, *memory


def slopes(measured: Sequence[Measured]) -> str:
    """How the seconds of the copy and of every step, and its CPU seconds, grow with the bytes."""
    sizes = [found.bytes for found in measured]
    told = [f"copy {slope(sizes, [found.copy for found in measured]):.2f}"]
    for name in measured[0].steps:
        steps = [found.steps[name] for found in measured]
        wall, cpu = slope(sizes, [step.seconds for step in steps]), slope(sizes, [step.cpu for step in steps])
        told.append(f"{name} {wall:.2f} (CPU seconds {cpu:.2f})")
    return f"slope of log seconds over log bytes: {', '.join(told)}"


def _leave(*_: object) -> None:
    """Leave on SIGTERM, so that the folder is removed; a second one must not cut that short."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(143)


def main() -> None:
    """Check the disk, measure every size, print the table."""
    parser = options(__doc__, gigabytes=[4.0, 8.0, 16.0, 30.0], tokens=16_384, export=False)
    parser.add_argument("--folder", type=Path, help="where the checkpoints are made (default: the temporary folder)")
    parser.add_argument("--steps", nargs="+", choices=STEPS[:2], default=STEPS[:2])
    parser.add_argument("--cache", choices=("cold", "warm"), default="cold", help="the page cache before each step")
    args = parser.parse_args()
    steps = [*args.steps, *(["export"] if args.export else [])]
    if args.export and "model-centric" not in steps:
        parser.error("--export needs the step model-centric")
    signal.signal(signal.SIGTERM, _leave)
    with tempfile.TemporaryDirectory(dir=args.folder) as temporary:
        check_room(Path(temporary), args.gigabytes, args.export)
        os.environ["MOE_COMPRESSOR_CACHE"] = str(Path(temporary) / "cache")
        print(f"page cache {args.cache}; {args.tokens} tokens for reap")
        head(*COLUMNS)
        measured = list[Measured]()
        for gigabytes in args.gigabytes:
            measured.append(measure(gigabytes, args.tokens, Path(temporary), steps, args.cache == "cold"))
        print(slopes(measured))


if __name__ == "__main__":
    try:
        main()
    except CompressionError as fault:
        sys.exit(str(fault))
