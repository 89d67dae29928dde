"""How routers make weights of logits, told from the weights of the experts that they choose."""

import pytest
import torch
from torch import Tensor

from compressor.pathways.router_logits import SCORES, Score, find_score, logits_of, weights_of

PLAIN = {
    "softmax": lambda logits: torch.softmax(logits, -1),
    "sigmoid": torch.sigmoid,
    "sqrt-softplus": lambda logits: torch.log1p(logits.exp()).sqrt(),
}


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


def test_weights_of_no_known_score_count_as_softmax() -> None:
    given, chosen = drawn().square().topk(3)
    assert find_score(drawn(), chosen, given) == "softmax"


@pytest.mark.parametrize("score", SCORES)
def test_weights_are_the_routers_and_lead_back(score: Score) -> None:
    logits = drawn()
    weights = weights_of(logits, score)
    torch.testing.assert_close(weights, PLAIN[score](logits))
    constant = logits.logsumexp(-1, keepdim=True) if score == "softmax" else 0
    torch.testing.assert_close(logits_of(weights, score) + constant, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("score", SCORES)
def test_weights_of_nothing_and_of_all_have_logits(score: Score) -> None:
    assert logits_of(torch.tensor([[0.0, 1.0, 1e-40]]), score).isfinite().all()
