"""What is said of the stock loader, against what it really makes of checkpoints."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, __version__

import compressor
from compressor.checkpoint.loader_fault import loader_fault
from compressor.checkpoint.reader import Checkpoint
from tests.support import zoo
from tests.support.per_expert_checkpoints import save_packed
from tests.support.quantized import plain_model, save_autofp8, save_compressed_tensors, save_fp8

STOCK = f"transformers {__version__}"
NO_ZERO_POINTS = "does not load pack-quantized experts: Asymmetric quant requires zero-point values"
CASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "int4": ({}, None),
    "int4-asymmetric": ({"symmetric": False}, NO_ZERO_POINTS),
    "fp8": ({"format": "float-quantized"}, None),
    "int8": ({"format": "int-quantized"}, "does not load int-quantized experts"),
    "mxfp4": ({"format": "mxfp4-pack-quantized"}, None),
    "nvfp4": ({"format": "nvfp4-pack-quantized"}, "loads nvfp4-pack-quantized experts wrongly"),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_the_sentence_is_true_of_the_stock_loader(case: str, tmp_path: Path) -> None:
    options, wanted = CASES[case]
    save_compressed_tensors(tmp_path, **options)
    found = loader_fault(Checkpoint(tmp_path).quantization)
    assert found == (None if wanted is None else f"{STOCK} {wanted}")
    assert compressor.inspect(str(tmp_path)).loader_fault == found
    plain = plain_model(tmp_path, torch.bfloat16)
    experts, alike = "model.layers.0.mlp.experts.down_proj", False
    with suppress(RuntimeError):  # of weights that cannot be converted
        stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        alike = torch.allclose(stock.get_parameter(experts), plain.get_parameter(experts), rtol=0.02)
    assert alike == (found is None)


def test_experts_that_are_not_quantised_have_no_fault(tmp_path: Path) -> None:
    zoo.save("qwen3_moe", tmp_path)
    assert compressor.inspect(str(tmp_path)).loader_fault is None
    cache = {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert loader_fault({"quant_method": "compressed-tensors", "config_groups": {}, **cache}) is None


def test_packed_experts_one_by_one_are_named(tmp_path: Path) -> None:
    save_packed("gpt_oss", tmp_path)
    fault = compressor.inspect(str(tmp_path)).loader_fault
    assert fault is not None and fault.startswith(f"{STOCK} finds nothing stored for, and draws at random, 4 tensors")


def test_scales_that_stock_transformers_does_not_read_beside_fp8_are_named(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    save_autofp8(tmp_path)
    fault = compressor.inspect(str(tmp_path)).loader_fault
    assert fault == f"{STOCK} does not read scales that are called weight_scale beside fp8 weights"
    stock = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=FineGrainedFP8Config(dequantize=True))
    weights = plain_model(tmp_path, torch.bfloat16).state_dict()
    key = "model.layers.0.mlp.experts.down_proj"
    assert stock.state_dict()[key].float().abs().max() > 100 * weights[key].float().abs().max()


def test_an_unknown_method_is_named() -> None:
    assert loader_fault({"quant_method": "modelopt"}) == f"{STOCK} does not read modelopt checkpoints"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("width", "says"), [(32, None), (24, "wrongly scales"), (40, "cannot dequantise")])
def test_fp8_blocks_that_stock_mistakes_are_named(width: int, says: str | None, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    save_fp8(tmp_path, sizes={"moe_intermediate_size": width})
    found = compressor.inspect(str(tmp_path)).loader_fault
    experts, alike = "model.layers.0.mlp.experts.gate_up_proj", False
    with suppress(RuntimeError):  # of weights that cannot be converted
        stock = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        plain = plain_model(tmp_path, torch.bfloat16)
        alike = torch.equal(stock.get_parameter(experts), plain.get_parameter(experts))
    assert alike == (found is None) == (says is None)
    if found and says:
        assert found.startswith(f"{STOCK} {says} model.layers.0.mlp.experts.0.")
