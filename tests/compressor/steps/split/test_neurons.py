"""Energies against a loop over tokens, what weights alone say, and the order that comes of both."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.model.opened import open_model
from compressor.progress import Silent
from compressor.statistics.statistics import collect
from compressor.steps.split.view import energy_of_weights, neuron_energies, order_of
from tests.support import zoo


def looped(model: Any, ids: torch.Tensor) -> list[torch.Tensor]:
    """Energies [E, I] of each layer of a stock Mixtral, one token, expert and neuron at a time."""
    calls: list[tuple[Any, tuple[torch.Tensor, ...]]] = []
    handles = [
        module.register_forward_pre_hook(lambda module, args: calls.append((module, args)))
        for module in zoo.experts(model).values()
    ]
    zoo.logits(model, ids)
    for handle in handles:
        handle.remove()
    found = []
    for module, (hidden, index, weights) in calls:
        width = module.down_proj.shape[2]
        energy = torch.zeros(len(module.down_proj), width, dtype=torch.float64)
        for token in range(len(hidden)):
            for slot, expert in enumerate(index[token].tolist()):
                both = module.gate_up_proj[expert].double() @ hidden[token].double()
                inner = silu(both[:width]) * both[width:]
                for neuron in range(width):
                    added = weights[token, slot].double() * inner[neuron] * module.down_proj[expert][:, neuron].double()
                    energy[expert, neuron] += added.square().sum()
        found.append(energy.detach())
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("model")
    return folder, zoo.save("mixtral", folder)


def test_energies_are_what_a_loop_over_tokens_finds(saved: tuple[Path, Any]) -> None:
    folder, model = saved
    ids = zoo.tokens(model, 2, 24)
    needs = frozenset({"weights", "squared_neuron_sum"})
    text = Calibration((ids,), {"source": "random tokens"})
    made = [neuron_energies(stats) for stats in collect(open_model(locate(str(folder), None)), needs, text, Silent())]
    by_weights = [energy_of_weights(module) for module in zoo.experts(model).values()]
    for energy, looped_energy, unread in zip(made, looped(model, ids), by_weights, strict=True):
        reached = looped_energy.sum(1, keepdim=True) > 0
        wanted = torch.where(reached, looped_energy, unread)  # what no token reached goes by its weights
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
