"""What sub-scores do to a router: their variance, their sign, and the ranks that change without them.

"Understanding Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs" (ICLR 2026): Proposition 1 (variance
measures influence), APS and ANS, AARV. Beside them the covariance with the logits, which adds up.
n tokens, R routers, E experts, K top-k.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import softplus

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "identity": lambda logits: logits,
    "sigmoid": torch.sigmoid,
    "softmax": lambda logits: logits.softmax(-1),
    "root of softplus": lambda logits: softplus(logits).sqrt(),
}


def spread(scores: Tensor) -> Tensor:
    """Variance over the experts, summed over the tokens: [n, R, E] -> [R], float64."""
    centred = scores - scores.mean(-1, keepdim=True)
    norms: Tensor = torch.linalg.vector_norm(centred, dim=(0, 2))
    return norms.double().square() / scores.shape[-1]


def spread_by_expert(scores: Tensor) -> Tensor:
    """The same by expert, [n, R, E] -> [R, E]: mean of squared centred scores, whose sum over the experts it is."""
    return (scores - scores.mean(-1, keepdim=True)).square().sum(0, dtype=torch.float64) / scores.shape[-1]


def covariance(scores: Tensor, logits: Tensor) -> Tensor:
    """Covariance of sub-scores and logits over the experts, summed over tokens: [n, R, E] twice -> [R], float64.

    Logits are sums of sub-scores, so the covariances of all components add up to the logits' variance.
    """
    centred = logits - logits.mean(-1, keepdim=True)
    return (scores * centred).sum(-1).sum(0, dtype=torch.float64) / scores.shape[-1]


def signs(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the experts of the positive and of the negative sub-scores, summed over tokens: [n, R, E] -> 2 [R]."""
    positive = scores.clamp(min=0).mean(-1).sum(0, dtype=torch.float64)
    return positive, scores.mean(-1).sum(0, dtype=torch.float64) - positive


def ranks(scores: Tensor, chosen: Tensor) -> Tensor:
    """How many experts score above each chosen one: [..., E], [..., K] -> [..., K]."""
    picked = scores.gather(-1, chosen)
    return torch.stack([(scores > picked[..., k, None]).sum(-1) for k in range(chosen.shape[-1])], -1)


@dataclass(frozen=True, slots=True)
class Selection:
    """What routers rank experts by: an activation of the logits, plus a bias [R, E] where they have one."""

    activation: str = "identity"
    bias: Tensor | None = None

    def scores(self, logits: Tensor, routers: slice = slice(None)) -> Tensor:
        """[n, R, E] logits -> what is ranked."""
        scores = ACTIVATIONS[self.activation](logits)
        return scores if self.bias is None else scores + self.bias[routers]


def competing(chosen: Tensor, valid: Tensor, experts: int, groups: Sequence[int]) -> Tensor:
    """[n, R, K] -> [n, R, E]: experts in the same groups of neighbours as the chosen ones, of so many per router."""
    counts = torch.zeros(*chosen.shape[:2], experts, device=chosen.device)
    found = counts.scatter_add_(-1, chosen, valid.float().expand(chosen.shape)) > 0
    for router, count in enumerate(groups):
        within = found[:, router].unflatten(-1, (count, -1))
        found[:, router] = within.any(-1, keepdim=True).expand_as(within).flatten(1)
    return found


def selections(biases: Sequence[Tensor]) -> list[Selection]:
    """The known ways to rank experts where routers have these biases, [R, E] each; the plainest first."""
    return [Selection(), *(Selection(activation, bias) for bias in biases for activation in ACTIVATIONS)]


def best_selection(
    tried: Sequence[Selection], logits: Tensor, chosen: Tensor, valid: Tensor, groups: Sequence[int] = ()
) -> int:
    """The number of the way to rank experts that agrees best with what the routers chose; the first of equals.

    `logits` [n, R, E], `chosen` [n, R, K], `valid` [R, K] marks slots that a router uses. Routers that choose `groups`
    first rank the experts of those alone.
    """
    used = valid.sum(-1)
    within = competing(chosen, valid, logits.shape[-1], groups or [1] * len(valid))

    def agreement(selection: Selection) -> float:
        scores = selection.scores(logits).masked_fill(~within, -torch.inf)
        return float(((ranks(scores, chosen) < used[:, None]) & valid).sum() / (valid.sum() * len(logits)))

    return max(range(len(tried)), key=lambda number: agreement(tried[number]))


def rank_change(
    logits: Tensor, removed: Tensor, chosen: Tensor, before: Tensor, share: Tensor, selection: Selection, routers: slice
) -> Tensor:
    """Mean absolute change of the chosen experts' ranks without the sub-scores, summed over tokens: -> [R].

    `logits` and `removed` are [n, R, E], `chosen` and their ranks `before` [n, R, K]; `share` [R, K] is 1 / K of each
    router, 0 in slots that it does not use.
    """
    after = ranks(selection.scores(logits - removed, routers), chosen)
    return ((after - before).abs() * share).sum((0, 2), dtype=torch.float64)
