"""The MoE node of a stock experts module: its values against the module's own, and what it cannot express."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from exporters.onnx import moe
from exporters.onnx.moe import activation, supported
from tests.support import zoo
from tests.support.onnx_answers import experts_of, run_node

# every stock layout: concatenated, interleaved, transposed, with and without biases; and every activation with a gate
LAYOUTS = ("mixtral", "gpt_oss", "aria", "openai_privacy_filter", "deepseek_v4", "minimax_m3_vl")
GATED = (*LAYOUTS, "beam", "glm5_next", "hy_v4", "lfm2_moe")


def ungated(act: str) -> Any:
    """Experts without a gate, with another activation than their family's own."""
    experts = experts_of("nemotron_h")
    experts.act_fn = ACT2FN[act]
    return experts


def drawn(experts: Any, tokens: int, top_k: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states [T, H], distinct experts [T, K] and weights [T, K], some of them 0 and one row all 0."""
    generator = torch.Generator().manual_seed(seed)
    width = experts.down_proj.shape[2 if experts.is_transposed else 1]
    hidden = 12 * torch.randn(tokens, width, generator=generator)  # beyond the limits of activations
    index = torch.rand(tokens, experts.num_experts, generator=generator).argsort(-1)[:, :top_k]
    weights = 2 * torch.rand(tokens, top_k, generator=generator)
    weights[1::3, 0] = 0
    weights[-1] = 0
    return hidden, index, weights


def run_moe(experts: Any, hidden: Tensor, index: Tensor, weights: Tensor, half: bool = False) -> Tensor:
    """The node alone, its logits from `routing_logits`, its output times the sum of the weights."""
    node, tensors = moe.moe_node(experts)
    feed = {"x": hidden, "logits": moe.routing_logits(index, weights, experts.num_experts)}
    inputs = ["x", "logits", *(name or "" for name in node.tensors)]
    attributes = {"k": index.shape[1], "normalize_routing_weights": 1, **node.attributes}
    return run_node(node.name, inputs, attributes, feed, tensors, half) * weights.sum(-1, keepdim=True)


def assert_same(experts: Any, top_k: int, half: bool = False) -> None:
    hidden, index, weights = drawn(experts, 40, top_k)
    if half:
        experts.half().float()
        hidden = (hidden / 4).half().float()
    with torch.no_grad():
        wanted = experts(hidden, index, weights)
    found = run_moe(experts, hidden, index, weights, half)
    error = float((found - wanted).abs().max() / wanted.abs().max())
    assert error < (1e-2 if half else 1e-5)
    assert float(found[-1].abs().max()) == 0  # every weight of the last token is 0


@pytest.mark.parametrize("name", GATED)
def test_the_node_computes_what_the_module_does(name: str) -> None:
    experts = experts_of(name)
    assert supported(experts) is None
    for top_k in (1, 2, 5):
        assert_same(experts, top_k)
    if name in ("mixtral", "gpt_oss"):
        assert_same(experts, 2, half=True)


ACTIVATIONS = {
    "relu": "relu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu", "silu": "silu",
    "swish": "silu", "linear": "identity",
}  # fmt: skip


@pytest.mark.parametrize(("act", "kind"), ACTIVATIONS.items())
def test_the_node_without_a_gate(act: str, kind: str) -> None:
    experts = ungated(act)
    assert supported(experts) is None
    assert activation(experts) == {"activation_type": kind}
    assert_same(experts, 2)


def test_an_expert_chosen_twice_counts_twice() -> None:
    experts = experts_of("mixtral")
    hidden, _, _ = drawn(experts, 6, 2)
    index, weights = torch.full((6, 2), 3), torch.tensor([[0.25, 0.5]]).expand(6, 2)
    with torch.no_grad():
        wanted = experts(hidden, index, weights)
    torch.testing.assert_close(run_moe(experts, hidden, index, weights), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("gemma4", "no gated activation like GELUTanh"),
        ("nemotron_h", "no activation like ReLUSquared"),
        ("inkling2", "no gated activation like Inkling2SoftcappedSwiGLU"),
        ("muse_spark", "normalises every expert's output"),
    ],
)
def test_what_the_node_cannot_express_is_told(name: str, reason: str) -> None:
    assert reason in (supported(experts_of(name)) or "")


def test_the_exact_gelu_is_not_the_node_s() -> None:
    assert activation(ungated("gelu")) is None


def test_a_layer_that_falls_back_computes_as_before() -> None:
    model = zoo.build("gemma4")
    tokens = zoo.tokens(model)
    wanted = zoo.logits(model, tokens)
    routes = moe.use_nodes(model)
    assert {route.route for route in routes} == {moe.FALLBACK} and all(route.reason for route in routes)
    torch.testing.assert_close(zoo.logits(model, tokens), wanted, rtol=1e-4, atol=1e-5)
