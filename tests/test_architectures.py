"""Every architecture through the real pipeline: what is written equals what a surgery in memory gives.

The cases come from the zoo; `reference.py` does the surgery a second way, from the plan's JSON alone.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import compressor
from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.model.opened import open_model
from compressor.progress import Silent
from compressor.recipe.registry import load_strategy
from compressor.recipe.steps_plan import Plan as StepsPlan
from tests.support import zoo
from tests.support.plans import by_hand, make_plan, plan_of, pruned
from tests.support.small import tensors_of
from tests.support.surgery_reference import cut, forced_logits, realign, stored_bytes

WIDER: dict[str, dict[str, Any]] = {"deepseek_v3-n_group4": {"n_routed_experts": 16}}  # 8 experts cannot lose any
# one of every layout, and of every way to route; that each family learns is seen in tests/compressor/steps/prune
LAYOUTS = ["mixtral", "mixtral-16experts", "qwen3_moe-collide", "gpt_oss", "deepseek_v3-n_group4", "zaya", "gemma4",
           "ernie4_5_vl_moe", "nemotron_h", "qwen4_exp", "inkling", "kimi_linear", "diffusion_gemma"]  # fmt: skip
NO_SAMPLES = {"diffusion_gemma"}  # its experts see a canvas, not the calibration tokens: nothing to learn from
WEIGHTS = 2e-6  # float32 sums against float64 ones
LOGITS = 1e-4

Plan = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Case:
    """A saved tiny model; `identity` is the plan that keeps all its experts."""

    name: str
    folder: Path
    model: PreTrainedModel
    ids: Tensor
    experts: int
    identity: Plan

    @property
    def count_field(self) -> str:
        return zoo.family(self.name).count_field


@pytest.fixture(scope="module", params=zoo.sweep())
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, folder = str(request.param), tmp_path_factory.mktemp("source")
    model = zoo.build(name, **WIDER.get(name, {}))
    model.save_pretrained(folder)
    count = attrgetter(zoo.family(name).count_field)(model.config)
    identity = plan_of(folder, strategy="model-centric", experts=count).to_dict()
    return Case(name, folder, model, zoo.tokens(model), count, identity)


def regroup(plan: Plan, choose: Callable[[random.Random, list[int]], list[Plan]], experts: int) -> Plan:
    """The plan as somebody might edit it: in every layer, `choose` makes the groups of each block of experts."""
    edited: Plan = json.loads(json.dumps(plan))
    made = pruned(edited)
    made["experts"] = experts
    for position, layer in enumerate(made["layers"]):
        draw = random.Random(position)
        size = layer["experts"] // layer.get("routing_groups", 1)
        blocks = [list(range(begin, begin + size)) for begin in range(0, layer["experts"], size)]
        layer["groups"] = [group for block in blocks for group in choose(draw, block)]
        named = {member for group in layer["groups"] for member in group["members"]}
        layer["dropped"] = sorted(set(range(layer["experts"])) - named)
    return edited


def shares(draw: random.Random, count: int) -> list[float]:
    values = [draw.uniform(0.1, 1.0) for _ in range(count)]
    return [value / sum(values) for value in values]


def keep_some(draw: random.Random, block: list[int]) -> list[Plan]:
    """Three quarters of a block, never its beginning."""
    size = len(block) * 3 // 4
    kept = block[:size]
    while kept == block[:size]:
        kept = sorted(draw.sample(block, size))
    return [{"members": [expert], "coefficients": [1.0], "router_coefficients": [1.0]} for expert in kept]


def mix_some(draw: random.Random, block: list[int]) -> list[Plan]:
    """One expert of a block dropped, the others in half as many groups of any order, shares and scale."""
    _, *rest = draw.sample(block, len(block))
    count = len(block) // 2
    groups = [rest[slot::count] for slot in range(count)]
    return [
        {
            "members": members,
            "coefficients": shares(draw, len(members)),
            "router_coefficients": shares(draw, len(members)),
            "scale": draw.uniform(0.5, 1.5),
        }
        for members in groups
    ]


def apply(plan: Plan, out: Path) -> compressor.Outcome:
    """Carry out a plan that was edited as a file."""
    file = out.parent / "plan.json"
    file.write_text(json.dumps(plan))
    return compressor.apply(file, out)


def learned_plan(case: Case, experts: int) -> StepsPlan:
    ids = zoo.tokens(case.model, batch=4, length=12, seed=1)
    model = open_model(locate(str(case.folder), None))
    strategy = load_strategy("model-centric", {"merge": "learned"})
    calibration = Calibration((ids[:3], ids[3:]), {"source": "zoo", "tokens": ids.numel()})
    return by_hand(make_plan(model, strategy, experts, {"merge": "learned"}, calibration, Silent()))


def check_output(case: Case, plan: Plan, summary: compressor.Outcome, exact: bool) -> PreTrainedModel:
    """Compare what was written with the reference's weights, size and logits; returns the reloaded model."""
    made = pruned(plan)
    expected = cut(case.model, case.count_field, made)
    found = zoo.reload(case.name, Path(summary.out))
    realign(found)
    assert type(found) is type(case.model)
    assert attrgetter(case.count_field)(found.config) == summary.experts_after == made["experts"]
    assert {module.num_experts for module in zoo.experts(found).values()} == {made["experts"]}
    gone = stored_bytes(case.model) - stored_bytes(expected)
    sizes = [sum(value.nbytes for value in tensors_of(folder).values()) for folder in (case.folder, Path(summary.out))]
    assert [summary.before.bytes, summary.after.bytes] == sizes
    assert sizes[0] - sizes[1] == gone and (gone > 0) == (summary.experts_after < summary.experts_before)
    wanted = expected.state_dict()
    assert list(found.state_dict()) == list(wanted)
    for key, value in found.state_dict().items():
        assert value.dtype == wanted[key].dtype
        torch.testing.assert_close(value, wanted[key], rtol=0, atol=0 if exact else WEIGHTS, msg=key)
    torch.testing.assert_close(
        zoo.logits(found, case.ids), zoo.logits(expected, case.ids), rtol=0, atol=0 if exact else LOGITS
    )
    return found


