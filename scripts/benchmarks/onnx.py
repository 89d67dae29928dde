"""Measure ONNX Runtime against torch on random models; every figure is a ratio of medians within one run.

    python -m scripts.benchmarks.onnx [--experts 16 64 256] [--top-k 4 8] [--hidden 256] [--layers 4] [--threads 1]
                                      [--quantize none int8 int4] [--runs 16] [--same-token] [--quantile 0.5]

Prints for every count of experts and top-k how many times as fast as torch the graph decodes (one sequence, one
token after another, 64 cached) and prefills (256 tokens); torch is the faster of its implementations eager and
grouped_mm, on as many threads. Then the number of nodes, the file, and the decode time over that with the fewest
experts at equal top-k. The sides take turns, so that what else the machine does hits all.

Tokens differ from step to step, as in generation, and so do the experts whose weights are read. With --same-token
they stay in the processor's cache, which favours the side that does less besides.
On a busy machine --quantile 0.1 shows what the sides do while they are left alone.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging

from compressor.model.inputs import cache_argument
from exporters.onnx import FORMATS, ExportOptions, export
from scripts.benchmarks.frame import head, options, qwen3_moe, random_model, row

CACHED, PREFILLED, VOCABULARY = 64, 256, 256
BURST = 8  # calls in a row, as in generation
TORCH = ("eager", "grouped_mm")


@dataclass(frozen=True, slots=True)
class Row:
    """One graph beside torch: typical seconds, and what is in the file."""

    experts: int
    top_k: int
    quantize: str
    decode: float
    prefill: float
    torch_decode: float
    torch_prefill: float
    nodes: int
    nbytes: int


def draw(length: int) -> Tensor:
    """Random tokens [1, length]."""
    return torch.randint(VOCABULARY, (1, length), generator=torch.Generator().manual_seed(length))


def torch_steps(model: Any, kinds: int) -> dict[str, Callable[[], Any]]:
    """Decode and prefill in the implementation that is set; decode cuts its own token off the cache again."""
    from transformers import DynamicCache

    cache, one, many = DynamicCache(config=model.config), cycle(draw(CACHED).T[:kinds]), draw(PREFILLED)
    past = {cache_argument(model): cache}
    with torch.inference_mode():
        model(draw(CACHED), **past)

    @torch.inference_mode()
    def decode() -> Any:
        logits = model(next(one)[None], **past, use_cache=True).logits
        cache.crop(-1)
        return logits

    @torch.inference_mode()
    def prefill() -> Any:
        return model(many, use_cache=True).logits

    return {"decode": decode, "prefill": prefill}


def graph_steps(folder: Path, threads: int, kinds: int) -> dict[str, Callable[[], Any]]:
    """The same two in ONNX Runtime."""
    import numpy as np
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.log_severity_level = threads, 3
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), settings, ["CPUExecutionProvider"])
    caches = [entry for entry in session.get_inputs() if entry.name.startswith("past_key_values")]
    names = [entry.name for entry in session.get_outputs()]

    def feed(length: int, past: int) -> dict[str, Any]:
        sizes = {"batch": 1, "past": 0}
        return {
            "input_ids": draw(length).numpy(),
            "attention_mask": np.ones((1, past + length), np.int64),
            "position_ids": np.arange(past, past + length, dtype=np.int64)[None],
            **{entry.name: np.zeros([sizes.get(side, side) for side in entry.shape], np.float32) for entry in caches},
        }

    first = dict(zip(names, session.run(None, feed(CACHED, 0)), strict=True))
    filled = {entry.name: first[entry.name.replace("past_key_values", "present")] for entry in caches}
    after, whole, one = {**feed(1, CACHED), **filled}, feed(PREFILLED, 0), cycle(draw(CACHED).T[:kinds].numpy())
    return {
        "decode": lambda: session.run(None, {**after, "input_ids": next(one)[None]}),
        "prefill": lambda: session.run(None, whole),
    }


def typical(steps: Mapping[str, Callable[[], Any]], runs: int, quantile: float) -> dict[str, float]:
    """A quantile of each step's seconds; they take turns of a few calls, the first of which only warms the caches."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(runs):
        for name, step in steps.items():
            step()
            for _ in range(BURST):
                begin = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - begin)
    return {name: float(torch.tensor(values).quantile(quantile)) for name, values in seconds.items()}


def measure(experts: int, top_k: int, given: argparse.Namespace) -> list[Row]:
    """The rows of one model: its graph in every format."""
    kinds = 1 if given.same_token else CACHED  # of tokens that are decoded
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "model"
        more = {"num_attention_heads": 4, "head_dim": given.hidden // 4, "max_position_embeddings": 1024}
        config = qwen3_moe(
            given.hidden, given.hidden, given.layers, experts, top_k, VOCABULARY, initializer_range=0.08, **more
        )
        random_model(config).save_pretrained(source)
        gc.collect()
        asked = {name: ExportOptions(quantize=name, tokens=8) for name in given.quantize}
        made = {name: export(source, Path(folder) / name, entry) for name, entry in asked.items()}
        graphs = {name: graph_steps(summary.folder, given.threads, kinds) for name, summary in made.items()}
        sides = {**graphs, **{name: torch_side(source, name, kinds) for name in TORCH}}
        found = {
            step: typical(
                {name: steps[step] for name, steps in sides.items()}, max(1, given.runs // share), given.quantile
            )
            for step, share in (("decode", 1), ("prefill", 8))
        }
    fastest = {step: min(values[name] for name in TORCH) for step, values in found.items()}
    return [
        Row(experts, top_k, name, found["decode"][name], found["prefill"][name], fastest["decode"], fastest["prefill"],
            summary.nodes, summary.nbytes)
        for name, summary in made.items()
    ]  # fmt: skip


def torch_side(source: Path, implementation: str, kinds: int) -> dict[str, Callable[[], Any]]:
    """The stock model with one implementation of its experts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, experts_implementation=implementation, attn_implementation="sdpa"
    )
    model.train(False)
    return torch_steps(model, kinds)


def alike(rows: Sequence[Row], row: Row) -> list[Row]:
    """The rows that differ in nothing but the number of experts, from the fewest on."""
    same = [other for other in rows if (other.top_k, other.quantize) == (row.top_k, row.quantize)]
    return sorted(same, key=lambda other: other.experts)


def main() -> None:
    """Measure and print."""
    sizes = {"experts": [16, 64, 256], "top_k": [4, 8], "hidden": 256, "layers": 4, "threads": 1}
    parser = options(__doc__, **sizes, same_token=False, quantile=0.5, runs=16)
    parser.add_argument("--quantize", nargs="+", choices=list(FORMATS), default=["none"])
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    logging.disable_progress_bar()
    rows = [row for top_k in given.top_k for experts in given.experts for row in measure(experts, top_k, given)]
    print("Over torch: decode and prefill, times as fast; over the fewest experts: decode time")
    head("experts", "top-k", "weights", "decode", "prefill", "growth", "nodes", "MiB")
    for each in rows:
        first = alike(rows, each)[0]
        over = (each.torch_decode / each.decode, each.torch_prefill / each.prefill, each.decode / first.decode)
        row(each.experts, each.top_k, each.quantize, *over, each.nodes, f"{each.nbytes / 2**20:.1f}")


if __name__ == "__main__":
    main()
