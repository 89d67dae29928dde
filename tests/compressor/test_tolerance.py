"""Ties: what rounding alone parts is equal, and no strategy's plan hangs on the last bits of its statistics."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import open_model
from compressor.progress import Silent
from compressor.recipe.plan import LayerPlan
from compressor.recipe.registry import load_strategy
from compressor.statistics.statistics import LayerStatistics, LayerWeights, collect
from compressor.steps.prune.partition import group_experts
from compressor.steps.prune.selection import coefficients
from compressor.tolerance import ROUNDING, rounded, stable_argmin
from tests.support import zoo
from tests.support.opened_models import batches

SEEDS = range(8)
NUMBERS = st.floats(1e-30, 1e30, allow_subnormal=False)
Values = Mapping[str, Any]


def noisy(value: Tensor, seed: int, size: float = 1e-7) -> Tensor:
    """A few units in float32's last place on every number."""
    return value * (
        1 + size * torch.randn(value.shape, generator=torch.Generator().manual_seed(seed), dtype=value.dtype)
    )


@given(
    values=st.lists(NUMBERS, min_size=1, max_size=12, unique=True), copies=st.integers(2, 6), seed=st.integers(0, 99)
)
def test_what_noise_alone_parts_is_equal_and_what_differs_is_not(values: list[float], copies: int, seed: int) -> None:
    """However far apart the values are, the largest 1e60 times the least among them."""
    ordered = torch.tensor(sorted(values), dtype=torch.float64)
    assume(bool((ordered[1:] > ordered[:-1] * (1 + 1e-4)).all()))
    found = rounded(noisy(ordered[:, None].expand(-1, copies), seed))
    assert bool((found == found[:, :1]).all())
    assert bool((found[1:, 0] > found[:-1, 0]).all())
    torch.testing.assert_close(found[:, 0], ordered, rtol=2 * ROUNDING, atol=0)


def test_representable_values_stay_what_they_are() -> None:
    halves = torch.tensor([[0.5, -0.25, 3.0], [0.0, 1.5, 1 + 2.0**-17]], dtype=torch.float64)
    assert torch.equal(rounded(halves), halves) and rounded(halves.float()).dtype == torch.float64
    assert rounded(torch.tensor([0.5 + 1e-12, 0.5, 0.5 - 1e-12], dtype=torch.float64)).tolist() == [0.5] * 3
    counts = torch.tensor([2**20, 2**20 + 1, 2**20 + 2])
    assert rounded(counts).tolist() == rounded(counts.double()).tolist() == counts.tolist()
    assert rounded(torch.zeros(0)).shape == (0,) and rounded(torch.zeros(2, 0)).shape == (2, 0)
    assert rounded(torch.tensor(0.75)).item() == 0.75
    assert rounded(torch.tensor([torch.inf, 0.3, -torch.inf])).tolist()[::2] == [torch.inf, -torch.inf]


def test_noise_says_what_is_zero() -> None:
    values = torch.tensor([0.0, 3e-17, -2e-16, 1e-9, 0.5], dtype=torch.float64)
    assert rounded(values, 1e-15).tolist()[:3] == [0.0] * 3 and rounded(values, 1e-15)[3] > 0
    each = rounded(values, torch.tensor([1e-15, 1e-15, 1e-15, 1e-8, 1e-15], dtype=torch.float64))
    assert each.tolist() == [0.0] * 4 + [0.5]
    assert bool((rounded(values)[1:3] != 0).all())
    close = torch.tensor([1e-3, 1e-3 + 1e-7], dtype=torch.float64)
    assert rounded(close)[0] < rounded(close)[1] and rounded(close, 2e-7)[0] == rounded(close, 2e-7)[1]


def test_the_least_is_the_first_of_equal_ones() -> None:
    assert stable_argmin([2.0, 1.0 + 1e-9, 1.0]) == 1 and stable_argmin([2.0, 1.001, 1.0]) == 2
    assert stable_argmin([float("nan"), 3.0, 3.0]) == 1 and stable_argmin([float("nan")] * 2) == 0
    assert stable_argmin([float("inf"), float("-inf")]) == 1 and stable_argmin([1e-12, 0.0], 1e-11) == 0


