"""What a plan makes of one layer's output on the sampled tokens, and how far that is from the original's.

The error is ||y - y'||^2 / ||y||^2 with gate weights on both sides, y' routed by the smaller layer's own router. For
plans that only drop experts it is a quadratic form in gate weights, since y' = sum_k w_k o_k with unchanged outputs o.
S sampled tokens, K top-k, E experts, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compressor.grouping.rerouting import SmallerRouter
from compressor.model.experts import apply_expert, routed
from compressor.recipe.plan import LayerPlan
from compressor.statistics.statistics import LayerStatistics
from compressor.surgery.cutting import merged_parameters

CHUNK = 32  # tokens whose outputs are laid side by side at once
ROUNDED_PRODUCTS = 2.0**-22  # of a layer's energy: what float32 products leave of an error that cancels to nothing


@torch.no_grad()
def original(stats: LayerStatistics) -> torch.Tensor:
    """What the layer's experts module puts out on the sampled tokens, float32: -> [S, H]."""
    outputs = stats.expert_outputs
    rows = torch.arange(outputs.shape[1], device=outputs.device)
    result = torch.zeros(outputs.shape[1:], dtype=torch.float32, device=outputs.device)
    for choice, weight in zip(stats.top_k_index.T, stats.top_k_weights.T, strict=True):
        result += weight[:, None] * outputs[choice, rows]
    return result


@torch.no_grad()
def reconstruct(stats: LayerStatistics, plan: LayerPlan) -> torch.Tensor:
    """What the smaller layer's experts module would put out on the sampled tokens, float32: -> [S, H].

    Untouched experts' outputs are taken from the statistic; merged experts run on the tokens that are routed to them,
    one at a time.
    """
    outputs = stats.expert_outputs
    weights, slots = SmallerRouter(stats).planned(plan)
    result = torch.zeros(outputs.shape[1:], dtype=torch.float32, device=outputs.device)
    for slot, rows, places in routed(weights, slots):
        if (group := plan.groups[slot]).untouched:
            found = outputs[group.members[0], rows]
        else:
            merged = merged_parameters(stats.weights.experts, group)
            found = apply_expert(stats.weights.experts, merged, stats.inputs[rows])
        result.index_add_(0, rows, weights[rows, places, None] * found)
    return result


def relative_error(stats: LayerStatistics, plan: LayerPlan) -> float:
    """||y - y'||^2 / ||y||^2 over the sampled tokens; the numerator alone where y is zero, 0 without tokens."""
    before = original(stats).double()
    gap = float((before - reconstruct(stats, plan)).square().sum())
    return gap / (float(before.square().sum()) or 1.0)


def rescaled_error(stats: LayerStatistics, plan: LayerPlan) -> float:
    """Weighted share of ||y||^2 that is missed once each token's y' has its best scale: sum_t w_t ||y||^2 sin^2(y, y').

    Fewer duplicates of a split expert leave more of the softmax to each, which scales a token's output up by a factor
    of its own; norms and corrections take that away, so it says nothing of what is lost. The scale is in closed form,
    max(0, <y, y'> / ||y'||^2). As in a correction, w = 1 / (||y||^2 + its median over tokens), so that a few tokens of
    huge output do not decide alone. 0 without tokens, or where there is nothing to bring back.
    """
    before, after = original(stats).double(), reconstruct(stats, plan).double()
    energies, sizes = before.square().sum(1), after.square().sum(1)
    if not float(energies.sum()):
        return 0.0
    weights = 1.0 / (energies + (energies.median() if energies.median() > 0 else energies.mean()))
    shared = (before * after).sum(1).clamp(min=0).square() / sizes.masked_fill(sizes == 0, 1.0)
    return float(weights @ (energies - shared).clamp(min=0) / (weights @ energies))


@dataclass(frozen=True, slots=True)
class Routed:
    """Tokens routed among kept experts: gate weights [n, K], experts of the source [n, K], errors [n] in float64."""

    weights: torch.Tensor
    experts: torch.Tensor
    errors: torch.Tensor


class KeptErrors:
    """Each sampled token's ||y - y'||^2 when only some experts are kept, without touching an output again.

    With G = <o_e, o_f> of a token's expert outputs, its gate weights w and the smaller router's w', all [E], this is
    w'Gw' - 2 w'Gw + wGw. G is float32, the sums float64, so that what is equal cancels.
    """

    @torch.no_grad()
    def __init__(self, stats: LayerStatistics) -> None:
        outputs, self._router = stats.expert_outputs, SmallerRouter(stats)
        experts, tokens = outputs.shape[:2]
        weights = torch.zeros(tokens, experts, dtype=torch.float64, device=outputs.device)
        weights.scatter_add_(1, stats.top_k_index, stats.top_k_weights.double())
        self._products = torch.empty(tokens, experts, experts, device=outputs.device)
        self._mixed = torch.empty_like(weights)  # Gw
        for begin in range(0, tokens, CHUNK):
            rows = slice(begin, begin + CHUNK)
            part = outputs[:, rows].transpose(0, 1).contiguous()
            torch.bmm(part, part.mT, out=self._products[rows])
            self._mixed[rows] = (self._products[rows].double() @ weights[rows, :, None])[..., 0]
        self._original = (self._mixed * weights).sum(1)  # wGw
        self._rows = torch.arange(tokens, device=outputs.device)
        self.noise = ROUNDED_PRODUCTS * float(self._original.sum())  # errors summed over all tokens tie within it

    @torch.no_grad()
    def kept(self, experts: Sequence[int], rows: torch.Tensor | None = None) -> Routed:
        """Routing and errors of the tokens at `rows` [n], or of all, when these experts, ascending, are kept."""
        weights, slots = self._router.kept(experts, rows)
        rows = self._rows if rows is None else rows
        chosen = torch.tensor(experts, device=rows.device)[slots]
        count, shares = self._mixed.shape[1], weights.double()
        places = rows[:, None] * count + chosen
        pairs = self._products.take(places[:, :, None] * count + chosen[:, None]).double()
        squared = (shares[:, None] @ pairs @ shares[..., None])[:, 0, 0]
        errors = squared - 2 * (shares * self._mixed.take(places)).sum(1) + self._original[rows]
        return Routed(weights, chosen, errors.clamp_(min=0))
