"""One `com.microsoft.MoE` or `QMoE` node for each MoE layer: which stock experts modules it can
express, and how.

The node routes by itself (softmax of router logits, top-k, renormalise). Given the logarithm of the
weights that the stock router chose as logits, its renormalised softmax is those weights over their
sum, whatever the router: softmax, sigmoid, groups, corrections. The sum is multiplied in
afterwards.

In a QMoE node the experts have 8 or 4 bits and everything else is as it was: the node dequantises 8
bits per row itself, and at accuracy level 0 4 bits in blocks too. So the stock model with its
rounded weights computes what the node does."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.model.architecture import experts_modules
from compressor.model.experts import parameter_names
from exporters.onnx.quantise import Scheme, codes, pack, rounded

IMPLEMENTATION = "moe_compressor_onnx"  # the name under which transformers knows `experts_forward`
ROUTE = "onnx_route"  # an experts module's attribute: its `MoeNode`
# an experts module's attribute: scales [E, rows, B] of each rounded weight, rows in stock order
SCALES = "onnx_scales"
FALLBACK = "batched_mm"  # the stock implementation of layers that the node cannot express
SMALLEST = 1e-30  # stands for a weight of 0: its logarithm is finite in float16 too


Attributes = dict[str, Any]  # of a node


KINDS = {  # the node's names of activation functions
    "ReLU": "relu",
    "GELUTanh": "gelu",  # the runtime's own approximation
    "NewGELUActivation": "gelu",
    "FastGELUActivation": "gelu",
    "AccurateGELUActivation": "gelu",
    "SiLUActivation": "silu",
    "SiLU": "silu",
    "silu": "silu",  # the function
    "LinearActivation": "identity",
}
# of stock experts with a gate other than act_fn(g) * u, the one of SwiGLU with a limit and with
# other constants: their attributes with alpha and the limit, and beta
GATES: Mapping[str, tuple[str | None, float, str | None]] = {
    "BeamExperts": (None, 0.0, None),
    "DeepseekV4Experts": (None, 0.0, "limit"),
    "Glm5NextTextExperts": (None, 0.0, "swiglu_limit"),
    "GptOssExperts": ("alpha", 1.0, "limit"),
    "HYV4Experts": (None, 0.0, "swiglu_limit"),
    "MiniMaxM3VLExperts": ("swiglu_alpha", 1.0, "swiglu_limit"),
    "OpenAIPrivacyFilterExperts": ("alpha", 1.0, "limit"),
}


def activation(experts: Any) -> Attributes | None:
    """Return the attributes of the activation between the node's projections that does what the
    stock module's does; None where the node has no such activation.

    SwiGLU is g * sigmoid(alpha * g) * (u + beta) on rows g0, u0, g1, u1, ...; with a limit, g is at
    most that, and u lies within plus and minus it.
    """
    from transformers.integrations.moe import _default_apply_gate

    act = getattr(experts, "act_fn", None)
    name = type(experts).__name__
    kind = KINDS.get(getattr(act, "__name__", type(act).__name__))
    if not experts.has_gate:
        return None if kind is None else {"activation_type": kind}
    is_default = type(experts)._apply_gate is _default_apply_gate
    if (act is not None and kind != "silu") or not (is_default or name in GATES):
        return None
    alpha, beta, limit = (None, 0.0, None) if is_default else GATES[name]
    attributes: Attributes = {
        "activation_type": "swiglu",
        "swiglu_fusion": 1,
        "activation_alpha": 1.0 if alpha is None else getattr(experts, alpha),
        "activation_beta": beta,
    }
    if limit is not None and getattr(experts, limit) is not None:
        attributes["swiglu_limit"] = getattr(experts, limit)
    return attributes


def supported(experts: Any) -> str | None:
    """Return the reason why the MoE node cannot express a stock experts module; None if it can."""
    if getattr(experts, "has_post_expert_norm", False):
        return "it normalises every expert's output, for which the MoE node has no place"
    if activation(experts) is None:
        name = type(experts.act_fn).__name__ if hasattr(experts, "act_fn") else "its own gate"
        gated = "gated " if experts.has_gate else ""
        return f"the MoE node has no {gated}activation like {name} of {type(experts).__name__}"
    return None


@frozen
class MoeNode:
    """A node of the domain com.microsoft: its type, the module's tensors after token and logits,
    its attributes."""

    name: str
    tensors: tuple[str | None, ...]
    attributes: Mapping[str, Any]
    # zeros that the node wants after each token's values, and gives after its outputs
    padding: int = 0


def first_rows(experts: Any, value: Tensor) -> Tensor:
    """The first projection's weight or bias with rows g0, u0, g1, u1, ... from rows of gates, then
    of ups."""
    if not (experts.has_gate and experts.is_concatenated):
        return value
    half = value.shape[1] // 2
    return torch.stack([value[:, :half], value[:, half:]], 2).flatten(1, 2)


def moe_node(experts: Any, scheme: Scheme | None = None) -> tuple[MoeNode, dict[str, Tensor]]:
    """The node of a supported module, QMoE if `round_experts` has rounded it, and its tensors by
    name.

    For each projection these are weight, scales if rounded, and bias. A QMoE node has zeros added
    so that both widths are whole blocks: packed codes [E, 2I, H] or [E, I, H] and [E, H, I] (half
    as wide for 4 bits), scales float32 [E, rows] or [E, rows, B] by the weight's name and
    `_scales`. Outputs of the first projection's added rows meet the second's added columns, which
    are 0; outputs of the second's added rows are cut off."""
    attributes = activation(experts)
    assert attributes is not None
    names = parameter_names(experts)  # two weights, then two biases or none
    first, second, *biases = names
    first_bias, second_bias = biases or (None, None)
    # as the node wants them: [E, 2I, H] or [E, I, H], [E, H, I], and the biases
    plain = {name: getattr(experts, name).detach() for name in names}
    if experts.is_transposed:
        plain |= {name: plain[name].transpose(1, 2) for name in (first, second)}
    plain |= {name: first_rows(experts, plain[name]) for name in names[::2]}
    plain = {name: value.contiguous() for name, value in plain.items()}
    if scheme is None or not hasattr(experts, SCALES):
        return MoeNode("MoE", (first, first_bias, second, second_bias), attributes), plain
    attributes |= {"expert_weight_bits": scheme.bits, "weights_prepacked": 0}
    if scheme.block is not None:
        attributes |= {"block_size": scheme.block, "accuracy_level": 0}
    scales = getattr(experts, SCALES)
    hidden, inner = (scheme.padding(plain[name].shape[-1]) for name in (first, second))
    inner_rows = inner * (2 if experts.has_gate else 1)
    tensors = {}
    for name, columns, rows in ((first, hidden, inner_rows), (second, inner, hidden)):
        scale = first_rows(experts, scales[name]) if name == first else scales[name]
        unpacked = codes(plain[name].float(), scale, scheme)
        tensors[name] = pack(nn.functional.pad(unpacked, (0, columns, 0, rows)), scheme)
        scale = nn.functional.pad(scale, (0, 0, 0, rows), value=1)
        tensors[f"{name}_scales"] = scale if scheme.block else scale[..., 0]
    for bias, rows in zip(biases, (inner_rows, hidden), strict=False):
        tensors[bias] = nn.functional.pad(plain[bias], (0, rows))
    inputs = (first, f"{first}_scales", first_bias, second, f"{second}_scales", second_bias)
    node = MoeNode("QMoE", inputs, attributes, hidden)
    return node, {name: value.contiguous() for name, value in tensors.items()}


