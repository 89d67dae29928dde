"""The order in which an expert's neurons are dealt out to its parts: [I] each, in S runs of equal length.

The first run holds what matters most, so that pruning experts afterwards takes the last ones.
"""

import hashlib
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from compressor.splitting.neurons import Neurons

ENERGY, CLUSTERS = "energy", "clusters"
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


def order_of(neurons: Neurons, parts: int, way: str, seed: int = 0) -> Tensor:
    """The order of a layer's neurons, [E, I] int32."""
    if way == ENERGY:
        return by_energy(neurons.energy).int()
    pairs = zip(neurons.energy, neurons.activity, strict=True)
    return torch.stack([by_clusters(energy, activity, parts, seed) for energy, activity in pairs]).int()


def digest_of_orders(orders: Iterable[tuple[str, Tensor]]) -> str:
    """SHA-256 of every layer's name and order."""
    digest = hashlib.sha256()
    for name, order in orders:
        digest.update(name.encode() + b"\0" + order.int().contiguous().numpy().tobytes())
    return digest.hexdigest()
