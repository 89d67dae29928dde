"""The output's config.json: every name of the count, nested and listed counts, extra heads, quantisation tables."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, MixtralForCausalLM

import compressor
from compressor.errors import CompressionError
from compressor.model.architecture import Architecture
from compressor.model.layout import Layout, Role
from compressor.model.moe_layer import MoeLayer
from compressor.recipe.plan import ExpertPlan, LayerPlan
from compressor.steps.configuration import output_config
from tests.support import small, zoo

BLOCK = "model.layers.{}.mlp"
KEPT = (0, 2, 5, 7)


def moe_layer(index: int) -> MoeLayer:
    block = BLOCK.format(index)
    return MoeLayer(f"{block}.experts", block, f"{block}.gate", f"model.layers.{index}", index, 8, 2)


LAYERS = (moe_layer(0), moe_layer(1))


def architecture(config: Any = None, field: str = "num_local_experts") -> Architecture:
    layer_names = tuple(layer.decoder_layer for layer in LAYERS)
    return Architecture("mixtral", "Mixtral", field, LAYERS, layer_names, config or MixtralConfig(num_local_experts=8))


def layout(left_out: tuple[str, ...] = (), quantized: bool = False) -> Layout:
    roles = {
        f"{layer.name}.{expert}.{part}.weight": Role(
            "expert", layer.decoder_layer, layer.name, expert=expert, family=part
        )
        for layer in LAYERS
        for expert in range(8)
        for part in ("up_proj", "down_proj")
    }
    return Layout(roles, left_out, True, quantized)


def a_plan(*kept: tuple[int, ...]) -> ExpertPlan:
    chosen = kept or (KEPT, KEPT)
    layers = tuple(LayerPlan.keep(layer, experts) for layer, experts in zip(LAYERS, chosen, strict=True))
    return ExpertPlan(len(chosen[0]), layers)


def rewrite(raw: dict[str, Any], plan: ExpertPlan | None = None, **given_parts: Any) -> dict[str, Any]:
    built = given_parts.pop("built", None) or architecture()
    config, _ = output_config(raw, built, given_parts.pop("stored", layout()), plan or a_plan(), None)
    return config


@pytest.mark.parametrize(
    ("raw", "written"),
    [
        ({"num_local_experts": 8, "x": 8}, {"num_local_experts": 4, "x": 8}),
        ({"num_experts": 8}, {"num_experts": 4}),
        ({"num_experts": 8, "num_local_experts": 8}, {"num_experts": 4, "num_local_experts": 4}),
        ({}, {"num_local_experts": 4}),  # the config class's default counted
        (
            {"num_local_experts": [8, 0, 8], "other": {"count": 8}},
            {"num_local_experts": [4, 0, 4], "other": {"count": 8}},
        ),
    ],
)
def test_the_count_is_set_under_every_name_present(raw: dict[str, Any], written: dict[str, Any]) -> None:
    assert rewrite(raw) == written


def test_a_nested_count() -> None:
    outer = SimpleNamespace(text_config=MixtralConfig(num_local_experts=8), num_local_experts=3)
    built = architecture(outer, "text_config.num_local_experts")
    raw = {"num_local_experts": 3, "text_config": {"num_local_experts": 8}, "vision_config": {"num_local_experts": 8}}
    assert rewrite(raw, built=built) == raw | {"text_config": {"num_local_experts": 4}}
    assert rewrite({}, built=built) == {"text_config": {"num_local_experts": 4}}


def test_remote_code_and_the_choice_of_kernels_do_not_travel() -> None:
    """It is not obeyed when the source is read, and might fetch code from a repository when the output is."""
    kernels = {"_attn_implementation": "org/kernels", "attn_implementation": "sdpa", "_experts_implementation": "a/b"}
    raw = {"x": 1, "text_config": {"y": 2}, "parts": [{"z": 3}]}
    named = {**raw, **kernels, "text_config": {"y": 2, **kernels}, "parts": [{"z": 3, **kernels}]}
    assert rewrite({**named, "auto_map": {"AutoConfig": "x.Y"}}) == {**raw, "num_local_experts": 4}


def test_a_head_that_is_left_out_is_zeroed() -> None:
    raw = {"num_local_experts": 8, "num_nextn_predict_layers": 1, "text_config": {"mtp_num_layers": 2, "mtp_on": True}}
    config, zeroed = output_config(raw, architecture(), layout(("model.layers.2.eh_proj",)), a_plan(), None)
    assert zeroed == ["num_nextn_predict_layers", "text_config.mtp_num_layers"]
    assert config["num_nextn_predict_layers"] == 0
    assert config["text_config"] == {"mtp_num_layers": 0, "mtp_on": True}
    config, zeroed = output_config(raw, architecture(), layout(), a_plan(), None)  # that is announced, but not stored
    assert len(zeroed) == 2 and config["num_nextn_predict_layers"] == 0


def test_fields_count_the_heads_that_are_kept() -> None:
    others = {"mtp_num_experts": 4, "mtp_layers_block_type": ["moe"], "mtp_num_attention_heads": 16}
    raw = {"num_local_experts": 8, "num_nextn_predict_layers": 0, "text_config": {"num_mtp_modules": 3}, **others}
    config, zeroed = output_config(raw, architecture(), layout(("a",)), a_plan(), None, {}, heads=1)
    assert (config["num_nextn_predict_layers"], config["text_config"], zeroed) == (1, {"num_mtp_modules": 1}, [])
    assert {name: config[name] for name in others} == others


def test_lists_that_go_on_with_the_heads_layers_are_cut_to_what_is_stored() -> None:
    """As in Step-3.7-Flash, whose lists of layers are longer than the trunk."""
    raw = {"num_local_experts": 8, "num_hidden_layers": 2, "num_nextn_predict_layers": 3, "layer_types": list("abcde")}
    found, _ = output_config({**raw, "vocab": [1, 2]}, architecture(), layout(), a_plan(), None)
    assert (found["layer_types"], found["vocab"], found["num_nextn_predict_layers"]) == (["a", "b"], [1, 2], 0)
    found, _ = output_config(raw, architecture(), layout(("x",)), a_plan(), None, {}, heads=1)
    assert (found["layer_types"], found["num_nextn_predict_layers"]) == (["a", "b", "c"], 1)


def test_a_field_that_the_stock_model_is_built_by_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in nemotron_h_omni, whose vision tower has a norm where the field is above zero."""
    config = MixtralConfig(num_local_experts=8, num_hidden_layers=1, tie_word_embeddings=False)
    field, raw = "num_nextn_predict_layers", {"num_local_experts": 8, "num_nextn_predict_layers": 1}
    setattr(config, field, 1)
    stock = MixtralForCausalLM.__init__

    def built(model: Any, config: Any) -> None:
        stock(model, config)
        if getattr(config, field) > 0:
            model.vision_norm = torch.nn.LayerNorm(2)

    monkeypatch.setattr(MixtralForCausalLM, "__init__", built)
    found, zeroed = output_config(raw, architecture(config), layout(("a",)), a_plan(), None)
    assert found[field] == 1 and zeroed == []


