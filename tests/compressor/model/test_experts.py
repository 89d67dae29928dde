"""What one expert computes, against the stock experts module of every family."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.model.architecture import experts_modules
from compressor.model.experts import apply_expert, expert_parameters, parameter_names, projections
from tests.support import zoo
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
