"""Time and memory of training and of generated answers (CoMoE, table 8)."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from compressor.answers.asking import pad_token, padded, with_rows
from compressor.answers.items import Item
from compressor.errors import wrap_faults
from compressor.frozen import frozen
from compressor.memory import PeakMemory, give_back

REPEATS = 3  # after one that is not counted


@frozen
class Cost:
    """Time, and the most memory that was held beyond what was held before: the device's, on the CPU
    the process's."""

    seconds: float
    peak_memory: int  # bytes


@contextmanager
def measured(device: torch.device) -> Iterator[list[Cost]]:
    """Yield a list to which the block's cost is added when it ends."""
    costs = list[Cost]()
    is_cuda = device.type == "cuda"
    held = 0
    if is_cuda:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    give_back()  # else freed memory would count as held before
    begin = time.perf_counter()
    with PeakMemory() as process:
        yield costs
        if is_cuda:
            torch.cuda.synchronize(device)
    seconds = time.perf_counter() - begin
    memory = process.anonymous - process.start
    if is_cuda:
        memory = torch.cuda.max_memory_allocated(device) - held
    costs.append(Cost(seconds, memory))


def answering_cost(
    model: Any, tokenizer: Any, items: Sequence[Item], batch_size: int, tokens: int
) -> Cost:
    """Return the cost of generating `tokens` tokens after each of the first `batch_size` prompts,
    greedily.

    It is the median in time of three runs, after one that is not counted.
    """
    prompts = [
        rows[0].tokens[: rows[0].start]
        for _, rows in with_rows(items[:batch_size], model, tokenizer)
    ]
    pad = pad_token(tokenizer)
    token_ids, mask = padded(prompts, pad, side="left")
    model.eval()
    costs = list[Cost]()
    for _ in range(1 + REPEATS):
        with (
            wrap_faults(
                "the model could not generate answers", "lower --timed-tokens", "lower --batch-size"
            ),
            torch.no_grad(),
            measured(model.device) as cost,
        ):
            model.generate(
                token_ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                do_sample=False,
                pad_token_id=pad,
            )
        costs += cost
    return sorted(costs[1:], key=lambda cost: cost.seconds)[REPEATS // 2]
