"""Multi-token-prediction heads: run as models of one layer they do what plain torch does, and are cut as their plan."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.errors import CompressionError
from compressor.model.mtp import acceptances, find_heads
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Silent
from compressor.steps.correct.heads import chosen_heads, statistics_with_heads
from tests.support import mtp_checkpoints, zoo
from tests.support.mtp_forward import run_all

Tensors = dict[str, Tensor]
NEEDS = frozenset({"routed_count", "gate_weight_sum", "inputs", "gated_norm_sum"})
CASES = {"qwen3_next": {"heads": 1}, "deepseek_v3": {"heads": 2, "own_ends": True}}


def opened(made: mtp_checkpoints.Made) -> OpenModel:
    return open_model(locate(str(made.folder)), "float32", "cpu")


def text(made: mtp_checkpoints.Made) -> tuple[Tensor, ...]:
    return torch.split(zoo.tokens(made.model, 5, 10, seed=3), [3, 2])


@pytest.mark.parametrize("name", CASES)
def test_a_head_runs_as_in_plain_torch(name: str, tmp_path: Path) -> None:
    made = mtp_checkpoints.make(name, tmp_path, **CASES[name])  # type: ignore[arg-type]
    model, batches = opened(made), text(made)
    heads = find_heads(model)
    assert len(heads) == len(made.blocks)
    trunk, seen = run_all(made, made.model, made.tensors, torch.cat(batches))
    found = {}
    for stats in statistics_with_heads(model, heads, NEEDS, Calibration(batches, {}), Silent(), 0, {}):
        found[stats.layer.name] = {need: stats.values[need].clone() for need in NEEDS}
    assert len(found) == len(model.architecture.layers) + len(heads)
    for head, block, own in zip(heads, made.blocks, seen, strict=True):
        assert head.named.name == f"{block}mlp.experts"
        stats = found[head.named.name]
        torch.testing.assert_close(stats["inputs"], own.inputs, rtol=0, atol=2e-5)
        counts = torch.bincount(own.index.flatten(), minlength=8)
        assert stats["routed_count"].tolist() == counts.tolist()
        sums = torch.zeros(8, dtype=torch.float64).index_add_(0, own.index.flatten(), own.weights.flatten().double())
        torch.testing.assert_close(stats["gate_weight_sum"], sums, rtol=0, atol=1e-4)
    for ahead, (own, accepted) in enumerate(zip(seen, acceptances(model, heads, batches), strict=True), start=1):
        agreed = trunk[:, ahead:] == own.choices
        assert accepted.tolist() == [int(agreed.sum()), agreed.numel()]


UNKNOWN: dict[str, tuple[str, Callable[[Tensors], object]]] = {
    "another tensor": ("no known layout", lambda tensors: tensors.update({"mtp.odd.weight": torch.ones(3)})),
    "no projection": ("no tensor for its projection", lambda tensors: tensors.pop("mtp.fc.weight")),
    "another width": ("not plain", lambda tensors: tensors.update({"mtp.fc.weight": torch.ones(32, 32)})),
    "fewer experts": ("not understood", lambda tensors: tensors.pop("mtp.layers.0.mlp.experts.7.up_proj.weight")),
}


def test_what_is_not_understood_is_left_out_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = mtp_checkpoints.make("qwen3_next", tmp_path)
    whole = made.tensors
    for why, change in UNKNOWN.values():
        changed = dict(whole)
        change(changed)
        save_file(changed, tmp_path / "model.safetensors", {"format": "pt"})
        model = opened(made)
        with pytest.raises(CompressionError, match=why):
            find_heads(model)
        caplog.clear()
        assert chosen_heads(model, None, 8) == ((), 8)
        assert "a multi-token-prediction head is left out" in caplog.text
        with pytest.raises(CompressionError, match=r"--mtp keep: .*; leave it out, or pass --mtp drop"):
            chosen_heads(model, "keep", 8)
        assert chosen_heads(model, "drop", 8) == ((), 8)


def test_text_too_short_for_a_head_is_refused(tmp_path: Path) -> None:
    made = mtp_checkpoints.make("deepseek_v3", tmp_path, heads=2)
    model = opened(made)
    with pytest.raises(CompressionError, match="sequences of 2 tokens; give a larger --sequence-length, or --mtp drop"):
        acceptances(model, find_heads(model), [zoo.tokens(made.model, 1, 3)])
