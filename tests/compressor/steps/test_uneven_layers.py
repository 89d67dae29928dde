"""Layers that keep different numbers of experts, where the model's code reads them from `per_layer_config`.

In transformers 5.24 no language model does, so one is made here: Mixtral whose MoE blocks are built from the configs of
their layers.
"""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    Dots3NoteConfig,
    Dots3NoteForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from tests.support import small, zoo
from tests.support.command_line import Run, refused, succeeded

KEPT = ([0, 2, 3, 5, 6, 7], [1, 2, 4, 6])  # by MoE layer; as many of each half, which may be a routing group


class LayeredConfig(MixtralConfig):
    model_type: ClassVar[str] = "layered"
    allow_global_per_layer_attribute_access: ClassVar[bool] = True


class LayeredForCausalLM(MixtralForCausalLM):
    config_class = LayeredConfig

    def __init__(self, config: LayeredConfig) -> None:
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.mlp = MixtralSparseMoeBlock(config.per_layer_config[index])


@pytest.fixture
def layered(tmp_path: Path) -> Iterator[Path]:
    """A checkpoint of the class above."""
    AutoConfig.register("layered", LayeredConfig)
    AutoModelForCausalLM.register(LayeredConfig, LayeredForCausalLM)
    config = LayeredConfig(**{**zoo.family("mixtral").config, "vocab_size": small.VOCABULARY})
    model = LayeredForCausalLM(config)
    zoo.randomise(model, torch.Generator().manual_seed(0))
    model.save_pretrained(tmp_path / "base")
    small.tokenizer().save_pretrained(tmp_path / "base")
    yield tmp_path / "base"
    CONFIG_MAPPING._extra_content.pop("layered")
    AutoModelForCausalLM._model_mapping._extra_content.pop(LayeredConfig)


def edited(run: Run, model: Path, path: Path, *options: Any) -> Path:
    """Return a plan edited by hand: the first MoE layer keeps 6 of 8 experts, the second 4."""
    text = small.text_file(path.parent)
    given = ("--strategy", "reap", "--experts", 4, "--calibration", text, "--samples", 16, "--sequence-length", 32)
    succeeded(run("plan", model, "-o", path, *given, *options))

    def change(plan: dict[str, Any]) -> None:
        decision = next(step["plan"] for step in plan["steps"] if step["name"] == "prune")
        decision |= {"budget": "uneven", "experts": 5}
        for layer, kept in zip(decision["layers"], KEPT, strict=True):
            layer["groups"] = [{"members": [expert], "coefficients": [1.0]} for expert in kept]
            layer["dropped"] = [expert for expert in range(8) if expert not in kept]

    small.edit_json(path, change)
    return path


def without(gone: list[int], gate: Any, _: Any, output: Any) -> Any:
    """Have a router choose among the other experts."""
    logits = output[0].index_fill(1, torch.tensor(gone), -torch.inf)
    weights, index = logits.softmax(-1).topk(gate.top_k)
    return logits, weights / weights.sum(-1, keepdim=True), index


