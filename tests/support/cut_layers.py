"""One cut layer of a tiny model in memory, recorded from plain forwards: what refitting starts from. Test support."""

import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compressor.data.batches import Calibration
from compressor.model.architecture import discover
from compressor.model.moe_layer import MoeLayer
from compressor.model.streaming import hidden_of
from compressor.recipe.plan import LayerPlan
from compressor.steps.correct.cut_layer import CutLayer, Recording
from tests.support import zoo
from tests.support.sequential_runs import drops
from tests.support.stock_models import stock_small


@dataclass(frozen=True)
class CutCase:
    """A layer as cut, and the stock modules that it is made of."""

    layer: MoeLayer
    plan: LayerPlan
    recording: Recording
    stock: Any
    small: Any  # the stock model of fewer experts, this layer filled
    cut: CutLayer
    fit: Tensor  # positions
    heldout: Tensor

    @property
    def experts(self) -> Any:
        """The smaller experts module."""
        return self.small.get_submodule(self.layer.name)

    @property
    def router(self) -> list[Tensor]:
        """The router's parameters that count experts."""
        keys = [t.key for t in self.layer.tensors if not t.key.startswith(f"{self.layer.name}.")]
        parameters = dict(self.small.named_parameters())
        return [parameters[key] for key in keys if key in parameters]


def cut_again(found: CutCase) -> CutLayer:
    """The layer with parameters of its own, from what the recording and the stock modules hold now."""
    block = found.small.get_submodule(found.layer.block)
    return CutLayer(found.recording, found.experts, found.small.get_submodule(found.layer.router), block)


def cut_case(
    name: str, position: int = 0, sequences: int = 16, dtype: torch.dtype = torch.float32, heaviest: int = 1
) -> CutCase:
    """Layer number `position` with a quarter of its experts dropped; half as many sequences are held out as fit.

    Tokens count up to `heaviest` times.
    """
    stock = zoo.build(name).to(dtype)
    architecture = discover(stock.config)
    layer = architecture.layers[position]
    plan = drops(architecture)[layer.name]
    rows = zoo.tokens(stock, sequences + sequences // 2, seed=1)
    counts = torch.randint(1, heaviest + 1, rows.shape, generator=torch.Generator().manual_seed(2)).float()
    emphasis = counts.split(sequences) if heaviest > 1 else ()
    parts = (rows[:sequences], rows[sequences:])
    recording = Recording(stock, layer, Calibration(parts, {}, heldout=frozenset({1}), emphasis=emphasis))
    behind = stock.get_submodule(layer.decoder_layer).register_forward_hook(
        lambda _, __, output: recording.on_layer_output(hidden_of(output))
    )
    for number, part in enumerate(parts):
        recording.enter(number)
        with torch.no_grad():
            stock(input_ids=part, use_cache=False)
    behind.remove()
    recording.detach()
    small = stock_small(name, stock, layer, plan).to(dtype)
    small.requires_grad_(False)
    block = small.get_submodule(layer.block)
    cut = CutLayer(recording, small.get_submodule(layer.name), small.get_submodule(layer.router), block)
    fit, heldout_rows = recording.positions(heldout=False), recording.positions(heldout=True)
    return CutCase(layer, plan, recording, stock, small, cut, fit, heldout_rows)


@torch.no_grad()
def stock_output(found: CutCase, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gate weights [n, K], slots [n, K] and output [n, H] of the stock modules of the smaller model."""
    block = found.small.get_submodule(found.layer.block)
    positional, by_keyword = found.recording.router_arguments(rows, block)
    _, weights, index, *_ = found.small.get_submodule(found.layer.router)(*positional, **by_keyword)
    weights, index = weights.reshape(len(rows), -1), index.reshape(len(rows), -1)
    return weights, index, found.experts(found.recording.inputs[rows].float(), index, weights)


@torch.no_grad()
def put_in(found: CutCase, cut: CutLayer) -> None:
    """Make the stock module's weights those of the refitted layer."""
    for name, value in cut.parameters.items():
        getattr(found.experts, name).copy_(value)


def token_weights(found: CutCase, rows: Tensor) -> Tensor:
    """[n]: as recorded, over the (lower) median of all recorded tokens' weighted squared norms."""
    weights = found.recording.weights.double()
    energies = weights * found.recording.outputs.double().norm(dim=-1) ** 2
    median = sorted(energies.tolist())[(len(energies) - 1) // 2]
    return weights[rows] / median


def plain_error(found: CutCase, rows: Tensor) -> float:
    """Weighted ||y - y'||^2 over weighted ||y||^2, of the stock modules."""
    before, weights = found.recording.outputs[rows].double(), token_weights(found, rows)
    gaps = (stock_output(found, rows)[2].double() - before).square().sum(-1)
    return float((weights * gaps).sum() / (weights * before.square().sum(-1)).sum())


def in_float(found: CutCase) -> CutCase:
    """The same with float32 copies of the smaller model's tensors as they are now."""
    return replace(found, small=copy.deepcopy(found.small).float())
