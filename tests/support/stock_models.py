"""The stock model of fewer experts, filled from a larger one, and what its modules put out."""

from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import silu

from compressor.model.moe_layer import MoeLayer
from compressor.recipe.plan import LayerPlan
from tests.support import surgery_reference, zoo
from tests.support.opened_models import Calls


def small_model(name: str, count: int) -> nn.Module:
    """The family's stock model with so many experts and any weights."""
    config = zoo.configure(name)
    zoo.set_count(config, zoo.family(name).count_field, count)
    small: nn.Module = getattr(transformers, zoo.family(name).model_class)(config).eval()
    return small


def fill(small: nn.Module, stock: Any, layer: MoeLayer, plan: LayerPlan) -> None:
    """Make the small model's block the planned one."""
    block = {key: value for key, value in stock.state_dict().items() if key.startswith(f"{layer.block}.")}
    planned = {"module": layer.name, "experts": layer.experts, "groups": [asdict(group) for group in plan.groups]}
    surgery_reference.fill(small, block, [planned])


def stock_small(name: str, stock: Any, layer: MoeLayer, plan: LayerPlan) -> nn.Module:
    """The stock model of N experts whose block is the planned one."""
    small = small_model(name, len(plan.groups))
    fill(small, stock, layer, plan)
    return small


@dataclass(slots=True)
class Small:
    """Stock models of all sizes that were asked for, run on what a plain forward of the large one called."""

    name: str
    stock: Any
    built: dict[int, nn.Module]

    @classmethod
    def of(cls, name: str, stock: Any) -> "Small":
        return cls(name, stock, {})

    @torch.no_grad()
    def run(self, layer: MoeLayer, plan: LayerPlan, calls: Calls) -> tuple[Tensor, Tensor, Tensor]:
        """Gate weights [T, K], slots [T, K] and the experts module's outputs [T, H] of the planned layer."""
        count = len(plan.groups)
        if count not in self.built:
            self.built[count] = small_model(self.name, count)
        small = self.built[count]
        fill(small, self.stock, layer, plan)
        large, block = self.stock.get_submodule(layer.block), small.get_submodule(layer.block)
        own = {id(value): key for key, value in (*large.named_parameters(), *large.named_buffers())}
        found = []
        for (args, kwargs), (hidden, _, _) in zip(calls.router_arguments, calls.experts_arguments, strict=True):
            args = tuple(getattr(block, own[id(a)]) if id(a) in own else a for a in args)
            _, weights, index, *_ = small.get_submodule(layer.router)(*args, **kwargs)
            weights, index = weights.reshape(len(hidden), -1), index.reshape(len(hidden), -1)
            found.append((weights, index, small.get_submodule(layer.name)(hidden, index, weights)))
        weights, index, outputs = (torch.cat(parts) for parts in zip(*found, strict=True))
        return weights, index, outputs

    def error(self, layer: MoeLayer, plan: LayerPlan, calls: Calls) -> float:
        """||y - y'||^2 / ||y||^2 over all tokens."""
        before = torch.cat(calls.experts_outputs).double()
        after = self.run(layer, plan, calls)[2].double()
        return float((after - before).square().sum() / before.square().sum())


def by_slot(weights: Tensor, index: Tensor, count: int) -> Tensor:
    """Gate weights of every slot, whatever the order of the choices: [T, K], [T, K] -> [T, N]."""
    return torch.zeros(len(weights), count).scatter_add_(1, index, weights)


def activations(experts: Any, expert: int, x: Tensor) -> Tensor:
    """[n, I] by each family's own formula, from the fused tensors."""
    if not experts.has_gate:
        return torch.relu(x @ experts.up_proj[expert].T).square()
    fused = experts.gate_up_proj[expert]
    if experts.is_transposed:  # gpt_oss: interleaved, clamped, one added to up
        inner = x @ fused + experts.gate_up_proj_bias[expert]
        gate, up = inner[:, 0::2].clamp(max=experts.limit), inner[:, 1::2].clamp(-experts.limit, experts.limit)
        return (up + 1) * gate * torch.sigmoid(experts.alpha * gate)
    gate, up = (x @ fused.T).chunk(2, dim=-1)
    if hasattr(experts, "limit"):  # deepseek_v4
        gate, up = gate.clamp(max=experts.limit), up.clamp(-experts.limit, experts.limit)
    activate = torch.nn.functional.gelu if "Gemma4" in type(experts).__name__ else silu
    return (activate(gate, approximate="tanh") if activate is not silu else silu(gate)) * up  # type: ignore[call-arg]
