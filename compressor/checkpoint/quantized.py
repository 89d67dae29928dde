"""Quantised checkpoints: the stock quantiser, set to load plain weights.

Pruning does not need it, as it copies stored tensors. Pass the result of `dequantizer` to
`get_model_conversion_mapping` and `LoadStateDictConfig`. Its `preprocess_model` and
`postprocess_model` are not called, as no module changes."""

import inspect
import re
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import ConversionOps, WeightRenaming
from transformers.integrations.compressed_tensors import CompressedTensorsDequantize
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from compressor.checkpoint.reader import DTYPE_BITS, TensorInfo
from compressor.devices import one_thread_each
from compressor.errors import CompressionError, reason_of
from compressor.extras import require

MODELOPT_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8")


def declared_quantization(config: Any) -> Any:
    """Return the quantisation in a config, or in that of its language model; None or empty for
    plain weights."""
    nodes = (config, config.get_text_config(decoder=True))
    first, second = (getattr(node, "quantization_config", None) for node in nodes)
    return first or second


def dequantizer(config: PreTrainedConfig) -> HfQuantizer | None:
    """Return the quantiser that dequantises this checkpoint while loading, or None for plain
    weights."""
    declared = declared_quantization(config)
    if not declared:
        return None
    fields: dict[str, Any] = declared if isinstance(declared, dict) else declared.to_dict()
    method = str(getattr(fields.get("quant_method"), "value", fields.get("quant_method")))
    settings: Any = {"modelopt": _ModelOptConfig, **AUTO_QUANTIZATION_CONFIG_MAPPING}.get(method)
    if settings is None or "dequantize" not in inspect.signature(settings).parameters:
        raise CompressionError(
            f"config.json: can't dequantise {method!r}; start from plain or fp8 weights."
        )
    if method == "compressed-tensors":
        require("compressed_tensors")
    if fields.get("transform_config"):
        raise CompressionError(
            "config.json: transformers would ignore transform_config and be wrong."
        )
    kind: Any = AUTO_QUANTIZER_MAPPING.get(method, _ModelOptQuantizer)
    try:
        declared = settings.from_dict(fields | {"dequantize": True})
        quantizer: HfQuantizer = _CORRECTED.get(kind, kind)(declared)
    except Exception as error:  # these packages raise anything
        raise CompressionError(
            f"config.json: this {method} checkpoint can't be read: {reason_of(error)}"
        ) from error
    return quantizer


def refuse_unscaled(
    tensors: Mapping[str, TensorInfo],
    plain: Mapping[str, str],
    targets: Mapping[str, str],
    floating: Collection[str],
) -> None:
    """Refuse a weight of 8 bits or less, or a packed one, of which no scale is read.

    `targets` maps stored tensors to parameters, `plain` does for a checkpoint that is not
    quantised. Only `floating` parameters are weights."""
    scaled = set()
    for name, target in targets.items():
        module, _, part = name.rpartition(".")
        if name not in plain and "scale" in part:
            scaled.add((target, module))
    for name, info in tensors.items():
        target = targets.get(name, "")
        module, _, part = name.rpartition(".")
        is_narrow = DTYPE_BITS[info.dtype] <= 8 and target in floating
        is_packed = part == "weight_packed" and (name in targets or not scaled)
        if (is_narrow or is_packed) and (target, module) not in scaled:
            raise CompressionError(
                f"tensor {name!r} in {info.file} is {info.dtype}, and none of its scales is read; "
                "restore its scale and the quantization_config from the source, or store the "
                "weight in bfloat16"
            )


def refuse_unread_scales(targets: Mapping[str, str | None]) -> None:
    """Refuse a weight that would be loaded without its scale; `targets` maps stored tensors to
    parameters."""
    loaded = {
        name.removesuffix("_packed") for name, target in targets.items() if target is not None
    }
    for name, target in targets.items():
        module, _, part = name.rpartition(".")
        cuts = range(1, part.count("_") + 1)
        # of x.weight_scale, x.up_scale
        weights = {f"{module}.{part.rsplit('_', cut)[0]}" for cut in cuts} & loaded
        if target is None and weights and re.search("^(?!.*input).*(scale|zero|g_idx)", part):
            raise CompressionError(
                f"Tensor {name}: transformers would load {min(weights)} but not this scale."
            )


def wanted_dtype(model: PreTrainedModel, name: str) -> torch.dtype:
    """Return the dtype in which a parameter or buffer would be loaded from a plain checkpoint."""
    dtype: torch.dtype = model.get_parameter_or_buffer(name).dtype
    plan: dict[str, torch.dtype] = model._get_dtype_plan(dtype)
    for glob, wanted in plan.items():
        if re.search(glob.replace("*", ".*"), name):
            return wanted
    return dtype


