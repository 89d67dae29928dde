"""Several plans from one pass; text and pictures apart: what each sends to the experts, and the warning."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.data.media import sequence_of
from compressor.model.inputs import Inputs, forward_inputs
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Silent
from compressor.recipe.registry import load_strategy
from compressor.statistics.statistics import LayerStatistics, collect
from compressor.steps.prune.planning import Planner, PruneSpec
from tests.support import pictures, zoo
from tests.support.opened_models import Calls, batches, calibration, opened, watch
from tests.support.plans import make_plan

NAMES = ("count-guided", "auto", "hc-smoe", "model-centric")


def spec(name: str, count: int = 4) -> PruneSpec:
    return PruneSpec(load_strategy(name), count)


def sourced(parts: tuple[torch.Tensor, ...], sources: tuple[int, ...], heldout: tuple[int, ...]) -> Calibration:
    """Calibration data whose batches are of these sources."""
    count = max(sources) + 1
    named = [{"source": f"source {number}"} for number in range(count)]
    identity = {"source": "several", "sources": named}
    return Calibration(parts, identity, sources, (1 / count,) * count, frozenset(heldout))


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_plans_of_one_pass_are_those_of_a_pass_each(family: str, tmp_path: Path) -> None:
    stock, model = opened(family, tmp_path)
    data = sourced(batches(stock, (2, 1, 1)), (0, 0, 0), (1,))
    specs = [spec(name, count) for name in NAMES for count in (4, 6)]
    for asked, planned in zip(specs, Planner(model, data, Silent(), 3).plans(specs), strict=True):
        assert planned.seconds >= 0
        alone = make_plan(model, asked.strategy, asked.experts, {}, data, Silent(), 3)
        assert planned.plan == alone.expert_plan


def maximin(
    scores: Sequence[Sequence[float]], blocks: Sequence[range], take: int, protected: frozenset[int]
) -> list[int]:
    """Kept experts, one by one: the best of the source that keeps the smallest share of its score."""
    kept = [expert for block in blocks for expert in block if expert in protected]
    while len(kept) < take * len(blocks):
        full = {expert for block in blocks if sum(e in block for e in kept) == take for expert in block}
        free = [expert for block in blocks for expert in block if expert not in {*kept, *full}]
        held = [
            math.inf if not any(row[expert] for expert in free) else sum(row[expert] for expert in kept) / sum(row)
            for row in scores
        ]
        poorest = scores[held.index(min(held))]
        kept.append(max(free, key=lambda expert: poorest[expert]))
    return sorted(kept)


@pytest.mark.parametrize("name", ["energy", "reap", "hub-guided", "ream", "router-guided"])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_the_worst_source_is_given_its_best_expert(family: str, name: str, tmp_path: Path) -> None:
    stock, model = opened(family, tmp_path)
    parts = batches(stock, (1, 2, 1, 2, 1))
    data = sourced(parts, (0, 1, 2, 1, 0), (4,))
    strategy = load_strategy(name)
    alone = [Planner(model, calibration([parts[n] for n in numbers]), Silent()) for numbers in ((0,), (1, 3), (2,))]
    protected = {model.architecture.layers[0].name: frozenset({5})}
    worst = Planner(model, data, Silent()).plans([PruneSpec(strategy.balancing("worst"), 4)], protected)[0].plan
    effects = Planner(model, data, Silent()).rank_changes([strategy])
    needs = strategy.needs - {"rank_change", "expert_outputs", "router_logits"}
    by_source = [list(collect(model, needs, planner.calibration, Silent())) for planner in alone]
    differs = False
    for layer, plan, *sources in zip(model.architecture.layers, worst.layers, *by_source, strict=True):
        arguments = [] if strategy.options is None else [strategy.options]
        assert strategy.score is not None
        scores = list[list[float]]()
        for stats in sources:
            stats = stats.adding(rank_change=effects.get(layer.name, torch.zeros(layer.experts)))
            scores.append(strategy.score(stats, *arguments).tolist())
        size = layer.experts // layer.routing_groups
        blocks = [range(begin, begin + size) for begin in range(0, layer.experts, size)]
        kept = maximin(scores, blocks, 4 // len(blocks), protected.get(layer.name, frozenset()))
        leaders = [group.members[group.router_coefficients.index(1.0)] for group in plan.groups]
        assert name == "router-guided" or sorted(leaders) == kept  # there another may lead a group
        assert all(len({*group.members} & {*kept}) == 1 for group in plan.groups)
        differs |= kept != sorted(sum(map(torch.tensor, scores)).argsort(descending=True)[:4].tolist())
    assert differs


def test_one_source_is_its_own_worst(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    specs = [
        PruneSpec(load_strategy(name).balancing(how), 4) for name in ("energy", "reap") for how in ("sum", "worst")
    ]
    plans = [planned.plan for planned in Planner(model, calibration(batches(stock)), Silent()).plans(specs)]
    assert plans[0] == plans[1] and plans[2] == plans[3]


CPU = torch.device("cpu")


def sequences(name: str, count: int = 4) -> tuple[Inputs, ...]:
    processor = pictures.processor(name)
    rows = ({"image": pictures.picture(seed), "text": f"number {seed} it is"} for seed in range(count))
    return tuple(sequence_of(row, None, processor, Path(), 64, "a row") for row in rows)


def opened_vision(name: str, folder: Path) -> tuple[Any, OpenModel]:
    stock = pictures.save(name, folder)
    return stock, open_model(locate(str(folder)), "float32", "cpu")


@torch.no_grad()
def whole_calls(stock: Any, model: OpenModel, batches: Sequence[Tensor]) -> dict[str, Calls]:
    """What every experts module is called with in whole runs of the stock model."""
    seen = watch(stock, model.architecture.layers)
    for batch in batches:
        stock(**forward_inputs(batch, CPU, torch.float32), use_cache=False)
    return seen


def measured(model: OpenModel, batches: Sequence[Tensor], *needs: str) -> list[LayerStatistics]:
    return list(collect(model, frozenset(needs), calibration(batches), Silent()))


def test_choices_are_counted_by_modality(tmp_path: Path) -> None:
    stock, model = opened_vision("qwen3_vl_moe", tmp_path)
    pictures_of, text = sequences("qwen3_vl_moe"), zoo.tokens(stock)
    found = measured(model, (*pictures_of, text), "modality_count", "routed_count")
    calls = whole_calls(stock, model, (*pictures_of, text))
    media = torch.cat([*(batch.media.flatten() for batch in pictures_of), torch.zeros(text.numel()).bool()]).int()
    for stats in found:
        expected = torch.zeros(8, 2, dtype=torch.float64)
        for token, chosen in enumerate(calls[stats.layer.name].joined()[1].tolist()):
            expected[chosen, media[token]] += 1
        assert torch.equal(stats.modality_count, expected) and expected.sum(0).min() > 0
        assert torch.equal(stats.modality_count.sum(1), stats.routed_count)


def test_experts_for_pictures_alone_are_measured_on_the_tokens_of_pictures(tmp_path: Path) -> None:
    stock, model = opened_vision("ernie4_5_vl_moe", tmp_path)
    batches = sequences("ernie4_5_vl_moe")
    found = measured(model, batches, "modality_count", "inputs", "top_k_index")
    assert sum("vision_moe" in stats.layer.name for stats in found) == 2 and len(found) == 4
    calls = whole_calls(stock, model, batches)
    for stats in found:
        text, media = stats.modality_count.sum(0).tolist()
        if "vision_moe" in stats.layer.name:  # the two tokens around each picture are text that goes with it
            assert (text, media) == (2 * 2 * len(batches), 2 * 4 * len(batches))
        else:
            assert media == 0
        hidden, index, _ = calls[stats.layer.name].joined()
        assert torch.equal(stats.inputs, hidden) and torch.equal(stats.top_k_index, index)


def plan(model: OpenModel, batches: Sequence[Tensor], in_order: bool = False) -> Any:
    spec, planner = PruneSpec(load_strategy("reap", {}), 4), Planner(model, calibration(batches), Silent())
    return planner.plan_sequentially(spec) if in_order else planner.plans([spec])[0].plan


@pytest.mark.parametrize("in_order", [False, True])
def test_a_plan_says_what_of_text_and_of_pictures_its_experts_had(in_order: bool, tmp_path: Path) -> None:
    _, model = opened_vision("qwen3_vl_moe", tmp_path)
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
    stock, model = opened_vision("ernie4_5_vl_moe", tmp_path)
    text = (zoo.tokens(stock, 8, 32),)
    made = plan(model, text)
    unreached = sum(int((s.routed_count == 0).sum()) for s in measured(model, text, "routed_count"))
    assert unreached >= 16, "no text ever reaches the experts for pictures"
    assert sum(layer.figures["experts_without_text"] for layer in made.layers) == unreached
    assert f"never reached {unreached} of its 32 experts ({100 * unreached / 32:.1f} %)" in caplog.text
    caplog.clear()
    plan(model, (*text, *sequences("ernie4_5_vl_moe")))
    assert "text alone" not in caplog.text
