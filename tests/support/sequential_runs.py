"""Passes in order over tiny models: calibration with a held-out part, and plans by hand; test support."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.model.architecture import Architecture
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel, open_model
from compressor.model.streaming import LayerVisitor
from compressor.progress import Silent
from compressor.recipe.plan import Group, LayerPlan, Source
from compressor.steps.correct.sequential import LayerWork, compress_sequentially
from tests.support import zoo
from tests.support.plans import Decided

WIDER: dict[str, dict[str, Any]] = {"deepseek_v3-n_group4": {"n_routed_experts": 16}}  # 8 experts cannot lose any
SHARED = {"diffusion_gemma"}  # encoder and decoder are the same experts

Plans = Mapping[str, LayerPlan]


def opened_wide(name: str, folder: Path, dtype: str = "float32", **overrides: Any) -> tuple[PreTrainedModel, OpenModel]:
    """The stock model in memory, wide enough to lose experts, and the same one opened from its checkpoint."""
    stock = zoo.build(name, **WIDER.get(name, {}), **overrides)
    stock.to(getattr(torch, dtype)).save_pretrained(folder)
    return stock, open_model(locate(str(folder)), dtype, "cpu")


def with_heldout(stock: PreTrainedModel, fit: int = 4, heldout: int = 3, length: int = 12) -> Calibration:
    """Batches of random tokens: fit, held out, fit."""
    rows = zoo.tokens(stock, fit + heldout, length, seed=3)
    parts = torch.split(rows, [fit // 2, heldout, fit - fit // 2])
    identity = {"source": "random tokens", "sha256": "0", "tokens": rows.numel()}
    return Calibration(tuple(parts), identity, heldout=frozenset({1}))


def _by_block(layer: MoeLayer) -> list[list[int]]:
    size = layer.experts // layer.routing_groups
    return [list(range(begin, begin + size)) for begin in range(0, layer.experts, size)]


def drops(architecture: Architecture) -> dict[str, LayerPlan]:
    """Keep three quarters of every routing group, drawn anew in each layer."""
    found = {}
    for layer in architecture.layers:
        draw = random.Random(layer.name)
        kept = [expert for block in _by_block(layer) for expert in draw.sample(block, len(block) * 3 // 4)]
        found[layer.name] = LayerPlan.keep(layer, kept)
    return found


def merges(architecture: Architecture) -> dict[str, LayerPlan]:
    """Pairs within a routing group become their mean, drawn anew in each layer."""
    found = {}
    for layer in architecture.layers:
        draw = random.Random(layer.name)
        groups = []
        for block in _by_block(layer):
            mixed = draw.sample(block, len(block))
            groups += [Group(pair, (0.5, 0.5), (0.5, 0.5)) for pair in zip(mixed[::2], mixed[1::2], strict=True)]
        found[layer.name] = LayerPlan.of(layer, groups)
    return found


def keeps(architecture: Architecture) -> dict[str, LayerPlan]:
    """Keep all experts."""
    return {layer.name: LayerPlan.keep(layer, range(layer.experts)) for layer in architecture.layers}


def whole_plan(model: OpenModel, plans: Plans, **more: Any) -> Decided:
    """The plan that somebody could write to a file."""
    layers = tuple(plans[layer.name] for layer in model.architecture.layers)
    source = Source(str(model.source.folder), None, model.fingerprint)
    return Decided(source, len(layers[0].groups), "by hand", {}, more.pop("calibration", None), layers, **more)


def run(model: OpenModel, plans: Plans, data: Calibration | None, **more: Any) -> dict[str, LayerPlan]:
    """`compress_sequentially` with these plans; the plans that come back, by layer."""
    experts = len(next(iter(plans.values())).groups)
    passing = {name: more.pop(name) for name in ("files", "probe") if name in more}
    work = LayerWork(experts, lambda stats: plans[stats.layer.name], **more)
    made = compress_sequentially(model, work, data, Silent(), **passing)
    return {plan.module: plan for plan in made}


@dataclass
class Watched(LayerVisitor):
    """Batches that ride along as an evaluator's do, and whose logits are kept."""

    batches: list[Tensor]
    first: int = 0
    logits: dict[int, Tensor] = field(default_factory=dict)

    def numbers_of(self, variant: int | None) -> list[int]:
        """Batches that pass the corrected layers are of variant 0."""
        return [self.first + number for number in range(len(self.batches)) if variant == 0]

    def on_batch_end(self, batch: int, output: Any) -> None:
        self.logits[batch - self.first] = output.logits.clone()
