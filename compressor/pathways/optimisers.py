"""C3PO at test time (arXiv 2504.07964): other router logits for an item, from the pathways of neighbours of it.

Of the methods of the paper, mode finding and kernel regression mix the neighbours' pathways, neighbourhood gradient
descent (NGD) lowers their loss. L late MoE layers, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.evaluation.answers import likelihoods
from compressor.pathways.engine import PathwayModel, Plain
from compressor.pathways.kernels import (
    best_share,
    core,
    descend,
    kernel_weights,
    mean_shift,
    towards,
)
from compressor.pathways.options import PathwayOptions
from compressor.pathways.scores import logits_of

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of the way to the neighbours, that the line search tries


@dataclass(frozen=True, slots=True)
class Neighbour:
    """An item of the reference set: its pathway [L, E] in the late layers, and a plain forward with its answer."""

    pathway: Tensor
    plain: Plain | None = None  # which mode finding, and kernel regression with a given share, go without


def needs_runs(options: PathwayOptions) -> bool:
    """Whether the neighbours themselves are run, not their pathways mixed alone."""
    return options.optimizer == "ngd" or (options.optimizer == "kernel" and options.share is None)


def optimised(
    model: PathwayModel,
    own: Tensor,
    neighbours: Sequence[Neighbour],
    query: Tensor,
    points: Tensor,
    options: PathwayOptions,
) -> Tensor:
    """What to add to the late router logits [L, E] of an item with the pathway `own` [L, E].

    `query` [D] is the item's embedding, `points` [n, D] are those of its neighbours. Without neighbours, or with ones
    whose pathways are its own (ngd excepted, which looks at their loss), that is nothing.
    """
    if options.optimizer == "oracle":
        raise CompressionError("the oracle needs the item's own answer; call `oracle`")
    if not neighbours:
        return torch.zeros_like(own)
    weights = kernel_weights(options.kernel, query, points, options.bandwidth)
    pathways = torch.stack([each.pathway for each in neighbours])
    movable = core(own, options.experts)
    if options.optimizer == "ngd":
        return _descended(model, own, neighbours, weights, movable, options)
    if options.optimizer == "mode":
        share = 0.5 if options.share is None else options.share
        target = mean_shift(own, pathways, options.kernel, options.bandwidth, share, options.steps)
        return _shift(model, own, target, movable)
    share = (
        options.share
        if options.share is not None
        else best_share(
            lambda share: neighbours_loss(
                model, own, _shift(model, own, towards(own, pathways, weights, share), movable), neighbours, weights
            ),
            SHARES,
        )
    )
    return _shift(model, own, towards(own, pathways, weights, share), movable)


def oracle(model: PathwayModel, plain: Plain, right: int, own: Tensor, options: PathwayOptions) -> Tensor:
    """What to add to the late router logits [L, E] so that an item's own right answer becomes likelier.

    An upper bound for study, and no method: it is told the answer. Aimed at a wrong answer it lifts that just as well.
    """
    movable = core(own, options.experts)

    def gradient(place: Tensor) -> Tensor:
        moved = place.requires_grad_()
        loss = -likelihoods(model.again(plain, moved), plain.rows)[right]
        return _gradient(loss, moved) * movable

    return descend(gradient, torch.zeros_like(own), options.steps, options.rate)


def _descended(
    model: PathwayModel,
    own: Tensor,
    neighbours: Sequence[Neighbour],
    weights: Tensor,
    movable: Tensor,
    options: PathwayOptions,
) -> Tensor:
    """Neighbourhood gradient descent: what lowers the neighbours' loss if all of them take the item's pathway."""

    def gradient(place: Tensor) -> Tensor:
        return neighbours_gradient(model, own, place, neighbours, weights) * movable

    return descend(gradient, torch.zeros_like(own), options.steps, options.rate)


def neighbours_gradient(
    model: PathwayModel, own: Tensor, place: Tensor, neighbours: Sequence[Neighbour], weights: Tensor
) -> Tensor:
    """The gradient [L, E] of the neighbours' loss, as `neighbours_loss` has it, with respect to `place`."""
    total = torch.zeros_like(own)
    for neighbour, weight in zip(neighbours, weights.tolist(), strict=True):  # one graph in memory at a time
        moved = place.detach().clone().requires_grad_()
        total += weight * _gradient(_neighbour_loss(model, own, moved, neighbour), moved)
    return total


@torch.no_grad()
def neighbours_loss(
    model: PathwayModel, own: Tensor, place: Tensor, neighbours: Sequence[Neighbour], weights: Tensor
) -> float:
    """The weighted loss of the neighbours, -log p(answer | prompt), under the pathway `own` moved by `place` [L, E]."""
    losses = torch.stack([_neighbour_loss(model, own, place, neighbour) for neighbour in neighbours])
    return float((weights.to(losses) * losses).sum())


def _neighbour_loss(model: PathwayModel, own: Tensor, place: Tensor, neighbour: Neighbour) -> Tensor:
    """A neighbour on the pathway of another item: its routers get that one's logits, moved by `place`."""
    assert neighbour.plain is not None
    shared = _logits(model, own) - _logits(model, neighbour.pathway) + place
    return -likelihoods(model.again(neighbour.plain, shared), neighbour.plain.rows)[0]


def _gradient(loss: Tensor, place: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, place)
    return found.detach()


def _logits(model: PathwayModel, pathway: Tensor) -> Tensor:
    return torch.stack([logits_of(weights, score) for weights, score in zip(pathway, model.late_scores, strict=True)])


def _shift(model: PathwayModel, own: Tensor, target: Tensor, movable: Tensor) -> Tensor:
    """What takes the movable experts' logits from one pathway to the other; nothing, bit for bit, where both agree."""
    return (_logits(model, target) - _logits(model, own)) * movable
