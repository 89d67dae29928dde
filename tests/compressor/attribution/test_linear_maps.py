"""Linear maps: pulling back is the transpose of the explicit matrix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from compressor.attribution.tracing import Chain, Step, pull_sum, same_chains
from tests.linear_maps import explicit


@st.composite
def chains(draw: st.DrawFn, width: int = 5) -> tuple[Chain, int, int]:
    """A chain from vectors of `width`, the width of its images, and a seed for vectors."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    steps: list[Step] = []
    own = width
    for kind in draw(st.lists(st.sampled_from(["number", "vector", "mean", "centre", "matrix"]), max_size=6)):
        if kind == "number":
            steps.append(Step("factor", draw(st.sampled_from([-1.0, 0.5, 2.0, 0.0]))))
        elif kind == "vector":
            steps.append(Step("factor", torch.randn(own, generator=generator)))
        elif kind == "matrix":
            after = draw(st.integers(1, 7))
            steps.append(Step("matrix", torch.randn(after, own, generator=generator)))
            own = after
        else:
            steps.append(Step("mean" if kind == "mean" else "centre"))
    return tuple(steps), own, draw(st.integers(0, 2**31))


@settings(deadline=None)
@given(chains())
def test_pulling_is_the_explicit_matrix(drawn: tuple[Chain, int, int]) -> None:
    chain, width, seed = drawn
    generator = torch.Generator().manual_seed(seed)
    rows, matrix = torch.randn(3, width, generator=generator), explicit(chain, 5)
    close = {"rtol": 1e-4, "atol": 1e-4 * (1 + float(matrix.abs().max()))}
    torch.testing.assert_close(pull_sum(rows, [chain]).double(), rows.double() @ matrix, **close)


@settings(deadline=None)
@given(chains())
def test_products_are_the_same_on_either_side(drawn: tuple[Chain, int, int]) -> None:
    chain, width, seed = drawn
    generator = torch.Generator().manual_seed(seed)
    vectors, rows = torch.randn(4, 5, generator=generator), torch.randn(3, width, generator=generator)
    here, there = vectors @ explicit(chain, 5).float().T @ rows.T, vectors @ pull_sum(rows, [chain]).T
    torch.testing.assert_close(here, there, rtol=1e-4, atol=1e-4 * (1 + float(here.abs().max())))


@settings(deadline=None)
@given(st.lists(chains(), min_size=1, max_size=3))
def test_a_sum_of_chains_pulls_back_to_the_sum(drawn: list[tuple[Chain, int, int]]) -> None:
    same_width = [chain for chain, width, _ in drawn if width == drawn[0][1]]
    rows = torch.randn(3, drawn[0][1], generator=torch.Generator().manual_seed(drawn[0][2]))
    total = torch.stack([rows.double() @ explicit(chain, 5) for chain in same_width]).sum(0)
    found = pull_sum(rows, same_width).double()
    torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-4 * (1 + float(total.abs().max())))


def test_the_empty_chain_changes_nothing() -> None:
    rows = torch.randn(3, 5)
    assert torch.equal(pull_sum(rows, [()]), rows)
    assert torch.equal(pull_sum(rows, [(), ()]), 2 * rows)


def test_a_half_precision_matrix_is_computed_in_float32() -> None:
    weight = torch.randn(4, 5).bfloat16()
    rows = torch.randn(2, 4)
    assert torch.equal(Step("matrix", weight).pull(rows), rows @ weight.float())


STEPS = [
    Step("factor", 2.0), Step("factor", torch.ones(5)), Step("mean"), Step("centre"), Step("matrix", torch.ones(4, 5)),
]  # fmt: skip


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.kind)
def test_steps_of_another_kind_or_other_values_differ(step: Step) -> None:
    others = [Step("factor", 3.0), Step("factor", 2 * torch.ones(5)), Step("matrix", torch.zeros(4, 5))]
    others += [Step("matrix", torch.ones(3, 5)), *(other for other in STEPS if other.kind != step.kind)]
    assert not any(step.is_same(other) or other.is_same(step) for other in others)
    assert step.is_same(step)


def test_equal_values_make_equal_chains() -> None:
    weight, scale = torch.randn(4, 5), torch.randn(5)
    one: list[Chain] = [(Step("factor", scale), Step("matrix", weight)), (Step("mean"),)]
    same: list[Chain] = [(Step("factor", scale.clone()), Step("matrix", weight.clone())), (Step("mean"),)]
    assert same_chains(one, same)
    moved = [same[0][:1], (*same[0][1:], *same[1])]
    for other in (same[:1], [same[1], same[0]], [(*same[0], Step("factor", 1.0)), same[1]], moved):
        assert not same_chains(one, other)
