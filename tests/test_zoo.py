"""The zoo itself: each tiny model builds, routes, reloads, and its count field cuts the expert-sized keys."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests import zoo

NAMES = [*zoo.FAMILIES, *zoo.VARIANTS]
EVERY = pytest.mark.parametrize("name", NAMES)

# Expert-sized tensors of a MoE block beside those of its experts; `gate.weight` alone where not listed.
BESIDE = {
    ("expert_bias", "router.gate.weight"): "afmoe",
    ("router.weight",): "aria granitemoe granitemoe_swa granitemoehybrid granitemoeshared jamba phimoe",
    ("gate.e_score_correction_bias", "gate.weight"): """axk1 axk2 bailing_hybrid beam deepseek_v3 deepseek_v32
        deepseek_v4 dots1 dots3_note exaone_moe glm4_moe glm4_moe_lite glm4v_moe glm5_next glm_moe_dsa hy_v4
        inkling inkling2 kimi_linear kolibri1 laguna mimo_v2_flash minimax_m3_vl muse_spark nemotron_h
        solar_open""",
    ("gate.moe_statics.e_score_correction_bias", "gate.weight"): "ernie4_5_moe ernie4_5_vl_moe",
    ("router.per_expert_scale", "router.proj.weight"): "gemma4 diffusion_gemma",
    ("router.bias", "router.weight"): "gpt_oss openai_privacy_filter",
    ("gate.wg.weight",): "hunyuan_v1_moe",
    ("e_score_correction_bias", "gate.weight"): "hy_v3 minimax_m2",
    ("expert_bias", "gate.weight"): "lfm2_moe",
    ("gate.balancing_biases", "gate.router_mlp.out_proj.weight"): "zaya",
}
EXTRA_ROWS = {"inkling": 2, "zaya": 1}  # rows of the router beyond the experts: shared experts, the skip expert


def beside(name: str) -> tuple[str, ...]:
    stem = name.split("-")[0]
    return next((keys for keys, families in BESIDE.items() if stem in families.split()), ("gate.weight",))


def record_calls(model: nn.Module) -> dict[str, Tensor]:
    """Have each experts module note the indices [T, K] of its last call under its name."""
    seen: dict[str, Tensor] = {}
    for name, module in zoo.experts(model).items():
        module.register_forward_pre_hook(lambda _, args, name=name: seen.update({name: args[1]}))
    return seen


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {key: tensor.shape for key, tensor in model.state_dict().items()}


def look_up(data: Any, path: str) -> Any:
    for part in path.split("."):
        data = data[part]
    return data


def test_zoo_covers_every_family_with_the_experts_interface() -> None:
    models = Path(transformers.__file__).parent / "models"
    carriers = {
        file.parent.name for file in models.glob("*/modeling_*.py") if "@use_experts_implementation" in file.read_text()
    }
    assert set(zoo.FAMILIES) == carriers


@EVERY
def test_forward_is_finite_and_routes_tokens_to_different_top_k(name: str) -> None:
    model = zoo.build(name)
    modules = zoo.experts(model)
    seen = record_calls(model)
    output = zoo.logits(model, zoo.tokens(model))
    assert output.dtype == torch.float32
    assert output.isfinite().all()
    assert len(modules) == zoo.family(name).experts_modules
    assert not model.training
    top_k = zoo.family(name).top_k
    expected = [top_k] * len(seen) if isinstance(top_k, int) else list(top_k)
    assert [indices.shape[-1] for indices in seen.values()] == expected
    never_called = set(modules) - set(seen)
    assert all("vision" in module for module in never_called)  # ernie4_5_vl_moe, on text alone
    for indices in seen.values():
        assert len(set(indices.flatten().tolist())) >= 4
        assert len({tuple(sorted(row)) for row in indices.tolist()}) >= 4


@EVERY
def test_dropping_an_expert_moves_the_logits(name: str) -> None:
    model = zoo.build(name)
    ids = zoo.tokens(model)
    seen = record_calls(model)
    before = zoo.logits(model, ids)
    for module_name, indices in dict(seen).items():
        down = model.get_parameter(f"{module_name}.down_proj")
        busiest = int(indices.flatten().mode().values)
        kept = down[busiest].detach().clone()
        with torch.no_grad():
            down[busiest] = 0
            moved = (zoo.logits(model, ids) - before).abs().max()
            down[busiest] = kept
        assert moved > 1e-2, module_name


@EVERY
def test_biases_and_scales_of_the_routers_tell_the_experts_apart(name: str) -> None:
    model = zoo.build(name)
    state = model.state_dict()
    for key, tensor in state.items():
        if any(key.endswith(f".{leaf}") for leaf in beside(name) if "bias" in leaf or "scale" in leaf):
            assert len(set(tensor.flatten().tolist())) == tensor.numel(), key


@EVERY
def test_saved_model_reloads_with_the_same_logits(name: str, tmp_path: Path) -> None:
    entry = zoo.family(name)
    model = zoo.save(name, tmp_path)
    ids = zoo.tokens(model)
    expected = zoo.logits(model, ids)
    reloaded = zoo.reload(name, tmp_path)
    assert type(reloaded) is type(model)
    torch.testing.assert_close(zoo.logits(reloaded, ids), expected, rtol=0, atol=1e-5)
    written = json.loads((tmp_path / "config.json").read_text())
    assert look_up(written, entry.count_field) == look_up(zoo.configure(name).to_dict(), entry.count_field)


@EVERY
def test_two_builds_differ_in_the_expert_sized_keys(name: str) -> None:
    entry = zoo.family(name)
    count = look_up(zoo.configure(name).to_dict(), entry.count_field)
    whole, half = zoo.skeleton(name), zoo.skeleton(name, count // 2)
    before, after = shapes(whole), shapes(half)
    assert list(before) == list(after)
    changed = {key for key in before if before[key] != after[key]}
    expected = set()
    for module_name, module in zoo.experts(whole).items():
        block = module_name.rpartition(".")[0]
        expected |= {f"{module_name}.{key}" for key, _ in module.named_parameters() if "post_expert_norm" not in key}
        expected |= {f"{block}.{key}" for key in beside(name)}
    if entry.name == "deepseek_v4":  # the hash layer selects by token id and has no correction bias
        expected.remove("model.layers.0.mlp.gate.e_score_correction_bias")
    assert changed == expected
    for key in changed:
        (dim,) = (d for d in range(len(before[key])) if before[key][d] != after[key][d])
        extra = EXTRA_ROWS.get(name, 0) if ".experts." not in key else 0
        sizes = (before[key][dim], after[key][dim])
        assert sizes in {(count, count // 2), (count + extra, count // 2 + extra)}, key


def test_zaya_skips_its_experts_for_some_tokens() -> None:
    model = zoo.build("zaya")
    weights: list[Tensor] = []
    for module in zoo.experts(model).values():
        module.register_forward_pre_hook(lambda _, args: weights.append(args[2]))
    zoo.logits(model, zoo.tokens(model))
    assert (torch.cat(weights) == 0).any()


def test_deepseek_v4_hash_layer_gives_each_token_two_experts() -> None:
    table = zoo.build("deepseek_v4").get_buffer("model.layers.0.mlp.gate.tid2eid")
    assert (table[:, 0] != table[:, 1]).all()
    assert set(table.flatten().tolist()) == set(range(8))
