"""Coefficients by hand, ties, groups that no token reached, and routers that stay one member's."""

from typing import Any

import pytest
import torch

from compressor.errors import CompressionError
from compressor.grouping.choose import METHODS, coefficients, competing, keep_best, merge_groups, merge_needs
from compressor.model.architecture import MoeLayer
from compressor.statistics.statistics import ALL, LayerStatistics

LAYER = MoeLayer(
    "model.layers.3.mlp.experts", "model.layers.3.mlp", "model.layers.3.mlp.gate", "model.layers.3", 3, 8, 2
)
GROUPED = MoeLayer(
    "model.layers.3.mlp.experts", "model.layers.3.mlp", "model.layers.3.mlp.gate", "model.layers.3", 3, 8, 2,
    routing_groups=2, chosen_groups=1, experts_per_group=2,
)  # fmt: skip
COUNTS = torch.tensor([3.0, 1, 0, 0, 5, 5, 2, 0], dtype=torch.float64)


def stats(layer: MoeLayer = LAYER, **values: Any) -> LayerStatistics:
    return LayerStatistics(layer, 16, values)


@pytest.mark.parametrize(
    ("members", "method", "expected"),
    [
        ((0, 1, 6), "uniform", (1 / 3, 1 / 3, 1 / 3)),
        ((0, 1, 6), "frequency", (3 / 6, 1 / 6, 2 / 6)),
        ((0, 1, 6), "max", (1, 0, 0)),
        ((0, 2), "frequency", (1, 0)),  # a member without visits weighs nothing
        ((2, 3, 7), "frequency", (1 / 3, 1 / 3, 1 / 3)),  # no visits at all: uniform
        ((2, 3, 7), "max", (1, 0, 0)),  # a tie goes to the lower expert
        ((1, 4, 5), "max", (0, 1, 0)),
        ((6,), "uniform", (1,)),
        ((2,), "frequency", (1,)),
        ((2,), "max", (1,)),
    ],
)
def test_coefficients_by_hand(members: tuple[int, ...], method: str, expected: tuple[float, ...]) -> None:
    found = coefficients(members, method, COUNTS)
    assert found == pytest.approx(expected, abs=1e-15)
    assert abs(sum(found) - 1) < 1e-12


def test_visits_must_have_been_counted() -> None:
    with pytest.raises(CompressionError, match="merge 'max' needs counts of routed tokens"):
        coefficients((0, 1), "max", None)
    assert coefficients((0, 1), "uniform", None) == (0.5, 0.5)


def test_merged_groups_are_put_in_order_and_singles_stay() -> None:
    plan = merge_groups(stats(routed_count=COUNTS), [(7,), (6, 0, 1), (5, 4), (2,), (3,)], "frequency", decided_by="x")
    assert [group.members for group in plan.groups] == [(0, 1, 6), (2,), (3,), (4, 5), (7,)]
    assert plan.groups[0].coefficients == pytest.approx((3 / 6, 1 / 6, 2 / 6))
    assert plan.groups[3].coefficients == plan.groups[3].router_coefficients == (0.5, 0.5)
    assert all(group.coefficients == group.router_coefficients for group in plan.groups)
    assert [group.untouched for group in plan.groups] == [False, True, True, False, True]
    assert all(group.scale == 1.0 for group in plan.groups)
    assert (plan.module, plan.layer, plan.decided_by, plan.dropped) == (LAYER.name, 3, "x", ())


def test_routers_that_are_not_merged_stay_the_most_visited_members() -> None:
    groups = [(0, 1, 6), (2, 3), (4, 5), (7,)]
    plan = merge_groups(stats(routed_count=COUNTS), groups, "uniform", merge_routers=False)
    assert [group.router_coefficients for group in plan.groups] == [(1, 0, 0), (1, 0), (1, 0), (1,)]
    assert plan.groups[0].coefficients == pytest.approx((1 / 3,) * 3)
    swapped = merge_groups(stats(routed_count=COUNTS.flip(0)), groups, "uniform", merge_routers=False)
    # visits are now 0 2 5 5 0 0 1 3
    assert [group.router_coefficients for group in swapped.groups] == [(0, 1, 0), (1, 0), (1, 0), (1,)]
    blind = merge_groups(stats(), groups, "uniform", merge_routers=False)  # nobody counted: the lowest member
    assert [group.router_coefficients for group in blind.groups] == [(1, 0, 0), (1, 0), (1, 0), (1,)]


def test_needs_of_every_method_exist() -> None:
    for method in METHODS:
        assert merge_needs(method, True) <= merge_needs(method, False) <= ALL
    assert merge_needs("uniform", True) == merge_needs("uniform", False) == frozenset()
    assert merge_needs("max", True) == {"routed_count"}
    assert "routed_count" in merge_needs("learned", False)
    with pytest.raises(CompressionError, match="there is no merge 'mean'; known are uniform, max, frequency, learned"):
        merge_needs("mean", True)


def test_scores_that_rank_nothing_are_refused() -> None:
    scores = COUNTS.clone()
    scores[[2, 5]] = torch.nan
    with pytest.raises(
        CompressionError, match=r"^model\.layers\.3\.mlp\.experts: the score of expert 2 is not a number"
    ):
        keep_best(stats(LAYER), scores, 4, frozenset())
    with pytest.raises(CompressionError, match=r"scores of the shape \[7\] cannot rank 8 experts; give one each"):
        keep_best(stats(LAYER), COUNTS[:7], 4, frozenset())
    infinite = torch.tensor([0.0, -torch.inf, torch.inf, 1, 2, 3, 4, 5])
    assert keep_best(stats(LAYER), infinite, 7, frozenset()).dropped == (1,)


def test_keep_best_by_hand() -> None:
    def kept(scores: torch.Tensor, keep: int, protected: set[int], layer: MoeLayer = LAYER) -> list[int]:
        before = scores.clone()
        plan = keep_best(stats(layer), scores, keep, frozenset(protected))
        assert torch.equal(scores, before)
        assert plan.is_drop
        return [group.members[0] for group in plan.groups]

    assert kept(COUNTS, 4, set()) == [0, 4, 5, 6]
    assert kept(COUNTS, 6, set()) == [0, 1, 2, 4, 5, 6]  # 2, 3 and 7 tie at none: the lowest stays
    assert kept(COUNTS, 4, {7, 3}) == [3, 4, 5, 7]
    assert kept(COUNTS, 4, set(), GROUPED) == [0, 1, 4, 5]
    assert kept(COUNTS, 4, {2, 3}, GROUPED) == [2, 3, 4, 5]
    assert kept(torch.full((8,), torch.inf), 2, {6, 7}) == [6, 7]  # no score is above being protected
    with pytest.raises(CompressionError, match="3 protected experts do not fit into 2; protect fewer or keep more"):
        kept(COUNTS, 2, {0, 1, 2})
    with pytest.raises(CompressionError, match="3 protected experts do not fit into 2 of experts 0 to 3"):
        kept(COUNTS, 4, {0, 1, 2}, GROUPED)  # all in one routing group, which keeps two
    with pytest.raises(CompressionError, match="1 experts are fewer than the top-k of 2"):
        kept(COUNTS, 1, set())


def test_routing_blocks_are_neighbours() -> None:
    assert competing(stats(GROUPED).layer) == [[0, 1, 2, 3], [4, 5, 6, 7]]
