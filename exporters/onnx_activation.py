"""Which activation a stock experts module has, of those that the `com.microsoft.MoE` node knows: found by trying."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from compressor.errors import reason_of

PROBES = 129
FAR = 1e4  # beyond any limit on a gate


@dataclass(frozen=True, slots=True)
class Activation:
    """What the node computes between its projections; of `swiglu`: g * sigmoid(alpha * g) * (u + beta).

    With a limit, g is at most `limit` and u lies within plus and minus `limit`.
    """

    kind: str
    alpha: float = 1.0
    beta: float = 0.0
    limit: float | None = None

    @property
    def is_gated(self) -> bool:
        """Whether the first projection makes gate and up values."""
        return self.kind == "swiglu"

    def attributes(self) -> dict[str, Any]:
        """The node's attributes for this activation."""
        found: dict[str, Any] = {"activation_type": self.kind}
        if self.is_gated:  # rows g0, u0, g1, u1, ...
            found |= {"swiglu_fusion": 1, "activation_alpha": self.alpha, "activation_beta": self.beta}
        return found if self.limit is None else {**found, "swiglu_limit": self.limit}

    def apply(self, inner: Tensor) -> Tensor:
        """What the formula says, [T, 2I] as concatenated gate and up (or [T, I]) -> [T, I]."""
        if not self.is_gated:
            return UNGATED[self.kind](inner)
        gate, up = inner.chunk(2, dim=-1)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.alpha * gate) * (up + self.beta)


UNGATED: MappingProxyType[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "relu": nn.functional.relu,
        "gelu": lambda value: nn.functional.gelu(value, approximate="tanh"),  # the runtime's is this one
        "silu": nn.functional.silu,
        "identity": lambda value: value,
    }
)


def _probe(experts: Any, gate: Tensor, up: Tensor) -> Tensor:
    """The module's own gate on gate [T, I] and up [T, I], fused as its first projection would give them, [T, 2I]."""
    fused = torch.cat([gate, up], -1) if experts.is_concatenated else torch.stack([gate, up], -1).flatten(-2)
    with torch.no_grad():
        value: Tensor = experts._apply_gate(fused)
    return value


def _fit_gate(experts: Any) -> Activation | None:
    """Alpha, beta and limit of a gate of the swiglu family, read off its own values; None for one of another family."""
    zero, one, far = torch.zeros(1, 1), torch.ones(1, 1), torch.full((1, 1), FAR)
    slope = _probe(experts, one, one) - _probe(experts, one, zero)  # of u, at g = 1: sigmoid(alpha)
    if not bool(0 < slope < 1):
        return None
    beta = _probe(experts, one, zero) / slope
    alpha = _round(float(torch.logit(slope)))
    highest = float(_probe(experts, far, one) - _probe(experts, far, zero))
    limit = highest
    for _ in range(50):  # to the gate at which g * sigmoid(alpha * g) is that high, for sigmoid is nearly 1
        limit = highest * (1 + math.exp(-alpha * limit))
    return Activation("swiglu", alpha, _round(float(beta)), None if highest > FAR * 0.99 else _round(limit))


def _round(value: float) -> float:
    """The short number that was meant where one is within rounding errors: 1.702 for 1.7019999."""
    short = round(value, 3)
    return short if abs(value - short) < 1e-5 * max(1.0, abs(value)) else value


def activation(experts: Any) -> Activation | None:
    """The activation of the node that does what the module does, tried out on numbers; None where there is none."""
    inner = torch.rand(PROBES, 4, generator=torch.Generator().manual_seed(0)) * 40 - 20
    inner[-1] *= 50  # some values far out
    if experts.has_gate:
        fitted = _fit_gate(experts)
        found: tuple[Activation, ...] = () if fitted is None else (fitted,)
        wanted = _probe(experts, *inner.chunk(2, -1))
    else:
        found = tuple(Activation(kind) for kind in UNGATED)
        with torch.no_grad():
            wanted = experts.act_fn(inner)
    for candidate in found:
        if torch.allclose(candidate.apply(inner), wanted.float(), rtol=1e-4, atol=1e-5):
            return candidate
    return None


