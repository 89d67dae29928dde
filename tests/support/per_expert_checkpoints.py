"""Checkpoints whose experts are packed one by one by compressed-tensors, of families that store them fused."""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.core_model_loading import revert_weight_conversion

from tests.support import zoo

FUSED = (
    *("aria", "diffusion_gemma", "gemma4", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid"),
    *("granitemoeshared", "hy_v4", "inkling", "inkling2", "minimax_m3_vl", "mistral4", "muse_spark"),
    *("openai_privacy_filter", "qwen3_vl_moe", "zaya"),
)
GROUP = 4  # divides all widths of the zoo


def matrices(experts: Any, expert: int) -> dict[str, Tensor]:
    """Views [out, in] of one expert's projections in the fused parameters of a stock experts module."""
    inner, down = experts.gate_up_proj.data[expert], experts.down_proj.data[expert]
    if experts.is_transposed:
        inner, down = inner.T, down.T
    gate, up = inner.chunk(2) if experts.is_concatenated else (inner[0::2], inner[1::2])
    return {"gate_proj": gate, "up_proj": up, "down_proj": down}


def save_packed(name: str, folder: Path, single_biases: bool = False, **overrides: Any) -> Any:
    """Write a family's model with int4 experts, one by one; returns the stock model that holds what they mean.

    With `single_biases`, those of gpt_oss are stored one by one, too.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    model = zoo.build(name, **overrides)
    model.save_pretrained(folder)
    (path,) = folder.glob("*.safetensors")
    stored = load_file(path)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": True}
    group = {"targets": [r"re:.*experts\.\d+\..*"], "weights": weights, "format": "pack-quantized"}
    quantization = QuantizationConfig(
        config_groups={"group_0": group}, format="pack-quantized", quantization_status="compressed", ignore=["lm_head"]
    )
    scheme = quantization.config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    tied = model.all_tied_weights_keys or {}
    for module, experts in zoo.experts(model).items():
        if f"{module}.down_proj" in tied:
            continue
        keys = [f"{module}.gate_up_proj", f"{module}.down_proj"]
        if single_biases:
            keys += [f"{key}_bias" for key in keys]
        for gone in revert_weight_conversion(model, {key: model.get_parameter(key) for key in keys}):
            del stored[gone]
        for expert in range(len(experts.down_proj)):
            for projection, view in matrices(experts, expert).items():
                groups = view.unflatten(1, (-1, GROUP))
                parts = {"weight": view, "weight_scale": groups.abs().amax(2) / 7.5}
                packed = compressor.compress(parts, scheme)
                view.copy_(compressor.decompress(packed, scheme)["weight"])
                stored |= {f"{module}.{expert}.{projection}.{part}": value for part, value in packed.items()}
            if single_biases:
                stored |= {f"{module}.{expert}.{key}.bias": value for key, value in _biases(experts, expert).items()}
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization.model_dump() | {"quant_method": "compressed-tensors"}
    (folder / "config.json").write_text(json.dumps(config, default=str))
    save_file({key: value.contiguous().clone() for key, value in stored.items()}, path, metadata={"format": "pt"})
    return model


def _biases(experts: nn.Module, expert: int) -> dict[str, Tensor]:
    inner, down = experts.gate_up_proj_bias.data[expert], experts.down_proj_bias.data[expert]
    return {"gate_proj": inner[0::2], "up_proj": inner[1::2], "down_proj": down}
