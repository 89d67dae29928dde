from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.stats import median_abs_deviation

from compressor.attribution.figures import Attribution, Output, Receiver, Sender
from compressor.attribution.hubs import SUPER_QUANTILE, Hub, find_hubs, outlier_scores, super_experts
from tests.support.attribution_results import attribution, module, sender

NUMBERS = st.lists(st.integers(-(10**6), 10**6).map(lambda number: number / 8), min_size=1, max_size=40)


def experts(influence: Sequence[Sequence[float | None]], rank_change: Any = None) -> Attribution:
    """One layer of experts with these rows; AARV as large as the influence unless given."""
    changes = influence if rank_change is None else rank_change
    senders = tuple(
        sender("expert", 1, row, number=place, rank_change=tuple(change))
        for place, (row, change) in enumerate(zip(influence, changes, strict=True))
    )
    return with_senders(senders)


def with_senders(senders: Sequence[Sender]) -> Attribution:
    """An attribution of these senders to as many routers as they speak of, each with logits of variance 1."""
    count = len(senders[0].influence)
    routers = tuple(Receiver(f"model.layers.{layer}.mlp.experts", layer, 1.0, 0.0) for layer in range(count))
    return replace(attribution(), senders=tuple(senders), receivers=routers)


def outputs(entries: Sequence[float], tokens: Sequence[int] | None = None, layers: int = 2) -> Attribution:
    """Experts with these largest entries, in layers of equally many."""
    width = len(entries) // layers
    counts = [10] * len(entries) if tokens is None else tokens
    found = tuple(
        Output(module(place // width), place // width, place % width, counts[place], 0.5, 2 * entry, entry)
        for place, entry in enumerate(entries)
    )
    return replace(attribution(), outputs=found)


def places(found: Sequence[Hub | Output]) -> list[tuple[int, int]]:
    return [(each.layer, each.expert) for each in found]


def test_scores_by_hand() -> None:
    assert outlier_scores([1.0, 2.0, 3.0, 4.0, 10.0]) == pytest.approx([-1.349, -0.6745, 0, 0.6745, 7 * 0.6745])
    # the median deviation of 0 gives way to a twentieth of the median 2
    assert outlier_scores([2.0, 2.0, 2.0, 3.0]) == pytest.approx([0, 0, 0, 6.745])
    # both are 0: the mean deviation is 5 / 5
    assert outlier_scores([0.0, 0.0, 0.0, 0.0, 5.0]) == pytest.approx([0, 0, 0, 0, 5 * 0.7979])
    assert outlier_scores([0.0, 0.0, 0.0, 0.0, -5.0])[4] == pytest.approx(-5 * 0.7979)
    assert outlier_scores([7.0]) == [0] and outlier_scores([0.0, 0.0]) == [0, 0]


@given(NUMBERS)
def test_scores_are_those_of_scipy_unless_the_values_hardly_differ(values: list[float]) -> None:
    deviation = median_abs_deviation(values, scale="normal")
    assume(deviation * 0.6745 > 0.051 * abs(np.median(values)))
    wanted = (np.array(values) - np.median(values)) / deviation
    assert outlier_scores(values) == pytest.approx(wanted.tolist(), rel=1e-4)


def test_an_outlier_of_both_is_a_hub_with_its_sums_and_scores() -> None:
    influence = [(None, 1.0 + 0.1 * place, 0.5) for place in range(7)] + [(None, 6.0, 3.0)]
    change = [(None, 0.2 + 0.01 * place, 0.1) for place in range(7)] + [(None, 1.0, 0.5)]
    made = experts(influence, change)
    (hub,) = find_hubs(made)
    sums = [sum(row[1:]) for row in influence]  # type: ignore[arg-type]
    assert (hub.module, hub.layer, hub.expert) == (module(1), 1, 7)
    assert hub.influence == 9 and hub.aarv == 1.5 and hub.share == made.senders[7].share
    deviation = median_abs_deviation(sums, scale="normal")
    assert hub.influence_score == pytest.approx((9 - np.median(sums)) / deviation, rel=1e-4)


@pytest.mark.parametrize("which", ["influence", "rank_change"])
def test_an_outlier_of_one_alone_is_no_hub(which: str) -> None:
    even = [(1.0 + 0.1 * place,) for place in range(8)]
    odd = [*even[:7], (90.0,)]
    assert places(find_hubs(experts(odd))) == [(1, 7)]
    assert find_hubs(experts(*((odd, even) if which == "influence" else (even, odd)))) == ()


def test_the_threshold_decides() -> None:
    made = experts([(value,) for value in (1.0, 2.0, 3.0, 4.0, 10.0)])  # 10 scores 4.72
    assert places(find_hubs(made)) == [(1, 4)]
    assert find_hubs(made, threshold=4.75) == ()
    assert places(find_hubs(made, threshold=1.0)) == [(1, 4)]
    assert places(find_hubs(made, threshold=0.5)) == [(1, 4), (1, 3)]
    assert find_hubs(made, threshold=7 * 0.6745) == ()  # has to be exceeded


@pytest.mark.parametrize(("share", "found"), [(0.0009, 0), (0.0011, 1)])
def test_what_stands_out_in_noise_is_no_hub(share: float, found: int) -> None:
    made = experts([(1e-7,)] * 7 + [(share,)], [(0.001,)] * 7 + [(1.0,)])
    assert len(find_hubs(made)) == found


def test_layers_are_judged_apart_and_the_strongest_comes_first() -> None:
    made = attribution(layers=5, experts=8, hubs={(1, 6): 50.0, (3, 0): 900.0, (2, 4): 200.0, (2, 1): 100.0})
    found = find_hubs(made)
    assert set(places(found)) == {(1, 6), (3, 0), (2, 4), (2, 1)}
    assert [hub.influence for hub in found] == sorted((hub.influence for hub in found), reverse=True)
    # the same hub, now as weak as another layer's plain experts
    weak = tuple(
        replace(each, influence=tuple(None if value is None else value / 1e4 for value in each.influence))
        if each.layer == 1 else each for each in made.senders
    )  # fmt: skip
    calm = tuple(replace(each, variance=0.0) for each in made.receivers)
    assert places(find_hubs(replace(made, senders=weak, receivers=calm)))[-1] == (1, 6)


def test_equally_strong_hubs_come_in_model_order() -> None:
    layers = [[sender("expert", layer, (1.0,), number=n) for n in range(8)] for layer in (2, 1)]
    senders = [replace(each, influence=(50.0,), rank_change=(9.0,)) if each.number in (3, 5) else each
               for layer in layers for each in layer]  # fmt: skip
    assert places(find_hubs(with_senders(senders))) == [(1, 3), (1, 5), (2, 3), (2, 5)]
    shaken = [replace(each, influence=(each.influence[0] * (1 + 1e-9 * place),)) for place, each in enumerate(senders)]
    assert places(find_hubs(with_senders(shaken))) == [(1, 3), (1, 5), (2, 3), (2, 5)]
    stronger = [
        replace(each, influence=(each.influence[0] * (1 + 1e-4 * place),)) for place, each in enumerate(senders)
    ]
    assert places(find_hubs(with_senders(stronger))) == [(1, 5), (1, 3), (2, 5), (2, 3)]


def paper_rule(entries: Sequence[float]) -> set[int]:
    least = np.percentile(entries, 99.5)
    return {place for place, entry in enumerate(entries) if entry > least and entry > max(entries) / 10}


@settings(max_examples=30)
@given(st.integers(202, 1000), st.integers(0, 999), st.lists(st.floats(50, 900), max_size=4))
def test_super_experts_are_the_outliers_that_the_papers_rule_names(count: int, seed: int, high: list[float]) -> None:
    entries = [*np.random.default_rng(seed).uniform(0.5, 1.5, count).tolist(), *high]
    entries = entries[: len(entries) // 2 * 2]
    assume(len(set(entries)) == len(entries))
    assume((SUPER_QUANTILE * (len(entries) - 1)) % 1 > 1e-6)
    found = super_experts(outputs(entries))
    wanted = {place for place in paper_rule(entries) if outlier_scores(entries)[place] > 3.5}
    assert {each.layer * (len(entries) // 2) + each.expert for each in found} == wanted
    assert [each.max_entry for each in found] == sorted((each.max_entry for each in found), reverse=True)


def test_more_than_the_percentile_are_not_named_but_equal_ones_are_together() -> None:
    assert places(super_experts(outputs([1.0] * 30 + [60.0, 50.0]))) == [(1, 14)]
    assert places(super_experts(outputs([1.0] * 30 + [50.0, 50.0]))) == [(1, 14), (1, 15)]
    thousand = [1.0] * 996 + [100.0, 30.0, 10.0, 9.0]  # beyond the percentile and outliers all
    assert places(super_experts(outputs(thousand))) == [(1, 496), (1, 497)]  # above a tenth of the largest
    assert super_experts(replace(attribution(), outputs=())) == ()


def test_experts_that_no_token_reached_are_left_out() -> None:
    entries = [0.0] * 40 + [1.0, 1.01, 1.02, 0.99, 0.98, 1.03, 1.04, 1.1]
    tokens = [0] * 40 + [10] * 8
    assert super_experts(outputs(entries, tokens)) == ()  # none is an outlier of the eight
    assert places(super_experts(outputs([*entries[:-1], 9.0], tokens))) == [(1, 23)]
