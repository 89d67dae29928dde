"""C3PO at test time (arXiv 2504.07964): other router logits for an item, from the pathways of
neighbours of it.

Of the methods of the paper, mode finding and kernel regression mix the neighbours' pathways,
neighbourhood gradient descent (NGD) lowers their loss. n points; a pathway [L, E] holds the weights
over all experts of L MoE layers."""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from sklearn.gaussian_process.kernels import Matern
from sklearn.metrics.pairwise import linear_kernel, polynomial_kernel, rbf_kernel
from torch import Tensor

from compressor.answers.items import likelihoods
from compressor.devices import as_float64
from compressor.frozen import frozen
from compressor.model.router_logits import logits_of
from compressor.pathways.engine import PathwayModel, PlainForward
from compressor.pathways.options import Kernel, PathwayOptions, Schedule

DEGREE = 2  # of the polynomial kernel, (1 + x.y)^2
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the way to the neighbours, that the line search tries


def kernel_weights(
    kernel: Kernel, query: Tensor, points: Tensor, bandwidth: float | None = None
) -> Tensor:
    """Return kernel weights [n] of the `points` [n, ...] around the `query` [...]; they sum to 1.

    Gaussian: exp(-d^2 / 2b^2). Matern (3/2): (1 + sqrt(3) d/b) exp(-sqrt(3) d/b). Linear: x.y, or
    none where that is negative. Polynomial: (1 + x.y)^2. Without a `bandwidth` b it is the points'
    mean distance d. If no point has any weight, such as those too far for a `bandwidth`, the
    nearest share it alike."""
    place = as_float64(query.reshape(1, -1)).cpu().numpy()
    rows = as_float64(points.flatten(1)).cpu().numpy()
    distances = np.linalg.norm(rows - place, axis=1)
    width = float(distances.mean()) if bandwidth is None else bandwidth
    if kernel == "linear":
        values = linear_kernel(rows, place)
    elif kernel == "polynomial":
        values = polynomial_kernel(rows, place, DEGREE, gamma=1)
    elif width == 0:
        values = np.ones((len(rows), 1))
    elif kernel == "gaussian":
        values = rbf_kernel(rows, place, gamma=1 / (2 * width**2))
    else:
        values = Matern(width, nu=1.5)(rows, place)
    weights = values[:, 0].clip(0)
    if not weights.any():
        weights = (distances == distances.min()).astype(float)
    return torch.from_numpy(weights / weights.sum()).float().to(query.device)


def towards(pathway: Tensor, points: Tensor, weights: Tensor, share: float = 1.0) -> Tensor:
    """Move a pathway [L, E] by `share` of the way to the weighted mean of the `points` [n, L, E].

    Points that are equal to it leave every bit as it is.
    """
    return pathway + share * torch.einsum("n,nle->le", weights, points - pathway)


def mean_shift(
    pathway: Tensor,
    points: Tensor,
    kernel: Kernel,
    bandwidth: float | None,
    share: float,
    steps: int,
) -> Tensor:
    """Move a pathway [L, E] repeatedly by `share` of the way to the points' mean, weighted from
    where it is."""
    for _ in range(steps):
        pathway = towards(
            pathway, points, kernel_weights(kernel, pathway, points, bandwidth), share
        )
    return pathway


