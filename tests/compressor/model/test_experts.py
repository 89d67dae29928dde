"""What one expert computes, against the stock experts module of every family."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from compressor.checkpoint.source import locate
from compressor.model.architecture import experts_modules
from compressor.model.experts import apply_expert, expert_parameters, parameter_names, projections
from compressor.model.opened import load_whole, open_model, served_model
from compressor.model.serving import advise
from compressor.model.streaming import Pass, ReversePass
from tests.support import opened_models, zoo
from tests.support.opened_models import one_expert

EVERY = pytest.mark.parametrize("name", zoo.sweep())
NO_PRODUCT = {"gpt_oss", "openai_privacy_filter", "minimax_m3_vl"}  # (up + 1) * glu(gate)


def layers(name: str) -> list[Any]:
    model = zoo.build(name)
    assert dict(experts_modules(model)).keys() == zoo.experts(model).keys()
    return [module for module in zoo.experts(model).values() if "vision" not in type(module).__name__.lower()]


def tokens(experts: Any, count: int = 9, scale: float = 1.0) -> Tensor:
    up = getattr(experts, "gate_up_proj" if experts.has_gate else "up_proj")
    width = up.shape[1] if experts.is_transposed else up.shape[2]
    return scale * torch.randn(count, width, generator=torch.Generator().manual_seed(4))


@EVERY
@torch.no_grad()
def test_apply_expert_is_the_stock_module_with_one_choice(name: str) -> None:
    for experts in layers(name):
        x = tokens(experts)
        for expert in range(experts.num_experts):
            found = apply_expert(experts, expert_parameters(experts, expert), x)
            torch.testing.assert_close(found, one_expert(experts, expert, x), rtol=1e-5, atol=1e-5)
        assert apply_expert(experts, expert_parameters(experts, 0), x[:0]).shape == x[:0].shape


@EVERY
@torch.no_grad()
def test_projections_are_views_in_canonical_layout(name: str) -> None:
    for experts in layers(name):
        x = tokens(experts, scale=0.05)  # small, for activations that clamp
        for parameter in (getattr(experts, key) for key in parameter_names(experts) if "bias" in key):
            parameter.zero_()
        view = projections(experts, 1)
        assert view.up.shape == view.down.T.shape
        assert view.up.shape[1] == x.shape[1]
        before = one_expert(experts, 1, x)
        if view.gate is None:
            inner = experts.act_fn(x @ view.up.T)
            torch.testing.assert_close(before, inner @ view.down.T, rtol=1e-5, atol=1e-6)
            continue
        assert view.gate.shape == view.up.shape
        if getattr(experts, "has_post_expert_norm", False):
            continue  # the norm hides every factor
        gate, up = x @ view.gate.T, x @ view.up.T
        fused = torch.cat([gate, up], -1) if experts.is_concatenated else torch.stack([gate, up], -1).flatten(1)
        torch.testing.assert_close(before, experts._apply_gate(fused) @ view.down.T, rtol=1e-5, atol=1e-6)
        if name.split("-")[0] in NO_PRODUCT:
            by_hand = (up + 1) * gate * (1.702 * gate).sigmoid()
            torch.testing.assert_close(before, by_hand @ view.down.T, rtol=1e-5, atol=1e-6)
            continue
        view.up.mul_(2)  # a product is linear in up, and the view writes through
        torch.testing.assert_close(one_expert(experts, 1, x), 2 * before, rtol=1e-5, atol=1e-6)
        view.up.mul_(0.5)
        view.gate.mul_(-3)
        assert not torch.allclose(one_expert(experts, 1, x), -3 * before, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(("name", "dtype", "width"), [
    ("mixtral", torch.bfloat16, 28), ("qwen3_moe", torch.float32, 90), ("gpt_oss", torch.bfloat16, 92),
])  # fmt: skip
def test_rows_of_any_width_pass_as_in_the_stock_loop(name: str, dtype: torch.dtype, width: int, tmp_path: Path) -> None:
    field = "moe_intermediate_size" if name == "qwen3_moe" else "intermediate_size"
    zoo.build(name, **{field: width}).to(dtype).save_pretrained(tmp_path)
    stock: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    tokens = zoo.tokens(stock)
    with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
        zoo.logits(stock, tokens)
    stock.set_experts_implementation("eager")
    expected = zoo.logits(stock, tokens)
    model = open_model(locate(str(tmp_path)), "auto", "cpu")
    assert torch.equal(opened_models.logits(Pass(model, (tokens,), to_end=True))[0], expected)
    assert torch.equal(zoo.logits(load_whole(tmp_path, dtype=dtype), tokens), expected)
    named = [breach.server for breach in advise(served_model(model)).breaches if "eager" in breach.says]
    assert named == ["transformers"]
    loss = ReversePass(model, (tokens,)).run(lambda _, output: output.logits.float().logsumexp(-1).mean())
    assert loss == pytest.approx([float(expected.float().logsumexp(-1).mean())], rel=1e-3)
