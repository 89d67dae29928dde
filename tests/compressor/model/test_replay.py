"""Batches that run through a layer without being moved on."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressor.model.streaming import LayerVisitor, Pass, Replay
from tests.support.opened_models import of_two_layers, plain_calls, watch
from tests.support.sequential_runs import opened_wide, with_heldout


class Replaying(LayerVisitor):
    """Replays some batches before every layer, so many times, and keeps the outputs."""

    def __init__(self, times: int, batches: int) -> None:
        self.times, self.batches, self.outputs = times, batches, list[Any]()

    def before_layer(self, decoder_layer: str, replay: Replay) -> None:
        for _ in range(self.times):
            replay(range(self.batches))

    def on_batch_end(self, batch: int, output: Any) -> None:
        self.outputs.append(output)


@pytest.mark.parametrize(
    "name", ["zaya", "deepseek_v4", "qwen3_next", "jamba", "kimi_linear", "minimax", "lfm2_moe", "granitemoehybrid"]
)
def test_replays_show_what_a_plain_forward_does_and_leave_no_trace(name: str, tmp_path: Path) -> None:
    """Every layer replayed twice: state that a forward leaves behind would show."""
    stock, model = opened_wide(name, tmp_path)
    parts = with_heldout(stock).batches
    expected = plain_calls(stock, model.architecture, parts)
    seen = watch(model.partial.model, model.architecture.layers)
    wanted = {layer.decoder_layer for layer in model.architecture.layers}
    Pass(model, parts, wanted=wanted).run(Replaying(2, len(parts)))
    for layer, calls in expected.items():
        assert len(seen[layer].experts_outputs) == 3 * len(parts), layer
        for found, plain in zip(seen[layer].experts_outputs, 3 * calls.experts_outputs, strict=True):
            torch.testing.assert_close(found, plain, rtol=0, atol=2e-6)


class InPlace(nn.Module):
    """A layer that writes into what it is given."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.mul_(2)


class Doubling(nn.Module):
    """Two such layers behind an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(9, 2), nn.ModuleList([InPlace(), InPlace()])

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
        hidden: Tensor = self.embed(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def test_replaying_a_layer_that_writes_into_its_input_does_not_move_it_on() -> None:
    ids, replaying, model = torch.tensor([[2, 5]]), Replaying(1, 1), of_two_layers(Doubling())
    Pass(model, [ids], to_end=True).run(replaying)
    assert torch.equal(replaying.outputs[0], 4 * model.partial.model.embed(ids))
