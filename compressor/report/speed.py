"""Inference speed and memory of base and output on this machine, by stock transformers, side by
side in one run.

Both models are in memory and take turns to continue the same tokens greedily with a KV cache, so
that what else the machine does meets both. Nothing else is optimised: servers are faster, and their
ratios can differ."""

import math
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from compressor.answers.stock import HEADROOM, free, load_writing, weight_bytes
from compressor.checkpoint.source import ModelSource
from compressor.devices import pick_device
from compressor.errors import CompressionError
from compressor.formatting import human_bytes
from compressor.model.opened import memory_budget
from compressor.progress import Progress
from compressor.report.data import Speed

PROMPT = 512  # tokens of the prompt at most
NEW_TOKENS = 32
REPETITIONS = 5  # of each model, after one to warm up


class _Clock(BaseStreamer):
    """Seconds at which generation began and each token was there."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Tensor) -> None:
        """Note the time: first of the prompt, then of each token, which is on the CPU by now."""
        self.times.append(time.perf_counter())

    def end(self) -> None:
        """Nothing comes after the last token."""


def measure_speed(
    sources: Sequence[ModelSource],
    prompt: Tensor,
    positions: int | None,
    progress: Progress,
    device: str,
    dtype: str,
) -> Speed:
    """Time base and output, `sources` in this order, on a prompt of token ids [1, L].

    Raises `CompressionError` where a model does not generate text, or both do not fit in memory
    together."""
    place = pick_device(device)
    needed = sum(weight_bytes(source, dtype) for source in sources)
    if any(
        needed + HEADROOM > (memory_budget(held) or math.inf)
        for held in (torch.device("cpu"), place)
    ):
        raise CompressionError(
            f"base and output need {human_bytes(needed)}, more than the memory; leave out --speed"
        )
    positions = positions or PROMPT + NEW_TOKENS
    new = min(NEW_TOKENS, max(2, positions // 4))
    prompt = prompt[:1, : min(PROMPT, positions - new)].to(place)
    models = [load_writing(source.folder, device, dtype) for source in sources]
    runs = []
    progress.start("speed", REPETITIONS + 1)
    for repetition in range(REPETITIONS + 1):
        runs.append([_generate(model, prompt, new) for model in models])
        models.reverse()
        if repetition % 2:
            runs[-1].reverse()
        progress.advance(f"repetition {repetition}")
    models.clear()
    free(place)
    base, output = torch.stack([torch.stack(run) for run in runs[1:]]).median(0).values.tolist()
    return Speed(
        place.type, dtype, prompt.shape[1], new, REPETITIONS, *zip(base, output, strict=True)
    )


def _generate(model: Any, prompt: Tensor, new: int) -> Tensor:
    """Seconds of a prompt and of each token after the first, and bytes that the model occupies:
    [3], float64.

    On a CPU the bytes are those of the weights; on a GPU, with what a generation allocates at most.
    """
    on_gpu = prompt.device.type == "cuda"
    weights = {
        tensor.data_ptr(): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())
    }
    memory = sum(weights.values())
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(prompt.device)
        memory -= torch.cuda.memory_allocated(prompt.device)
    clock = _Clock()
    with torch.inference_mode():
        model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            num_beams=1,
            max_new_tokens=new,
            min_new_tokens=new,
            use_cache=True,
            pad_token_id=0,
            streamer=clock,
        )
    if on_gpu:
        memory += torch.cuda.max_memory_allocated(prompt.device)
    start, first, *_, last = clock.times
    return torch.tensor([first - start, (last - first) / (new - 1), memory], dtype=torch.float64)
