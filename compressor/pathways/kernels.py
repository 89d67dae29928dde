"""The mathematics of C3PO (arXiv 2504.07964): kernels, means and modes of pathways, descent. n points, L layers,
E experts; a pathway [L, E] holds the weights over all experts of every layer.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from compressor.pathways.options import Kernel

DEGREE = 2  # of the polynomial kernel, (1 + x.y)^2


def kernel_weights(kernel: Kernel, query: Tensor, points: Tensor, bandwidth: float | None = None) -> Tensor:
    """Weights [n] of the `points` [n, ...] as seen from the `query` [...], which sum to one.

    Gaussian: exp(-d^2 / 2b^2). Matern (3/2): (1 + sqrt(3) d/b) exp(-sqrt(3) d/b). Linear: x.y, polynomial: (1 + x.y)^2,
    negative values counting as none. Without a `bandwidth` b it is the points' mean distance d. Points of which none
    has a weight share it alike.
    """
    query, points = query.flatten().double(), points.flatten(1).double()
    products, distances = points @ query, (points - query).norm(dim=1)
    width = bandwidth if bandwidth is not None else float(distances.mean())
    scaled = distances / width if width > 0 else torch.zeros_like(distances)
    if kernel == "gaussian":
        found = (-(scaled.square() - scaled.square().min()) / 2).exp()  # the nearest has one: none can vanish with all
    elif kernel == "matern":
        far = math.sqrt(3) * scaled
        found = (1 + far) * (-(far - far.min())).exp()
    else:
        found = products.clamp_min(0) if kernel == "linear" else (1 + products).clamp_min(0) ** DEGREE
    total = float(found.sum())
    return (found / total if total > 0 else torch.full_like(found, 1 / len(found))).float()


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


def cosine(rate: float, step: int, steps: int) -> float:
    """The rate of a step that falls from `rate` to nothing along half a cosine."""
    return rate * (1 + math.cos(math.pi * step / steps)) / 2


def descend(gradient: Callable[[Tensor], Tensor], start: Tensor, steps: int, rate: float) -> Tensor:
    """Where steps against the gradient lead from `start`."""
    place = start
    for step in range(steps):
        place = place - cosine(rate, step, steps) * gradient(place)
    return place


def best_share(loss: Callable[[float], float], shares: Sequence[float]) -> float:
    """Of these shares the one of the least loss, the earliest among equals."""
    return min(shares, key=loss)
