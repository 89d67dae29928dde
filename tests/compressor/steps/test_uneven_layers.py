"""Layers that would keep different numbers of experts, and a vision tower's that do beside the language model's."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Dots3NoteConfig, Dots3NoteForConditionalGeneration

from tests.support import small, zoo
from tests.support.command_line import Run, refused, succeeded

KEPT = ([0, 2, 3, 5, 6, 7], [1, 2, 4, 6])  # by MoE layer


@pytest.mark.parametrize("budget", [{}, {"budget": "uneven", "experts": 5}])
def test_a_plan_that_keeps_other_numbers_in_other_layers_is_refused(
    budget: dict[str, Any], run: Run, tmp_path: Path
) -> None:
    model = small.save(tmp_path / "model", "mixtral")
    path = tmp_path / "plan.json"
    succeeded(run("plan", model, "-o", path, "--strategy", "model-centric", "--experts", 6, "--correct", "none"))

    def change(plan: dict[str, Any]) -> None:
        decision = next(step["plan"] for step in plan["steps"] if step["name"] == "prune")
        decision |= budget
        for layer, kept in zip(decision["layers"], KEPT, strict=True):
            layer["groups"] = [{"members": [expert], "coefficients": [1.0]} for expert in kept]
            layer["dropped"] = [expert for expert in range(8) if expert not in kept]

    small.edit_json(path, change)
    refused(run("apply", path, "-o", tmp_path / "out"), r"every layer; make them equal, .*constants")
    assert not (tmp_path / "out").exists()


# published checkpoints have the text's fields at the top level
@pytest.mark.parametrize("is_flat", [zoo.full(False), True])
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
