"""Faults of the installed transformers with experts of a quantisation, found by loading two random matrices."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CompressedTensorsConfig
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer

from compressor.checkpoint.quantized import scheme_of
from compressor.errors import reason_of
from compressor.extras import require

EXPERTS, SIDE = 2, 64
ROUNDED = 2.0**-6  # of the largest weight: two roundings to bfloat16 differ by less


def loader_fault(
    quantization: Mapping[str, Any],
    module: str = "model.layers.0.mlp.experts.0.down_proj",
    family: str | None = None,
    merged: str | None = None,
) -> str | None:
    """Return the sentence on what the stock loader does wrong with experts of a `quantization_config`; None if nothing.

    Experts of compressed-tensors are packed by its own compressor, and what the loader makes of them is compared with
    what they mean. `module` is the name of one, where the config has several groups, and `family` the architecture if
    it stores experts fused in stock checkpoints, but here one by one, or if several modules share the stored experts.
    `merged` is a plain weight, if there is one, that the loader puts together from several tensors.
    """
    method, stock = str(quantization.get("quant_method")), f"transformers {transformers.__version__}"
    if method != "compressed-tensors":
        return None if method in AUTO_QUANTIZATION_CONFIG_MAPPING else f"{stock} does not read {method} checkpoints"
    if family is not None:
        return f"{stock} does not load quantised experts of {family} that are stored one by one"
    require("compressed_tensors")
    quantizer = CompressedTensorsHfQuantizer(CompressedTensorsConfig.from_dict({**quantization, "dequantize": True}))
    quantizer.validate_environment()
    config = quantizer.compressor.quantization_config
    scheme = scheme_of(config, module) if config.config_groups else None
    if scheme is None or scheme.weights is None:
        return None
    kind = scheme.format or config.format
    try:
        experts, wanted = _packed(scheme, kind)
        loaded = _loaded(quantizer, experts, wanted)
    except Exception as error:  # whatever an integration raises
        return f"{stock} does not load {kind} experts: {reason_of(error)}"
    if loaded is None:
        return f"{stock} does not load {kind} experts"
    if loaded.shape != wanted.shape or (loaded - wanted).abs().max() > ROUNDED * wanted.abs().max():
        return f"{stock} loads {kind} experts wrongly"
    if merged is not None and not _merges(quantizer):
        return f"{stock} does not load {merged} beside {kind} experts"
    return None


def _packed(scheme: Any, kind: str) -> tuple[list[dict[str, Tensor]], Tensor]:
    """Return the stored parts of each of some random matrices, and what they mean, [E, O, I]."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    compressor, weights = BaseCompressor.get_value_from_registry(kind), scheme.weights
    block = weights.block_structure or (1, max(weights.group_size or 0, 0) or SIDE)
    rows, columns = max(SIDE, 2 * block[0]), 2 * block[1]
    grid = {"tensor": (1, 1), "channel": (rows, 1)}.get(weights.strategy, (rows // block[0], 2))
    generator, experts, meant = torch.Generator().manual_seed(0), list[dict[str, Tensor]](), list[Tensor]()
    for _ in range(EXPERTS):
        weight = torch.randn(rows, columns, generator=generator)
        cells = weight.unflatten(1, (grid[1], -1)).unflatten(0, (grid[0], -1))
        low, high = cells.amin((1, 3)), cells.amax((1, 3))
        whole = generate_gparam(low.min(), high.max()) if weights.strategy == "tensor_group" else None
        scale, zero = calculate_qparams(low, high, weights, whole)
        parts = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero, "weight_global_scale": whole}
        given = {part: value for part, value in parts.items() if value is not None}
        experts.append(compressor.compress(given, scheme))
        meant.append(compressor.decompress(experts[-1], scheme)["weight"])
    return experts, torch.stack(meant).bfloat16()


def _loaded(quantizer: Any, experts: list[dict[str, Tensor]], wanted: Tensor) -> Any:
    """Return what the stock loader puts into a parameter of that shape; None if it puts nothing there."""
    model = nn.ModuleDict({"experts": nn.ParameterDict({"down_proj": torch.empty_like(wanted)})})
    plain = WeightConverter(["experts.*.down_proj.weight"], ["experts.down_proj"], [MergeModulelist(dim=0)])
    converter = quantizer.update_weight_conversions([plain], model)[0]
    for number, parts in enumerate(experts):
        for part, value in parts.items():
            name = f"experts.{number}.down_proj.{part}"
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                converter.add_tensor(target, name, pattern, value)
    return converter.convert("experts.down_proj", model=model).get("experts.down_proj")


def _merges(quantizer: Any) -> bool:
    """Return True if the stock loader still concatenates plain weights."""
    parts = {"q.weight": torch.ones(1, 2), "k.weight": torch.zeros(1, 2)}
    model = nn.ModuleDict({"merged": nn.ParameterDict({"weight": torch.empty(2, 2)})})
    plain = WeightConverter([*parts], ["merged.weight"], [Concatenate(dim=0)])
    converter = quantizer.update_weight_conversions([plain], model)[0]
    for name, value in parts.items():
        converter.add_tensor("merged.weight", name, name, value)
    try:
        merged = converter.convert("merged.weight", model=model).get("merged.weight")
    except Exception:  # whatever an integration raises
        return False
    return merged is not None and torch.equal(merged, torch.cat([*parts.values()]))
