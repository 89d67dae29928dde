"""One `com.microsoft.MoE` node for each MoE layer: which stock experts modules it can express, and how.

The node routes by itself (softmax of router logits, top-k, renormalise). Given the logarithm of the weights that the
stock router chose as logits, its renormalised softmax is those weights over their sum, whatever the router: softmax,
sigmoid, groups, corrections. The sum is multiplied in afterwards.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import CompressionError
from compressor.model.architecture import experts_modules
from compressor.model.experts import parameter_names
from exporters.onnx_activation import Activation, activation, supported

IMPLEMENTATION = "moe_compressor_onnx"  # the name under which transformers knows `experts_forward`
ROUTE = "onnx_route"  # an experts module's attribute: its `MoeNode`, or the name of a stock implementation
FALLBACKS = ("batched_mm", "grouped_mm")
SMALLEST = 1e-30  # stands for a weight of 0: its logarithm is finite in float16 too


@dataclass(frozen=True, slots=True)
class MoeNode:
    """A node of the domain com.microsoft: its type, the module's tensors after token and logits, its attributes."""

    name: str
    tensors: tuple[str | None, ...]
    attributes: tuple[tuple[str, Any], ...]
    padding: int = 0  # zeros that the node wants after each token's values, and gives after its outputs


def first_rows(experts: Any, value: Tensor) -> Tensor:
    """The first projection's weight or bias with rows g0, u0, g1, u1, ... from rows of gates, then of ups."""
    if not (experts.has_gate and experts.is_concatenated):
        return value
    half = value.shape[1] // 2
    return torch.stack([value[:, :half], value[:, half:]], 2).flatten(1, 2)


def node_tensors(experts: Any) -> dict[str, Tensor]:
    """The module's tensors as the node wants them: [E, 2I, H] or [E, I, H], [E, H, I], and the biases if any."""
    names = parameter_names(experts)  # two weights, then two biases or none
    found = {name: getattr(experts, name).detach() for name in names}
    if experts.is_transposed:
        found |= {name: found[name].transpose(1, 2) for name in names[:2]}
    found |= {name: first_rows(experts, found[name]) for name in names[::2]}
    return {name: value.contiguous() for name, value in found.items()}


def moe_node(experts: Any, kind: Activation) -> tuple[MoeNode, dict[str, Tensor]]:
    """The MoE node of a module (first weights and biases, second weights and biases), and its tensors."""
    first, second, *biases = parameter_names(experts)
    first_bias, second_bias = biases or (None, None)
    node = MoeNode("MoE", (first, first_bias, second, second_bias), tuple(kind.attributes().items()))
    return node, node_tensors(experts)


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """How the experts' weights are stored: how they are rounded before the stock model is asked, and which node reads.

    `node` sees the rounded weights in the stock layout and returns the node with its tensors by attribute name.
    """

    node: Callable[[Any, Activation], tuple[MoeNode, dict[str, Tensor]]] = moe_node
    rounded: Callable[[Any], None] | None = None  # rounds an experts module in place
    outlined: Callable[[Any], None] | None = None  # the same for one whose weights are absent, known by shape alone
    label: str = ""  # what the record calls the rounding


PLAIN = WeightFormat()


def routing_logits(index: Tensor, weights: Tensor, experts: int) -> Tensor:
    """[T, K], [T, K] -> [T, E]: logarithms of the weights; an expert chosen twice gets the sum, one with 0 nothing."""
    dense = torch.zeros(weights.shape[0], experts, dtype=torch.float32, device=weights.device)
    return dense.scatter_add(1, index, weights.float()).clamp(min=SMALLEST).log()


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What transformers calls for an experts module while it is traced: [T, H], [T, K], [T, K] -> [T, H]."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    route = getattr(self, ROUTE, FALLBACKS[0])
    if not isinstance(route, MoeNode):
        stock: Tensor = ALL_EXPERTS_FUNCTIONS[route](self, hidden_states, top_k_index, top_k_weights)
        return stock
    logits = routing_logits(top_k_index, top_k_weights, self.num_experts).to(hidden_states.dtype)
    tensors = [None if name is None else getattr(self, name) for name in route.tensors]
    while tensors[-1] is None:
        tensors.pop()
    given = nn.functional.pad(hidden_states, (0, route.padding)) if route.padding else hidden_states
    output: Tensor = torch.onnx.ops.symbolic(
        f"com.microsoft::{route.name}",
        [given, logits, *tensors],
        {"k": top_k_index.shape[-1], "normalize_routing_weights": 1, **dict(route.attributes)},
        dtype=hidden_states.dtype,
        shape=given.shape,
        version=1,
    )
    output = output[:, : hidden_states.shape[-1]] if route.padding else output
    return output * top_k_weights.sum(-1, keepdim=True).to(hidden_states.dtype)


@dataclass(frozen=True, slots=True)
class LayerRoute:
    """How one MoE layer is written: one node, or a stock implementation and why."""

    layer: str
    route: str  # MoE, QMoE, batched_mm or grouped_mm
    reason: str | None = None


def use_nodes(
    model: nn.Module, fallback: str = FALLBACKS[0], half: bool = False, weights: WeightFormat = PLAIN
) -> tuple[LayerRoute, ...]:
    """Bring every experts module into its node's layout, one after the other and in place, ready to be traced.

    The model computes nothing sensible afterwards: a traced node has no values in torch.
    """
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if fallback not in FALLBACKS:
        raise CompressionError(f"there is no fallback {fallback!r}; known are {', '.join(FALLBACKS)}")
    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    routes = []
    for name, experts in experts_modules(model):
        reason = supported(experts, half)
        kind = None if reason else activation(experts)
        if kind is None:
            setattr(experts, ROUTE, fallback)
            routes.append(LayerRoute(name, fallback, reason))
            continue
        node, tensors = weights.node(experts, kind)
        for key in parameter_names(experts):
            experts._parameters.pop(key)
        for key, value in tensors.items():
            experts.register_buffer(key, value)
        setattr(experts, ROUTE, node)
        routes.append(LayerRoute(name, node.name))
    model.set_experts_implementation(IMPLEMENTATION)  # type: ignore[operator]
    return tuple(routes)
