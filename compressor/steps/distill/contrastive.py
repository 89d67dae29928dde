"""The contrastive loss that keeps experts distinct (CoMoE: Feng et al., 2025, Algorithm 1 and equations 10 to 13).

T tokens, of which S are sampled, K top-k, E experts, D features of an expert's output, P positives, N negatives.
"""

import math
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.model.experts import apply_expert, expert_parameters
from compressor.steps.distill.options import Distill

EPSILON = 1e-3  # Algorithm 1's constant under the fraction
TEMPERATURE = 0.07
SAMPLED = 256  # tokens of a layer and a batch


def contrastive_loss(
    anchor: Tensor, positives: Tensor, negatives: Tensor, temperature: float = TEMPERATURE, epsilon: float = EPSILON
) -> Tensor:
    """InfoNCE of one anchor a token, [T, D], [T, P, D], [T, N, D] -> [], the mean over tokens; 0 for no tokens.

    Algorithm 1, for a token with the anchor q and all vectors made unit length:
    -log(sum_p exp(q.p / temperature) / (sum_p exp(q.p / temperature) + sum_n exp(q.n / temperature) + epsilon)).
    A vector of zeros stays one and gets no gradient. Computed in float32 or more.
    Raises `CompressionError` for no positives or no negatives.
    """
    if not positives.shape[1] or not negatives.shape[1]:
        raise CompressionError(
            f"the contrastive loss has {positives.shape[1]} positives and {negatives.shape[1]} negatives a token; "
            "activate at least two experts and leave at least one inactive"
        )
    query = unit(anchor).unsqueeze(-1)  # [T, D, 1]
    for_it = (unit(positives) @ query).squeeze(-1) / temperature  # [T, P]
    against = (unit(negatives) @ query).squeeze(-1) / temperature  # [T, N]
    whole = torch.cat((for_it, against), dim=-1).logsumexp(-1)  # sums of exp would overflow at a low temperature
    if epsilon:
        whole = torch.logaddexp(whole, whole.new_tensor(math.log(epsilon)))
    losses = whole - for_it.logsumexp(-1)
    return losses.mean() if len(losses) else losses.sum()


def information_gap(loss: float, negatives: int) -> float:
    """Theorem 1's lower bound, log N - L in nats, of a token's gap of mutual information: activated less inactive."""
    return math.log(negatives) - loss


def unit(vectors: Tensor) -> Tensor:
    """Vectors at length 1, [..., D] -> [..., D]; zeros, which an untrained expert (B = 0) answers, get no gradient."""
    vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    length = vectors.norm(dim=-1, keepdim=True)
    return vectors.div(length.where(length > 0, math.inf))


def experts_apart(
    experts: Any, hidden: Tensor, index: Tensor, weights: Tensor, options: Distill, generator: torch.Generator
) -> Tensor:
    """CoMoE's Algorithm 1 on sampled tokens of a layer: one activated expert as anchor, the other ones for it.

    `hidden` [T, D], `index` and gate `weights` [T, K] are what the experts were called with: -> []. Against the anchor
    are up to `options.negatives` inactive experts, sampled. Tokens that a router leaves with fewer than K experts are
    not sampled.
    """
    full = (weights.detach() != 0).all(-1).nonzero().flatten().cpu()
    rows, top_k = full[torch.randperm(len(full), generator=generator)[:SAMPLED]], index.shape[1]
    active = index.detach()[rows.to(index.device)].cpu()  # [S, K]
    count = len(experts.down_proj)
    order = torch.rand(active.shape, generator=generator).argsort(-1)
    scores = torch.rand(len(active), count, generator=generator)
    scores -= torch.zeros(len(active), count).scatter_(1, active, 1.0)
    inactive = scores.topk(min(options.negatives, count - top_k), -1).indices
    sampled, chosen = (
        hidden[rows.to(hidden.device)],
        torch.cat((active.gather(1, order), inactive), 1).to(hidden.device),
    )
    places, outputs = list[Tensor](), list[Tensor]()
    for expert in chosen.unique().tolist():
        tokens, slots = (chosen == expert).nonzero(as_tuple=True)
        outputs.append(apply_expert(experts, expert_parameters(experts, expert), sampled[tokens]))
        places.append(tokens * chosen.shape[1] + slots)
    answers = torch.cat(outputs)[torch.cat(places).argsort()].view(*chosen.shape, -1)  # [S, M, D], without gate weights
    return contrastive_loss(answers[:, 0], answers[:, 1:top_k], answers[:, top_k:], options.temperature)
