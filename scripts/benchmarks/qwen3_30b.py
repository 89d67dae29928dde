"""Measure one decoder layer of Qwen3-30B-A3B in each step, on a checkpoint of random weights with a few of its layers.

    python -m scripts.benchmarks.qwen3_30b [--layers 4] [--folder DIR] [--samples 16] [--length 512] [--device cpu]
                                           [--only NAME ...]

Prints for each step the seconds and CPU seconds of a layer, and the peak of anonymous memory, below the rate of matrix
products on the same machine. Every step is a recipe, run in a process of its own, streamed. `tune` (without `ridge`
before it) and `distill` run twice, with different numbers of optimizer steps; the difference gives the time of one.
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

from scripts.benchmarks.frame import Child, head, options, qwen3_moe, row, run_child, timed, warm, write_layers
from scripts.benchmarks.scale import random_text

Step = dict[str, dict[str, Any]]
KEEP, EXTRA = 64, 4  # experts; optimizer steps between the two runs of a step that is measured by their difference
RUN = """
from compressor.cli.main import main
from compressor.steps.correct import refit
refit.STEPS_OF = {**refit.STEPS_OF, "tune": ("tune",)}
main()
"""
PRUNE: Step = {"prune": {"strategy": "count-guided", "experts": KEEP}}


def tune(steps: int) -> list[Step]:
    return [PRUNE, {"correct": {"method": "tune", "steps": steps}}]


def distill(steps: int) -> list[Step]:
    return [{"distill": {"steps": steps, "stream": True, "evaluate_every": 1 + EXTRA}}]


STEPS: dict[str, tuple[list[Step], list[Step]]] = {  # each with the steps whose time is subtracted
    "calibrate": ([], [PRUNE]),
    "enumerate": ([], [{"prune": {"strategy": "enumerate", "experts": KEEP}}]),
    "ridge": ([], [PRUNE, {"correct": {"method": "ridge"}}]),
    "tune": (tune(1), tune(1 + EXTRA)),
    "split": ([], [{"split": {"parts": 2}}]),
    "distill": (distill(1), distill(1 + EXTRA)),
    "rtn": ([], [{"quantize": {"scheme": "int4"}}]),
    "gptq": ([], [{"quantize": {"scheme": "int4", "method": "gptq"}}]),
}


def config(layers: int) -> Any:
    """Qwen3-30B-A3B, as its config.json has it, with so many of its 48 layers."""
    attention = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    more = {"norm_topk_prob": True, "rms_norm_eps": 1e-6, "max_position_embeddings": 40_960, "dtype": "bfloat16"}
    return qwen3_moe(2048, 768, layers, 128, 8, 151_936, intermediate_size=6144, **attention, **more)


def rate(dtype: torch.dtype) -> float:
    """GFLOP/s of a product of 2048 x 2048 matrices."""
    left = torch.randn(2048, 2048, dtype=dtype)
    left @ left
    seconds, _ = timed(lambda: [left @ left for _ in range(8)])
    return 8 * 2 * 2048**3 / seconds / 1e9


def main() -> None:
    """Make the checkpoint, run every step and print the table."""
    parser = options(__doc__, layers=4, samples=16, length=512, device="cpu", only=[*STEPS])
    parser.add_argument("--folder", type=Path, help="where the checkpoint is made, or lies already (kept)")
    given = parser.parse_args()
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        scratch = Path(temporary)
        out, recipe, text = (scratch / name for name in ("out", "recipe.yaml", "text.txt"))
        os.environ["MOE_COMPRESSOR_CACHE"] = str(scratch / "cache")
        base = (given.folder or scratch) / "base"
        if not (base / "config.json").is_file():
            write_layers(base, config, given.layers)
        warm(base)
        text.write_text(random_text(200_000))
        calibration = {"data": [str(text)], "samples": given.samples, "sequence_length": given.length}

        def run(steps: Sequence[Step], model: Path = base) -> Child:
            where = {"model": str(model), "base": str(base), "resident": "no"}
            recipe.write_text(yaml.safe_dump({**where, "calibration": calibration, "steps": [*steps]}))
            shutil.rmtree(out, ignore_errors=True)
            flags = ["-o", str(out), "--device", given.device, "--json"]
            seen = run_child([sys.executable, "-c", RUN, "compress", str(recipe), *flags])
            if seen.status:
                raise SystemExit(f"{steps} ended with status {seen.status}")
            return seen

        rates = ", ".join(f"{rate(dtype):.0f} GFLOP/s in {dtype}" for dtype in (torch.bfloat16, torch.float32))
        print(f"{os.cpu_count()} cores; matrix products at {rates}")
        print(f"{given.layers} layers, {given.samples * given.length} tokens, {KEEP} of 128 experts kept")
        head("step", "seconds a layer", "CPU seconds a layer", "peak GB", "seconds of all layers by phase")
        for name in given.only:
            few, more = STEPS[name]
            model = base
            if name == "distill":
                run([PRUNE])
                model = out.rename(scratch / "smaller")
            before = run(few, model) if few else None
            seen = run(more, model)
            count = given.layers * (EXTRA if before else 1)
            seconds, cpu = (
                getattr(seen, each) - (getattr(before, each) if before else 0) for each in ("seconds", "cpu")
            )
            phases = json.loads(seen.output)["seconds"]
            shown = ", ".join(f"{phase} {value:.1f}" for phase, value in phases.items())
            row(name, seconds / count, cpu / count, seen.anonymous / 1e9, shown)


if __name__ == "__main__":
    main()
