"""Quantised checkpoints give, whole or one layer at a time, the weights that our own formulas give."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    PreTrainedConfig,
)
from transformers.utils.quantization_config import Mxfp4Config

from compressor.answers.decoding import load_writing
from compressor.checkpoint.quantized import dequantizer, refuse_unread_scales
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.opened import load_whole, open_model
from tests.support.quantized import MODELOPT, plain_model, save_compressed_tensors, save_fp8, save_modelopt, save_mxfp4

Save = Callable[[Path], None]

HALF_A_BLOCK = {"qk_rope_head_dim": 8}  # 40 rows under 3 scales of 16 rows, as DeepSeek's 576 under 5 of 128
HALF_A_BLOCK_EVEN = HALF_A_BLOCK | {"kv_lora_rank": 16}  # 24 rows under 2 scales, which 2 divides

FP8, COMPRESSED = FineGrainedFP8Config, CompressedTensorsConfig
READ_BY_STOCK: dict[str, tuple[Save, type]] = {
    "fp8-qwen3_moe": (save_fp8, FP8),
    "fp8-deepseek_v3": (lambda folder: save_fp8(folder, "deepseek_v3"), FP8),
    "fp8-minimax_m2": (lambda folder: save_fp8(folder, "minimax_m2"), FP8),
    "mxfp4-gpt_oss": (save_mxfp4, Mxfp4Config),
    "float-qwen3_moe": (lambda folder: save_compressed_tensors(folder, "qwen3_moe", "float-quantized"), COMPRESSED),
    "packed-qwen3_moe": (save_compressed_tensors, COMPRESSED),
    "packed-mixtral": (lambda folder: save_compressed_tensors(folder, "mixtral"), COMPRESSED),
}
ALL: dict[str, tuple[Save, type]] = READ_BY_STOCK | {
    "fp8-ragged": (lambda folder: save_fp8(folder, "deepseek_v3", sizes=HALF_A_BLOCK), FP8),
    "int8-qwen3_moe": (lambda folder: save_compressed_tensors(folder, "qwen3_moe", "int-quantized"), COMPRESSED),
    "naive-int8-mixtral": (lambda folder: save_compressed_tensors(folder, "mixtral", "naive-quantized"), COMPRESSED),
    "nvfp4-qwen3_moe": (lambda folder: save_compressed_tensors(folder, format="nvfp4-pack-quantized"), COMPRESSED),
    "mxfp4-qwen3_moe": (lambda folder: save_compressed_tensors(folder, format="mxfp4-pack-quantized"), COMPRESSED),
    "modelopt-nvfp4": (save_modelopt, COMPRESSED),
    "modelopt-file": (lambda folder: save_modelopt(folder, "mixtral", declared=[MODELOPT]), COMPRESSED),
    "modelopt-config": (lambda folder: save_modelopt(folder, "deepseek_v3", declared=["config.json"]), COMPRESSED),
    "modelopt-fp8": (lambda folder: save_modelopt(folder, algorithm="FP8"), COMPRESSED),
    "modelopt-mixed": (lambda folder: save_modelopt(folder, algorithm="MIXED_PRECISION"), COMPRESSED),
    "packed-asymmetric": (lambda folder: save_compressed_tensors(folder, symmetric=False), COMPRESSED),
    "fp8-ragged-even": (lambda folder: save_fp8(folder, "deepseek_v3", sizes=HALF_A_BLOCK_EVEN), FP8),
}


def save(folder: Path, case: str) -> type:
    """Write the case's checkpoint; gives its config class."""
    pytest.importorskip("accelerate")  # stock transformers wants it for FP8
    pytest.importorskip("compressed_tensors")
    write, config_class = ALL[case]
    write(folder)
    return config_class


def stock(folder: Path, config_class: type) -> Any:
    config = config_class(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)


def configured(**quantization: Any) -> PreTrainedConfig:
    return AutoConfig.for_model("qwen3_moe", quantization_config=quantization)