def quantized(entries: Any, plan: ExpertPlan | None = None, key: str = "ignore") -> Any:
    raw = {"num_local_experts": 8, "quantization_config": {"quant_method": "fp8", key: entries}}
    before = repr(raw)
    changed = rewrite(raw, plan, stored=layout(quantized=True))["quantization_config"][key]
    assert repr(raw) == before, "the base's config was changed"
    return changed


def test_ignore_lists_are_renumbered_layer_by_layer() -> None:
    first, second = BLOCK.format(0), BLOCK.format(1)
    entries = [
        "lm_head",
        f"{first}.gate",
        f"{first}.experts.5.down_proj",  # expert 5 is slot 2 of layer 0 ...
        f"{second}.experts.5.down_proj",  # ... and goes from layer 1
        f"{first}.experts.1.up_proj",
        f"{second}.experts.7",
        f"{first}.shared_experts.up_proj",
    ]
    assert quantized(entries, a_plan(KEPT, (0, 1, 2, 7))) == [
        "lm_head",
        f"{first}.gate",
        f"{first}.experts.2.down_proj",
        f"{second}.experts.3",
        f"{first}.shared_experts.up_proj",
    ]


def test_tables_keyed_by_module_are_renumbered() -> None:
    first = BLOCK.format(0)
    table = {f"{first}.experts.7.up_proj": {"bits": 8}, f"{first}.experts.1.up_proj": {"bits": 4}, "lm_head": {}}
    assert quantized(table, key="extra_config") == {f"{first}.experts.3.up_proj": {"bits": 8}, "lm_head": {}}