@torch.no_grad()
def round_experts(experts: Any, scheme: Scheme) -> None:
    """Replace a module's weights by the rounded ones, one expert at a time; the scales are kept
    with the module.

    A module that no node can express is left as it is. Of weights that are absent, the scales are
    absent too."""
    if supported(experts) is not None:
        return
    kept = {}
    for name in parameter_names(experts)[:2]:
        old = getattr(experts, name)
        if isinstance(old, FakeTensor):
            rows = old.transpose(1, 2) if experts.is_transposed else old  # [E, outputs, inputs]
            width = rows.shape[-1]
            count = (width + scheme.padding(width)) // (scheme.block or width)
            kept[name] = rows.new_empty(*rows.shape[:2], count, dtype=torch.float32)
            continue
        # new memory: a loaded tensor may lie in a file that is only read
        new = torch.empty_like(old)
        scales = []
        for expert, (weight, target) in enumerate(zip(old, new, strict=True)):
            # [outputs, inputs]
            rows, filled = (weight.T, target.T) if experts.is_transposed else (weight, target)
            if not bool(torch.isfinite(rows).all()):
                raise CompressionError(
                    f"{name} of expert {expert} holds a value that is not finite, so it has no "
                    "scale; export the checkpoint with --quantize none"
                )
            value, expert_scales = rounded(rows, scheme)
            filled.copy_(value)
            scales.append(expert_scales)
        experts._parameters[name] = torch.nn.Parameter(new, requires_grad=False)
        kept[name] = torch.stack(scales)
    setattr(experts, SCALES, kept)


