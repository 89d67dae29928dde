"""Alignment: every order tried, planted twins in every layout, and what is written end to end."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn

import compressor
from compressor.checkpoint.source import locate
from compressor.model.experts import Parameters, expert_parameters, width_of
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import open_model
from compressor.recipe.plan import Group, LayerPlan, Source
from compressor.recipe.steps_plan import Plan
from compressor.steps.cutting import matching, merged_parameters, reordered
from tests.support import zoo
from tests.support.opened_models import one_expert
from tests.support.plans import Decided, by_hand

LAYOUTS = ["mixtral", "gpt_oss", "nemotron_h", "granitemoe", "deepseek_v3", "aria", "openai_privacy_filter"]
END_TO_END = ["mixtral", "gpt_oss", "nemotron_h", "granitemoe", "deepseek_v3"]
TWINS = {0: 2, 3: 1, 4: 6, 5: 7}  # head: member, within the routing groups of four


def an_experts_module(name: str, width: int = 24) -> Any:
    field = "moe_intermediate_size" if name in ("nemotron_h", "deepseek_v3") else "intermediate_size"
    return next(iter(zoo.experts(zoo.build(name, **{field: width})).values()))


def neuron(experts: Any, expert: int, number: int) -> list[Tensor]:
    """Everything that belongs to one intermediate neuron: views of its row(s) up, column down and bias entries."""
    down, axis = experts.down_proj[expert], int(experts.is_transposed)
    width = down.shape[1 - axis]
    if not experts.has_gate:
        name, rows = "up_proj", [number]
    else:
        name, rows = (
            "gate_up_proj",
            [number, width + number] if experts.is_concatenated else [2 * number, 2 * number + 1],
        )
    views = [getattr(experts, name)[expert].select(axis, row) for row in rows] + [down.select(1 - axis, number)]
    return views + (
        [getattr(experts, f"{name}_bias")[expert][row : row + 1] for row in rows] if experts.has_bias else []
    )


@torch.no_grad()
def plant(experts: Any, head: int, member: int, seed: int = 0) -> list[int]:
    """Make the member the head with its neurons in a random order, which is returned."""
    order: list[int] = torch.randperm(width_of(experts), generator=torch.Generator().manual_seed(seed)).tolist()
    for place, number in enumerate(order):
        for own, other in zip(neuron(experts, member, place), neuron(experts, head, number), strict=True):
            own.copy_(other)
    if experts.has_bias:
        experts.down_proj_bias[member] = experts.down_proj_bias[head]
    return order


@pytest.mark.parametrize("name", zoo.sweep(LAYOUTS))
def test_matching_is_the_best_of_all_orders(name: str) -> None:
    experts = an_experts_module(name, 4)
    vectors = [
        [torch.cat([view for view in neuron(experts, expert, i) if len(view) > 1]).double() for i in range(4)]
        for expert in (5, 2)
    ]
    table = [[float(ours @ theirs) for theirs in vectors[1]] for ours in vectors[0]]
    best = max(itertools.permutations(range(4)), key=lambda order: sum(table[i][order[i]] for i in range(4)))
    assert tuple(matching(experts, 5, 2).tolist()) == best
    assert matching(experts, 3, 3).tolist() == [0, 1, 2, 3]


def permuted(experts: Any, parameters: Parameters, order: torch.Tensor) -> Parameters:
    """All parameters of an expert with its neurons in this order."""
    return {name: reordered(experts, name, value, order) for name, value in parameters.items()}


@pytest.mark.parametrize("name", zoo.sweep([*LAYOUTS, "muse_spark"]))
@torch.no_grad()
def test_an_expert_with_permuted_neurons_computes_the_same(name: str) -> None:
    experts = an_experts_module(name)
    columns = experts.down_proj.shape[2 if experts.is_transposed else 1]
    x = torch.randn(9, columns, generator=torch.Generator().manual_seed(1))
    before = one_expert(experts, 1, x)
    original = {key: value.clone() for key, value in expert_parameters(experts, 1).items()}

    @given(st.permutations(range(width_of(experts))))
    @settings(max_examples=10)
    def check(order: list[int]) -> None:
        moved = permuted(experts, original, torch.tensor(order))
        assert list(moved) == list(original)
        for key, value in moved.items():
            getattr(experts, key)[1] = value
        torch.testing.assert_close(one_expert(experts, 1, x), before, rtol=1e-5, atol=1e-5)

    check()


@pytest.mark.parametrize("name", ["gpt_oss", "nemotron_h"])
@torch.no_grad()
def test_a_group_is_mixed_neuron_by_neuron(name: str) -> None:
    """Unlike experts, one of them without a share, the head neither first nor counted."""
    experts, shares, scale = an_experts_module(name), (0.6, 0.0, 0.4, 0.0), 1.25
    group = Group((1, 3, 4, 7), shares, (0.25,) * 4, scale, head=7)
    merged = merged_parameters(experts, group)
    orders = {member: matching(experts, 7, member).tolist() for member in (1, 4)}
    assert orders[1] != orders[4]
    for number in range(width_of(experts)):
        parts = zip(neuron(experts, 1, orders[1][number]), neuron(experts, 4, orders[4][number]), strict=True)
        expected = [scale * (0.6 * one.double() + 0.4 * other.double()) for one, other in parts]
        for key, value in merged.items():
            getattr(experts, key)[0] = value
        for found, wanted in zip(neuron(experts, 0, number), expected, strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


def routers(model: nn.Module) -> list[nn.Module]:
    blocks = [model.get_submodule(name.rpartition(".")[0]) for name in zoo.experts(model)]
    return [getattr(block, "gate", None) or block.router for block in blocks]


@torch.no_grad()
def with_twins(name: str) -> Any:
    """A model of four experts and their permuted twins, whose choice makes no difference or never happens."""
    model = zoo.build(name, **({"num_experts_per_tok": 1} if name in ("mixtral", "granitemoe") else {}))
    for seed, (experts, router) in enumerate(zip(zoo.experts(model).values(), routers(model), strict=True)):
        for head, member in TWINS.items():
            plant(experts, head, member, 10 * seed + head)
            for key, value in router.state_dict().items():
                if value.shape[:1] == (8,):
                    value[member] = -100 if "bias" in key else value[head]
    return model


def planned(folder: Path, groups: list[Group]) -> Plan:
    model = open_model(locate(str(folder)))
    layers = tuple(LayerPlan.of(layer, groups) for layer in model.architecture.layers)
    source = Source(str(folder), None, model.fingerprint)
    return by_hand(Decided(source, len(groups), "by hand", {}, None, layers))


@pytest.mark.parametrize("name", ["gpt_oss", "nemotron_h", *map(zoo.full, ("mixtral", "granitemoe", "deepseek_v3"))])
def test_what_is_written_computes_what_the_original_does(name: str, tmp_path: Path) -> None:
    model = with_twins(name)
    model.save_pretrained(tmp_path / "in")
    ids = zoo.tokens(model)
    groups = [Group((h, m), (0.3, 0.7), (1.0, 0.0), head=h) for h, m in TWINS.items()]
    plan = planned(tmp_path / "in", groups)
    compressor.apply(Plan.from_dict(plan.to_dict()), tmp_path / "out")
    compressor.apply(planned(tmp_path / "in", [replace(group, head=None) for group in groups]), tmp_path / "plain")
    before = zoo.logits(model, ids)
    after, plain = (zoo.logits(zoo.reload(name, tmp_path / folder), ids) for folder in ("out", "plain"))
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(plain, before, atol=1e-2)
    compressor.apply(plan, tmp_path / "again")
    files = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("out", "again")]
    assert files[0] == files[1]


@pytest.mark.parametrize("dtype", ["bfloat16", zoo.full("float32")])
@pytest.mark.parametrize("name", zoo.sweep([*END_TO_END, "olmoe"]))
def test_nothing_but_aligned_experts_differs_from_what_is_written_without_a_head(
    name: str, dtype: str, tmp_path: Path
) -> None:
    """The way through the model gives the names and bits that copying and mixing stored tensors gives."""
    zoo.build(name).to(getattr(torch, dtype)).save_pretrained(tmp_path / "in")
    first = Group((0, 1), (0.3, 0.7), (0.4, 0.6), 1.1)
    others = [Group((2, 3), (0.2, 0.8), (0.9, 0.1)), Group((4, 5), (0.5, 0.5), (1.0, 0.0)), Group.single(7)]
    compressor.apply(planned(tmp_path / "in", [first, *others]), tmp_path / "stored")
    compressor.apply(planned(tmp_path / "in", [replace(first, head=1), *others]), tmp_path / "aligned")
    stored, aligned = (load_file(tmp_path / folder / "model.safetensors") for folder in ("stored", "aligned"))
    assert set(stored) == set(aligned)
    for key, value in aligned.items():
        assert value.dtype == stored[key].dtype, key
        if ".experts.0." in key:
            assert not torch.equal(value, stored[key]) or key.endswith("down_proj.bias"), key
        elif key.rpartition(".")[0].endswith("experts") or "input_linear" in key or "output_linear" in key:  # fused
            assert torch.equal(value[1:], stored[key][1:]), key
            assert not torch.equal(value[0], stored[key][0]) or key.endswith("down_proj_bias"), key
        else:
            assert torch.equal(value, stored[key]), key
    assert (tmp_path / "stored" / "config.json").read_bytes() == (tmp_path / "aligned" / "config.json").read_bytes()
    assert zoo.logits(zoo.reload(name, tmp_path / "aligned").float(), zoo.tokens(zoo.build(name))).isfinite().all()


def test_a_layer_is_named_in_a_refusal() -> None:
    layer = MoeLayer("m.experts", "m", "m.gate", "m", 0, 8, 1)
    with pytest.raises(compressor.CompressionError, match=r"group \[0, 1\] has head 2, which is none of its members"):
        LayerPlan.of(layer, [Group((0, 1), (0.5, 0.5), (1.0, 0.0), head=2)])
