"""Routers' logits and what the gradient says of them, against the stock model in memory; every family of the zoo."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.model.architecture import discover
from compressor.model.streaming import ReversePass
from compressor.pathways.router_logits import Product, router_weight, watched
from compressor.steps.routers.weights import Moments, RouterGradients
from tests import zoo
from tests.compressor.model.test_reverse import REFUSED, loss
from tests.opened import batches, opened

EVERY = pytest.mark.parametrize("name", [*zoo.FAMILIES, *zoo.VARIANTS])


@EVERY
@torch.no_grad()
def test_logits_are_the_product_of_inputs_and_weight_and_handing_them_back_changes_nothing(name: str) -> None:
    stock = zoo.build(name)
    stock.config.architectures = [type(stock).__name__]
    layers, (tokens,) = discover(stock.config).layers, batches(stock, (2,))
    seen: dict[str, Product] = {}

    def note(layer: str, product: Product) -> Tensor:
        seen[layer] = Product(product.inputs.clone(), product.logits.clone(), product.weight)
        return product.logits.clone()

    torch.manual_seed(7)  # diffusion_gemma draws the canvas that it fills in
    plain = zoo.logits(stock, tokens)
    with ExitStack() as watching:
        for layer in layers:
            watching.enter_context(watched(stock, layer, lambda product, layer=layer: note(layer.name, product)))
        torch.manual_seed(7)
        assert torch.equal(zoo.logits(stock, tokens), plain)
    torch.manual_seed(7)
    assert torch.equal(zoo.logits(stock, tokens), plain)
    assert seen
    for layer in layers:
        if layer.name in seen:  # not where no token is an image's
            product, weight = seen[layer.name], stock.state_dict()[router_weight(layer)]
            own = product.weight if product.weight.shape == weight.shape else product.weight.T
            assert torch.equal(own.float(), weight.float())
            logits = product.logits.reshape(len(product.inputs), -1)
            bias = logits - product.inputs.float() @ weight.float().T  # nothing, or what the product adds to all tokens
            torch.testing.assert_close(bias, bias[:1].expand_as(bias), atol=1e-4, rtol=0)


@torch.no_grad()
def test_other_logits_route_otherwise() -> None:
    stock = zoo.build("mixtral")
    layers, (tokens,) = discover(stock.config).layers, batches(stock, (2,))
    with watched(stock, layers[0], lambda product: -product.logits):
        changed = zoo.logits(stock, tokens)
    weight = stock.get_parameter(router_weight(layers[0]))
    weight.neg_()
    torch.testing.assert_close(zoo.logits(stock, tokens), changed)


def test_a_router_without_a_product_is_told() -> None:
    stock = zoo.build("mixtral")
    layer = discover(stock.config).layers[0]
    router: Any = stock.get_submodule(layer.router)
    scores = torch.randn(12, layer.experts)
    router.forward = lambda hidden: (scores, *scores.softmax(-1).topk(layer.top_k))
    told = pytest.raises(CompressionError, match="computes its logits by no matrix product")
    with told, watched(stock, layer, lambda product: None):
        zoo.logits(stock, batches(stock, (1,))[0])


@EVERY
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