@pytest.mark.parametrize("correction", ["none", "ridge"])
def test_an_uneven_plan_becomes_a_model_that_stock_code_loads(
    layered: Path, run: Run, tmp_path: Path, correction: str
) -> None:
    plan = edited(run, layered, tmp_path / "plan.json", "--correct", correction)
    out = tmp_path / "out"
    succeeded(run("apply", plan, "-o", out))
    config = json.loads((out / "config.json").read_text())
    assert config["num_local_experts"] == 6
    assert [config["per_layer_config"][str(layer)]["num_local_experts"] for layer in (0, 1)] == [6, 4]
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype=torch.float32)
    assert not any(info.values())
    for index, kept in enumerate(KEPT):
        assert model.model.layers[index].mlp.experts.down_proj.shape[0] == len(kept)
    succeeded(run("check", out, "--base", layered))
    tokens = torch.arange(40).reshape(2, 20)
    if correction == "none":  # experts that no token may choose are as good as gone
        base = AutoModelForCausalLM.from_pretrained(layered, dtype=torch.float32)
        for index, kept in enumerate(KEPT):
            gone = [expert for expert in range(8) if expert not in kept]
            base.model.layers[index].mlp.gate.register_forward_hook(partial(without, gone))
        with torch.no_grad():
            torch.testing.assert_close(model(tokens).logits, base(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["mixtral", "dots3_note"])
def test_an_uneven_plan_is_refused_where_stock_code_reads_one_number(family: str, run: Run, tmp_path: Path) -> None:
    model = small.save(tmp_path / "model", family)
    plan = edited(run, model, tmp_path / "plan.json", "--correct", "none")
    refused(run("apply", plan, "-o", tmp_path / "out"), "keeps 4 to 6 experts in a layer, and .*ForCausalLM")
    assert not (tmp_path / "out").exists()


def test_uneven_lists_of_another_tool_keep_what_they_name(layered: Path, run: Run, tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text(json.dumps(dict(enumerate(KEPT))))
    succeeded(run("plan", layered, "-o", tmp_path / "plan.json", "--from", tmp_path / "kept.json"))
    succeeded(run("apply", tmp_path / "plan.json", "-o", tmp_path / "out"))
    before, after = small.tensors_of(layered), small.tensors_of(tmp_path / "out")
    for index, kept in enumerate(KEPT):
        rows = f"model.layers.{index}.mlp.gate.weight"
        assert torch.equal(after[rows], before[rows][kept])


@pytest.mark.parametrize("is_flat", [False, True])  # as published checkpoints have the text's fields: at the top level
def test_the_uneven_experts_of_a_vision_tower_stay_beside_a_smaller_language_model(
    is_flat: bool, run: Run, tmp_path: Path
) -> None:
    tower = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 3, "intermediate_size": 24}
    vision = {"patch_size": 4, "moe_intermediate_size": 12, "adapter_in_dim": 16, "adapter_out_dim": 32}
    sound = {"downsample_hidden_size": 8, "adapter_input_size": 16, "adapter_out_dim": 32}
    config = Dots3NoteConfig(
        text_config={**zoo.family("dots3_note").config, "vocab_size": small.VOCABULARY},
        vision_config={**tower, **vision, "pyramid_num_routed": [-1, 4, 6]},
        audio_config={**tower, **sound},
        **{f"{kind}_token_id": number for number, kind in enumerate(("image", "video", "audio"), 3)},
    )
    model = Dots3NoteForConditionalGeneration(config)
    zoo.randomise(model, torch.Generator().manual_seed(0))
    base, out = tmp_path / "base", tmp_path / "out"
    model.save_pretrained(base)
    small.tokenizer().save_pretrained(base)
    if is_flat:
        text = json.loads((base / "config.json").read_text())["text_config"]
        small.edit_json(base / "config.json", lambda content: content.update({**text, **content}))
        small.edit_json(base / "config.json", lambda content: content.pop("text_config"))
    options = ("--strategy", "reap", "--calibration", small.text_file(tmp_path), "--samples", 8)
    succeeded(run("compress", base, "-o", out, "--experts", 4, *options, "--sequence-length", 32))
    before, after = small.tensors_of(base), small.tensors_of(out)
    towers = {name: value for name, value in before.items() if "vision" in name or "audio" in name}
    assert len(towers) > 20 and all(torch.equal(after[name], value) for name, value in towers.items())
    smaller, info = Dots3NoteForConditionalGeneration.from_pretrained(out, output_loading_info=True)
    assert not any(info.values())
    assert [len(smaller.model.language_model.layers[index].mlp.experts.down_proj) for index in (1, 2)] == [4, 4]
    assert [len(smaller.model.vision_tower.blocks[index].mlp.experts.down_proj) for index in (1, 2)] == [4, 6]
    sides = [json.loads((folder / "config.json").read_text())["vision_config"] for folder in (base, out)]
    assert sides[0] == sides[1] and sides[0]["per_layer_config"]["2"] == {"num_local_experts": 6}
    succeeded(run("check", out, "--base", base))
