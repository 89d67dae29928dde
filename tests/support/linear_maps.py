"""Linear maps as explicit matrices, written from the definition of each step."""

from collections.abc import Sequence

import torch
from torch import Tensor

from compressor.attribution.tracing import Chain, Context, Term


def explicit(chain: Chain, width: int) -> Tensor:
    """[H', H]: the matrix of a chain on vectors of this width, written from the definition of each step."""
    total = torch.eye(width, dtype=torch.float64)
    for step in chain:
        factor = torch.as_tensor(step, dtype=torch.float64)
        matrix = factor if factor.dim() == 2 else torch.diag(factor.expand(len(total)))
        total = matrix @ total
    return total


def evaluate(context: Context, terms: Sequence[Term]) -> Tensor:
    """What the terms sum to, [T, H] or broadcastable to it."""
    total = torch.zeros((), dtype=torch.float64)
    for term in terms:
        value = context.leaves[term.leaf].double()
        image = value @ explicit(term.chain, value.shape[-1]).T
        total = total + image * term.token
    return total.float()
