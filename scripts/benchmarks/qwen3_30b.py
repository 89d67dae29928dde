"""Measure one decoder layer of Qwen3-30B-A3B in each step, on a checkpoint of random weights with a few of its layers.

    python -m scripts.benchmarks.qwen3_30b [--layers 4] [--folder DIR] [--samples 16] [--length 512] [--device cpu]
                                           [--only NAME ...] [--shrink 1]

Prints the rate of matrix products, and for each step the seconds and CPU seconds of a layer and the peak of anonymous
memory. Every step is a recipe, run in a process of its own, streamed. `tune` runs twice, with different numbers of
optimizer steps; the difference gives the time of one. `default` and `fast` are whole runs at 25%, with their share of
the bound: base and output read and written at 5 GB/s, or 3.3 PFLOP at the rate of the products if that takes longer.
Last are the operators that take most time in `tune`. `--shrink 8` tries it all on matrices of an eighth.
"""

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from scripts.benchmarks import frame

Step = dict[str, Any]
KEEP = 64  # experts
EXTRA = 8  # optimizer steps between the two runs of a step that is measured by their difference
LAYERS, TOKENS = 48, 256 * 2048
BYTES_PER_SECOND, OPERATIONS = 5e9, 3.3e15  # of the bound
PROFILE = """
import sys
from torch.profiler import profile
from compressor.cli.main import main
with profile() as seen:
    try:
        main()
    except SystemExit as end:
        status = end.code
key = "self_cpu_time_total" if "cpu" in sys.argv else "self_device_time_total"
items = sorted(seen.key_averages(), key=lambda item: -getattr(item, key))
whole = sum(getattr(item, key) for item in items)
print(*(f"{getattr(item, key) / whole:.0%} {item.key} ({item.count} calls)" for item in items[:5]), sep=", ")
sys.exit(status)
"""
CONFIG = {
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
}  # fmt: skip
WIDTHS = {"hidden_size": 2048, "moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": 151_936}


def prune(correct: Any = "none") -> Step:
    return {"prune": {"strategy": "count-guided", "experts": KEEP, "correct": correct}}


def tune(steps: int) -> Step:
    return prune({"method": "tune", "steps": steps})


FAST = {"strategy": "energy", "ratio": 0.25, "sequential": True, "correct": {"method": "ridge", "toward": 0}}
WHOLE: dict[str, Step] = {"default": {"prune": {"ratio": 0.25, "correct": "tune"}}, "fast": {"prune": FAST}}
STEPS: dict[str, Step] = {
    "calibrate": prune(),
    "ridge": prune("ridge"),
    "tune": tune(1 + EXTRA),
    "rtn": {"quantize": {"scheme": "int4"}},
    "gptq": {"quantize": {"scheme": "int4", "method": "gptq"}},
    **WHOLE,
}


def rate(dtype: torch.dtype, device: str) -> float:
    """Return the GFLOP/s of a product of 2048 x 2048 matrices."""
    left = torch.randn(2048, 2048, dtype=dtype, device=device)
    for _ in range(2):  # the first time warms up
        begin = time.perf_counter()
        for _ in range(16):
            last = left @ left
        last.sum().item()  # which waits for the device
        seconds = time.perf_counter() - begin
    return 16 * 2 * 2048**3 / seconds / 1e9


def main() -> None:
    """Make the checkpoint, run every step and print the table."""
    sizes = {"layers": 4, "samples": 16, "length": 512, "device": "cpu", "shrink": 1}
    given = frame.options(__doc__, **sizes, only=[*STEPS], folder=None).parse_args()
    if given.folder:
        Path(given.folder).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        scratch = Path(temporary)
        out, recipe, text = (scratch / name for name in ("out", "recipe.yaml", "text.txt"))
        os.environ["MOE_COMPRESSOR_CACHE"] = str(scratch / "cache")
        base = Path(given.folder or scratch) / "base"
        if not (base / "config.json").is_file():
            widths = {name: width // given.shrink for name, width in WIDTHS.items()}
            frame.write_layers(base, given.layers, **CONFIG, **widths)
        for file in base.glob("*.safetensors"):
            file.read_bytes()  # so that all timings find the same page cache
        text.write_text(frame.random_text(max(200_000, 2 * given.samples * given.length)))
        calibration = {"data": [str(text)], "samples": given.samples, "sequence_length": given.length}
        content = {"model": str(base), "resident": "no", "calibration": calibration}

        def run(step: Step, start: Sequence[str] = frame.COMMAND) -> frame.Child:
            recipe.write_text(yaml.safe_dump({**content, "steps": [step]}))
            shutil.rmtree(out, ignore_errors=True)
            flags = ["-o", str(out), "--device", given.device, "--json", "--no-evaluate"]
            return frame.run_child([*start, "compress", str(recipe), *flags])

        speed, slower = (rate(dtype, given.device) for dtype in (torch.bfloat16, torch.float32))
        products = f"{speed:.0f} GFLOP/s in bfloat16, {slower:.0f} GFLOP/s in float32"
        print(f"{os.cpu_count()} cores, {given.device}; matrix products at {products}")
        tokens = given.samples * given.length
        print(f"{given.layers} layers, {tokens} tokens, {KEEP} of 128 experts kept")
        columns = ["step", "seconds a layer", "CPU seconds a layer", "peak GB", "seconds of a layer by phase"]
        print(frame.table([*columns, "of the bound"]), flush=True)
        for name in given.only:
            before = run(tune(1)) if name == "tune" else None
            child = run(STEPS[name])
            phases = json.loads(child.output)["seconds"]
            seconds, cpu, count = sum(phases.values()), child.cpu, given.layers
            if before is not None:
                seconds, cpu = child.seconds - before.seconds, child.cpu - before.cpu
                count *= EXTRA
            shown = ", ".join(f"{phase} {phases[phase] / given.layers:.2f}" for phase in phases)
            bound = ""
            if name in WHOLE:
                share = given.layers / LAYERS * tokens / TOKENS / given.shrink**2
                files = [*base.glob("*.safetensors"), *out.glob("*.safetensors")]
                disk = sum(file.stat().st_size for file in files) / BYTES_PER_SECOND
                least = max(disk, OPERATIONS * share / speed / 1e9)
                bound = f"{least / seconds:.1%} of {least / given.layers:.3f} s"
            figures = seconds / count, cpu / count, child.anonymous / 1e9
            print(frame.row(name, *figures, shown, bound), flush=True)
        profiled = run(tune(EXTRA), start=[sys.executable, "-c", PROFILE])
        print(f"most time in {EXTRA} steps of tune a layer: {profiled.output.splitlines()[-1]}")


if __name__ == "__main__":
    frame.run(main)
