"""Protected experts: how they are read and checked, which hubs fit, and that every strategy leaves them alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.data.batches import Calibration
from compressor.entry_points import STRATEGIES, names
from compressor.errors import CompressionError
from compressor.model.moe_layer import MoeLayer
from compressor.progress import Silent
from compressor.recipe.plan import LayerPlan, touched
from compressor.recipe.registry import Strategy, load_strategy
from compressor.report.comparison import random_drop
from compressor.statistics.statistics import ALL, collect
from compressor.steps.prune.planning import given_protected, strongest_that_fit, with_list
from compressor.steps.prune.selection import METHODS, competing
from tests.support import zoo
from tests.support.opened_models import batches, calibration, opened
from tests.support.plans import make_plan
from tests.support.strategy_runs import moe_layer

MERGING = ("model-centric", "data-centric", "hc-smoe", "router-guided")


LAYERS = (
    *(moe_layer(index=index) for index in (1, 2, 4)),
    *(moe_layer(index=6, part=part) for part in ("text", "vision")),
)


def test_entries_are_read_by_the_number_of_the_decoder_layer(tmp_path: Path) -> None:
    path = tmp_path / "hubs.json"
    entries = [
        {"layer": 6, "expert": 0, "module": "model.layers.6.vision.experts"},
        {"layer": 4, "expert": 7, "influence": 3.5, "aarv": None, "module": "model.layers.4.mlp.experts"},
        {"layer": 1, "expert": 2},
        {"layer": 1, "expert": 0, "module": None},
        {"layer": 1, "expert": 2},
    ]
    path.write_text(json.dumps(entries), encoding="utf-8")
    found = given_protected(path, LAYERS, 4)
    assert found == given_protected(with_list(str(path)), LAYERS, 4)
    assert found == {LAYERS[0].name: {0, 2}, LAYERS[2].name: {7}, LAYERS[4].name: {0}}
    assert list(found) == [LAYERS[0].name, LAYERS[2].name, LAYERS[4].name]  # in the order of the layers
    assert [given_protected(protect, LAYERS, 2) for protect in ([], None, "auto")] == [{}, {}, {}]
    assert with_list(str(path))[1:3] == (
        {"layer": 4, "expert": 7, "module": "model.layers.4.mlp.experts"},
        {"layer": 1, "expert": 2},
    )
    assert (with_list([]), with_list("graph:3")) == (None, "graph:3")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[{", "hubs.json is not valid JSON .*; mend it"),
        (b"\xff\xfe[", "is not valid JSON"),
        ({"layer": 1, "expert": 2}, "should hold a JSON list of experts, such as"),
        ([[1, 2]], r"entry 1 should be an object, it is \[1, 2\]"),
        ([{"layer": 1, "expert": 1}, {"layer": 1}], r"entry 2\.expert is missing"),
        ([{"layer": True, "expert": 1}], r"entry 1\.layer should be a whole number, it is True"),
        ([{"layer": 1, "expert": 2.0}], r"expert should be a whole number, it is 2\.0"),
        ([{"layer": 0, "expert": 2}], "layer 0 has no experts module; layers with experts are 1 to 2, 4, 6"),
        ([{"layer": 1, "expert": 8}], r"model\.layers\.1\.mlp\.experts has no expert 8; .* numbered 0 to 7"),
        ([{"layer": 1, "expert": -1}], "has no expert -1"),
        ([{"layer": 1, "expert": 1, "module": "mlp"}], "no experts module called 'mlp'; .* like model.layers.1"),
        ([{"layer": 1, "expert": 1, "module": 3}], "module should be text, it is 3"),
        ([{"layer": 1, "expert": 1, "module": LAYERS[1].name}], "layer 1 has no experts module called 'model.layers.2"),
        ([{"layer": 6, "expert": 1}], "6 has several experts modules, .*6.text.experts and .*vision.* as 'module'"),
    ],
)
def test_a_faulty_list_is_refused_in_one_sentence(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "hubs.json"
    path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(CompressionError, match=message):
        given_protected(path, LAYERS, 8)


@given(
    groups=st.sampled_from([1, 2, 4]),
    places=st.integers(1, 2),
    strength=st.permutations([(index, expert) for index in range(2) for expert in range(8)]),
    count=st.integers(0, 16),
)
def test_the_strongest_hubs_that_fit_are_protected(
    groups: int, places: int, strength: list[tuple[int, int]], count: int
) -> None:
    """Against taking one after another wherever there is still a place."""
    layers, taken = (
        [moe_layer(index=index, routing_groups=groups, chosen_groups=groups) for index in range(2)],
        list[tuple[int, int]](),
    )
    hubs = [(layers[index].name, expert) for index, expert in strength[:count]]
    for index, expert in strength[:count]:
        here = [one for one in taken if (one[0], one[1] * groups // 8) == (index, expert * groups // 8)]
        taken += [(index, expert)] if len(here) < places else []
    found = strongest_that_fit(hubs, layers, places * groups, "auto")
    assert sorted((index, e) for index in range(2) for e in found.get(layers[index].name, ())) == sorted(taken)


def variations() -> list[Strategy]:
    """Every installed strategy, with every way to merge and align, to search and to rank."""
    wishes: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in names(STRATEGIES) if name != "listed"]
    for name in MERGING:
        for merge in METHODS:
            wishes += [(name, {"merge": merge, "align": align, "merge_routers": not align}) for align in (False, True)]
    wishes += [("enumerate", {"most_subsets": 0})]
    wishes += [("model-centric", {"representation": "vectorized"})]
    return [*(load_strategy(*wish) for wish in wishes), random_drop(0)]


def least_liked(free: LayerPlan, layer: MoeLayer, places: int) -> list[int]:
    """So many experts of each routing group, those first that a plan drops or merges with the most others."""
    size = {expert: len(group.members) for group in free.groups for expert in group.members}
    ranked = [sorted(block, key=lambda e: (-size.get(e, 99), -e)) for block in competing(layer)]
    return [expert for block in ranked for expert in block[:places]]


@pytest.mark.parametrize("name", ["mixtral", zoo.full("deepseek_v3")])
def test_no_strategy_touches_protected_experts(name: str, tmp_path: Path) -> None:
    stock, model = opened(name, tmp_path)
    data = calibration(batches(stock, (2, 2, 1), 16))
    data = Calibration(data.batches, data.identity, heldout=frozenset({2}))
    strategies, keep = variations(), 4
    passing = collect(model, ALL, data, Silent())
    stats = next(passing).adding(rank_change=torch.rand(8, dtype=torch.float64))
    for strategy in strategies:
        layer = stats.layer
        wished = least_liked(strategy.plan_layer(stats, keep), layer, keep // layer.routing_groups)
        for count in (keep, keep - 1):
            protected = frozenset(wished[:count])
            made = strategy.plan_layer(stats, keep, protected)
            assert touched(made, protected) == [], (strategy.name, strategy.options)
            assert len(made.groups) == keep
            if count == keep:
                assert made.is_drop and {group.members[0] for group in made.groups} == protected
            elif strategy.name in (*MERGING, "ream"):  # the last group takes what competes with it
                assert set(made.dropped) == (set() if layer.routing_groups == 1 else {0, 1, 2, 3} - protected)
    passing.close()


def test_a_strategy_that_does_not_heed_protection_is_refused(tmp_path: Path) -> None:
    _, model = opened("mixtral", tmp_path)
    layers = model.architecture.layers
    deaf = Strategy("deaf", lambda stats, keep, protected: LayerPlan.keep(stats.layer, range(keep)), frozenset())
    made = make_plan(model, deaf, 4, {}, None, Silent(), protected={layers[0].name: frozenset({0, 3})})
    assert made.protected == {layers[0].name: (0, 3)}
    with pytest.raises(CompressionError, match=f"{layers[1].name}: strategy 'deaf' does not keep protected expert 6"):
        make_plan(model, deaf, 4, {}, None, Silent(), protected={layers[1].name: frozenset({1, 6})})
