"""Routers' logits against the stock model in memory, for every family of the zoo, and their scores as weights."""

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.model.architecture import discover
from compressor.model.router_logits import (
    SCORES,
    Product,
    Score,
    find_score,
    logits_of,
    router_weight,
    watched,
    weights_of,
)
from tests.support import zoo
from tests.support.opened_models import batches

EVERY = pytest.mark.parametrize("name", zoo.sweep())
PLAIN = {
    "softmax": lambda logits: torch.softmax(logits, -1),
    "sigmoid": torch.sigmoid,
    "sqrt-softplus": lambda logits: torch.log1p(logits.exp()).sqrt(),
}


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


def test_a_router_without_a_product_is_told() -> None:
    stock = zoo.build("mixtral")
    layer = discover(stock.config).layers[0]
    router: Any = stock.get_submodule(layer.router)
    scores = torch.randn(12, layer.experts)
    router.forward = lambda hidden: (scores, *scores.softmax(-1).topk(layer.top_k))
    told = pytest.raises(CompressionError, match="computes its logits by no matrix product")
    with told, watched(stock, layer, lambda product: None):
        zoo.logits(stock, batches(stock, (1,))[0])


def drawn(tokens: int = 6, experts: int = 8) -> Tensor:
    return 2 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("top_k", [1, 3])
def test_a_router_is_known_by_its_weights(score: Score, normalised: bool, top_k: int) -> None:
    logits = drawn()
    given, chosen = PLAIN[score](logits).topk(top_k)
    if normalised:
        given = given / given.sum(-1, keepdim=True)
    found = find_score(logits, chosen, 2.5 * given)
    assert found == ("softmax" if normalised and top_k == 1 else score)  # a weight of one tells nothing
    unknown, chosen = logits.square().topk(3)
    assert find_score(logits, chosen, unknown) == "softmax"


@pytest.mark.parametrize("score", SCORES)
def test_weights_are_the_routers_and_lead_back(score: Score) -> None:
    logits = drawn()
    weights = weights_of(logits, score)
    torch.testing.assert_close(weights, PLAIN[score](logits))
    constant = logits.logsumexp(-1, keepdim=True) if score == "softmax" else 0
    torch.testing.assert_close(logits_of(weights, score) + constant, logits, rtol=1e-4, atol=1e-4)
    assert logits_of(torch.tensor([[0.0, 1.0, 1e-40]]), score).isfinite().all()
