"""The original's next-token distributions, kept on disk so that it and its smaller model are never in memory together.

Of each position the largest log probabilities are kept, and the mass of all others as one more outcome. The divergence
from what is kept is a lower bound of the divergence from the whole, and differs little from it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.data.batches import load_tokenizer
from compressor.errors import CompressionError
from compressor.evaluation.heldout import rows_at_once
from compressor.model.architecture import head_of
from compressor.model.buffers import allocate
from compressor.model.opened import OpenModel
from compressor.model.streaming import LayerStream, LayerVisitor
from compressor.progress import Progress

KEPT = 64  # log probabilities of each position
LEAST = -60.0  # the logarithm of a mass of nothing, as far as float32 is concerned


@dataclass(frozen=True, slots=True)
class Distributions:
    """Of one batch [B, L]: the likeliest tokens' ids and log probabilities [B, L, K], and of all others together."""

    tokens: Tensor
    logs: Tensor
    others: Tensor  # [B, L] log of their mass


def check_teacher(smaller: OpenModel, original: OpenModel) -> None:
    """Refuse an original that cannot teach the smaller model: one of another vocabulary or tokenizer."""
    if smaller.vocabulary != original.vocabulary:
        raise CompressionError(
            f"{original.source.label} knows {original.vocabulary} tokens, {smaller.source.label} {smaller.vocabulary}; "
            "name the model that the checkpoint was made of"
        )
    if load_tokenizer(smaller.source.folder).get_vocab() != load_tokenizer(original.source.folder).get_vocab():
        raise CompressionError(
            f"{original.source.label} and {smaller.source.label} have different tokenizers; name the model that the "
            "checkpoint was made of"
        )


def distributions(
    model: OpenModel, batches: Sequence[Tensor], progress: Progress, *visitors: LayerVisitor
) -> list[Distributions]:
    """What the model expects after every position of these batches (token ids [B, L]), from one streamed pass.

    Visitors see the same pass. Raises `CompressionError` for a model without a language-model head.
    """
    if head_of(model.partial.model) is None:
        raise CompressionError(
            f"{type(model.partial.model).__name__} has no language-model head, so it expects no next token"
        )
    units = model.architecture.units
    seen = _Keeping(len(batches))
    stream = LayerStream(model.partial, batches, units, units, range(len(batches)))
    progress.start("ask the original", len(units))
    for unit in stream.passing(*visitors, seen):
        progress.advance(unit)
    return [entry for entry in seen.found if entry is not None]


class _Keeping(LayerVisitor):
    def __init__(self, count: int) -> None:
        self.found: list[Distributions | None] = [None] * count

    @torch.no_grad()
    def finished(self, batch: int, output: Any) -> None:
        logits: Tensor = output.logits
        shape, kept = tuple(logits.shape[:2]), min(KEPT, logits.shape[-1])
        cpu = torch.device("cpu")
        made = Distributions(
            allocate((*shape, kept), torch.int32, cpu, budget=0),
            allocate((*shape, kept), torch.float32, cpu, budget=0),
            allocate(shape, torch.float32, cpu, budget=0),
        )
        rows = rows_at_once(1, logits.shape[-1])
        for number, sequence in enumerate(logits):
            for begin in range(0, len(sequence), rows):
                part = slice(begin, begin + rows)
                logs, tokens = sequence[part].float().log_softmax(-1).topk(kept)
                made.tokens[number, part], made.logs[number, part] = tokens.int(), logs
                made.others[number, part] = _log_rest(logs.double()).float()
        self.found[batch] = made


def divergence(original: Distributions, logits: Tensor) -> Tensor:
    """KL(original || other) in nats at every position of a batch, [B, L]; `logits` [B, L, V] are the other's."""
    device = logits.device
    tokens, logs, others = (value.to(device) for value in (original.tokens, original.logs, original.others))
    scores = logits.float()
    ours = scores.gather(-1, tokens.long()) - scores.logsumexp(-1, keepdim=True)
    rest = _log_rest(ours)
    return (logs.exp() * (logs - ours)).sum(-1) + others.exp() * (others - rest)


def _log_rest(logs: Tensor) -> Tensor:
    """The log of what these log probabilities [..., K] leave of 1."""
    return (1 - logs.exp().sum(-1)).clamp_min(torch.finfo(torch.float32).tiny).log().clamp_min(LEAST)
