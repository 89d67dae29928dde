"""Every architecture through the real pipeline: what is written equals what a surgery in memory gives.

The cases come from the zoo; `reference.py` does the surgery a second way, from the plan's JSON alone.
"""

import json
import random
import re
import shutil
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
from compressor import CompressionError
from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.model.opened import open_model
from compressor.pipeline.verify import verify_against_base
from compressor.progress import Silent
from compressor.recipe.registry import load_strategy
from compressor.recipe.steps_plan import Plan as StepsPlan
from tests.support import zoo
from tests.support.plans import by_hand, make_plan, plan_of, pruned
from tests.support.small import edit_json, edit_tensors, tensors_of
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


# ---- one stored tensor is changed ----


def one_of_an_expert(folder: Path) -> str:
    """The name of a stored matrix of an expert that is kept and gets another number, or of all experts."""
    roles = open_model(locate(str(folder))).layout.roles
    names = [name for name, role in roles.items() if role.kind == "fused" and not role.is_router]
    names = names or [name for name, role in roles.items() if role.expert == 6]
    return min(names or [name for name in tensors_of(folder) if ".experts." in name])


def half(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name].half()


def double(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name].double() * 1.0001


def narrow(tensors: dict[str, Tensor], name: str) -> None:
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


def without_name(tensors: dict[str, Tensor], name: str) -> None:
    tensors[f"{name}_renamed"] = tensors.pop(name)


def fp8(tensors: dict[str, Tensor]) -> list[str]:
    """Store matrices in fp8 with a scale of each row; returns the names of the scales."""
    scales = []
    for name, value in [*tensors.items()]:
        dense = not any(word in name for word in ("embed", "head", "norm", "router", "gate.weight", "conv"))
        if name.endswith(".weight") and value.dim() == 2 and min(value.shape) > 1 and dense:
            scale = (value.abs().amax(1, keepdim=True) / 448).clamp(min=1e-9)
            tensors |= {name: (value / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
            scales.append(f"{name}_scale")
    return scales


def plain(folder: Path, out: Path) -> Path:
    """Write a checkpoint whose fp8 matrices are multiplied by their scales, by hand."""
    shutil.copytree(folder, out)
    edit_json(out / "config.json", lambda config: config.pop("quantization_config", None))

    def dequantize(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if f"{name}_scale" in tensors]:
            tensors[name] = tensors[name].float() * tensors.pop(f"{name}_scale")

    edit_tensors(out, dequantize)
    return out


def masked(case: Case, folder: Path, out: Path) -> None:
    """A drop of a changed checkpoint gives the logits of what stock transformers reads of it, cut in memory."""
    identity = plan_of(folder, strategy="model-centric", experts=case.experts).to_dict()
    plan = regroup(identity, keep_some, case.experts * 3 // 4)
    apply(plan, out)
    stock = zoo.reload(case.name, plain(folder, out.parent / "plain-in")).float()
    small = zoo.reload(case.name, plain(out, out.parent / "plain-out")).float()
    expected = cut(stock, case.count_field, pruned(plan))
    torch.testing.assert_close(zoo.logits(small, case.ids), zoo.logits(expected, case.ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("change", [half, double, narrow], ids=lambda change: change.__name__)
def test_another_dtype_of_one_tensor_is_kept_or_refused_by_name(case: Case, tmp_path: Path, change: Any) -> None:
    folder = tmp_path / "in"
    shutil.copytree(case.folder, folder)
    name = one_of_an_expert(folder)
    edit_tensors(folder, lambda tensors: change(tensors, name))
    if change is narrow:
        with pytest.raises(CompressionError, match=re.escape(name)):
            plan_of(folder, strategy="model-centric", experts=case.experts)
        return
    masked(case, folder, tmp_path / "out")
    before, after = (
        sorted(str(value.dtype) for value in tensors_of(each).values() if value.dtype != torch.float32)
        for each in (folder, tmp_path / "out")
    )
    # experts that text and vision share are written in the widest dtype of their layer's
    assert before == after or not open_model(locate(str(folder))).layout.regular
    assert verify_against_base(tmp_path / "out", str(folder)).passed


def test_scales_of_fp8_are_read_or_missed_by_name(case: Case, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(case.folder, folder)
    scales: list[str] = []
    edit_tensors(folder, lambda tensors: scales.extend(fp8(tensors)))
    edit_json(folder / "config.json", lambda config: config.update(quantization_config={"quant_method": "fp8"}))
    if not scales:
        pytest.skip("all matrices hold several experts")
    refused = ""
    try:
        masked(case, folder, tmp_path / "out")
    except CompressionError as error:  # of a matrix that the loader converts
        refused = str(error)
    if refused:
        assert any(name in refused for name in scales) or re.search("quantised weights|can't be converted", refused)
        return
    edit_tensors(folder, lambda tensors: without_name(tensors, scales[-1]))
    with pytest.raises(CompressionError, match=re.escape(scales[-1].removesuffix("_scale"))):
        plan_of(folder, strategy="model-centric", experts=case.experts)


def test_an_unknown_vector_beside_the_router_changes_nothing_or_is_refused(case: Case, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    shutil.copytree(case.folder, folder)
    roles = open_model(locate(str(folder))).layout.roles
    beside = min(name for name, role in roles.items() if role.is_router).rpartition(".")[0]
    edit_tensors(folder, lambda tensors: tensors.update({f"{beside}.odd_scale": torch.rand(case.experts)}))
    masked(case, folder, tmp_path / "out")
    assert f"{beside}.odd_scale" not in tensors_of(tmp_path / "out")
