"""One traced layer: what its parts are, and that heads and experts add up to what their modules put out."""

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compressor.attribution.unit_trace import STREAM, UnitTrace, head_count, parts_of, router_width, trace_unit
from compressor.model.architecture import Architecture, discover, layers_by_unit
from tests import zoo
from tests.linear_maps import evaluate

Traces = dict[str, tuple[UnitTrace, Tensor, Tensor]]  # by decoder layer, with its plain input and output


def kinds(name: str, unit: int) -> dict[str, str]:
    """Kind of each part of a layer, by the module's name in it."""
    model = zoo.skeleton(name)
    architecture = discover(model.config, model)
    full = architecture.units[unit]
    own = layers_by_unit(architecture.layers).get(full, ())
    found = parts_of(full, model.get_submodule(full), own)
    return {part.removeprefix(f"{full}."): kind for part, kind in found.items()}


@pytest.mark.parametrize(
    ("name", "unit", "expected"),
    [
        ("mixtral", 0, {"self_attn": "attention", "mlp.experts": "expert"}),
        ("granitemoe", 0, {"self_attn": "attention", "block_sparse_moe.experts": "expert"}),
        ("deepseek_v3", 0, {"self_attn": "attention", "mlp": "mlp"}),
        ("deepseek_v3", 1, {"self_attn": "attention", "mlp.experts": "expert", "mlp.shared_experts": "shared"}),
        ("gemma4", 0, {"self_attn": "attention", "mlp": "shared", "experts": "expert"}),
        ("nemotron_h", 0, {"mixer": "attention"}),  # a state-space mixer
        ("nemotron_h", 1, {"mixer.experts": "expert", "mixer.shared_experts": "shared"}),
        ("nemotron_h", 3, {"mixer": "mlp"}),
        ("jamba", 0, {"mamba": "attention", "feed_forward": "mlp"}),
        ("jamba", 1, {"self_attn": "attention", "feed_forward.experts": "expert"}),
        ("lfm2_moe", 0, {"conv": "attention", "feed_forward": "mlp"}),
        ("minimax", 0, {"self_attn": "attention", "mlp.experts": "expert"}),
        ("qwen3_next", 1, {"linear_attn": "attention", "mlp.experts": "expert", "mlp.shared_expert": "shared"}),
    ],
    ids=lambda value: str(value) if not isinstance(value, dict) else "",
)
def test_parts_are_the_modules_that_write_to_the_stream(name: str, unit: int, expected: dict[str, str]) -> None:
    assert kinds(name, unit) == expected


class _Sizes(nn.Module):
    def __init__(self, **sizes: object) -> None:
        super().__init__()
        for name, size in sizes.items():
            setattr(self, name, size)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"head_dim": 16}, 4),
        ({"head_dim": 16, "v_head_dim": 32}, 2),  # values are what the projection mixes
        ({"head_dim": 48}, None),
        ({"v_head_dim": 48, "head_dim": 8}, 8),  # of sizes that the module names, one that fits
        ({"head_dim": 0}, None),
        ({"head_dim": 16.0}, None),
        ({}, None),
    ],
)
def test_heads_are_counted_by_their_size(sizes: dict[str, object], expected: int | None) -> None:
    assert head_count(_Sizes(**sizes), nn.Linear(64, 32)) == expected


def traced(name: str) -> tuple[PreTrainedModel, Architecture, Traces]:
    """A stock model whose layers all ran traced on the same tokens."""
    model = zoo.build(name)
    architecture = discover(model.config, zoo.skeleton(name))
    by_unit = layers_by_unit(architecture.layers)
    found: Traces = {}

    def stand_in(unit: str) -> None:
        module = model.get_submodule(unit)
        own = module.forward

        def forward(*args: object, **kwargs: object) -> object:
            before = (args[0] if args else kwargs["hidden_states"]).clone()  # type: ignore[attr-defined]
            output, trace = trace_unit(model, unit, by_unit.get(unit, ()), own, args, kwargs)
            found[unit] = trace, before, (output[0] if isinstance(output, tuple) else output).clone()
            return output

        module.forward = forward  # type: ignore[method-assign]

    for unit in architecture.units:
        stand_in(unit)
    ids = zoo.tokens(model)
    traced_logits = zoo.logits(model, ids)
    for unit in architecture.units:
        del model.get_submodule(unit).__dict__["forward"]
    torch.testing.assert_close(traced_logits, zoo.logits(model, ids), rtol=0, atol=1e-5)
    return model, architecture, found