@lru_cache(maxsize=64)
def node_fault(kind: Activation, has_bias: bool, half: bool) -> str | None:
    """What is wrong with the installed ONNX Runtime's MoE node of this activation; None if its values are right."""
    import onnxruntime
    from onnx import TensorProto, helper, numpy_helper

    dtype, code = (torch.float16, TensorProto.FLOAT16) if half else (torch.float32, TensorProto.FLOAT)
    generator = torch.Generator().manual_seed(0)
    count, hidden, inner, rows = 3, 8, 8, (16 if kind.is_gated else 8)
    shapes = {
        "x": (5, hidden),
        "logits": (5, count),
        "fc1": (count, rows, hidden),
        "fc1_bias": (count, rows),
        "fc2": (count, hidden, inner),
        "fc2_bias": (count, hidden),
    }
    names, attributes = [name if has_bias or "bias" not in name else "" for name in shapes], kind.attributes()
    drawn = {name: torch.randn(shapes[name], generator=generator) for name in names if name}
    stored = {name: (value / 3 if name in ("fc1", "fc2") else value).to(dtype) for name, value in drawn.items()}
    node = helper.make_node("MoE", names, ["y"], domain="com.microsoft", k=2, normalize_routing_weights=1, **attributes)
    weights = [numpy_helper.from_array(value.numpy(), name) for name, value in stored.items() if "fc" in name]
    inputs = [helper.make_tensor_value_info(name, code, list(stored[name].shape)) for name in ("x", "logits")]
    output = helper.make_tensor_value_info("y", code, [5, hidden])
    graph = helper.make_graph([node], "one", inputs, [output], weights)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 4
    settings.intra_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), settings, ["CPUExecutionProvider"])
        (found,) = session.run(None, {name: stored[name].numpy() for name in ("x", "logits")})
    except Exception as error:  # the runtime raises classes of its own
        return reason_of(error)
    wanted = _plain_layer({name: value.float() for name, value in stored.items()}, kind)
    error_size = float((torch.from_numpy(found).float() - wanted).abs().max() / wanted.abs().max())
    return None if error_size < (1e-2 if half else 1e-5) else f"its values are wrong by {error_size:.1e}"


def _plain_layer(tensors: dict[str, Tensor], kind: Activation) -> Tensor:
    """The layer's formula expert by expert, [T, H]: what the node should give for interleaved rows."""
    weights, index = tensors["logits"].softmax(-1).topk(2)
    weights = weights / weights.sum(-1, keepdim=True)
    total = torch.zeros_like(tensors["x"])
    zero = torch.zeros(tensors["fc1"].shape[0], 1)
    for expert in range(tensors["fc1"].shape[0]):
        inner = tensors["x"] @ tensors["fc1"][expert].T + tensors.get("fc1_bias", zero)[expert]
        if kind.is_gated:
            inner = torch.cat([inner[:, 0::2], inner[:, 1::2]], -1)
        outer = kind.apply(inner) @ tensors["fc2"][expert].T + tensors.get("fc2_bias", zero)[expert]
        total += outer * (weights * (index == expert)).sum(-1, keepdim=True)
    return total


def supported(experts: Any, half: bool = False) -> str | None:
    """Why the MoE node cannot express a stock experts module; None if it can."""
    if getattr(experts, "has_post_expert_norm", False):
        return "it normalises every expert's output, for which the MoE node has no place"
    kind = activation(experts)
    if kind is None:
        name = type(experts.act_fn).__name__ if hasattr(experts, "act_fn") else "its own gate"
        gated = "gated " if experts.has_gate else ""
        return f"the MoE node has no {gated}activation like {name} of {type(experts).__name__}"
    fault = node_fault(kind, bool(experts.has_bias), half)
    return None if fault is None else f"ONNX Runtime's MoE node does not do {kind.kind} here: {fault}"
