"""From the model's tensors back to the checkpoint's: what was read comes out as it is stored, in every family."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.opened import open_model
from compressor.steps.distill.engines import stored_dtypes, stored_tensors, trained_layers
from compressor.steps.distill.step import Distill
from tests import quantized, small, zoo
from tests.opened import opened


@pytest.mark.parametrize("name", [*zoo.FAMILIES, *zoo.VARIANTS])
def test_tensors_that_were_not_changed_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    _, model = opened(name, tmp_path)
    if name == "diffusion_gemma":
        with pytest.raises(CompressionError, match="is shared by two layers"):
            trained_layers(model, Distill())
        return
    layers = trained_layers(model, Distill())
    dtypes = stored_dtypes(model, layers)
    model.partial.load(model.partial.keys_under(""))
    state, written = model.partial.model.state_dict(), set[str]()
    for layer in layers:
        for found, value in stored_tensors(model, {key: state[key] for key in layer.keys}, dtypes).items():
            assert torch.equal(value, model.checkpoint.read(found)), found
            written.add(found)
    experts = {entry for entry, role in model.layout.roles.items() if role.layer}
    buffers = {entry for entry in experts if model.partial.keys.targets[entry] not in dict(
        model.partial.model.named_parameters())}  # fmt: skip
    choosing = {entry for entry in experts if entry.endswith("expert_bias")}  # which no gradient reaches
    assert experts - written <= buffers | choosing and written


def test_a_stored_tensor_that_is_none_of_the_stock_names_is_told(tmp_path: Path) -> None:
    small.save(tmp_path)
    model = open_model(locate(str(tmp_path)), "float32", "cpu")
    name = next(name for name in model.checkpoint.tensors if name.endswith("w2.weight"))
    del model.checkpoint.tensors[name]
    with pytest.raises(CompressionError, match="is not stored as transformers would write it"):
        stored_dtypes(model, trained_layers(model, Distill()))


@pytest.mark.parametrize("save", [quantized.save_fp8, quantized.save_mxfp4, quantized.save_compressed_tensors])
def test_quantised_tensors_are_refused_by_name_and_plain_ones_beside_them_are_not(
    save: Callable[[Path], None], tmp_path: Path
) -> None:
    save(tmp_path)
    model = open_model(locate(str(tmp_path)), "auto", "cpu")
    with pytest.raises(CompressionError, match=r"tensor '\S+' is stored quantised.* train: router"):
        stored_dtypes(model, trained_layers(model, Distill()))
    router = stored_dtypes(model, trained_layers(model, Distill("router")))
    assert router and all(dtype.itemsize > 1 for dtype in router.values())
