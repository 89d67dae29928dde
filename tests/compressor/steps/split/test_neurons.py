"""Energies against a loop over tokens, what weights alone say, and the order that comes of both."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from compressor.data.batches import Calibration
from compressor.progress import Silent
from compressor.statistics.statistics import collect
from compressor.steps.split.view import energy_of_weights, neuron_energies, order_of
from tests.support import zoo
from tests.support.opened_models import Calls, opened, plain_calls


def looped(experts: Any, calls: Calls) -> torch.Tensor:
    """Energies [E, I] of a layer of a stock Mixtral, one token, expert and neuron at a time."""
    hidden, index, weights = calls.joined()
    width = experts.down_proj.shape[2]
    energy = torch.zeros(len(experts.down_proj), width, dtype=torch.float64)
    for token, slot in itertools.product(range(len(hidden)), range(index.shape[1])):
        expert = int(index[token, slot])
        both = experts.gate_up_proj[expert].double() @ hidden[token].double()
        inner = silu(both[:width]) * both[width:]
        for neuron in range(width):
            added = weights[token, slot].double() * inner[neuron] * experts.down_proj[expert][:, neuron].double()
            energy[expert, neuron] += added.square().sum()
    return energy.detach()


def test_energies_are_what_a_loop_over_tokens_finds(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    ids = zoo.tokens(stock, 2, 24)
    needs = frozenset({"weights", "squared_neuron_sum"})
    text = Calibration((ids,), {"source": "random tokens"})
    made = [neuron_energies(stats) for stats in collect(model, needs, text, Silent())]
    calls = plain_calls(stock, model.architecture, [ids])
    for layer, energy in zip(model.architecture.layers, made, strict=True):
        experts = stock.get_submodule(layer.name)
        looped_energy = looped(experts, calls[layer.name])
        reached = looped_energy.sum(1, keepdim=True) > 0
        wanted = torch.where(reached, looped_energy, energy_of_weights(experts))  # of unreached ones, by their weights
        torch.testing.assert_close(energy, wanted, rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "nemotron_h"])  # with a gate, interleaved, without
def test_weights_alone_give_a_product_of_norms(name: str) -> None:
    model = zoo.build(name)
    module = next(iter(zoo.experts(model).values()))
    found = energy_of_weights(module)
    fused: torch.Tensor = module.gate_up_proj if module.has_gate else module.up_proj  # type: ignore[assignment]
    down: torch.Tensor = module.down_proj  # type: ignore[assignment]
    if name == "gpt_oss":
        fused, down = fused.transpose(1, 2), down.transpose(1, 2)
    for expert, neuron in ((0, 0), (3, 5), (7, found.shape[1] - 1)):
        rows = {"mixtral": (neuron, neuron + 24), "gpt_oss": (2 * neuron, 2 * neuron + 1)}.get(name, (neuron,))
        wanted = float(down[expert, :, neuron].norm())
        for row in rows:
            wanted *= float(fused[expert, row].norm())
        assert found[expert, neuron] == pytest.approx(wanted, rel=1e-5)


def test_order_falls_and_equals_keep_their_places() -> None:
    energy = torch.tensor([[1.0, 3.0, 1.0, 3.0, 2.0, 1.0]])
    assert order_of(energy, 3).tolist() == [[1, 3, 0, 4, 2, 5]]  # within a part neurons stand as they did
    assert order_of(energy, 6).tolist() == [[1, 3, 4, 0, 2, 5]]
