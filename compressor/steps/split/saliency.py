"""Which neurons the model's loss hangs on: second-order saliencies from one backward pass over the text.

HEAPr, Li et al. 2025, arXiv:2509.22299: neuron k of an expert puts out o_k = z_k d_k, z_k what enters the down
projection and d_k its column. Without it the loss rises by about s_k = 1/2 E[z_k^2] d_k' G d_k, with G = E[g g'] of the
gradient g of the loss at the expert's output, means over the expert's tokens. d_k' G d_k is E[(g . d_k)^2], so G [H, H]
is never made. With tokens drawn from the model's own distribution in place of the text's, G is the Hessian of the KL
divergence from the model to itself without the neuron.
E experts, I neurons of each, H hidden, n tokens of an expert.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from compressor.devices import as_float64, float64_device
from compressor.model.experts import Watch, expert_parameters, intermediate, projections, routed, width_of
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.model.streaming import ReversePass, ReverseVisitor
from compressor.progress import Progress
from compressor.recipe.plan import KL


@dataclass(slots=True)
class _Sums:
    """Of a layer's experts: z^2 and (g . d)^2 of each neuron over its tokens, [E, I] float64, and tokens [E]."""

    activity: Tensor
    gradient: Tensor
    tokens: Tensor

    @property
    def saliency(self) -> Tensor:
        """[E, I] float64; 0 for an expert that no token reached."""
        return self.activity * self.gradient / (2 * self.tokens.clamp(min=1).square()[:, None])


@dataclass(slots=True)
class _Sensing(ReverseVisitor):
    progress: Progress
    sums: dict[str, _Sums] = field(default_factory=dict)  # by experts module
    watches: list[Watch] = field(default_factory=list)
    calls: dict[str, tuple[Tensor, Tensor, Tensor]] = field(default_factory=dict)  # inputs, choices, gate weights

    def replaying(self, unit: str, batch: int) -> None:
        for layer in self.at.moe_layers:
            called = partial(self._called, layer)
            watch = Watch(self.at.model, layer, on_experts=called, on_output=partial(self._put_out, layer))
            self.watches.append(watch.attach())

    def returned(self, unit: str, batch: int) -> None:
        for watch in self.watches:
            watch.detach()
        self.watches = []

    def done(self, unit: str) -> None:
        self.progress.advance(unit)

    def _called(self, layer: MoeLayer, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        self.calls[layer.name] = hidden.detach(), index, weights.detach()

    def _put_out(self, layer: MoeLayer, hidden: Tensor, output: Tensor) -> None:
        call = self.calls.pop(layer.name)
        if output.requires_grad:
            output.register_hook(lambda gradient: self._came_back(layer, *call, gradient))

    @torch.no_grad()
    def _came_back(self, layer: MoeLayer, hidden: Tensor, index: Tensor, weights: Tensor, gradient: Tensor) -> None:
        experts = self.at.model.get_submodule(layer.name)
        if layer.name not in self.sums:
            device = float64_device(experts.down_proj.device)
            shape = (layer.experts, width_of(experts))
            sizes = (shape, shape, shape[:1])
            self.sums[layer.name] = _Sums(*(torch.zeros(size, dtype=torch.float64, device=device) for size in sizes))
        sums = self.sums[layer.name]
        for expert, rows, slots in routed(weights, index):
            inner = intermediate(experts, expert_parameters(experts, expert), hidden[rows])
            own = gradient.reshape(len(hidden), -1)[rows].float() * weights[rows, slots, None].float()
            sums.activity[expert] += as_float64(inner).square().sum(0)
            sums.gradient[expert] += as_float64(own @ projections(experts, expert).down.float()).square().sum(0)
            sums.tokens[expert] += len(rows)


def saliencies(
    model: OpenModel, batches: Sequence[Tensor], way: str, progress: Progress, seed: int = 0
) -> dict[str, Tensor]:
    """s_k of every neuron, [E, I] float64, by experts module; layers are loaded one at a time, forward and back.

    The loss is the next token's cross-entropy on token ids [B, L], or with `KL` that of tokens which the model draws.
    Raises `CompressionError` where gradients cannot be taken layer by layer.
    """

    def loss(batch: int, output: Any) -> Tensor:
        logits = output.logits.flatten(0, 1).float()
        if way == KL:
            generator = torch.Generator().manual_seed(seed + batch)
            wanted = torch.multinomial(logits.detach().softmax(-1).cpu(), 1, generator=generator)[:, 0]
        else:
            following = batches[batch].roll(-1, dims=1)
            following[:, -1] = -100  # nothing follows the last token
            wanted = following.flatten()
        return cross_entropy(logits, wanted.to(logits.device), reduction="sum")

    progress.start("measure neurons, backward", len(model.architecture.units))
    sensing = _Sensing(progress)
    ReversePass(model, batches).run(loss, sensing)
    return {name: sums.saliency.cpu() for name, sums in sensing.sums.items()}
