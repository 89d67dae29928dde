"""Measure one decoder layer of Qwen3-30B-A3B in each step, on a checkpoint of random weights with a few of its layers.

    python -m scripts.benchmarks.qwen3_30b [--layers 4] [--folder DIR] [--samples 16] [--length 512] [--device cpu]
                                           [--only NAME ...] [--shrink 1]

Prints for each step the seconds and CPU seconds of a layer, and the peak of anonymous memory, below the rate of matrix
products on the same machine. Every step is a recipe, run in a process of its own, streamed. `tune` runs twice, with
different numbers of optimizer steps; the difference gives the time of one. `default` and `fast` are whole runs at 25%,
without the start of Python, and have a share of the bound: the base read and the output written at
5 GB/s, or 3.3 PFLOP at the rate of the products if that takes longer, for all 48 layers and 256 x 2,048 tokens. Last
are the operators that take most time in a short run of `tune`. `--shrink 8` tries it all on matrices of an eighth.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from scripts.benchmarks.frame import (
    COMMAND,
    Child,
    head,
    options,
    qwen3_moe,
    row,
    run_child,
    timed,
    warm,
    write_layers,
)
from scripts.benchmarks.scale import random_text

Step = dict[str, dict[str, Any]] | str
KEEP, EXTRA = (
    64,
    8,
)  # experts; optimizer steps between the two runs of a step that is measured by their difference
LAYERS, TOKENS, DISK, WORK = (
    48,
    256 * 2048,
    5e9,
    3.3e15,
)  # of the bound: bytes a second, and operations
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
COUNTED = {"strategy": "count-guided", "experts": KEEP}
PRUNE: Step = {"prune": COUNTED}


def tune(steps: int) -> list[Step]:
    return [{"prune": {**COUNTED, "correct": {"method": "tune", "steps": steps}}}]


WHOLE: dict[str, list[Step]] = {
    "default": [{"prune": {"ratio": 0.25, "correct": "tune"}}],
    "fast": [
        {
            "prune": {
                "strategy": "energy",
                "ratio": 0.25,
                "sequential": True,
                "correct": {"method": "ridge", "toward": 0},
            }
        },
    ],
}
STEPS: dict[str, tuple[list[Step], list[Step]]] = {  # each with the steps whose time is subtracted
    "calibrate": ([], [PRUNE]),
    "ridge": ([], [{"prune": {**COUNTED, "correct": "ridge"}}]),
    "tune": (tune(1), tune(1 + EXTRA)),
    "rtn": ([], [{"quantize": {"scheme": "int4"}}]),
    "gptq": ([], [{"quantize": {"scheme": "int4", "method": "gptq"}}]),
    **{name: ([], steps) for name, steps in WHOLE.items()},
}


def config(layers: int, shrink: int = 1) -> Any:
    """Qwen3-30B-A3B, as its config.json has it, with so many of its 48 layers; `shrink` divides its widths."""
    attention = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    more = {
        "norm_topk_prob": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40_960,
        "dtype": "bfloat16",
    }
    hidden, inner, vocabulary = 2048 // shrink, 768 // shrink, 151_936 // shrink
    return qwen3_moe(
        hidden, inner, layers, 128, 8, vocabulary, intermediate_size=3 * hidden, **attention, **more
    )


def rate(dtype: torch.dtype, device: str) -> float:
    """GFLOP/s of a product of 2048 x 2048 matrices."""
    left = torch.randn(2048, 2048, dtype=dtype, device=device)

    def products() -> None:
        for _ in range(16):
            last = left @ left
        last.sum().item()  # which waits for the device

    products()
    seconds, _ = timed(products)
    return 16 * 2 * 2048**3 / seconds / 1e9


def stored(folder: Path) -> int:
    """Bytes of the weights in a folder."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def main() -> None:
    """Make the checkpoint, run every step and print the table."""
    parser = options(
        __doc__, layers=4, samples=16, length=512, device="cpu", only=[*STEPS], shrink=1
    )
    parser.add_argument(
        "--folder", type=Path, help="where the checkpoint is made, or lies already (kept)"
    )
    given = parser.parse_args()
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        scratch = Path(temporary)
        out, recipe, text = (scratch / name for name in ("out", "recipe.yaml", "text.txt"))
        os.environ["MOE_COMPRESSOR_CACHE"] = str(scratch / "cache")
        base = (given.folder or scratch) / "base"
        if not (base / "config.json").is_file():
            write_layers(base, lambda layers: config(layers, given.shrink), given.layers)
        warm(base)
        text.write_text(random_text(max(200_000, 2 * given.samples * given.length)))
        calibration = {
            "data": [str(text)],
            "samples": given.samples,
            "sequence_length": given.length,
        }

        def run(steps: Sequence[Step], start: Sequence[str] = COMMAND) -> Child:
            where = {"model": str(base), "resident": "no"}
            recipe.write_text(
                yaml.safe_dump({**where, "calibration": calibration, "steps": [*steps]})
            )
            shutil.rmtree(out, ignore_errors=True)
            flags = ["-o", str(out), "--device", given.device, "--json", "--no-evaluate"]
            seen = run_child([*start, "compress", str(recipe), *flags])
            if seen.status:
                raise SystemExit(f"{steps} ended with status {seen.status}")
            return seen

        rates = {dtype: rate(dtype, given.device) for dtype in (torch.bfloat16, torch.float32)}
        said = ", ".join(f"{value:.0f} GFLOP/s in {dtype}" for dtype, value in rates.items())
        print(f"{os.cpu_count()} cores, {given.device}; matrix products at {said}")
        print(
            f"{given.layers} layers, {given.samples * given.length} tokens, {KEEP} of 128 experts kept"
        )
        head(
            "step",
            "seconds a layer",
            "CPU seconds a layer",
            "peak GB",
            "seconds of a layer by phase",
            "of the bound",
        )
        for name in given.only:
            few, more = STEPS[name]
            before = run(few) if few else None
            seen = run(more)
            count = given.layers * (EXTRA if before else 1)
            phases = json.loads(seen.output)["seconds"]
            seconds = seen.seconds - before.seconds if before else sum(phases.values())
            cpu = seen.cpu - (before.cpu if before else 0)
            shown = ", ".join(
                f"{phase} {value / given.layers:.2f}" for phase, value in phases.items()
            )
            bound = ""
            if name in WHOLE:
                share = (
                    given.layers / LAYERS * given.samples * given.length / TOKENS / given.shrink**2
                )
                least = max(
                    (stored(base) + stored(out)) / DISK, WORK * share / rates[torch.bfloat16] / 1e9
                )
                bound = f"{least / seconds:.1%} of {least / given.layers:.3f} s"
            row(name, seconds / count, cpu / count, seen.anonymous / 1e9, shown, bound)
        profiled = run(tune(EXTRA), start=[sys.executable, "-c", PROFILE])
        print(f"most time in {EXTRA} steps of tune a layer: {profiled.output.splitlines()[-1]}")


if __name__ == "__main__":
    main()
