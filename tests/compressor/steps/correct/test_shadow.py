"""The shadow model's layers: one at a time is filled, and shares what was not cut."""

from pathlib import Path

import pytest
import torch

from compressor.steps.correct.in_order import ShadowModel
from compressor.surgery.cutting import cut_layers
from tests.ordered import Corrected, drops, opened_wide, run, watch_corrections, with_heldout


@pytest.mark.parametrize("name", ["mixtral", "muse_spark", "ernie4_5_vl_moe", "deepseek_v4", "qwen3_next"])
def test_one_layer_is_filled_at_a_time_and_the_originals_experts_have_gone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock, model = opened_wide(name, tmp_path)

    def check(seen: Corrected) -> None:
        inside = {key for key in seen.after if key.startswith(f"{seen.layer.unit}.")}
        assert set(seen.after) == inside == {key for key in seen.model.state_dict() if key in inside}
        original = model.partial.model.get_submodule(seen.layer.name)
        assert {value.device.type for value in original.parameters()} == {"meta"}

    seen = watch_corrections(monkeypatch, check)
    run(model, drops(model.architecture), with_heldout(stock), measure=True)
    assert len(seen) == len(model.architecture.layers)
    for corrected in seen.values():
        assert {value.device.type for value in corrected.model.state_dict().values()} == {"meta"}
    assert {value.device.type for value in model.partial.model.state_dict().values()} == {"meta"}


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v4", "zaya"])
def test_what_is_not_cut_is_shared_and_what_is_cut_is_not(name: str, tmp_path: Path) -> None:
    _, model = opened_wide(name, tmp_path)
    layer, partial = model.architecture.layers[0], model.partial
    plans = drops(model.architecture)
    shadow = ShadowModel(model, len(plans[layer.name].groups))
    partial.load(partial.keys_under(layer.unit))
    cut = cut_layers(partial.model, [layer], plans)
    shadow.fill(layer.unit, cut)
    large, small = partial.model.state_dict(), shadow.model.state_dict()
    keys = partial.keys_under(layer.unit)
    assert set(cut) == {tensor.key for tensor in layer.tensors} | set(layer.tables)
    for key in keys:
        assert small[key].data_ptr() == (cut[key] if key in cut else large[key]).data_ptr(), key
        assert key not in cut or small[key].data_ptr() != large[key].data_ptr(), key
    buffers = dict(shadow.model.get_submodule(layer.unit).named_buffers())
    for key, value in partial.model.get_submodule(layer.unit).named_buffers():
        assert f"{layer.unit}.{key}" in cut or torch.equal(value, buffers[key])
    assert shadow.filled == layer.unit
    shadow.empty_again()
    assert shadow.filled is None
    assert {shadow.model.state_dict()[key].device.type for key in keys} == {"meta"}
    assert all(large[key].device.type != "meta" for key in keys)
