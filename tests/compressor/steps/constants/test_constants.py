"""The constant of an expert, what it misses, and budgets, each against sums or a search written out plainly."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.data.batches import Calibration
from compressor.divergence.evaluator import Evaluator
from compressor.errors import CompressionError
from compressor.model.substitution import Substitution
from compressor.progress import Silent
from compressor.steps.constants.search import (
    NEEDS,
    LayerConstants,
    cheapest_numbers,
    choose_replaced,
    curve,
    even_numbers,
    halfway,
    probed_numbers,
    replaceable,
    substitutes_of,
)
from compressor.steps.correct.cut_layer import CutLayer, Recording, RefittedConstants
from compressor.steps.correct.refit import refit_constants
from tests.support import opened_models


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "gpt_oss"])
def test_sums_and_the_best_constant_are_those_of_a_plain_forward(name: str, tmp_path: Path) -> None:
    stock, model = opened_models.opened(name, tmp_path)
    parts = opened_models.batches(stock, (2, 1), 16)
    found = opened_models.statistics(model, NEEDS, parts)
    for layer, calls in opened_models.plain_calls(stock, model.architecture, parts).items():
        hidden, index, weights = calls.joined()
        experts, constants = stock.get_submodule(layer), LayerConstants.of(found[layer])
        for expert in range(model.architecture.experts):
            tokens, places = (index == expert).nonzero(as_tuple=True)
            gate = weights[tokens, places].double()
            output = opened_models.one_expert(experts, expert, hidden)[tokens].double()
            torch.testing.assert_close(found[layer].squared_gate_sum[expert].clone(), (gate**2).sum())
            if not len(tokens):
                assert not constants.values[expert].any() and constants.missed[expert] == 0
                continue
            # least squares of g o on g, each token a row: the constant that misses least, and what it misses
            best = torch.linalg.lstsq(gate[:, None], gate[:, None] * output).solution[0]
            missed = (gate**2 * (output - best).square().sum(-1)).sum()
            torch.testing.assert_close(constants.values[expert].double(), best, atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(constants.missed[expert], missed, atol=1e-8, rtol=1e-4)


def test_the_experts_that_miss_least_go_first_and_ties_keep_the_lower_number() -> None:
    found = LayerConstants(torch.zeros(5, 2), torch.tensor([2.0, 0.0, 1.0, 0.0, 3.0], dtype=torch.float64))
    layers: Any = [SimpleNamespace(name="experts", experts=5, top_k=1)]
    assert replaceable(layers, {"experts": found}, {}) == [[3, 1, 2, 0]]
    assert replaceable(layers, {"experts": found}, {"experts": frozenset({3, 2})}) == [[1, 0, 4]]
    gate, output, norm = torch.tensor([4.0, 0]), torch.tensor([[2.0, 4], [0, 0]]), torch.tensor([6.0, 0])
    sums: Any = SimpleNamespace(squared_gate_sum=gate, squared_gate_output_sum=output, squared_gated_norm_sum=norm)
    made = LayerConstants.of(sums)
    assert made.values.tolist() == [[0.5, 1.0], [0, 0]] and made.missed.tolist() == [1.0, 0]


COSTS = st.lists(st.floats(0, 10, width=32), min_size=1, max_size=4)


@given(st.lists(COSTS, min_size=1, max_size=4), st.data())
def test_the_cheapest_division_is_that_of_trying_all(steps: list[list[float]], data: st.DataObject) -> None:
    curves = [np.concatenate([[0.0], np.cumsum(own)]) for own in steps]
    most = [len(own) for own in steps]
    removed = data.draw(st.integers(0, sum(most)))
    every = [numbers for numbers in itertools.product(*(range(each + 1) for each in most)) if sum(numbers) == removed]

    def cost(numbers: list[int]) -> float:
        return float(sum(own[number] for own, number in zip(curves, numbers, strict=True)))

    found, even = cheapest_numbers(curves, removed), even_numbers(removed, most)
    assert sum(found) == removed and cost(found) == pytest.approx(min(cost(list(each)) for each in every))
    assert sum(even) == removed and all(0 <= number <= top for number, top in zip(even, most, strict=True))
    full = [number == top for number, top in zip(even, most, strict=True)]
    free = [number for number, at_top in zip(even, full, strict=True) if not at_top]
    assert not free or (max(free) - min(free) <= 1 and max(even) <= max(free) + 1)
    between = halfway(found, even)
    assert sum(between) == removed
    assert all(min(a, b) <= c <= max(a, b) for a, b, c in zip(found, even, between, strict=True))


def test_a_curve_meets_what_was_measured_and_grows_with_what_is_missed_between() -> None:
    costs = curve([1.0, 1.0, 2.0, 4.0], {2: 0.4, 4: 1.0})
    assert costs.tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 1.0])
    assert curve([0.0, 0.0], {2: 0.4}).tolist() == pytest.approx([0, 0.2, 0.4])
    assert curve([1.0, 1.0], {1: 0.5, 2: 0.3}).tolist() == pytest.approx([0, 0.5, 0.5])  # never cheaper with more
    assert probed_numbers(6, 8) == (2, 4, 6) and probed_numbers(28, 32) == (8, 16, 24, 28)


def test_variants_of_one_pass_are_measured_as_alone_and_a_division_is_never_worse_than_even(tmp_path: Path) -> None:
    stock, model = opened_models.opened("mixtral", tmp_path)
    parts = opened_models.batches(stock, (4, 4), 16)
    stats = opened_models.statistics(model, NEEDS, parts)
    constants = {name: LayerConstants.of(own) for name, own in stats.items()}
    layers = [layer.name for layer in model.architecture.layers]
    first, both = ({layers[0]: [1, 2]}, {layers[0]: [0], layers[1]: [3]})
    variants = [Substitution(constants=substitutes_of(dropped, constants)) for dropped in ({}, first, both)]
    evaluator = Evaluator.of(model, parts)
    together = [each.kl.tolist() for each in evaluator.measure(model, variants)]
    assert together == [evaluator.measure(model, [own])[0].kl.tolist() for own in variants]
    assert not any(together[0]) and sum(together[1]) > 0.001 and sum(together[2]) > 0.001
    removed = 3
    given = model, constants, {layers[0]: frozenset({0})}, removed
    replaced, figures = choose_replaced(*given, "uneven", parts, Silent())
    numbers = [len(replaced[name]) for name in layers]
    assert sum(numbers) == removed and 0 not in replaced[layers[0]]
    even, _ = choose_replaced(*given, "even", parts, Silent())
    assert sorted(len(even[name]) for name in layers) == [1, 2]
    assert all(0 <= number <= model.architecture.experts - 2 for number in numbers)
    assert figures["heldout_kl_chosen"] <= figures["heldout_kl_even"]
    with pytest.raises(CompressionError, match="leaves 7; calibrate on more sequences"):
        choose_replaced(*given, "uneven", [parts[0], parts[1][:3]], Silent())


def test_refitted_constants_are_the_weighted_least_squares_of_what_the_layer_misses(tmp_path: Path) -> None:
    stock, model = opened_models.opened("mixtral", tmp_path)
    layer = model.architecture.layers[1]
    dropped, kept = [1, 4, 6], [0, 2, 3, 5, 7]
    emphasis = 0.5 + torch.rand(6, 16, generator=torch.Generator().manual_seed(1))
    parts = opened_models.batches(stock, (4, 2), 16)
    recording = Recording(stock, layer, Calibration(tuple(parts), {}, emphasis=(emphasis,)))
    calls = opened_models.plain_calls(stock, model.architecture, parts)[layer.name]
    recording.detach()
    experts, block = stock.get_submodule(layer.name), stock.get_submodule(layer.block)
    hidden, index, weights = calls.joined()
    gates = torch.zeros(len(hidden), 8, dtype=torch.float64).scatter_add_(1, index, weights.double())
    outputs = torch.stack([opened_models.one_expert(experts, expert, hidden).double() for expert in range(8)], 1)
    for name in ("gate_up_proj", "down_proj"):
        setattr(experts, name, torch.nn.Parameter(getattr(experts, name)[kept], requires_grad=False))
    slots = torch.tensor([[*kept, *dropped].index(expert) for expert in range(8)])
    start = torch.randn(3, hidden.shape[1], generator=torch.Generator().manual_seed(0))
    router = stock.get_submodule(layer.router)
    constants = RefittedConstants(start.clone(), start, slots)
    cut = CutLayer(recording, experts, router, block, constants)
    rows = torch.arange(len(hidden))
    refit_constants(cut, rows, rows)
    missing = torch.einsum("te,teh->th", gates[:, dropped], outputs[:, dropped])  # the layer without its kept experts
    share = emphasis.flatten().double().sqrt()[:, None]
    best = torch.linalg.lstsq(gates[:, dropped] * share, missing * share).solution
    torch.testing.assert_close(constants.values.double(), best, atol=2e-4, rtol=1e-3)
    expected = (
        torch.einsum("te,teh->th", gates[:, kept], outputs[:, kept]) + gates[:, dropped] @ constants.values.double()
    )
    output = cut.targets(rows) - cut.gap(rows, cut.targets(rows))
    torch.testing.assert_close(output.double(), expected, atol=1e-5, rtol=1e-4)