def core_coverage(pathway: Tensor, shift: Tensor, logits: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the share of the experts of largest weight after a shift that are among the n largest
    before it.

    Pathway, shift and its logits are [L, E], `counts` the experts that each layer chooses; returned
    for n of 1 to E."""
    covered = torch.zeros(pathway.shape[-1])
    for before, after, count in zip(pathway, logits + shift, counts, strict=True):
        ranks = before.argsort(descending=True, stable=True).argsort()
        chosen = after.argsort(descending=True, stable=True)[:count]
        covered += torch.bincount(ranks[chosen], minlength=len(before)).cumsum(0) / count
    return covered / len(pathway)


def core(pathway: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` experts of largest weight in each layer: [L, E] -> [L, E]."""
    largest = pathway.topk(min(count, pathway.shape[-1]), dim=-1).indices
    return torch.zeros_like(pathway, dtype=torch.bool).scatter(-1, largest, True)


def descend(
    gradient: Callable[[Tensor], Tensor],
    start: Tensor,
    steps: int,
    rate: float,
    schedule: Schedule = "cosine",
) -> Tensor:
    """Step against the gradient from `start`; the rate stays, or falls to nothing along half a
    cosine."""
    position = start
    for step in range(steps):
        decay = (1 + math.cos(math.pi * step / steps)) / 2 if schedule == "cosine" else 1.0
        position = position - rate * decay * gradient(position)
    return position


@frozen
class Neighbour:
    """An item of the reference set: its pathway [L, E] in the moved layers, and a plain forward
    with its answer."""

    pathway: Tensor
    # not needed by mode finding, nor by kernel regression with a given share
    plain: PlainForward | None = None


def optimised(
    model: PathwayModel,
    pathway: Tensor,
    neighbours: Sequence[Neighbour],
    weights: Tensor,
    options: PathwayOptions,
) -> Tensor:
    """Return the shift [L, E] of the moved layers' router logits of an item with this `pathway` [L,
    E].

    `weights` [n] are the neighbours'. Ones whose pathways are the item's own change nothing, except
    by ngd, which looks at their loss. The oracle is ngd with the item as its only neighbour."""
    movable = core(pathway, options.experts)
    if options.optimizer in ("ngd", "oracle"):

        def gradient(shift: Tensor) -> Tensor:
            return neighbours_gradient(model, pathway, shift, neighbours, weights) * movable

        start = torch.zeros_like(pathway)
        return descend(gradient, start, options.steps, options.rate, options.schedule)
    points = torch.stack([neighbour.pathway for neighbour in neighbours])
    if options.optimizer == "mode":
        share = 0.5 if options.share is None else options.share
        moved = mean_shift(pathway, points, options.kernel, options.bandwidth, share, options.steps)
        targets = [moved]
    else:
        shares = SHARES if options.share is None else (options.share,)
        targets = [towards(pathway, points, weights, share) for share in shares]
    # exact zeros where both pathways agree
    logits = pathway_logits(model, pathway)
    shifts = [(pathway_logits(model, target) - logits) * movable for target in targets]
    if len(shifts) == 1:
        return shifts[0]
    losses = [neighbours_loss(model, pathway, shift, neighbours, weights) for shift in shifts]
    return shifts[losses.index(min(losses))]


@torch.enable_grad()
def neighbours_gradient(
    model: PathwayModel,
    pathway: Tensor,
    shift: Tensor,
    neighbours: Sequence[Neighbour],
    weights: Tensor,
) -> Tensor:
    """Return the gradient [L, E] of `neighbours_loss` with respect to the shift."""
    variable = shift.detach().clone().requires_grad_()
    total = torch.zeros_like(pathway)
    losses = _losses(model, pathway, variable, neighbours)  # one graph in memory at a time
    for loss, weight in zip(losses, weights.tolist(), strict=True):
        total += weight * torch.autograd.grad(loss, variable)[0]
    return total


@torch.no_grad()
def neighbours_loss(
    model: PathwayModel,
    pathway: Tensor,
    shift: Tensor,
    neighbours: Sequence[Neighbour],
    weights: Tensor,
) -> float:
    """Return the weighted loss of the neighbours, -log p(answer | prompt), on the `pathway` moved
    by `shift` [L, E]."""
    losses = torch.stack(list(_losses(model, pathway, shift, neighbours)))
    return float((weights.to(losses) * losses).sum())


def _losses(
    model: PathwayModel, pathway: Tensor, shift: Tensor, neighbours: Sequence[Neighbour]
) -> Iterator[Tensor]:
    """Return each neighbour's loss on another item's pathway: its routers get that item's logits,
    moved by `shift`."""
    for neighbour in neighbours:
        assert neighbour.plain is not None
        added = pathway_logits(model, pathway) - pathway_logits(model, neighbour.pathway) + shift
        yield -likelihoods(model.again(neighbour.plain, added), neighbour.plain.rows)[0]


def pathway_logits(model: PathwayModel, pathway: Tensor) -> Tensor:
    """Return the moved routers' logits of which these weights are made: [L, E] -> [L, E]."""
    pairs = zip(pathway, model.layer_numbers, strict=True)
    return torch.stack([logits_of(weights, model.scores[number]) for weights, number in pairs])
