"""Measure how memory and time of `compress` grow with the model, on synthetic Qwen3-MoE checkpoints of given sizes.

    python -m scripts.benchmarks.scale [--gigabytes 4 8 16 30] [--tokens 16384] [--folder DIR]
        [--steps model-centric export reap ridge tune]

Each checkpoint (bfloat16, layers of 0.26 GB) is copied file by file and compressed to half of its experts; `export`
writes model-centric's output as ONNX. Prints the time over that of the copy and the peak anonymous memory above a bare
interpreter's over the largest layer, and over all sizes the slope of log time over log size. The source is dropped from
the page cache before each step.
"""

import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from compressor import inspect
from scripts.benchmarks import frame

LENGTH = 512
EXPERTS = 20
HIDDEN, INNER = 2048, 1024
CONFIG = {
    "hidden_size": HIDDEN, "intermediate_size": 2 * INNER, "moe_intermediate_size": INNER, "num_experts": EXPERTS,
    "num_experts_per_tok": 4, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64,
    "tie_word_embeddings": False, "vocab_size": 512,  # so small that a checkpoint is its layers
}  # fmt: skip
COMPRESS = f"compress MODEL -o OUT --experts {EXPERTS // 2} --resident no --device cpu --json"
REAP = f"{COMPRESS} --strategy reap --calibration TEXT --samples SAMPLES --sequence-length {LENGTH}"
STEPS = {
    "model-centric": f"{COMPRESS} --strategy model-centric --correct none",
    "export": "export KEPT -o OUT --dtype fp16 --json",
    "reap": f"{REAP} --correct none",
    "ridge": f"{REAP} --correct ridge",
    # Memory does not depend on the number of steps.
    "tune": f"{REAP} --correct tune --set prune.correct.steps=2",
}


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


def measure(gigabytes: float, tokens: int, scratch: Path, steps: Sequence[str]) -> dict[str, float]:
    """Make a checkpoint and carry out the steps, each printed when it is done; returns bytes, and seconds by step."""
    folder, text, out, kept = (scratch / name for name in ("model", "text.txt", "out", "kept"))
    frame.write_layers(folder, int(gigabytes * 1e9 / (EXPERTS * 3 * HIDDEN * INNER * 2)) + 1, **CONFIG)
    text.write_text(frame.random_text(tokens))
    drop_pages(folder)
    report = inspect(str(folder))
    figures = {"bytes": float(report.bytes), "copy": copy_seconds(folder, scratch / "copy")}
    bare = min((frame.run_child(frame.BARE) for _ in range(2)), key=lambda child: child.seconds)
    named = {"MODEL": folder, "OUT": out, "KEPT": kept, "TEXT": text, "SAMPLES": max(1, tokens // LENGTH)}
    for name in steps:
        drop_pages(folder)
        child = frame.run_child([*frame.COMMAND, *(str(named.get(word, word)) for word in STEPS[name].split())])
        figures[name] = max(child.seconds - bare.seconds, 1e-3)
        memory = (child.anonymous - bare.anonymous) / report.largest_layer_bytes
        print(frame.row(f"{report.bytes / 1e9:.1f}", name, figures[name] / figures["copy"], memory), flush=True)
        if name == "model-centric":
            out.rename(kept)
        else:
            shutil.rmtree(out)
    return figures


def main() -> None:
    """Measure every size and print the table, and the slopes where there are several sizes."""
    sizes = {"gigabytes": [4.0, 8.0, 16.0, 30.0], "tokens": 16_384}
    given = frame.options(__doc__, **sizes, steps=["model-centric", "reap"], folder=None).parse_args()
    print(frame.table(["GB", "step", "seconds over a copy", "memory over the largest layer"]), flush=True)
    measured = list[dict[str, float]]()
    for gigabytes in given.gigabytes:
        with tempfile.TemporaryDirectory(dir=given.folder) as scratch:
            os.environ["MOE_COMPRESSOR_CACHE"] = f"{scratch}/cache"
            measured.append(measure(gigabytes, given.tokens, Path(scratch), given.steps))
    log_bytes = [math.log(figures["bytes"]) for figures in measured]
    for name in ("copy", *given.steps) if len(measured) > 1 else ():
        log_seconds = [math.log(figures[name]) for figures in measured]
        growth = statistics.linear_regression(log_bytes, log_seconds).slope
        print(f"{name}: slope of log seconds over log bytes {growth:.2f}")


if __name__ == "__main__":
    frame.run(main)