@given(seed=st.integers(0, 99), count=st.integers(1, 7), blocks=st.sampled_from([None, [[0, 1, 2, 3], [4, 5, 6, 7]]]))
def test_groups_of_tied_experts_do_not_hang_on_noise(seed: int, count: int, blocks: Any) -> None:
    """Eight experts at the corners of a cube: three distances, each many times."""
    corners = torch.tensor([[i >> bit & 1 for bit in range(3)] for i in range(8)], dtype=torch.float64)
    table = torch.cdist(corners, corners, compute_mode="donot_use_mm_for_euclid_dist")
    shaken = noisy(table, seed).triu(1)
    count = 2 * count if blocks is not None and count < 5 else 4 if blocks is not None else count
    assert (
        group_experts(shaken + shaken.T, count, blocks=blocks).groups
        == group_experts(table, count, blocks=blocks).groups
    )


def layer_of(experts: int, top_k: int = 1) -> MoeLayer:
    return MoeLayer("m.experts", "m", "m.gate", "m", 0, experts, top_k)


def scored(values: Values, experts: int) -> LayerStatistics:
    return LayerStatistics(layer_of(experts), 100, values)


TIED = torch.tensor([0.1, 0.7, 0.3, 0.7, 0.3, 0.7, 0.3, 0.2], dtype=torch.float64)
SCORES: list[tuple[str, dict[str, Any], str]] = [
    ("count-guided", {}, "routed_count"),
    ("gated-mass", {}, "gated_norm_sum"),
    ("hub-guided", {}, "gated_norm_sum"),
    ("hub-guided", {}, "rank_change"),
    ("hub-guided", {"mass": "visits", "exponent": 10}, "rank_change"),
    ("reap", {}, "gated_norm_sum"),
    ("ean", {}, "norm_sum"),
    ("man", {}, "norm_sum"),
    ("msan", {}, "squared_norm_sum"),
    ("energy", {}, "stream_energy_sum"),
    ("razor", {}, "squared_deletion_sum"),
    ("leave-one-out", {}, "squared_deletion_sum"),
]


@pytest.mark.parametrize(("name", "options", "statistic"), SCORES)
def test_tied_scores(name: str, options: dict[str, Any], statistic: str) -> None:
    """Where visits are no whole numbers, as with weighted sources, they are as uncertain as the sums."""
    strategy = load_strategy(name, options)
    even = torch.full((8,), 12.3, dtype=torch.float64)
    values = {"routed_count": even, "gated_norm_sum": even, "rank_change": even, statistic: TIED}
    for seed in SEEDS:
        shaken = {key: noisy(value, seed + place) for place, (key, value) in enumerate(values.items())}
        assert kept(strategy.plan_layer(scored(shaken, 8), 5)) == (1, 2, 3, 4, 5)
    better = {**values, statistic: TIED.index_fill(0, torch.tensor(6), 0.3001)}
    assert kept(strategy.plan_layer(scored(better, 8), 5)) == (1, 2, 3, 5, 6)


def kept(made: LayerPlan) -> tuple[int, ...]:
    return tuple(group.members[0] for group in made.groups)


def members(made: LayerPlan) -> list[tuple[int, ...]]:
    return [group.members for group in made.groups]


def test_the_most_visited_of_equals_leads_whatever_the_last_bit_says() -> None:
    visits = torch.tensor([0.1, 0.3, 0.1 + 0.2, 0.3 - 1e-9], dtype=torch.float64)
    assert coefficients((0, 1, 2, 3), "max", visits) == (0, 1, 0, 0)
    assert coefficients((0, 2, 3), "max", visits) == (0, 1, 0)


