"""Text and pictures apart: what each sends to the experts, where they have experts of their own, and the warning."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.checkpoint.source import locate
from compressor.data.media import sequence_of
from compressor.model.inputs import Inputs, forward_inputs
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Silent
from compressor.recipe.registry import load_strategy
from compressor.statistics.statistics import LayerStatistics, collect
from compressor.steps.prune.planning import Planner, PruneSpec
from tests.support import pictures, zoo
from tests.support.opened_models import calibration

CPU = torch.device("cpu")


def sequences(name: str, count: int = 4) -> tuple[Inputs, ...]:
    processor = pictures.processor(name)
    rows = ({"image": pictures.picture(seed), "text": f"number {seed} it is"} for seed in range(count))
    return tuple(sequence_of(row, None, processor, Path(), 64, "a row") for row in rows)


def opened(name: str, folder: Path) -> tuple[Any, OpenModel]:
    stock = pictures.save(name, folder)
    return stock, open_model(locate(str(folder)), "float32", "cpu")


def expert_calls(stock: Any, names: Sequence[str], batch: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Hidden states and choices of every experts module in a whole run of the stock model."""
    seen = dict[str, tuple[Tensor, Tensor]]()

    def note(name: str, args: Sequence[Tensor]) -> None:
        seen[name] = args[0].clone(), args[1].clone()

    handles = [
        stock.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: note(name, args))
        for name in names
    ]
    with torch.no_grad():
        stock(**forward_inputs(batch, CPU, torch.float32), use_cache=False)
    for handle in handles:
        handle.remove()
    return seen


def measured(model: OpenModel, batches: Sequence[Tensor], *needs: str) -> list[LayerStatistics]:
    return list(collect(model, frozenset(needs), calibration(batches), Silent()))


def test_choices_are_counted_by_modality(tmp_path: Path) -> None:
    stock, model = opened("qwen3_vl_moe", tmp_path)
    batches = (*sequences("qwen3_vl_moe"), zoo.tokens(stock))
    for stats in measured(model, batches, "modality_count", "routed_count"):
        expected = torch.zeros(8, 2, dtype=torch.float64)
        for batch in batches:
            _, index = expert_calls(stock, [stats.layer.name], batch)[stats.layer.name]
            media = batch.media.flatten() if isinstance(batch, Inputs) else torch.zeros(batch.numel(), dtype=torch.bool)
            for token, chosen in enumerate(index.tolist()):
                for expert in chosen:
                    expected[expert, int(media[token])] += 1
        assert torch.equal(stats.modality_count, expected) and expected.sum(0).min() > 0
        assert torch.equal(stats.modality_count.sum(1), stats.routed_count)


def test_experts_for_pictures_alone_are_measured_on_the_tokens_of_pictures(tmp_path: Path) -> None:
    stock, model = opened("ernie4_5_vl_moe", tmp_path)
    batches = sequences("ernie4_5_vl_moe")
    found = {stats.layer.name: stats for stats in measured(model, batches, "modality_count", "inputs", "top_k_index")}
    names = list(found)
    vision = [name for name in names if "vision_moe" in name]
    assert len(vision) == 2 and len(names) == 4
    calls = [expert_calls(stock, names, batch) for batch in batches]
    for name, stats in found.items():
        text, media = stats.modality_count.sum(0).tolist()
        assert (media > 0) is (name in vision)
        if name in vision:  # the two tokens around each picture are text that goes with it
            assert (text, media) == (2 * 2 * len(batches), 2 * 4 * len(batches))
        assert torch.equal(stats.inputs, torch.cat([call[name][0] for call in calls]))
        assert torch.equal(stats.top_k_index, torch.cat([call[name][1] for call in calls]))


def plan(model: OpenModel, batches: Sequence[Tensor], in_order: bool = False) -> Any:
    spec, planner = PruneSpec(load_strategy("reap", {}), 4), Planner(model, calibration(batches), Silent())
    return planner.plan_sequentially(spec) if in_order else planner.plans([spec])[0].plan


@pytest.mark.parametrize("in_order", [False, True])
def test_a_plan_says_what_of_text_and_of_pictures_its_experts_had(in_order: bool, tmp_path: Path) -> None:
    _, model = opened("qwen3_vl_moe", tmp_path)
    batches = sequences("qwen3_vl_moe")
    for layer in plan(model, batches, in_order).layers:
        assert {"kept_share_of_text", "kept_share_of_media", "experts_without_text"} <= layer.figures.keys()
        if not in_order:
            seen = {stats.layer.name: stats.modality_count for stats in measured(model, batches, "modality_count")}
            counts = seen[layer.module]
            kept = [expert for group in layer.groups for expert in group.members]
            assert layer.figures["kept_share_of_media"] == round(float(counts[kept, 1].sum() / counts[:, 1].sum()), 6)
            assert layer.figures["experts_without_text"] == int((counts[:, 0] == 0).sum())
        assert json.loads(json.dumps(dict(layer.figures))) == dict(layer.figures)


def test_calibrating_on_text_alone_warns_with_the_experts_that_it_never_reached(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stock, model = opened("ernie4_5_vl_moe", tmp_path)
    text = (zoo.tokens(stock, 8, 32),)
    made = plan(model, text)
    unreached = sum(int((s.routed_count == 0).sum()) for s in measured(model, text, "routed_count"))
    assert unreached >= 16, "no text ever reaches the experts for pictures"
    assert sum(layer.figures["experts_without_text"] for layer in made.layers) == unreached
    assert f"never reached {unreached} of its 32 experts ({100 * unreached / 32:.1f} %)" in caplog.text
    caplog.clear()
    plan(model, (*text, *sequences("ernie4_5_vl_moe")))
    assert "text alone" not in caplog.text
