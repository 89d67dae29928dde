"""The order in which an expert's neurons are dealt out to its parts: [I] each, in S runs of equal length.

The first run holds what matters most, so that pruning experts afterwards takes the last ones. Within a run neurons
stand as they did, so that a plan need only tell the part of each.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from compressor.recipe.plan import CLUSTERS, ENERGY
from compressor.steps.split.neurons import Neurons

WAYS = (ENERGY, CLUSTERS)


def by_energy(energy: Tensor) -> Tensor:
    """Neurons by falling energy, the lower number first of equals: [..., I] -> [..., I]."""
    return energy.argsort(dim=-1, descending=True, stable=True)


def by_clusters(energy: Tensor, activity: Tensor, parts: int, seed: int = 0) -> Tensor:
    """Neurons that do alike on the same tokens beside each other, [I]: `parts` clusters of equal size.

    `activity` [I, n] is what each neuron adds to its tokens, up to direction; of it the size on each token, normed to
    length 1, is clustered by k-means. A neuron goes to the nearest centre that has room, those first that would lose
    most by another one. Clusters and the neurons in them stand by falling energy. Without tokens it is `by_energy`.
    """
    from sklearn.cluster import KMeans

    points = activity.abs() / activity.norm(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    if activity.shape[1] == 0 or len(points.unique(dim=0)) < parts:
        return by_energy(energy)
    fitted = KMeans(parts, n_init=3, random_state=seed).fit(points.double().numpy())
    labels = balanced(torch.from_numpy(np.asarray(fitted.transform(points.double().numpy()))))
    order = by_energy(energy)
    weight = torch.zeros(parts, dtype=energy.dtype).index_add_(0, labels, energy)
    return torch.cat([order[labels[order] == cluster] for cluster in by_energy(weight)])


def balanced(distances: Tensor) -> Tensor:
    """Clusters [I] of equal size from distances [I, S]: the nearest that has room, by falling loss of the next one."""
    count, parts = distances.shape
    best = distances.sort(dim=1).values
    room, labels = [count // parts] * parts, torch.empty(count, dtype=torch.long)
    for neuron in by_energy(best[:, 1] - best[:, 0]).tolist():
        for cluster in distances[neuron].argsort(stable=True).tolist():
            if room[cluster]:
                room[cluster] -= 1
                labels[neuron] = cluster
                break
    return labels


def order_of(neurons: Neurons, parts: int, way: str, seed: int = 0, block: int = 1) -> Tensor:
    """The order of a layer's neurons, [E, I] int32; `block` neighbours stay together, and count as one."""
    if block > 1:
        blocks = order_of(_in_blocks(neurons, block), parts, way, seed)
        return (block * blocks[..., None] + torch.arange(block, dtype=torch.int32)).flatten(1)
    if way == ENERGY:
        order = by_energy(neurons.energy)
    else:
        pairs = zip(neurons.energy, neurons.activity, strict=True)
        order = torch.stack([by_clusters(energy, activity, parts, seed) for energy, activity in pairs])
    return order_of_parts(parts_of(order, parts))


def _in_blocks(neurons: Neurons, block: int) -> Neurons:
    """Blocks of neighbours as neurons: the sum of their energies, and the norm of what they do on each token."""
    activity = tuple(each.unflatten(0, (-1, block)).norm(dim=1) for each in neurons.activity)
    return replace(neurons, energy=neurons.energy.unflatten(1, (-1, block)).sum(-1), activity=activity)


def parts_of(order: Tensor, parts: int) -> Tensor:
    """The part that each neuron goes to, from an order cut into equal runs: [E, I] -> [E, I] int32."""
    run = torch.arange(order.shape[1]) // (order.shape[1] // parts)
    return torch.empty_like(order, dtype=torch.int32).scatter_(1, order.long(), run.int().expand_as(order))


def order_of_parts(dealt: Tensor) -> Tensor:
    """The order that deals neurons out so, those of a part ascending: [E, I] -> [E, I] int32."""
    return dealt.argsort(dim=1, stable=True).int()
