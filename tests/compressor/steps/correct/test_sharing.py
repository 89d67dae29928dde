"""Sharing a step of tuning: gradients are those of the loss, and ranks have about as much to do."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.steps.correct.sharing import Share, Tree, balanced, descend, foreseen, leaves, shared
from tests.cut_cases import cut_case

LOADS = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


@given(LOADS, st.integers(1, 20))
def test_each_expert_has_one_rank_and_ranks_have_about_as_much_to_do(loads: list[int], size: int) -> None:
    share = Share.of(loads, size)
    assert sorted(expert for rank in range(size) for expert in share.of_rank(rank)) == [*range(len(loads))]
    assert sorted(expert for leaf in leaves(share.tree) for expert in leaf) == [*range(len(loads))]
    heaviest = max(sum(loads[expert] for expert in leaf) for leaf in leaves(share.tree))
    for rank in range(size):
        assert abs(sum(loads[expert] for expert in share.of_rank(rank)) - sum(loads) / size) <= heaviest


@given(LOADS)
def test_halves_have_about_as_much_to_do(loads: list[int]) -> None:
    def check(tree: Tree) -> None:
        if isinstance(tree, tuple):
            experts = [[expert for leaf in leaves(half) for expert in leaf] for half in tree]
            first, second = (sum(loads[expert] for expert in half) for half in experts)
            assert abs(first - second) <= max(loads[expert] for half in experts for expert in half)
            for half in tree:
                check(half)
        else:
            assert tree

    check(balanced(loads))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v3", "zaya"])
def test_gradients_are_those_of_the_loss(name: str) -> None:
    found = cut_case(name)
    cut, rows = found.cut, found.fit[:60]
    leaves = [*(value for parameters in cut.parameters for value in parameters.values()), *found.router]
    for leaf in leaves:
        leaf.requires_grad_()
    target = cut.targets(rows)
    with torch.enable_grad():
        loss = cut.token_weights(target) @ cut.gap(rows, target).square().sum(-1) / len(rows)
        expected = torch.autograd.grad(loss, leaves, allow_unused=True)
        descend(cut, shared(foreseen(cut, [rows]), 1), rows)
    assert sum(value is not None for value in expected) > len(leaves) / 2
    for leaf, value in zip(leaves, expected, strict=True):
        assert (leaf.grad is None) == (value is None)
        if value is not None and leaf.grad is not None:
            torch.testing.assert_close(leaf.grad, value, rtol=1e-4, atol=1e-5 * float(value.abs().max()))