def routing_logits(index: Tensor, weights: Tensor, experts: int) -> Tensor:
    """[T, K], [T, K] -> [T, E]: logarithms of the weights; an expert chosen twice gets the sum, one
    with 0 nothing."""
    dense = torch.zeros(weights.shape[0], experts, dtype=torch.float32, device=weights.device)
    return dense.scatter_add(1, index, weights.float()).clamp(min=SMALLEST).log()


def experts_forward(
    self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """Stand in for an experts module while it is traced: [T, H], [T, K], [T, K] -> [T, H]."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    route: MoeNode | None = getattr(self, ROUTE, None)
    if route is None:
        stock: Tensor = ALL_EXPERTS_FUNCTIONS[FALLBACK](
            self, hidden_states, top_k_index, top_k_weights
        )
        return stock
    logits = routing_logits(top_k_index, top_k_weights, self.num_experts).to(hidden_states.dtype)
    tensors = [None if name is None else getattr(self, name) for name in route.tensors]
    while tensors[-1] is None:
        tensors.pop()
    inputs = hidden_states
    if route.padding:
        inputs = nn.functional.pad(hidden_states, (0, route.padding))
    output: Tensor = torch.onnx.ops.symbolic(
        f"com.microsoft::{route.name}",
        [inputs, logits, *tensors],
        {"k": top_k_index.shape[-1], "normalize_routing_weights": 1, **route.attributes},
        dtype=hidden_states.dtype,
        shape=inputs.shape,
        version=1,
    )
    if route.padding:
        output = output[:, : hidden_states.shape[-1]]
    return output * top_k_weights.sum(-1, keepdim=True).to(hidden_states.dtype)


@frozen
class LayerRoute:
    """The form of one MoE layer: one node, or a stock implementation and why."""

    layer: str
    route: str  # MoE, QMoE or batched_mm
    reason: str | None = None


def use_nodes(model: nn.Module, scheme: Scheme | None = None) -> tuple[LayerRoute, ...]:
    """Bring every experts module into its node's layout in place, to be traced: a node has no
    values in torch."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, experts_forward)
    routes = []
    for name, experts in experts_modules(model):
        reason = supported(experts)
        if reason is not None:
            routes.append(LayerRoute(name, FALLBACK, reason))
            continue
        node, tensors = moe_node(experts, scheme)
        for key in parameter_names(experts):
            experts._parameters.pop(key)
        for key, value in tensors.items():
            experts.register_buffer(key, value)
        setattr(experts, ROUTE, node)
        routes.append(LayerRoute(name, node.name))
    model.set_experts_implementation(IMPLEMENTATION)  # type: ignore[operator]
    return tuple(routes)