NAMES = ["mixtral", "qwen2_moe", "deepseek_v3", "gemma4", "gpt_oss", "flex_olmo", "nemotron_h", "phimoe", "minimax"]


@pytest.mark.parametrize("name", NAMES)
def test_traces_add_up_to_what_the_modules_put_out(name: str) -> None:
    model, architecture, traces = traced(name)
    by_unit = layers_by_unit(architecture.layers)
    heads_seen = 0
    for unit, (trace, before, after) in traces.items():
        flat = after.reshape(-1, after.shape[-1])
        torch.testing.assert_close(evaluate(trace.terms), flat, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(trace.context.leaves[STREAM].value, before.reshape(-1, before.shape[-1]))
        for module, heads in trace.heads.items():
            heads_seen += 1
            check_heads(model.get_submodule(module), heads.inputs, heads.weight, heads.heads, trace, module)
        for layer in by_unit.get(unit, ()):
            total = torch.zeros_like(trace.context.leaves[layer.name].value)
            for routed in trace.routed[layer.name]:
                total.index_add_(0, routed.rows, routed.outputs * routed.weights[:, None])
            torch.testing.assert_close(total, trace.context.leaves[layer.name].value, rtol=1e-4, atol=1e-5)
            logits = trace.logits[layer.name]
            assert logits.value.shape == (trace.context.tokens, layer.experts)
            sums = evaluate(logits.terms)[:, : layer.experts]
            torch.testing.assert_close(sums, logits.value, rtol=1e-4, atol=1e-5)
            check_routing(trace, layer.name, logits.chosen)
    assert heads_seen > 0


def check_heads(
    attention: nn.Module, inputs: Tensor, weight: Tensor, heads: int, trace: UnitTrace, module: str
) -> None:
    """Each head's slice of the projection, added up, is the attention's output less its bias."""
    parts = zip(inputs.chunk(heads, -1), weight.chunk(heads, -1), strict=True)
    total = torch.stack([part @ columns.T for part, columns in parts]).sum(0)
    (bias,) = [
        child.bias for child in attention.modules() if isinstance(child, nn.Linear) and child.weight is weight
    ] or [None]  # fmt: skip
    expected = trace.context.leaves[module].value - (0 if bias is None else bias)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-5)


def check_routing(trace: UnitTrace, name: str, chosen: Tensor) -> None:
    """What the router chose is what the experts computed."""
    pairs = sorted((int(row), routed.expert) for routed in trace.routed[name] for row in routed.rows)
    assert pairs == sorted((row, expert) for row, own in enumerate(chosen.tolist()) for expert in own)


def test_nothing_is_left_behind_by_a_trace_or_by_a_layer_that_fails() -> None:
    model, _, _ = traced("qwen2_moe")
    as_it_was(model)
    model = zoo.build("mixtral")
    architecture = discover(model.config, zoo.skeleton("mixtral"))
    unit = architecture.units[0]

    def broken(*args: object) -> object:
        raise RuntimeError("in the layer")

    with pytest.raises(RuntimeError, match="in the layer"):
        trace_unit(model, unit, architecture.layers[:1], broken, (torch.zeros(1, 4, 32),), {})
    as_it_was(model)


def as_it_was(model: nn.Module) -> None:
    for module in model.modules():
        assert "forward" not in module.__dict__
        assert not module._forward_hooks and not module._forward_pre_hooks


def test_a_gated_attention_is_still_split_by_heads() -> None:
    """The gate comes before the output projection, so the projection's output is the attention's."""
    _, _, traces = traced("qwen3_next")
    assert {module.rpartition(".")[2] for trace, _, _ in traces.values() for module in trace.heads} == {
        "linear_attn",
        "self_attn",
    }


def test_router_width_counts_what_is_scored_beside_the_experts() -> None:
    for name in ("mixtral", "deepseek_v3"):
        model = zoo.skeleton(name)
        for layer in discover(model.config, model).layers:
            assert router_width(layer) == 8
