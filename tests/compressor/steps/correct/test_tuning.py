"""Tuning a cut layer: it learns what can be learned, changes nothing else, and depends on nothing but its seed."""

import pytest
import torch
from torch import Tensor

from compressor.steps.correct import cut_layer
from compressor.steps.correct.cut_layer import CutLayer
from compressor.steps.correct.refit import Adafactor, descend, tune
from tests.support.cut_layers import CutCase, cut_again, cut_case, plain_error, put_in, stock_output


def all_values(found: CutCase, cut: CutLayer) -> list[Tensor]:
    return [value.detach().clone() for value in (*cut.parameters.values(), *found.router)]


@torch.no_grad()
def taught(name: str, spread: float = 0.1) -> tuple[CutCase, CutLayer]:
    """A layer whose original is the cut layer with every weight a little off: tuning could bring it all back."""
    found = cut_case(name, sequences=60)
    generator = torch.Generator().manual_seed(2)
    target = [*(getattr(found.experts, name) for name in found.cut.parameters), *found.router]
    own = [value.clone() for value in target]
    for value in target:
        value.add_(spread * value.square().mean().sqrt() * torch.randn(value.shape, generator=generator))
    rows = torch.cat([found.fit, found.heldout])
    found.recording.outputs[rows] = stock_output(found, rows)[2]
    for value, old in zip(target, own, strict=True):
        value.copy_(old)
    return found, cut_again(found)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("mixtral", torch.bfloat16),
        ("gpt_oss", torch.float32),
        ("zaya", torch.float32),
        ("deepseek_v4", torch.bfloat16),
    ],
)
def test_the_error_falls_where_all_can_be_learned(name: str, dtype: torch.dtype) -> None:
    found, cut = taught(name)
    before = cut.error(found.heldout)
    assert before == pytest.approx(plain_error(found, found.heldout), rel=1e-4)
    tune(cut, found.fit, found.router, steps=120, tokens=256, rate=0.03, dtype=dtype)
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


@pytest.mark.parametrize("at_once", [2**25, 1])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "zaya"])
def test_gradients_are_those_of_the_loss(name: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a layer so large that its experts take turns."""
    monkeypatch.setattr(cut_layer, "SMALL", at_once)
    found = cut_case(name)
    cut, rows = found.cut, found.fit[:60]
    groups = [{key: value[group].clone() for key, value in cut.parameters.items()} for group in cut.groups]
    tuned = [*cut.parameters.values(), *found.router]
    for leaf in [*tuned, *(value for group in groups for value in group.values())]:
        leaf.requires_grad_()
    target = cut.targets(rows)
    order, reached = list[int](), list[Tensor]()

    def step(group: int, ran: Tensor) -> None:
        order.append(group)
        reached.append(ran[cut.groups[group]].flatten())

    with torch.enable_grad():
        loss = cut.token_weights(rows) @ cut.gap(rows, target).square().sum(-1) / len(rows)
        expected = torch.autograd.grad(loss, tuned, allow_unused=True)
        descend(cut, rows, len(rows), groups, step, torch.float32)
    assert order == [*range(len(cut.groups))] and (len(order) > 1) == (at_once == 1)
    weights, index, _ = stock_output(found, rows)
    assert torch.cat(reached).tolist() == (index[weights != 0].bincount(minlength=cut.count) > 0).tolist()
    found_gradients = [torch.cat([group[key].grad for group in groups]) for key in cut.parameters]  # type: ignore[misc]
    for leaf, value in zip([*found_gradients, *(leaf.grad for leaf in found.router)], expected, strict=True):
        assert (leaf is None) == (value is None)
        if value is not None:
            torch.testing.assert_close(leaf, value, rtol=1e-4, atol=1e-5 * float(value.abs().max()))


def test_the_optimiser_of_all_experts_is_torchs_of_each_one() -> None:
    """An expert that a step does not reach stays as it is, and so does its state."""
    shapes = ((5, 6, 4), (5, 7))
    values = [torch.randn(shape) for shape in shapes]
    each = [[value[expert].clone().requires_grad_() for value in values] for expert in range(5)]
    theirs = [torch.optim.Adafactor(tensors) for tensors in each]
    ours = Adafactor(values)
    for rate in (0.3, 0.02, 0.1, 0.05):
        gradients = [
            torch.randn(shape) * 10.0 ** torch.randint(-6, 3, (5, *[1] * (len(shape) - 1))) for shape in shapes
        ]
        reached = torch.rand(5) < 0.7
        for expert in reached.nonzero().flatten().tolist():
            for tensor, gradient in zip(each[expert], gradients, strict=True):
                tensor.grad = gradient[expert].clone()
            theirs[expert].param_groups[0]["lr"] = rate
            theirs[expert].step()
        ours.step(rate, reached.float()[:, None, None], gradients)
    for expert in range(5):
        for value, tensor in zip(values, each[expert], strict=True):
            torch.testing.assert_close(value[expert], tensor.detach(), rtol=1e-5, atol=1e-6)
