"""The contrastive loss that keeps experts distinct (CoMoE: Feng et al., 2025, Algorithm 1 and
equations 10 to 13).

T tokens, D features of an expert's output, P positives, N negatives.
"""

import math

import torch
from torch import Tensor

EPSILON = 1e-3  # Algorithm 1's constant under the fraction


def contrastive_loss(
    anchor: Tensor, positives: Tensor, negatives: Tensor, temperature: float
) -> Tensor:
    """InfoNCE of one anchor a token, [T, D], [T, P, D], [T, N, D] -> [], the mean over tokens; 0
    for no tokens.

    Algorithm 1, for a token with the anchor q and all vectors made unit length: -log(sum_p exp(q.p
    / temperature) / (sum_p exp(q.p / temperature) + sum_n exp(q.n / temperature) + epsilon)). A
    vector of zeros stays one and gets no gradient. Computed in float32 or more."""
    query = unit(anchor).unsqueeze(-1)  # [T, D, 1]
    near = (unit(positives) @ query).squeeze(-1) / temperature  # [T, P]
    far = (unit(negatives) @ query).squeeze(-1) / temperature  # [T, N]
    # sums of exp would overflow at a low temperature
    whole = torch.cat((near, far), dim=-1).logsumexp(-1)
    whole = torch.logaddexp(whole, whole.new_tensor(math.log(EPSILON)))
    losses = whole - near.logsumexp(-1)
    return losses.mean() if len(losses) else losses.sum()


def unit(vectors: Tensor) -> Tensor:
    """Normalise vectors to length 1: [..., D] -> [..., D]; zeros (of an untrained expert) get no
    gradient."""
    vectors = vectors.to(torch.promote_types(vectors.dtype, torch.float32))
    length = vectors.norm(dim=-1, keepdim=True)
    return vectors.div(length.where(length > 0, math.inf))
