"""The contrastive term on the experts of a model as they are: single experts' outputs of some of a layer's tokens.

T tokens, K top-k, E experts, D width; S sampled tokens, N negatives.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer
from compressor.model.experts import Watch, apply_expert, expert_parameters
from compressor.model.opened import OpenModel
from compressor.steps.distill.contrastive import contrastive_loss
from compressor.steps.distill.step import Distill

SAMPLED = 256  # tokens of a layer and a batch


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """What an experts module was called with: hidden states [T, D], choices and gate weights [T, K]."""

    hidden: Tensor
    index: Tensor
    weights: Tensor


def refuse_too_few(model: OpenModel) -> None:
    """Refuse a model in which a token has no second activated expert, or no inactive one."""
    for layer in model.architecture.layers:
        if layer.top_k < 2 or layer.top_k >= layer.experts:
            raise CompressionError(
                f"{layer.name}: {layer.top_k} of {layer.experts} experts are activated, and the contrastive loss needs "
                "two or more, and one that is not; leave out --contrastive"
            )


@contextmanager
def noted_call(model: Any, layer: MoeLayer) -> Iterator[list[ExpertCall]]:
    """A list of the calls of a layer's experts module while the block runs."""
    calls = list[ExpertCall]()
    with Watch(model, layer, on_experts=lambda *call: calls.append(ExpertCall(*call))):
        yield calls


def experts_apart(experts: Any, call: ExpertCall, options: Distill, generator: torch.Generator) -> Tensor:
    """CoMoE's Algorithm 1 on sampled tokens of a layer, []: one activated expert as anchor, the other ones for it.

    Against it are up to `options.negatives` inactive experts. Tokens that a router leaves with fewer than K experts are
    not sampled.
    """
    full = (call.weights.detach() != 0).all(-1).nonzero().flatten().cpu()
    rows = full[torch.randperm(len(full), generator=generator)[:SAMPLED]]
    chosen = _chosen(call.index.detach()[rows.to(call.index.device)].cpu(), len(experts.down_proj), options, generator)
    top_k = call.index.shape[1]
    outputs = _outputs(experts, call.hidden[rows.to(call.hidden.device)], chosen.to(call.hidden.device))
    return contrastive_loss(outputs[:, 0], outputs[:, 1:top_k], outputs[:, top_k:], options.temperature)


def _chosen(index: Tensor, experts: int, options: Distill, generator: torch.Generator) -> Tensor:
    """[S, K] -> [S, K + N] experts of each token: the anchor, the other activated ones, and sampled inactive ones."""
    order = torch.rand(index.shape, generator=generator).argsort(-1)
    active = torch.zeros(len(index), experts).scatter_(1, index, 1.0)
    scores = torch.rand(len(index), experts, generator=generator) - active
    count = min(options.negatives, experts - index.shape[1])
    return torch.cat((index.gather(1, order), scores.topk(count, -1).indices), 1)


def _outputs(experts: Any, hidden: Tensor, chosen: Tensor) -> Tensor:
    """[S, D], [S, M] -> [S, M, D]: what each of these experts makes of its token, without a gate weight."""
    places, found = list[Tensor](), list[Tensor]()
    for expert in chosen.unique().tolist():
        rows, slots = (chosen == expert).nonzero(as_tuple=True)
        found.append(apply_expert(experts, expert_parameters(experts, expert), hidden[rows]))
        places.append(rows * chosen.shape[1] + slots)
    return torch.cat(found)[torch.cat(places).argsort()].view(*chosen.shape, -1)


def seeded(seed: int, step: int, batch: int, layer: MoeLayer) -> torch.Generator:
    """A generator that hangs on the step, the batch and the layer, and on no order in which they come."""
    digest = hashlib.sha256(f"{seed} {step} {batch} {layer.name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:6], "big"))
