from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import softplus

from compressor.attribution.routers import agreements, selections
from compressor.model.router_logits import Score

ACTIVATIONS: dict[Score | None, Callable[[Tensor], Tensor]] = {
    None: lambda logits: logits,
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt-softplus": lambda logits: softplus(logits).sqrt(),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_routers_own_way_to_rank_is_found(activation: Score | None) -> None:
    logits = 2 * normal(200, 2, 8)
    bias, decoy = normal(2, 8, seed=1), normal(2, 8, seed=2)
    scale = {None: 1.0, "sigmoid": 0.5, "softmax": 0.3, "sqrt-softplus": 1.0}[activation]
    chosen = (ACTIVATIONS[activation](logits) + scale * bias).topk(2).indices
    tried = selections([decoy, scale * bias])
    found = tried[int(agreements(tried, logits, chosen, torch.ones(2, 2, dtype=torch.bool), (1, 1)).argmax())]
    assert found.score == activation
    assert found.bias is not None and torch.equal(found.bias, scale * bias)
