"""Adapters on disk: what comes back is what was written, and nothing else is taken for it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from compressor.comoe import comoe_layers, inject, load_adapters, save_adapters
from compressor.errors import CompressionError
from tests import zoo
from tests.command_line import names
from tests.small import edit_json


def trained(seed: int = 0) -> Any:
    """An injected model whose B is not 0."""
    model = inject(zoo.build("mixtral"), r=4, experts=3)
    generator = torch.Generator().manual_seed(seed)
    for layer in comoe_layers(model).values():
        layer.up.data.normal_(0, 0.1, generator=generator)
    return model


def test_adapters_come_back_exactly(tmp_path: Path) -> None:
    model = trained()
    save_adapters(model, tmp_path / "adapters")
    fresh = load_adapters(zoo.build("mixtral"), tmp_path / "adapters")
    batch = zoo.tokens(model, 2, 9, seed=3)
    with torch.no_grad():
        logits = fresh(batch).logits
        assert torch.equal(model(batch).logits, logits) and not torch.equal(zoo.build("mixtral")(batch).logits, logits)
    assert names(tmp_path / "adapters") == ["adapters.safetensors", "comoe.json"]
    assert names(tmp_path) == ["adapters"]


def test_another_base_model_is_refused_by_the_layer(tmp_path: Path) -> None:
    save_adapters(trained(), tmp_path / "adapters")
    wide = zoo.build("mixtral", num_key_value_heads=4)
    with pytest.raises(CompressionError, match=r"layer 'model.layers.0.self_attn.k_proj' is of 32 by 32 .* 32 by 64"):
        load_adapters(wide, tmp_path / "adapters")
    assert not comoe_layers(wide)
    with pytest.raises(CompressionError, match="lacks it"):
        load_adapters(zoo.build("mixtral", num_hidden_layers=1), tmp_path / "adapters")


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "adapters"
    save_adapters(trained(), folder)
    with pytest.raises(CompressionError, match="exists already"):
        save_adapters(trained(), folder)
    tensors = load_file(folder / "adapters.safetensors")
    first = min(tensors)
    for damage, message in (
        ({first: tensors[first][:1].contiguous()}, f"{first}' .* does not fit"),
        ({"extra": torch.zeros(1)}, "'extra' .* does not fit"),
        ({first: tensors[first] * torch.nan}, f"{first}' .* NaN"),
    ):
        save_file({**tensors, **damage}, folder / "adapters.safetensors")
        model = zoo.build("mixtral")
        with pytest.raises(CompressionError, match=message):
            load_adapters(model, folder)
        assert not comoe_layers(model)
    edit_json(folder / "comoe.json", lambda content: content["config"].update(top_k=9))
    with pytest.raises(CompressionError, match="top-k is 9 of 3"):
        load_adapters(zoo.build("mixtral"), folder)
    with pytest.raises(CompressionError, match="holds no comoe"):
        load_adapters(zoo.build("mixtral"), tmp_path)


def test_what_is_said_of_adapters_is_what_they_are(tmp_path: Path) -> None:
    save_adapters(trained(), tmp_path / "adapters")
    content = json.loads((tmp_path / "adapters" / "comoe.json").read_text())
    assert content["format"] == "moe-compressor-comoe/1" and content["config"]["targets"][0] == "q_proj"
    assert content["layers"]["model.layers.1.self_attn.v_proj"] == [32, 32]


def test_a_model_without_experts_has_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match="no LoRA experts"):
        save_adapters(zoo.build("mixtral"), tmp_path / "adapters")
    assert names(tmp_path) == []
