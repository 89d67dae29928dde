"""What each neuron of each expert does for the layer's output, and the order in which neurons go to sub-experts.

E experts, I neurons of each, H hidden, S parts, n tokens that were sent to an expert. An order [I] is S runs of equal
length. The first run holds what matters most, so that pruning experts afterwards takes the last ones. Within a run
neurons stand as they did, so that a plan need only say the part of each.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compressor.memory import give_back
from compressor.model.architecture import MoeLayer
from compressor.model.experts import Watch, expert_parameters, intermediate, projections, routed, width_of
from compressor.model.opened import OpenModel
from compressor.model.streaming import LayerVisitor, Pass
from compressor.progress import Progress
from compressor.recipe.plan import ENERGY

SAMPLE = 256  # tokens of each expert whose activations are kept


@dataclass(frozen=True, slots=True)
class Neurons:
    """A layer's neurons: energies [E, I] float64, and for each expert what its neurons did [I, n], float32."""

    layer: MoeLayer
    energy: Tensor
    activity: tuple[Tensor, ...] = ()


@torch.no_grad()
def energy_of_weights(experts: Any) -> Tensor:
    """|gate row| * |up row| * |down column| of every neuron, [E, I] float64; without a gate, of the other two."""
    energy = torch.empty(int(experts.num_experts), width_of(experts), dtype=torch.float64)
    for expert in range(len(energy)):
        own = projections(experts, expert)
        product = own.up.double().norm(dim=1) * own.down.double().norm(dim=0)
        energy[expert] = (product if own.gate is None else product * own.gate.double().norm(dim=1)).cpu()
    return energy


class Meter:
    """Sums what the neurons of one loaded layer do while batches pass it; `sample` keeps their activity as well.

    The energy of neuron i is the sum over its expert's tokens of g^2 z_i^2 |down_i|^2: g is the token's gate weight, z
    enters the down projection, so it is the squared norm of what the neuron adds to the output.
    """

    def __init__(self, model: Any, layer: MoeLayer, sample: bool) -> None:
        self.layer, self.sample = layer, sample
        self.experts = experts = model.get_submodule(layer.name)
        self.sums = torch.zeros(layer.experts, width_of(experts), dtype=torch.float64, device=experts.down_proj.device)
        self.kept: list[list[Tensor]] = [[] for _ in range(layer.experts)]
        self.watch = Watch(model, layer, on_experts=self._called).attach()

    @torch.no_grad()
    def _called(self, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        for expert, rows, slots in routed(weights, index):
            inner = intermediate(self.experts, expert_parameters(self.experts, expert), hidden[rows])
            gated = inner.double() * weights[rows, slots, None].double()
            self.sums[expert] += gated.square().sum(0)
            kept = self.kept[expert]
            if self.sample and (missing := SAMPLE - sum(map(len, kept))) > 0:
                kept.append(gated[:missing].float().cpu())

    @torch.no_grad()
    def finish(self) -> Neurons:
        """The measures of the layer; an expert that no token reached has those of its weights."""
        self.watch.detach()
        energy, activity = self.sums.cpu(), list[Tensor]()
        for expert, kept in enumerate(self.kept):
            lengths = projections(self.experts, expert).down.double().norm(dim=0).cpu()
            energy[expert] *= lengths.square()
            sampled = torch.cat(kept) if kept else torch.zeros(0, len(lengths))
            activity.append((sampled * lengths.float()).T)
        reached = energy.sum(1, keepdim=True) > 0
        energy = torch.where(reached, energy, energy_of_weights(self.experts))
        return Neurons(self.layer, energy, tuple(activity) if self.sample else ())


class _Metering(LayerVisitor):
    def __init__(self, sample: bool) -> None:
        self.sample, self.meters = sample, list[Meter]()

    def loaded(self, unit: str) -> None:
        self.meters = [Meter(self.at.model, layer, self.sample) for layer in self.at.moe_layers]


def measured(
    model: OpenModel, batches: Sequence[Tensor] | None, progress: Progress, sample: bool, seed: int = 0
) -> Iterator[Neurons]:
    """The neurons of every MoE layer in order, one layer in memory at a time; without data, of the weights alone."""
    if batches is None:
        layers = model.architecture.layers
        progress.start("measure neurons", len(layers))
        for layer in layers:
            model.partial.load(tensor.key for tensor in layer.tensors if tensor.key.startswith(f"{layer.name}."))
            yield Neurons(layer, energy_of_weights(model.partial.model.get_submodule(layer.name)))
            model.partial.release(layer.block)
            give_back()
            progress.advance(layer.name)
        return
    metering = _Metering(sample)
    with closing(Pass(model, batches, progress, "measure neurons", seed).layers(metering)) as passed:
        for _ in passed:
            yield from (meter.finish() for meter in metering.meters)
            metering.meters = []  # before their layer's memory is given back


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
    if block > 1:  # blocks as neurons: the sum of their energies, and the norm of what they do on each token
        activity = tuple(each.unflatten(0, (-1, block)).norm(dim=1) for each in neurons.activity)
        summed = replace(neurons, energy=neurons.energy.unflatten(1, (-1, block)).sum(-1), activity=activity)
        blocks = order_of(summed, parts, way, seed)
        return (block * blocks[..., None] + torch.arange(block, dtype=torch.int32)).flatten(1)
    if way == ENERGY:
        order = by_energy(neurons.energy)
    else:
        pairs = zip(neurons.energy, neurons.activity, strict=True)
        order = torch.stack([by_clusters(energy, activity, parts, seed) for energy, activity in pairs])
    return order_of_parts(parts_of(order, parts))


def parts_of(order: Tensor, parts: int) -> Tensor:
    """The part that each neuron goes to, from an order cut into equal runs: [E, I] -> [E, I] int32."""
    run = torch.arange(order.shape[1]) // (order.shape[1] // parts)
    return torch.empty_like(order, dtype=torch.int32).scatter_(1, order.long(), run.int().expand_as(order))


def order_of_parts(dealt: Tensor) -> Tensor:
    """The order that deals neurons out so, those of a part ascending: [E, I] -> [E, I] int32."""
    return dealt.argsort(dim=1, stable=True).int()
