"""Faults of the installed transformers with experts of a quantisation, found by loading two random
matrices."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CompressedTensorsConfig
from transformers.core_model_loading import MergeModulelist, WeightConverter
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

from compressor.checkpoint.quantized import scheme_of
from compressor.checkpoint.reader import Checkpoint
from compressor.errors import reason_of
from compressor.extras import require

EXPERTS = 2
SIDE = 64
ROUNDED = 2.0**-6  # of the largest weight: two roundings to bfloat16 differ by less


def loader_fault(
    quantization: Mapping[str, Any], module: str = "model.layers.0.mlp.experts.0.down_proj"
) -> str | None:
    """Return a sentence on how the stock loader mistreats experts of a `quantization_config`; None
    if it does not.

    Experts are packed by compressed-tensors itself and compared after loading. `module` is the name
    of an expert, for a config with several groups."""
    method = str(quantization.get("quant_method"))
    stock = f"transformers {transformers.__version__}"
    if method == "fp8":  # only of scales with that name is it asked
        return f"{stock} does not read scales that are called weight_scale beside fp8 weights"
    if method != "compressed-tensors":
        return (
            None
            if method in AUTO_QUANTIZATION_CONFIG_MAPPING
            else f"{stock} does not read {method} checkpoints"
        )
    require("compressed_tensors")
    quantizer = CompressedTensorsHfQuantizer(
        CompressedTensorsConfig.from_dict({**quantization, "dequantize": True})
    )
    quantizer.validate_environment()
    config = quantizer.compressor.quantization_config
    scheme = scheme_of(config, module) if config.config_groups else None
    if scheme is None or scheme.weights is None:
        return None
    kind = scheme.format or config.format
    try:
        stored, wanted = _packed(scheme, kind)
        model = nn.ModuleDict(
            {"experts": nn.ParameterDict({"down_proj": torch.empty_like(wanted)})}
        )
        stacked = WeightConverter(
            ["experts.*.down_proj.weight"], ["experts.down_proj"], [MergeModulelist(dim=0)]
        )
        converter = quantizer.update_weight_conversions([stacked], model)[0]
        for name, value in stored.items():
            _, pattern = converter.rename_source_key(name)
            if pattern is not None:
                converter.add_tensor("experts.down_proj", name, pattern, value)
        loaded = converter.convert("experts.down_proj", model=model).get("experts.down_proj")
    except Exception as error:  # integrations raise anything
        return f"{stock} does not load {kind} experts: {reason_of(error)}"
    if loaded is None:
        return f"{stock} does not load {kind} experts"
    if loaded.shape != wanted.shape or (loaded - wanted).abs().max() > ROUNDED * wanted.abs().max():
        return f"{stock} loads {kind} experts wrongly"
    return None


def _packed(scheme: Any, kind: str) -> tuple[dict[str, Tensor], Tensor]:
    """Return random experts as they are stored, by name, and their weights [E, O, I]."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    compressor = BaseCompressor.get_value_from_registry(kind)
    weights = scheme.weights
    block = weights.block_structure or (1, max(weights.group_size or 0, 0) or SIDE)
    rows = max(SIDE, 2 * block[0])
    columns = 2 * block[1]
    scales = {"tensor": (1, 1), "channel": (rows, 1)}
    down, across = scales.get(weights.strategy, (rows // block[0], 2))
    generator = torch.Generator().manual_seed(0)
    stored = dict[str, Tensor]()
    plain = []
    for expert in range(EXPERTS):
        weight = torch.randn(rows, columns, generator=generator)
        cells = weight.unflatten(1, (across, -1)).unflatten(0, (down, -1))
        low = cells.amin((1, 3))
        high = cells.amax((1, 3))
        parts = {"weight": weight}
        whole = None
        if weights.strategy == "tensor_group":
            whole = parts["weight_global_scale"] = generate_gparam(low.min(), high.max())
        parts["weight_scale"], parts["weight_zero_point"] = calculate_qparams(
            low, high, weights, whole
        )
        packed = compressor.compress(parts, scheme)
        stored |= {f"experts.{expert}.down_proj.{part}": value for part, value in packed.items()}
        plain.append(compressor.decompress(packed, scheme)["weight"])
    return stored, torch.stack(plain).bfloat16()


def block_fault(checkpoint: Checkpoint) -> str | None:
    """Return a sentence on the first FP8 weight whose blocks the stock loader mistakes; None if
    there is none."""
    block = checkpoint.quantization.get("weight_block_size") or ()
    for name, info in checkpoint.tensors.items():
        if f"{name}_scale_inv" in checkpoint.tensors and info.dtype.startswith("F8"):
            fault = next(filter(None, map(_side_fault, info.shape, block)), None)
            if fault:
                stock = f"transformers {transformers.__version__}"
                return f"{stock} {fault} {name}, {info.shape} in FP8 blocks of {block}"
    return None


@cache
def _side_fault(side: int, length: int) -> str | None:
    """Return what the stock loader does wrong with a side in blocks of a length; None if
    nothing."""
    scales = torch.arange(-(-side // length)).float()[:, None]
    wanted = scales.repeat_interleave(length, 0)[:side]
    try:
        loaded = Fp8Dequantize(None)._dequantize_one(torch.ones(side, 1), scales)
    except ValueError:
        return "cannot dequantise"
    return None if torch.equal(loaded, wanted) else "wrongly scales"