def load_layer(folder: Path, layer: int, dtype: torch.dtype) -> Any:
    """The model on the meta device, of which one decoder layer is loaded."""
    partial = open_model(locate(str(folder)), str(dtype).removeprefix("torch."), "cpu").partial
    partial.load(partial.keys_under(f"model.layers.{layer}"))
    return partial.model


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("case", READ_BY_STOCK)
def test_stock_loader_gives_the_hand_dequantised_model(tmp_path: Path, case: str) -> None:
    loaded = stock(tmp_path, save(tmp_path, case)).eval()
    plain = plain_model(tmp_path, torch.bfloat16)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    tokens = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert torch.equal(plain(tokens).logits, loaded(tokens).logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", ALL)
def test_one_layer_alone_has_the_hand_dequantised_weights(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    save(tmp_path, case)
    layer = load_layer(tmp_path, 1, dtype)
    plain = plain_model(tmp_path, dtype).state_dict()
    for name, tensor in layer.state_dict().items():
        assert tensor.is_meta == (not name.startswith("model.layers.1.")), name
        if not tensor.is_meta:
            assert tensor.dtype == plain[name].dtype, name
            assert torch.equal(tensor, plain[name]), name


@pytest.mark.parametrize("case", ["fp8-qwen3_moe", "nvfp4-qwen3_moe"])
def test_a_whole_model_has_the_hand_dequantised_weights(tmp_path: Path, case: str) -> None:
    save(tmp_path, case)
    loaded, plain = load_whole(tmp_path, dtype=torch.bfloat16), plain_model(tmp_path, torch.bfloat16)
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, loaded.state_dict()[name]), name
    with torch.no_grad():
        tokens = torch.tensor([[5, 6, 7]])
        logits, found = (
            model(tokens).logits[0, -1].float() for model in (plain, load_writing(tmp_path, "cpu", "auto"))
        )
    assert torch.allclose(found, logits, atol=1e-2)


def test_unreadable_method_is_refused() -> None:
    with pytest.raises(CompressionError, match="can't dequantise 'gptq'"):
        dequantizer(configured(quant_method="gptq", bits=4))


@pytest.mark.parametrize("said", [{"quant_algo": "W4A8_AWQ"}, {"quantization": {"quant_algo": "W4A8_AWQ"}}])
def test_an_unknown_algorithm_of_modelopt_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(CompressionError, match="W4A8_AWQ is not known; known are NVFP4, W4A16_NVFP4, FP8"):
        dequantizer(configured(quant_method="modelopt", **said))


def test_a_transform_is_refused() -> None:
    config = configured(quant_method="compressed-tensors", transform_config={"config_groups": {"R3": {}}})
    with pytest.raises(CompressionError, match="transform_config"):
        dequantizer(config)


def test_a_scale_that_would_not_be_read_is_refused() -> None:
    quantizer = dequantizer(configured(quant_method="fp8"))
    assert quantizer is not None
    weight = "model.layers.0.mlp.experts.gate_up_proj"
    with pytest.raises(CompressionError, match="gate_up_proj_scale_inv: transformers would load"):
        refuse_unread_scales(quantizer, {weight: weight, f"{weight}_scale_inv": None})
    modelopt = dequantizer(configured(quant_method="modelopt", quant_algo="FP8"))
    assert modelopt is not None
    with pytest.raises(CompressionError, match="gate_up_proj_weight_scale: transformers would load"):
        refuse_unread_scales(modelopt, {weight: weight, f"{weight}_weight_scale": None})
    refuse_unread_scales(quantizer, {"model.layers.61.eh_proj.weight": None})


def test_experts_of_which_only_some_are_quantised_are_refused(tmp_path: Path) -> None:
    save(tmp_path, "packed-qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.7.down_proj.weight_scale"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CompressionError, match=r"holds 7 tensors like .*weight_scale' for 8 experts"):
        load_layer(tmp_path, 1, torch.float32)


def change_group(folder: Path, declared: dict[str, Any], **weights: Any) -> None:
    """Let the config of compressed-tensors say something else."""
    content = json.loads((folder / "config.json").read_text())
    quantization = content["quantization_config"]
    quantization |= declared
    quantization["config_groups"]["group_0"]["weights"] |= weights
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("case", "weights"),
    [
        *(("packed-qwen3_moe", {"num_bits": bits}) for bits in (2, 3, 5, 8)),
        *(("packed-asymmetric", {"group_size": size}) for size in (8, 32)),
        ("nvfp4-qwen3_moe", {"num_bits": 8}),
        ("nvfp4-qwen3_moe", {"group_size": 32}),
        ("mxfp4-qwen3_moe", {"group_size": 16}),
    ],
)
def test_a_config_that_its_packed_tensors_do_not_fit_is_refused(
    tmp_path: Path, case: str, weights: dict[str, Any]
) -> None:
    save(tmp_path, case)
    open_model(locate(str(tmp_path)))
    change_group(tmp_path, {}, **weights)
    ((_, value),) = weights.items()
    with pytest.raises(CompressionError, match=rf"tensor '.*weight_packed' has shape .* the .*\b{value}\b.* declares"):
        open_model(locate(str(tmp_path)))


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_bits_that_do_not_fill_the_words_of_a_row_are_refused(tmp_path: Path, bits: int) -> None:
    save(tmp_path, "packed-qwen3_moe")
    tensors = load_file(tmp_path / "model.safetensors")
    by_rows = {name: tensor[:, :1].contiguous() for name, tensor in tensors.items() if name.endswith("weight_scale")}
    save_file(tensors | by_rows, tmp_path / "model.safetensors")
    change_group(tmp_path, {}, strategy="channel", group_size=None)
    load_whole(tmp_path)
    change_group(tmp_path, {}, num_bits=bits)
    with pytest.raises(CompressionError, match=rf"{bits} bits of \d+ weights do not fill \d+ words"):
        load_whole(tmp_path)


def test_a_modelopt_weight_that_its_scales_do_not_fit_is_refused(tmp_path: Path) -> None:
    save_modelopt(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.0.down_proj.weight"
    save_file(tensors | {name: tensors[name][:, :8].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(CompressionError, match=rf"tensor '{name}' has shape .* 4 bits in groups of 16"):
        open_model(locate(str(tmp_path)))
