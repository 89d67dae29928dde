"""C3PO at test time (arXiv 2504.07964): other router logits for an item, from the pathways of neighbours of it.

Of the methods of the paper, mode finding and kernel regression mix the neighbours' pathways, neighbourhood gradient
descent (NGD) lowers their loss. n points; a pathway [L, E] holds the weights over all experts of L late MoE layers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from compressor.devices import as_float64
from compressor.evaluation.items import likelihoods
from compressor.model.router_logits import logits_of
from compressor.pathways.engine import PathwayModel, Plain
from compressor.pathways.options import Kernel, PathwayOptions

DEGREE = 2  # of the polynomial kernel, (1 + x.y)^2
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the way to the neighbours, that the line search tries


def kernel_weights(kernel: Kernel, query: Tensor, points: Tensor, bandwidth: float | None = None) -> Tensor:
    """Weights [n] of the `points` [n, ...] as seen from the `query` [...], which sum to one.

    Gaussian: exp(-d^2 / 2b^2). Matern (3/2): (1 + sqrt(3) d/b) exp(-sqrt(3) d/b). Linear: x.y, polynomial: (1 + x.y)^2,
    negative values counting as none. Without a `bandwidth` b it is the points' mean distance d. Points of which none
    has a weight share it alike.
    """
    device, query, points = query.device, as_float64(query.flatten()), as_float64(points.flatten(1))
    products, distances = points @ query, (points - query).norm(dim=1)
    width = bandwidth if bandwidth is not None else float(distances.mean())
    scaled = distances / width if width > 0 else torch.zeros_like(distances)
    if kernel == "gaussian":
        weights = (-(scaled.square() - scaled.square().min()) / 2).exp()  # the nearest has one: not all can vanish
    elif kernel == "matern":
        far = math.sqrt(3) * scaled
        weights = (1 + far) * (-(far - far.min())).exp()
    else:
        weights = products.clamp_min(0) if kernel == "linear" else (1 + products).clamp_min(0) ** DEGREE
    total = float(weights.sum())
    return (weights / total if total > 0 else torch.full_like(weights, 1 / len(weights))).float().to(device)


def towards(own: Tensor, points: Tensor, weights: Tensor, share: float = 1.0) -> Tensor:
    """A pathway [L, E] moved by `share` of the way to the weighted mean of the `points` [n, L, E].

    Points that are equal to it leave every bit as it is.
    """
    return own + share * torch.einsum("n,nle->le", weights, points - own)


def mean_shift(
    own: Tensor, points: Tensor, kernel: Kernel, bandwidth: float | None, share: float, steps: int
) -> Tensor:
    """A pathway [L, E] that goes `share` of the way to the points' mean as weighted from where it is, and so on."""
    for _ in range(steps):
        own = towards(own, points, kernel_weights(kernel, own, points, bandwidth), share)
    return own


def core(pathway: Tensor, count: int) -> Tensor:
    """[L, E] -> whether an expert is among its layer's `count` of the largest weight, [L, E]."""
    largest = pathway.topk(min(count, pathway.shape[-1]), dim=-1).indices
    return torch.zeros_like(pathway, dtype=torch.bool).scatter(-1, largest, True)


def descend(gradient: Callable[[Tensor], Tensor], start: Tensor, steps: int, rate: float) -> Tensor:
    """Where steps against the gradient lead from `start`; the rate falls to nothing along half a cosine."""
    place = start
    for step in range(steps):
        place = place - rate * (1 + math.cos(math.pi * step / steps)) / 2 * gradient(place)
    return place


@dataclass(frozen=True, slots=True)
class Neighbour:
    """An item of the reference set: its pathway [L, E] in the late layers, and a plain forward with its answer."""

    pathway: Tensor
    plain: Plain | None = None  # which mode finding, and kernel regression with a given share, go without


def optimised(
    model: PathwayModel, own: Tensor, neighbours: Sequence[Neighbour], weights: Tensor, options: PathwayOptions
) -> Tensor:
    """What to add to the late router logits [L, E] of an item with the pathway `own` [L, E].

    `weights` [n] are the neighbours'. Ones whose pathways are the item's own change nothing, except by ngd, which
    looks at their loss; an item that is its own neighbour makes that an oracle, an upper bound which knows the answer.
    """
    movable = core(own, options.experts)
    if options.optimizer == "ngd":
        gradient = partial(neighbours_gradient, model, own, neighbours=neighbours, weights=weights)
        return descend(lambda place: gradient(place) * movable, torch.zeros_like(own), options.steps, options.rate)
    pathways = torch.stack([each.pathway for each in neighbours])

    def shift(target: Tensor) -> Tensor:
        """What moves the movable experts' logits to another pathway; nothing, bit for bit, where both agree."""
        return (_logits(model, target) - _logits(model, own)) * movable

    if options.optimizer == "mode":
        share = 0.5 if options.share is None else options.share
        return shift(mean_shift(own, pathways, options.kernel, options.bandwidth, share, options.steps))
    if options.share is not None:
        return shift(towards(own, pathways, weights, options.share))
    tried = [shift(towards(own, pathways, weights, share)) for share in SHARES]
    return min(tried, key=lambda place: neighbours_loss(model, own, place, neighbours, weights))


@torch.enable_grad()
def neighbours_gradient(
    model: PathwayModel, own: Tensor, place: Tensor, neighbours: Sequence[Neighbour], weights: Tensor
) -> Tensor:
    """The gradient [L, E] of the neighbours' loss, as `neighbours_loss` has it, with respect to `place`."""
    moved, total = place.detach().clone().requires_grad_(), torch.zeros_like(own)
    losses = _losses(model, own, moved, neighbours)  # one graph in memory at a time
    for loss, weight in zip(losses, weights.tolist(), strict=True):
        total += weight * torch.autograd.grad(loss, moved)[0]
    return total


@torch.no_grad()
def neighbours_loss(
    model: PathwayModel, own: Tensor, place: Tensor, neighbours: Sequence[Neighbour], weights: Tensor
) -> float:
    """The weighted loss of the neighbours, -log p(answer | prompt), under the pathway `own` moved by `place` [L, E]."""
    losses = torch.stack(list(_losses(model, own, place, neighbours)))
    return float((weights.to(losses) * losses).sum())


def _losses(model: PathwayModel, own: Tensor, place: Tensor, neighbours: Sequence[Neighbour]) -> Iterator[Tensor]:
    """Each neighbour's loss on the pathway of another item: its routers get that one's logits, moved by `place`."""
    for neighbour in neighbours:
        assert neighbour.plain is not None
        shared = _logits(model, own) - _logits(model, neighbour.pathway) + place
        yield -likelihoods(model.again(neighbour.plain, shared), neighbour.plain.rows)[0]


def _logits(model: PathwayModel, pathway: Tensor) -> Tensor:
    late = zip(pathway, model.scores[-model.late :], strict=True)
    return torch.stack([logits_of(weights, score) for weights, score in late])