def test_keeping_all_experts_changes_no_byte(case: Case, tmp_path: Path) -> None:
    summary = compressor.compress(str(case.folder), tmp_path / "out", strategy="model-centric", experts=case.experts)
    found = check_output(case, case.identity, summary, exact=True)
    before, after = tensors_of(case.folder), tensors_of(tmp_path / "out")
    assert set(after) == set(before)
    for name, value in before.items():
        assert after[name].dtype == value.dtype
        assert after[name].shape == value.shape
        assert after[name].numpy().tobytes() == value.numpy().tobytes(), name
    assert torch.equal(zoo.logits(found, case.ids), zoo.logits(case.model, case.ids))
    assert not summary.left_out


def test_dropping_experts_equals_the_reference(case: Case, tmp_path: Path) -> None:
    plan = regroup(case.identity, keep_some, case.experts * 3 // 4)
    found = check_output(case, plan, apply(plan, tmp_path / "out"), exact=True)
    forced = forced_logits(case.model, found, pruned(plan), case.ids)
    torch.testing.assert_close(zoo.logits(found, case.ids), forced, rtol=0, atol=1e-6)


@pytest.mark.parametrize("case", zoo.sweep(LAYOUTS), indirect=True)
def test_learned_merge_equals_the_reference(case: Case, tmp_path: Path) -> None:
    plan = learned_plan(case, case.experts * 3 // 4)
    groups = [group for layer in plan.expert_plan.layers for group in layer.groups]
    learned = any(group.scale != 1.0 or len(set(group.coefficients)) > 1 for group in groups)
    assert learned is (case.name not in NO_SAMPLES)
    summary = compressor.apply(plan, tmp_path / "out", model=str(case.folder))
    check_output(case, json.loads(plan.to_json()), summary, exact=False)


def test_edited_plan_that_drops_and_mixes_equals_the_reference(case: Case, tmp_path: Path) -> None:
    plan = regroup(case.identity, mix_some, case.experts // 2)
    check_output(case, plan, apply(plan, tmp_path / "out"), exact=False)
