"""Tuning a cut layer: it learns what can be learned, changes nothing else, and depends on nothing but its seed."""

import pytest
import torch
from torch import Tensor

from compressor.steps.correct.cut_layer import CutLayer
from compressor.steps.correct.tuning import descend, tune
from tests.support.cut_layers import CutCase, cut_again, cut_case, plain_error, put_in, stock_output


def all_values(found: CutCase, cut: CutLayer) -> list[Tensor]:
    values = [value for parameters in cut.parameters for value in parameters.values()]
    return [value.detach().clone() for value in (*values, *found.router)]


@torch.no_grad()
def taught(name: str, spread: float = 0.1) -> tuple[CutCase, CutLayer]:
    """A layer whose original is the cut layer with every weight a little off: tuning could bring it all back."""
    found = cut_case(name, sequences=60)
    generator = torch.Generator().manual_seed(2)
    target = [*(getattr(found.experts, name) for name in found.cut.parameters[0]), *found.router]
    own = [value.clone() for value in target]
    for value in target:
        value.add_(spread * value.square().mean().sqrt() * torch.randn(value.shape, generator=generator))
    rows = torch.cat([found.fit, found.heldout])
    found.recording.outputs[rows] = stock_output(found, rows)[2]
    for value, old in zip(target, own, strict=True):
        value.copy_(old)
    return found, cut_again(found)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "zaya", "deepseek_v4"])
def test_the_error_falls_where_all_can_be_learned(name: str) -> None:
    found, cut = taught(name)
    before = cut.error(found.heldout)
    assert before == pytest.approx(plain_error(found, found.heldout), rel=1e-4)
    tune(cut, found.fit, found.router, steps=120, tokens=256, rate=0.03)
    after = cut.error(found.heldout)
    assert after < 0.5 * before
    put_in(found, cut)  # the router's parameters are the stock module's own already
    assert plain_error(found, found.heldout) == pytest.approx(after, rel=1e-3)


def test_steps_whose_tokens_all_skip_the_experts_change_nothing() -> None:
    """zaya hands a skipped token on as expert 0 with weight 0: there is nothing to learn from it."""
    found = cut_case("zaya", sequences=40)
    weights, _, _ = stock_output(found, found.fit)
    skipped = found.fit[(weights == 0).all(-1)]
    assert len(skipped) > 4
    before = all_values(found, found.cut)
    tune(found.cut, skipped, [], steps=3, tokens=2, rate=0.01)
    assert all(torch.equal(a, b) for a, b in zip(before, all_values(found, found.cut), strict=True))
    tune(found.cut, found.fit, found.router, steps=40, tokens=1, rate=0.01)
    assert all(bool(torch.isfinite(value).all()) for value in all_values(found, found.cut))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "zaya"])
def test_gradients_are_those_of_the_loss(name: str) -> None:
    found = cut_case(name)
    cut, rows = found.cut, found.fit[:60]
    tuned = [*(value for parameters in cut.parameters for value in parameters.values()), *found.router]
    for leaf in tuned:
        leaf.requires_grad_()
    target = cut.targets(rows)
    with torch.enable_grad():
        loss = cut.token_weights(rows) @ cut.gap(rows, target).square().sum(-1) / len(rows)
        expected = torch.autograd.grad(loss, tuned, allow_unused=True)
        descend(cut, rows, len(rows), found.router, lambda values: None)
    assert sum(value is not None for value in expected) > len(tuned) / 2
    for leaf, value in zip(tuned, expected, strict=True):
        assert (leaf.grad is None) == (value is None)
        if value is not None and leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, value, rtol=1e-4, atol=1e-5 * float(value.abs().max()))
