"""What sub-scores do to a router: the propositions of the paper, and ranks against sorting."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import softplus

from compressor.attribution.projecting import rank_change
from compressor.attribution.routers import Selection, agreements, competing, ranks_of, selections
from compressor.model.router_logits import Score

ACTIVATIONS: dict[Score | None, Callable[[Tensor], Tensor]] = {
    None: lambda logits: logits,
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": torch.sigmoid,
    "sqrt-softplus": lambda logits: softplus(logits).sqrt(),
}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def find_selection(
    logits: Tensor, chosen: Tensor, valid: Tensor, biases: list[Tensor], groups: tuple[int, ...] = (1, 1)
) -> Selection:
    tried = selections(biases)
    return tried[int(agreements(tried, logits, chosen, valid, groups).argmax())]


def top(scores: Tensor, count: int) -> Tensor:
    return scores.argsort(-1, descending=True)[..., :count]


def places(scores: Tensor) -> Tensor:
    """[..., E]: each expert's place when they are sorted, the highest first; scores are distinct."""
    return scores.argsort(-1, descending=True).argsort(-1)


@given(st.integers(0, 999), st.sampled_from([*ACTIVATIONS]), st.booleans())
def test_change_of_rank_is_that_of_a_plain_loop(seed: int, activation: Score | None, biased: bool) -> None:
    tokens, routers, experts, slots, used = 4, 3, 7, 3, (3, 1, 2)
    logits, removed = normal(tokens, routers, experts, seed=seed), normal(tokens, routers, experts, seed=seed + 1)
    bias = 0.3 * normal(routers, experts, seed=seed + 2) if biased else None
    selection = Selection(activation, bias)
    chosen = torch.rand(tokens, routers, experts).argsort(-1)[..., :slots]
    share = torch.tensor([[1 / count if slot < count else 0 for slot in range(slots)] for count in used])
    before = ranks_of(selection.scores(logits), chosen)
    found = rank_change(selection.scores(logits - removed), chosen, before, share)

    def rank(values: Tensor, token: int, router: int, expert: int) -> int:
        scores = ACTIVATIONS[activation](values[token, router])
        scores = scores if bias is None else scores + bias[router]
        return sorted(range(experts), key=lambda e: -float(scores[e])).index(expert)

    for router, count in enumerate(used):
        total = 0.0
        for token in range(tokens):
            for expert in chosen[token, router, :count].tolist():  # what lies in unused slots does not count
                now = rank(logits - removed, token, router, expert)
                total += abs(now - rank(logits, token, router, expert)) / count
        assert float(found[router]) == pytest.approx(total, abs=1e-5)
        one = slice(router, router + 1)
        scores = selection.scores((logits - removed)[:, one], one)
        alone = rank_change(scores, chosen[:, one], before[:, one], share[one])
        assert float(alone) == pytest.approx(total, abs=1e-5)


VALID = torch.tensor([[True, True], [True, True]])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_routers_own_way_to_rank_is_found(activation: Score | None) -> None:
    logits = 2 * normal(200, 2, 8)
    bias, decoy = normal(2, 8, seed=1), normal(2, 8, seed=2)
    scale = {None: 1.0, "sigmoid": 0.5, "softmax": 0.3, "sqrt-softplus": 1.0}[activation]
    chosen = top(ACTIVATIONS[activation](logits) + scale * bias, 2)
    found = find_selection(logits, chosen, VALID, [decoy, scale * bias])
    assert found.score == activation
    assert found.bias is not None and torch.equal(found.bias, scale * bias)


@pytest.mark.parametrize("seed", [11, 34, 35, 102])  # by the places among all experts, something else would agree best
def test_routers_that_choose_groups_first_are_judged_within_them(seed: int) -> None:
    """The better of 2 groups of neighbours by its two best experts, then the best 2 experts in it."""
    logits, bias = 3 * normal(40, 2, 8, seed=seed), 0.1 * normal(2, 8, seed=seed + 1)
    scores = logits.sigmoid() + bias
    group = scores.unflatten(-1, (2, 4)).topk(2, -1).values.sum(-1).argmax(-1, keepdim=True)
    outside = torch.arange(8) // 4 != group
    chosen = top(scores.masked_fill(outside, -torch.inf), 2)
    found = find_selection(logits, chosen, VALID, [bias], (2, 2))
    assert found.score == "sigmoid" and found.bias is bias
    within = competing(chosen, VALID, 8, [2, 1])
    assert torch.equal(within[:, 0], ~outside[:, 0])
    assert bool(within[:, 1].all())  # a router without groups ranks all experts
