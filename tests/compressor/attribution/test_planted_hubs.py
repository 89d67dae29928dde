"""Hubs planted in tiny models: an expert or head that writes what a later router reads is found, no other is."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from compressor.attribution.figures import Attribution, Sender
from compressor.attribution.graph import MEASURES, centralities, ranking, routing_graph
from compressor.attribution.hubs import find_hubs, super_experts
from compressor.attribution.measure import attribute
from compressor.checkpoint.source import locate
from compressor.model.opened import open_model
from compressor.progress import Silent
from tests.support import zoo
from tests.support.opened_models import batches, calibration

FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_hidden_layers": 6, "num_local_experts": 16},
    "qwen2_moe": {"num_hidden_layers": 6},  # with a shared expert
    "deepseek_v3": {"num_hidden_layers": 6, "n_group": 1, "topk_group": 1},  # sigmoid, bias, shared, a dense layer
}
LAYER, EXPERT, STRENGTH = 3, 5, 20.0


def attributed(model: PreTrainedModel, folder: Path) -> Attribution:
    model.save_pretrained(folder)
    parts = batches(model, (4, 2), 16)
    return attribute(open_model(locate(str(folder)), "float32", "cpu"), calibration(parts), Silent())


def reading(model: Any, layer: int) -> Tensor:
    """[E, H]: the rows of a layer's router on the residual stream, through its norm's weight."""
    block = model.model.layers[layer]
    rows: Tensor = block.mlp.gate.weight * block.post_attention_layernorm.weight
    return rows.detach()


def towards(model: Any, layer: int) -> Tensor:
    """[H]: the unit vector that favours a later router's first expert over its second."""
    rows = reading(model, layer)
    return torch.nn.functional.normalize(rows[0] - rows[1], dim=0)


def unread(model: Any, layers: Sequence[int]) -> Tensor:
    """[H]: a unit vector that no router of these layers reads."""
    rows = torch.cat([reading(model, layer) for layer in layers])
    complement = torch.linalg.svd(rows.double(), full_matrices=True).Vh[len(rows) :]
    assert len(complement) > 0
    return complement[0].float()


@torch.no_grad()
def write(model: Any, layer: int, expert: int, direction: Tensor) -> None:
    """Let an expert put out multiples of one direction, large ones."""
    down = model.model.layers[layer].mlp.experts.down_proj
    mixed = torch.randn(down.shape[-1], generator=torch.Generator().manual_seed(1))
    down[expert] = STRENGTH * torch.outer(direction, mixed)


def strongest(senders: Sequence[Sender], row: str) -> Sender:
    return max(senders, key=lambda sender: float(getattr(sender, row)))


def most_routed(model: Any, layer: int, folder: Path) -> tuple[Sequence[Sender], Sender]:
    """All experts, and the one of a layer that most tokens are routed to."""
    experts = attributed(model, folder / "before").of_kind("expert")
    return experts, strongest([sender for sender in experts if sender.layer == layer], "share")


@pytest.mark.parametrize("name", FAMILIES)
def test_an_expert_that_every_later_router_reads_is_first_by_every_measure(name: str, tmp_path: Path) -> None:
    model = zoo.build(name, **FAMILIES[name])
    _, often = most_routed(model, 1, tmp_path)
    write(model, 1, often.number or 0, torch.stack([towards(model, layer) for layer in range(2, 6)]).sum(0))
    graph = routing_graph(attributed(model, tmp_path / "after"))
    found = centralities(graph)
    for measure in MEASURES:
        assert ranking(found, measure)[0] == f"L1 E{often.number}", measure
        assert max(found[measure].values()) == found[measure][f"L1 E{often.number}"], measure


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe"])
def test_a_massive_expert_that_no_later_router_reads_is_no_hub(name: str, tmp_path: Path) -> None:
    model = zoo.build(name, **{**FAMILIES[name], "num_hidden_layers": 5})
    layer = 3 if name == "mixtral" else 2  # the routers after it leave room among 32 dimensions
    write(model, layer, EXPERT, unread(model, range(layer + 1, 5)))
    found = attributed(model, tmp_path)
    supers = super_experts(found)
    assert [(each.layer, each.expert) for each in supers] == [(layer, EXPERT)]
    assert not any(hub.layer == layer and hub.expert == EXPERT for hub in find_hubs(found))
    own = next(each for each in found.of_kind("expert") if (each.layer, each.number) == (layer, EXPERT))
    weakest = min(each.total_influence for each in found.of_kind("expert") if each.layer == layer and each is not own)
    assert own.share > 0 and own.total_influence < 1e-3 * weakest
    assert own.total_rank_change == 0
