"""Sharing a step of tuning: gradients are those of the loss, and no number of ranks changes a bit of the sums."""

from functools import reduce

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressor.steps.correct.sharing import Branch, Share, descend, foreseen, grown, shared
from tests.cut_cases import cut_case

LOADS = st.lists(st.integers(1, 1000), min_size=1, max_size=40)


def summed(branch: Branch, values: Tensor) -> Tensor:
    """Along the tree as its docstring says, by itself."""
    if branch.halves is None:
        return reduce(torch.add, (values[expert] for expert in branch.experts), torch.zeros_like(values[0]))
    return summed(branch.halves[0], values) + summed(branch.halves[1], values)


@given(LOADS, st.integers(1, 20))
def test_any_number_of_ranks_comes_to_the_same_bits(loads: list[int], size: int) -> None:
    values = torch.randn(len(loads), 3, generator=torch.Generator().manual_seed(len(loads)))
    tree = grown(loads)
    share = Share.of(tree, size)
    assert sorted(expert for rank in range(size) for expert in share.of_rank(rank)) == [*range(len(loads))]
    assert torch.equal(share.total([summed(branch, values) for branch in share.branches]), summed(tree, values))
    assert list(share.owners) == sorted(share.owners)
    heaviest = max(sum(loads[expert] for expert in leaf.experts) for leaf in tree.leaves)
    for rank in range(size):
        assert abs(sum(loads[expert] for expert in share.of_rank(rank)) - sum(loads) / size) <= heaviest


@given(LOADS)
def test_halves_have_about_as_much_to_do(loads: list[int]) -> None:
    def check(branch: Branch) -> None:
        if branch.halves is not None:
            first, second = (sum(loads[expert] for expert in half.experts) for half in branch.halves)
            assert abs(first - second) <= max(loads[expert] for expert in branch.experts)
            for half in branch.halves:
                assert half.experts
                check(half)

    check(grown(loads))


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