def scheme_of(config: Any, module: str) -> Any:
    """Return compressed-tensors' config group that names a module, or else one for its class."""
    from compressed_tensors.utils.match import match_name

    def fit(group: Any) -> tuple[bool, bool]:
        named = any(match_name(module, target) for target in group.targets)
        return named, any(target.isidentifier() for target in group.targets)

    return max(config.config_groups.values(), key=fit)


class _Shared:
    """An operation that is not copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        # the loader copies converters for every tensor, and with this its whole quantiser
        return self


class _Fp8Dequantize(_Shared, Fp8Dequantize):
    """Upstream's operation, corrected for sides that are no multiple of the block, and for unscaled
    tensors."""

    def _dequantize_one(self, quantized: Any, scales: Any, *args: Any, **kwargs: Any) -> Any:
        block = self.hf_quantizer.quantization_config.weight_block_size
        (rows, columns) = quantized.shape[-2:]
        if scales.dim() < 2:  # of the whole matrix, or of each row
            scales = scales.reshape(-1, 1)
        if block and quantized.is_floating_point():  # packed fp4 has blocks of its own
            down = -(-rows // block[0])
            across = -(-columns // block[1])
            padding = (0, across * block[1] - columns, 0, down * block[0] - rows)
            if any(padding) and scales.shape[-2:] == (down, across):
                padded = torch.nn.functional.pad(quantized.float(), padding)
                plain = super()._dequantize_one(padded, scales, *args, **kwargs)
                return plain[..., :rows, :columns].contiguous()
        return super()._dequantize_one(quantized, scales, *args, **kwargs)

    def convert(self, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = wanted_dtype(kwargs["model"], kwargs["full_layer_name"])
        plain = super().convert(input_dict, *args, **kwargs)
        return tree_map(lambda tensor: tensor.to(dtype), plain)


class _CompressedTensorsDequantize(_Shared, CompressedTensorsDequantize):
    """Dequantisation of any format by the package's `decompress`; upstream reads only fp8 and
    symmetric experts."""

    def convert(self, input_dict: Any, *args: Any, **kwargs: Any) -> Any:
        target = kwargs["full_layer_name"]
        plain: dict[str, Any] = {}
        dtype = wanted_dtype(kwargs["model"], target)
        modules: dict[str, dict[str, list[Tensor]]] = {}  # pattern -> part -> one tensor per expert
        for pattern, tensors in input_dict.items():
            module, _, part = pattern.rpartition(".")
            as_list = tensors if isinstance(tensors, list) else [tensors]
            modules.setdefault(module, {})[part] = as_list
        for module, parts in modules.items():
            name = target
            if module:
                name = target.replace(kwargs["target_patterns"][0], module.replace("*", "0"))
            experts, *others = {len(tensors) for tensors in parts.values()}
            if others:
                raise ValueError(f"{module} is quantised for some of the experts only")
            if not module:  # no experts: the converter of all other weights
                return {target: self._weight(parts, 0, name).to(dtype)}
            # plain, or for two modules
            if len(parts) == 1 or "*" not in module or len(kwargs["target_patterns"]) > 1:
                weights = (self._weight(parts, expert, name) for expert in range(experts))
                plain[f"{module}.weight"] = [weight.to(dtype) for weight in weights]
                continue
            first = self._weight(parts, 0, name)
            # stacked here rather than by the merge that follows, to hold the weights once
            stacked = first.new_empty((experts, *first.shape), dtype=dtype)
            plain[f"{module}.weight"] = stacked
            stacked[0] = first
            with one_thread_each() as pool:
                list(pool.map(partial(self._fill, stacked, parts, name), range(1, experts)))
        return plain

    def _fill(
        self, stacked: Tensor, parts: dict[str, list[Tensor]], name: str, expert: int
    ) -> None:
        stacked[expert] = self._weight(parts, expert, name)

    def _weight(self, stored: dict[str, list[Tensor]], expert: int, name: str) -> Any:
        """Return the plain weight of a module, or of one of its experts, from its stored parts."""
        parts = {part: tensors[expert] for part, tensors in stored.items()}
        if "weight_scale" not in parts:
            return parts["weight"]
        from compressed_tensors.compressors import BaseCompressor

        config = self.hf_quantizer.compressor.quantization_config
        scheme = scheme_of(config, name.removesuffix(".weight"))
        storage = scheme.format or config.format
        if scheme.weights is None or storage in ("dense", "fakequant"):
            raise ValueError(
                f"config.json does not say how it is quantised (its format is {storage!r})"
            )
        needed = {
            "weight_zero_point": not scheme.weights.symmetric,
            "weight_global_scale": scheme.weights.strategy == "tensor_group",
            "weight_shape": storage == "pack-quantized",
        }
        for part, is_needed in needed.items():
            if is_needed and part not in parts:
                raise ValueError(f"its {part} is missing")
        if "weight_shape" in parts:
            width = parts["weight_packed"].shape[-1]
            columns = int(parts["weight_shape"][-1])
            if width != -(-columns * scheme.weights.num_bits // 32):
                raise ValueError(
                    f"{scheme.weights.num_bits} bits of {columns} weights do not fill {width} words"
                )
        zero_point = parts.get("weight_zero_point")
        # with other strides the package can't view it as bytes
        if zero_point is not None and len(zero_point) == 1:
            parts["weight_zero_point"] = zero_point.reshape(-1, 1).T
        # the product would be rounded to it first
        if parts["weight_scale"].dtype == torch.bfloat16:
            parts["weight_scale"] = parts["weight_scale"].float()
        compressor = BaseCompressor.get_value_from_registry(storage)
        return compressor.decompress(parts, scheme)["weight"]


class _ModelOptDequantize(_CompressedTensorsDequantize):
    """Dequantisation of NVFP4 and FP8 of NVIDIA's modelopt, told apart by the tensors of each
    module."""

    def _weight(self, stored: dict[str, list[Tensor]], expert: int, name: str) -> Any:
        parts = {part: tensors[expert] for part, tensors in stored.items()}
        weight = parts["weight"]
        scale = parts.get("weight_scale")
        if scale is None:
            return weight
        if weight.dtype != torch.uint8:
            return weight.float() * scale.float().reshape(-1, 1)
        scales = scale.float() * parts["weight_scale_2"].float()  # [O, I / 16]
        values = Fp8Dequantize(self.hf_quantizer)._unpack_fp4(weight)
        return (values.view(*scales.shape, -1) * scales[..., None]).flatten(1)


class _ModelOptConfig(QuantizationConfigMixin):
    """The config that modelopt writes into config.json, or as `quantization` into a file of its
    own."""

    def __init__(self, dequantize: bool = True, **declared: Any) -> None:
        self.quant_method = "modelopt"
        self.dequantize = dequantize
        declared = declared.get("quantization") or declared
        entries = [declared, *(declared.get("quantized_layers") or {}).values()]
        algorithms = {str(entry.get("quant_algo") or "").upper() for entry in entries}
        unknown = sorted(algorithms - {"", "MIXED_PRECISION", *MODELOPT_ALGORITHMS})
        if unknown:
            known = ", ".join(MODELOPT_ALGORITHMS)
            raise ValueError(f"its quant_algo {unknown[0]} is not known; known are {known}")


class _Dequantizing:
    """Names the operation of a quantiser that the loader dequantises with."""

    operation: ClassVar[type]

    def get_load_operations(self) -> dict[str, type]:
        return {"dequantize": self.operation}


class _ModelOptQuantizer(_Dequantizing, HfQuantizer):
    """A quantiser for modelopt, which transformers lacks."""

    operation = _ModelOptDequantize
    is_trainable = True
    serialized_names: ClassVar = {"weight": ["weight", "weight_scale", "weight_scale_2"]}

    def is_serializable(self) -> bool:
        return False


class _OfPlain(ConversionOps):
    """An operation on dequantised tensors of these patterns, in a conversion that also has patterns
    of scales."""

    supports_many_to_many = True

    def __init__(self, operation: Any, patterns: list[str]) -> None:
        self.operation = operation
        self.patterns = patterns

    def convert(self, input_dict: Any, *, source_patterns: Any, **kwargs: Any) -> Any:
        return self.operation.convert(input_dict, source_patterns=self.patterns, **kwargs)


class _Fp8Quantizer(_Dequantizing, FineGrainedFP8HfQuantizer):
    operation = _Fp8Dequantize

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> list[Any]:
        """Return upstream's conversions, after AutoFP8's names of scales become upstream's."""
        renaming = WeightRenaming(r"\.weight_scale$", ".weight_scale_inv")
        return [renaming, *super().update_weight_conversions(weight_conversions, model)]


class _CompressedQuantizer(_Dequantizing, CompressedTensorsHfQuantizer):
    operation = _CompressedTensorsDequantize
    use_fp8_kernel = False  # set by `validate_environment` upstream

    def update_weight_conversions(self, weight_conversions: Any, model: Any) -> list[Any]:
        """Return upstream's conversions, corrected for experts shared by modules, such as text and
        vision."""
        updated: list[Any] = super().update_weight_conversions(weight_conversions, model)
        for conversion in updated:
            first, *others = getattr(conversion, "operations", []) or [None]
            patterns = conversion.source_patterns
            plain = [pattern for pattern in patterns if pattern.endswith(".weight")]
            # others are left as they were
            if plain and others and len(conversion.target_patterns) > 1:
                conversion.operations = [first, *(_OfPlain(other, plain) for other in others)]
        return updated


_CORRECTED = {
    FineGrainedFP8HfQuantizer: _Fp8Quantizer,
    CompressedTensorsHfQuantizer: _CompressedQuantizer,
}