@pytest.mark.parametrize(
    "entry",
    ["re:.*lm_head", "re:.*mlp.gate$", r"re:.*\.experts\..*\.down_proj$", r"re:model\.layers\.0\..*",
     r"re:.*experts\.\d+\..*", r"re:(?:model\.)?layers\.0\..*", "gate_proj", "model.layers.5.self_attn",
     "block_sparse_moe.gate", "model.layers.0.self_attn*", "*.experts.?.up_proj", "model.layers.*"],
)  # fmt: skip
def test_patterns_that_treat_experts_alike_stay(entry: str) -> None:
    assert quantized([entry]) == [entry]


@pytest.mark.parametrize(
    "entry",
    [r"re:.*experts\.7\..*", r"re:.*\.experts\.[0-3]\..*up_proj", r"re:model\.layers\.1\.mlp\.experts\.2\.down_proj",
     "layers.0.mlp.experts.7.up_proj", "experts.2", "model.layers.*.experts.[0-3].*", "*.experts.*5.up_proj"],
)  # fmt: skip
def test_patterns_that_name_single_experts_are_refused_where_these_are_renumbered(entry: str) -> None:
    message = f"{re.escape(repr(entry))}, by which .* speaks of single experts, which get other numbers"
    for key, entries in (("ignore", [entry]), ("dynamic", {entry: {"bits": 8}})):
        with pytest.raises(CompressionError, match=message):
            quantized(entries, key=key)
    everyone = tuple(range(8))
    assert quantized([entry], a_plan(everyone, everyone)) == [entry]
    first = r"re:.*experts\.0\..*"
    assert quantized([first], a_plan((0, 1, 2, 3), (0, 1, 2, 3))) == [first]


SECOND = {  # another name of the count beside the family's own, at the top or with the text's fields
    "qwen3_moe": ("n_routed_experts", ""), "deepseek_v3": ("num_experts", ""), "mixtral": ("moe_num_experts", ""),
    "glm4_moe": ("num_local_experts", ""), "ernie4_5_vl_moe": ("num_experts", "text_config"),
    "qwen3_vl_moe": ("n_routed_experts", ""), "qwen3_omni_moe": ("num_local_experts", "text_config"),
}  # fmt: skip


@pytest.mark.parametrize("name", zoo.sweep(SECOND))
def test_every_field_that_counts_experts_is_set_and_recorded(name: str, tmp_path: Path) -> None:
    other, inside = SECOND[name]
    stock = zoo.save(name, tmp_path / "model")

    def second(config: dict[str, Any]) -> None:
        (config[inside] if inside else config).update({other: 8, "num_experts_per_tok_of_another": 8})

    small.edit_json(tmp_path / "model" / "config.json", second)
    asked: dict[str, Any] = {"strategy": "model-centric", "experts": 4, "correct": "none", "evaluate": False}
    compressor.compress(str(tmp_path / "model"), tmp_path / "out", **asked)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    node = config[inside] if inside else config
    assert (node[other], node["num_experts_per_tok_of_another"]) == (4, 8)
    field = zoo.family(name).count_field
    record = json.loads((tmp_path / "out" / "compression.json").read_text())["config_fields"]
    assert record[f"{inside}.{other}".removeprefix(".")] == 4 and record.keys() <= {
        f"{inside}.{other}".removeprefix("."), field
    }  # fmt: skip
    smaller = zoo.reload(name, tmp_path / "out")
    assert {int(experts.num_experts) for experts in zoo.experts(smaller).values()} == {4}  # type: ignore[arg-type]
    assert zoo.logits(smaller, zoo.tokens(stock)).isfinite().all()


@pytest.mark.parametrize("stale", [
    ("mixtral", {"0": {"num_local_experts": 8}, "1": {"num_local_experts": 8}}), ("mixtral", {"0": {"num_experts": 8}}),
    ("deepseek_v3", {"1": {"n_routed_experts": 8}}), ("qwen3_moe", {}),
])  # fmt: skip
def test_counts_of_single_layers_that_are_out_of_date_stay_behind(stale: tuple[str, Any], tmp_path: Path) -> None:
    name, layers = stale
    stock = zoo.save(name, tmp_path / "model")
    small.edit_json(tmp_path / "model" / "config.json", lambda config: config.update(per_layer_config=layers))
    zoo.reload(name, tmp_path / "model")
    asked: dict[str, Any] = {"strategy": "model-centric", "experts": 4, "correct": "none", "evaluate": False}
    compressor.compress(str(tmp_path / "model"), tmp_path / "out", **asked)
    assert "per_layer_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert zoo.logits(zoo.reload(name, tmp_path / "out"), zoo.tokens(stock)).isfinite().all()