def test_experts_join_the_lower_of_two_centroids_that_are_as_like_them() -> None:
    logits, outputs = torch.eye(6)[:, [0, 1, 2, 0, 1, 2]], torch.eye(3).repeat(2, 1)[:, None].expand(-1, 6, -1)
    exact = {"gated_norm_sum": torch.full((6,), 0.3), "routed_count": torch.full((6,), 0.7)}
    pairs = [(0, 3), (1, 4), (2, 5)]
    for size, expected in ((2, pairs), (3, [(0, 3, 4), (1, 5), (2,)]), (0, pairs)):
        strategy = load_strategy("ream", {"group_size": size})
        for seed in SEEDS:
            values = {name: noisy(value.double(), seed + place) for place, (name, value) in enumerate(exact.items())}
            values |= {"router_logits": noisy(logits, seed), "expert_outputs": noisy(outputs, seed)}
            assert members(strategy.plan_layer(scored(values, 6), 3)) == expected, (size, seed)


@pytest.mark.parametrize("representation", ["surrogate", "vectorized"])
def test_tied_distances_of_weights(representation: str) -> None:
    """Two triples of equal experts, one of them in pieces: which of the three are merged is not for rounding to say."""
    generator = torch.Generator().manual_seed(0)
    gate_up = (torch.randn(2, 32, 24, generator=generator) * 0.1).repeat_interleave(3, 0)
    down = (torch.randn(2, 24, 16, generator=generator) * 0.1).repeat_interleave(3, 0)
    strategy = load_strategy("model-centric", {"representation": representation})
    for keep in range(1, 6):
        found = [members(strategy.plan_layer(weighty(noisy(gate_up, seed), noisy(down, seed)), keep)) for seed in SEEDS]
        assert all(made == found[0] for made in found), keep
    gate_up[1] *= 1.01
    assert members(strategy.plan_layer(weighty(gate_up, down), 3)) == [(0, 2), (1,), (3, 4, 5)]


def weighty(gate_up: Tensor, down: Tensor) -> LayerStatistics:
    experts = SimpleNamespace(
        has_gate=True, is_transposed=False, is_concatenated=True, gate_up_proj=gate_up, down_proj=down,
        parameters=lambda: [gate_up, down],
    )  # fmt: skip
    return scored({"weights": LayerWeights(experts, None, None, lambda count: None)}, len(gate_up))


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixtral whose experts 0 and 2, 1 and 3, 4 and 6, 5 and 7 are one, rows of the router included."""
    stock, folder = zoo.build("mixtral"), tmp_path_factory.mktemp("twins")
    with torch.no_grad():
        for name, experts in zoo.experts(stock).items():
            router = stock.get_submodule(name.rpartition(".")[0]).gate
            for parameter in (*experts.parameters(), *router.parameters()):
                for one, other in {0: 2, 1: 3, 4: 6, 5: 7}.items():
                    parameter[other] = parameter[one]
    stock.save_pretrained(folder)
    return folder


def shaken(stats: LayerStatistics, seed: int) -> LayerStatistics:
    """Statistics with noise on everything that a matrix product made."""
    change: Callable[[str, Any], Any] = lambda name, value: (  # noqa: E731
        shaken(value, seed) if name == "heldout"
        else noisy(value, seed) if isinstance(value, Tensor) and value.is_floating_point() and name != "routed_count"
        else value
    )  # fmt: skip
    return replace(stats, values={name: change(name, value) for name, value in stats.values.items()})


BY_TEXT = [
    ("router-guided", {}), ("hc-smoe", {}), ("data-centric", {"similarity": "mean-output", "merge": "uniform"}),
    ("data-centric", {"similarity": "linear-cka", "merge": "uniform"}),
    ("data-centric", {"similarity": "rbf-cka", "merge": "uniform"}),
    ("enumerate", {}), ("enumerate", {"most_subsets": 0}),
    ("auto", {}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), BY_TEXT)
def test_twins_are_planned_alike_whatever_the_last_bits_of_what_is_measured(
    name: str, options: dict[str, Any], twins: Path
) -> None:
    model = open_model(locate(str(twins)), "float32", "cpu")
    parts = batches(zoo.build("mixtral"), (2, 2, 2))
    data = Calibration(tuple(parts), {"source": "random tokens"}, heldout=frozenset({1}))
    strategy = load_strategy(name, options)
    for stats in collect(model, strategy.needs, data, Silent()):
        for keep in (3, 5, 7):
            made = strategy.plan_layer(stats, keep)
            for seed in SEEDS:
                assert strategy.plan_layer(shaken(stats, seed), keep).groups == made.groups
