"""Moments of routers' inputs and gradients, against the stock model in memory; every family of the zoo."""

from pathlib import Path

import pytest
import torch

from compressor.model.router_logits import router_weight
from compressor.model.streaming import ReversePass
from compressor.steps.routers.weights import Moments, RouterGradients
from tests import zoo
from tests.compressor.model.test_reverse import REFUSED, loss
from tests.opened import batches, opened


@pytest.mark.parametrize("name", [*zoo.FAMILIES, *zoo.VARIANTS])
def test_inputs_times_gradients_are_the_gradient_of_the_weight(name: str, tmp_path: Path) -> None:
    if name in REFUSED:
        pytest.skip("no gradients go through it layer by layer")
    stock, model = opened(name, tmp_path)
    parts, seen = batches(stock, (2, 1)), RouterGradients()
    ReversePass(model, parts).run(loss, seen)
    stock.requires_grad_(True)
    for number, tokens in enumerate(parts):
        loss(number, stock(input_ids=tokens, use_cache=False)).backward()  # type: ignore[no-untyped-call]
    for key, moments in seen.found.items():
        expected = stock.get_parameter(key).grad
        assert expected is not None and moments.tokens == sum(part.numel() for part in parts)
        scale = max(float(expected.abs().max()), 1e-3)
        torch.testing.assert_close(moments.both.T.float(), expected, atol=1e-4 * scale, rtol=1e-3, msg=key)
        assert torch.equal(moments.gradients, moments.gradients.T)
    keys = map(router_weight, model.architecture.layers)
    assert seen.found.keys() == {key for key in keys if stock.get_parameter(key).grad is not None}


def test_a_direction_solves_the_ridge_equations() -> None:
    generator = torch.Generator().manual_seed(0)
    x, g = (torch.randn(50, size, generator=generator).double() for size in (6, 4))
    moments = Moments.empty(6, 4)
    for part in range(0, 50, 7):
        moments.add(x[part : part + 7], g[part : part + 7])
    change = moments.direction(0.3)
    left = x.T @ x + 0.3 * (x.square().sum() / 6) * torch.eye(6)
    right = g.T @ g + 0.3 * (g.square().sum() / 4) * torch.eye(4)
    torch.testing.assert_close(right @ change @ left, -(g.T @ x))  # as one system: kron(right, left) vec = -vec
    assert moments.mean_square(change) == pytest.approx(float((x @ change.T).square().mean()))
    assert float((change * (g.T @ x)).sum()) < 0  # downhill
