"""The contrastive loss that keeps experts distinct (CoMoE: Feng et al., 2025, Algorithm 1 and equations 10 to 13).

T tokens, D features of an expert's output, P positives, N negatives.
"""

import math

import torch
from torch import Tensor

from compressor.errors import CompressionError

EPSILON = 1e-3  # Algorithm 1's constant under the fraction
TEMPERATURE = 0.07


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
