"""What each neuron of each expert does for the layer's output: measured on tokens, or read from the weights.

E experts, I neurons of each, H hidden, n tokens that were sent to an expert.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.memory import give_back
from compressor.model.architecture import MoeLayer
from compressor.model.experts import Watch, expert_parameters, intermediate, projections, routed, width_of
from compressor.model.opened import OpenModel
from compressor.model.streaming import LayerVisitor, Pass
from compressor.progress import Progress

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
    found = torch.empty(int(experts.num_experts), width_of(experts), dtype=torch.float64)
    for expert in range(len(found)):
        own = projections(experts, expert)
        product = own.up.double().norm(dim=1) * own.down.double().norm(dim=0)
        found[expert] = (product if own.gate is None else product * own.gate.double().norm(dim=1)).cpu()
    return found


class Meter:
    """Sums what the neurons of one loaded layer do while batches pass it; `sample` keeps their activity as well.

    The energy of neuron i is the sum over its expert's tokens of g^2 z_i^2 |down_i|^2: g is the token's gate weight, z
    enters the down projection, so it is the squared norm of what the neuron adds to the output.
    """

    def __init__(self, model: Any, layer: MoeLayer, sample: bool) -> None:
        self.layer, self.experts, self.sample = layer, model.get_submodule(layer.name), sample
        experts = self.experts
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
            if self.sample and (room := SAMPLE - sum(map(len, kept))) > 0:
                kept.append(gated[:room].float().cpu())

    @torch.no_grad()
    def finish(self) -> Neurons:
        """The measures of the layer; an expert that no token reached has those of its weights."""
        self.watch.detach()
        by_weights, found = energy_of_weights(self.experts), self.sums.cpu()
        activity = []
        for expert in range(len(found)):
            lengths = projections(self.experts, expert).down.double().norm(dim=0).cpu()
            found[expert] *= lengths.square()
            kept = torch.cat(self.kept[expert]) if self.kept[expert] else torch.zeros(0, len(lengths))
            activity.append((kept * lengths.float()).T)
        reached = found.sum(1, keepdim=True) > 0
        return Neurons(self.layer, torch.where(reached, found, by_weights), tuple(activity) if self.sample else ())


class _Watching(LayerVisitor):
    def __init__(self, sample: bool) -> None:
        self.sample, self.meters = sample, list[Meter]()

    def loaded(self, unit: str) -> None:
        self.meters = [Meter(self.at.model, layer, self.sample) for layer in self.at.moe_layers]


def measured(
    model: OpenModel, batches: Sequence[Tensor] | None, progress: Progress, sample: bool, seed: int = 0
) -> Iterator[Neurons]:
    """The neurons of every MoE layer in order, one layer in memory at a time; without data, of the weights alone."""
    layers = model.architecture.layers
    if batches is None:
        progress.start("measure neurons", len(layers))
        for layer in layers:
            model.partial.load(tensor.key for tensor in layer.tensors if tensor.key.startswith(f"{layer.name}."))
            yield Neurons(layer, energy_of_weights(model.partial.model.get_submodule(layer.name)))
            model.partial.release(layer.block)
            give_back()
            progress.advance(layer.name)
        return
    watching = _Watching(sample)
    with closing(Pass(model, batches, progress, "measure neurons", seed).layers(watching)) as passed:
        for _ in passed:
            for meter in watching.meters:
                yield meter.finish()
            watching.meters = []  # before their layer's memory is given back
