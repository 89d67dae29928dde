"""How a router makes weights of logits, learnt from what it gives its experts, and the way back.

T tokens, E experts.
"""

from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

Score = Literal["softmax", "sigmoid", "sqrt-softplus"]
SCORES: tuple[Score, ...] = get_args(Score)
EXACT = 0.05  # of a logarithm: what bfloat16 leaves between two chosen experts' weights and their scores
LEAST = 1e-30  # weight of an expert that counts for nothing, whose logarithm must stay a number


def log_weights(logits: Tensor, score: Score) -> Tensor:
    """[..., E] -> logarithms of the weights over all experts, in float32."""
    logits = logits.float()
    if score == "softmax":
        return logits.log_softmax(-1)
    return logsigmoid(logits) if score == "sigmoid" else softplus(logits).clamp_min(LEAST).log() / 2


def weights_of(logits: Tensor, score: Score) -> Tensor:
    """[..., E] -> the weights over all experts, as the router scores them, in float32."""
    return log_weights(logits, score).exp()


def logits_of(weights: Tensor, score: Score) -> Tensor:
    """[..., E] -> logits that have these weights; of softmax those whose exponentials are the weights themselves."""
    weights = weights.float().clamp_min(LEAST)
    if score == "softmax":
        return weights.log()
    if score == "sigmoid":
        return torch.logit(weights.clamp_max(1 - torch.finfo(torch.float32).eps))
    squared = weights.square().clamp_min(LEAST)
    return squared + (-torch.expm1(-squared)).log()  # the inverse of softplus, without an overflow


def find_score(logits: Tensor, chosen: Tensor, given: Tensor) -> Score:
    """The score by which a router with logits [T, E] gives its `chosen` experts [T, k] the weights `given` [T, k].

    A factor that all of a token's experts share does not count, nor does one of all tokens if each has one expert.
    Softmax, where no score fits: it takes every logit and gives it back.
    """
    logits, chosen, given = (value.reshape(-1, value.shape[-1]).detach() for value in (logits, chosen, given))
    known = given.float().clamp_min(LEAST).log()
    among = 1 if chosen.shape[1] > 1 else 0

    def misfit(score: Score) -> float:
        ratio = known - log_weights(logits, score).gather(1, chosen.long())
        return float((ratio - ratio.mean(among, keepdim=True)).abs().median())

    best = min(SCORES, key=misfit)
    return best if misfit(best) <= EXACT else "softmax"
