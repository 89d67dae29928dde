"""Tiny quantised MoE checkpoints, and what their weights mean, both by plain torch formulas of our own.

Letters: E experts, O output rows, I input columns, B block rows or columns, G group of input columns.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

Tensors = dict[str, torch.Tensor]

MODELOPT = "hf_quant_config.json"
BLOCK = 16  # a published checkpoint has 128
GROUP = 16  # of int4 columns; a published checkpoint has 32 or 128
MXFP4, NVFP4 = 32, 16  # values under one scale, fixed by the formats
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
FP8_MAX = 448.0

_FP4 = {"num_bits": 4, "type": "float", "symmetric": True, "observer": "static_minmax", "observer_kwargs": {}}
_NVFP4 = _FP4 | {"strategy": "tensor_group", "group_size": NVFP4, "scale_dtype": "torch.float8_e4m3fn"}
_MXFP4 = _FP4 | {"strategy": "group", "group_size": MXFP4, "scale_dtype": "torch.uint8"}
# Of weights and activations, as published checkpoints have them.
FP4_SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nvfp4-pack-quantized": (_NVFP4 | {"dynamic": False}, _NVFP4 | {"dynamic": "local"}),
    "mxfp4-pack-quantized": (_MXFP4 | {"dynamic": False}, _MXFP4 | {"dynamic": True}),
}

_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64}
_SIZES = {"vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 2, "num_experts_per_tok": 2}
_FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": _ATTENTION | {"num_experts": 8, "moe_intermediate_size": 32, "intermediate_size": 48},
    "mixtral": _ATTENTION | {"num_local_experts": 8, "intermediate_size": 32},
    "minimax_m2": _ATTENTION | {"num_local_experts": 8, "intermediate_size": 32, "rotary_dim": 8},
    "gpt_oss": _ATTENTION | {"num_local_experts": 8, "intermediate_size": 32, "sliding_window": 16},
    "deepseek_v3": {
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
        "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
        "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 2, "first_k_dense_replace": 1,
        "moe_intermediate_size": 32, "intermediate_size": 48, "num_nextn_predict_layers": 0,
    },
}  # fmt: skip
# What published checkpoints say; see the names in their own config.json.
_FP8_UNTOUCHED: dict[str, list[str] | None] = {
    "qwen3_moe": ["lm_head", "model.layers.0.mlp.gate", "model.layers.1.mlp.gate"],
    "deepseek_v3": None,
    "minimax_m2": ["gate", "e_score_correction_bias", "lm_head"],
}


def plain_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """A model of the checkpoint's config without quantisation that holds the weights of `dequantized`."""
    config = AutoConfig.from_pretrained(folder)
    vars(config).pop("quantization_config", None)
    model_class = getattr(transformers, config.architectures[0])
    model = model_class.from_pretrained(None, config=config, state_dict=dequantized(folder), dtype=dtype)
    return model.eval()


def save_fp8(folder: Path, family: str = "qwen3_moe", seed: int = 0, sizes: dict[str, Any] | None = None) -> None:
    """Block FP8 with `weight_scale_inv`; `sizes` overrides config fields, for sides of part of a block."""
    config, tensors = _random(family, seed, sizes)
    scale_dtype = torch.bfloat16 if family == "qwen3_moe" else torch.float32
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if not _is_linear(name, tensor):
            stored[name] = tensor
            continue
        stored[name], stored[name + "_scale_inv"] = _to_fp8_blocks(tensor, scale_dtype)
    quantization: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    quantization["weight_block_size"] = [BLOCK, BLOCK]
    if _FP8_UNTOUCHED[family] is not None:
        quantization["modules_to_not_convert"] = _FP8_UNTOUCHED[family]
    _write(folder, config, stored, quantization)


def save_autofp8(
    folder: Path, family: str = "qwen3_moe", scales: str = "matrix", sizes: dict[str, Any] | None = None
) -> None:
    """AutoFP8: FP8 with `weight_scale`, one of the `matrix`, a `row` [O] or a `column` [O, 1] of them, and a static
    `input_scale`; with scales in rows, the router, too."""
    config, tensors = _random(family, 0, sizes)
    stored = Tensors()
    for name, tensor in tensors.items():
        if not (_is_linear(name, tensor) or (scales == "row" and name.endswith("gate.weight"))):
            stored[name] = tensor
            continue
        largest = tensor.float().abs()
        scale = {"matrix": largest.max(), "row": largest.amax(1), "column": largest.amax(1, keepdim=True)}[scales]
        scale = scale / FP8_MAX
        stored[name] = (tensor.float() / (scale[:, None] if scales == "row" else scale)).to(torch.float8_e4m3fn)
        stored |= {f"{name}_scale": scale, name.removesuffix("weight") + "input_scale": torch.rand(1)}
    quantization = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
    _write(folder, config, stored, quantization)


def save_mxfp4(folder: Path, seed: int = 0, sizes: dict[str, Any] | None = None) -> None:
    """gpt_oss: experts as `*_blocks` [E, O, I / 32, 16] of uint8 and `*_scales` [E, O, I / 32] of uint8."""
    config, tensors = _random("gpt_oss", seed, sizes)
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name + "_blocks"], stored[name + "_scales"] = _to_mxfp4(tensor.transpose(1, 2))
        else:
            stored[name] = tensor
    untouched = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    _write(folder, config, stored, {"quant_method": "mxfp4", "modules_to_not_convert": untouched})


def save_compressed_tensors(
    folder: Path,
    family: str = "qwen3_moe",
    format: str = "pack-quantized",
    seed: int = 0,
    symmetric: bool = True,
    sizes: dict[str, Any] | None = None,
) -> None:
    """compressed-tensors: per-channel fp8 (`float-quantized`), per-channel int8 (`int-quantized`,
    `naive-quantized`), int4 in groups (`pack-quantized`), or fp4 (`nvfp4-pack-quantized`, `mxfp4-pack-quantized`)."""
    config, tensors = _random(family, seed, sizes)
    router = "block_sparse_moe.gate" if family == "mixtral" else "mlp.gate"
    ignore = ["lm_head", *(f"model.layers.{layer}.{router}" for layer in range(config.num_hidden_layers))]
    stored: Tensors = {}
    for name, tensor in tensors.items():
        if not _is_linear(name, tensor):
            stored[name] = tensor
        elif format == "pack-quantized":
            stored |= {f"{name}_{part}": value for part, value in _to_int4_groups(tensor, symmetric).items()}
        elif format == "nvfp4-pack-quantized":
            parts = _to_nvfp4(tensor)
            stored |= {f"{name}_{part}": value for part, value in parts.items()}
            stored[name.removesuffix("weight") + "input_global_scale"] = 100 * torch.rand(1)
        elif format == "mxfp4-pack-quantized":
            blocks, stored[f"{name}_scale"] = _to_mxfp4(tensor)
            stored[f"{name}_packed"] = blocks.flatten(1)
        else:
            stored[name], stored[name + "_scale"] = _to_channels(tensor, format)
    packed = format == "pack-quantized"
    weights: dict[str, Any] = {
        "num_bits": 4 if packed else 8,
        "type": "float" if format == "float-quantized" else "int",
        "strategy": "group" if packed else "channel",
        "group_size": GROUP if packed else None,
        "symmetric": symmetric,
        "dynamic": False,
    }
    activations: Any = None if packed else weights | {"strategy": "token", "dynamic": True}
    if format in FP4_SCHEMES:
        weights, activations = FP4_SCHEMES[format]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations, "output_activations": None}
    state = {"quantization_status": "compressed", "kv_cache_scheme": None, "global_compression_ratio": None}
    groups = {"config_groups": {"group_0": group}, "ignore": ignore}
    _write(folder, config, stored, {"quant_method": "compressed-tensors", "format": format, **groups, **state})


def save_modelopt(
    folder: Path,
    family: str = "qwen3_moe",
    algorithm: str = "NVFP4",
    declared: Sequence[str] = ("config.json", MODELOPT),
    sizes: dict[str, Any] | None = None,
) -> None:
    """NVIDIA's modelopt: NVFP4, FP8 with one scale a matrix, or with MIXED_PRECISION experts in the one, the rest in
    the other; `declared` in these files."""
    config, tensors = _random(family, 0, sizes)
    stored, layers = Tensors(), dict[str, dict[str, str]]()
    for name, tensor in tensors.items():
        if not _is_linear(name, tensor):
            stored[name] = tensor
            continue
        is_expert = ".experts." in name
        own = {"MIXED_PRECISION": "NVFP4" if is_expert else "FP8"}.get(algorithm, algorithm)
        layers[name.removesuffix(".weight")] = {"quant_algo": own}
        if own == "NVFP4":
            parts = _to_nvfp4(tensor)
            stored |= {name: parts["packed"], f"{name}_scale": parts["scale"]}
            stored[f"{name}_scale_2"] = 1 / parts["global_scale"].squeeze()
        else:
            scale = tensor.float().abs().max() / FP8_MAX
            stored |= {name: (tensor.float() / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
        stored[name.removesuffix("weight") + "input_scale"] = torch.rand(())
    excluded = ["lm_head", *(f"model.layers.{layer}.mlp.gate" for layer in range(config.num_hidden_layers))]
    said = {"quant_algo": algorithm, "kv_cache_quant_algo": None}
    if algorithm == "MIXED_PRECISION":
        said |= {"quantized_layers": layers}
    producer = {"name": "modelopt", "version": "0.33.0"}
    of_file = {"producer": producer, "quantization": said | {"exclude_modules": excluded}}
    of_config = said | {"ignore": excluded, "quant_method": "modelopt", "producer": producer}
    _write(folder, config, stored, of_config if "config.json" in declared else None)
    if MODELOPT in declared:
        (folder / MODELOPT).write_text(json.dumps(of_file))


def dequantized(folder: Path) -> Tensors:
    """The checkpoint's weights in float32 under the names they would have if it were not quantised."""
    stored = load_file(folder / "model.safetensors")
    quantization = json.loads((folder / "config.json").read_text()).get("quantization_config", {})
    companions = ("_scale_inv", "_scale", "_scale_2", "_packed", "_shape", "_zero_point", "_blocks", "_scales")
    format = quantization.get("format")
    plain = {name: tensor.float() for name, tensor in stored.items() if not name.endswith(companions)}
    for name, tensor in stored.items():
        base, _, part = name.rpartition("_")
        if part == "inv":
            base = name.removesuffix("_scale_inv")
            plain[base] = _from_fp8_blocks(stored[base], tensor, quantization["weight_block_size"])
        elif part == "blocks":
            plain[base] = _from_mxfp4(tensor, stored[base + "_scales"]).transpose(1, 2)
        elif part == "packed" and format == "nvfp4-pack-quantized":
            scale = stored[base + "_scale"].float() / stored[base + "_global_scale"]
            plain[base] = _from_nvfp4(tensor, scale).bfloat16()  # to which compressed-tensors rounds
        elif part == "packed" and format == "mxfp4-pack-quantized":
            plain[base] = _from_mxfp4(tensor.unflatten(1, (-1, MXFP4 // 2)), stored[base + "_scale"])
        elif part == "packed":
            zero_point = stored.get(base + "_zero_point")
            plain[base] = _from_int4_groups(tensor, stored[base + "_scale"], stored[base + "_shape"], zero_point)
        elif part == "scale" and f"{name}_2" in stored:
            plain[base] = _from_nvfp4(stored[base], tensor.float() * stored[f"{name}_2"])
        elif part == "scale" and base in stored:
            plain[base] = stored[base].float() * (tensor[:, None] if tensor.dim() == 1 else tensor).float()
    return plain


def _random(family: str, seed: int, sizes: dict[str, Any] | None = None) -> tuple[PreTrainedConfig, Tensors]:
    """A tiny random model: its config, and its bfloat16 weights under their names on disk."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **_SIZES | _FAMILIES[family] | (sizes or {}), tie_word_embeddings=False)
    config.dtype = torch.bfloat16
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            spread = torch.randn_like(tensor) * 0.2
            tensor.copy_(tensor + spread if "norm" in name else spread)
    tensors = revert_weight_conversion(model, model.state_dict())
    wide = "e_score_correction_bias"  # float32 in published checkpoints
    return config, {n: (t if n.endswith(wide) else t.bfloat16()).contiguous() for n, t in tensors.items()}


def _is_linear(name: str, tensor: torch.Tensor) -> bool:
    """Whether published checkpoints quantise it: every matrix but embeddings, head and router."""
    return tensor.ndim == 2 and not name.endswith(("embed_tokens.weight", "lm_head.weight", "gate.weight"))


def _write(folder: Path, config: PreTrainedConfig, stored: Tensors, quantization: dict[str, Any] | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    fields = config.to_dict() | ({"quantization_config": quantization} if quantization else {})
    fields["architectures"] = [type(AutoModelForCausalLM.from_config(config)).__name__]
    (folder / "config.json").write_text(json.dumps(fields, indent=2, default=str))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def _to_fp8_blocks(weight: torch.Tensor, scale_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """[O, I] -> FP8 [O, I] and scales [ceil(O / B), ceil(I / B)], one per block of B by B."""
    rows, columns = weight.shape
    grid = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK))
    quantized = torch.empty(rows, columns)
    for i in range(grid.shape[0]):
        for j in range(grid.shape[1]):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            grid[i, j] = (weight[block].float().abs().max() / FP8_MAX).to(scale_dtype)
            quantized[block] = (weight[block].float() / grid[i, j]).clamp(-FP8_MAX, FP8_MAX)
    return quantized.to(torch.float8_e4m3fn), grid.to(scale_dtype)


def _from_fp8_blocks(weight: torch.Tensor, scales: torch.Tensor, block: list[int]) -> torch.Tensor:
    """Element (o, i) times the scale of block (o // B, i // B)."""
    rows = torch.arange(weight.shape[0]) // block[0]
    columns = torch.arange(weight.shape[1]) // block[1]
    return weight.float() * scales.float()[rows[:, None], columns[None, :]]


def _to_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, O, I] -> bytes [E, O, I / 32, 16], the even column in the low half, and exponents plus 127."""
    groups = weight.float().unflatten(-1, (-1, MXFP4))  # [E, O, I / 32, 32]
    exponents = (groups.abs().amax(-1) / FP4_VALUES[7]).clamp(min=2.0**-60).log2().ceil()
    distances = (groups / exponents.exp2()[..., None])[..., None] - torch.tensor(FP4_VALUES)
    codes = distances.abs().argmin(-1).to(torch.uint8)
    return codes[..., 0::2] | codes[..., 1::2] << 4, (exponents + 127).to(torch.uint8)


def _from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Bytes [E, O, I / 32, 16] and exponents [E, O, I / 32] -> [E, O, I]."""
    table = torch.tensor(FP4_VALUES)
    halves = torch.stack([table[(blocks & 15).long()], table[(blocks >> 4).long()]], dim=-1)
    return (halves.flatten(-2) * 2.0 ** (scales.float() - 127)[..., None]).flatten(-2)


def _to_nvfp4(weight: torch.Tensor) -> Tensors:
    """[O, I] -> bytes [O, I / 2], the even column in the low half; scales [O, I / 16] in FP8; what divides them [1]."""
    groups = weight.float().unflatten(1, (-1, NVFP4))  # [O, I / 16, 16]
    largest = FP4_VALUES[7]
    divisor = FP8_MAX * largest / weight.float().abs().max()
    scale = (groups.abs().amax(2) / largest * divisor).to(torch.float8_e4m3fn)
    distances = (groups / (scale.float() / divisor)[..., None])[..., None] - torch.tensor(FP4_VALUES)
    codes = distances.abs().argmin(-1).to(torch.uint8).flatten(1)
    return {"packed": codes[:, 0::2] | codes[:, 1::2] << 4, "scale": scale, "global_scale": divisor.reshape(1)}


def _from_nvfp4(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Bytes [O, I / 2] and scales [O, I / 16] -> [O, I]."""
    table = torch.tensor(FP4_VALUES)
    values = torch.stack([table[(packed & 15).long()], table[(packed >> 4).long()]], dim=-1).flatten(1)
    return values * scale.repeat_interleave(NVFP4, dim=1)


def _to_channels(weight: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    """[O, I] -> FP8 or int8 [O, I] and scales [O, 1]."""
    largest = FP8_MAX if format == "float-quantized" else 127.0
    scale = (weight.float().abs().amax(1, keepdim=True) / largest).bfloat16()
    scaled = (weight.float() / scale.float()).clamp(-largest, largest)
    return (scaled.to(torch.float8_e4m3fn) if largest == FP8_MAX else scaled.round().to(torch.int8)), scale


def _to_int4_groups(weight: torch.Tensor, symmetric: bool) -> Tensors:
    """[O, I] -> int4 packed by 8 [O, I / 8], scales [O, I / G], zero points packed down [O / 8, I / G]."""
    groups = weight.float().unflatten(1, (-1, GROUP))  # [O, I / G, G]
    low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
    scale = (high - low) / 15 if not symmetric else groups.abs().amax(2) / 7.5
    scale = scale.bfloat16()
    zero = torch.zeros_like(low) if symmetric else (-8 - low / scale.float()).round().clamp(-8, 7)
    codes = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(-8, 7).flatten(1)
    parts = {"packed": _pack(codes), "scale": scale, "shape": torch.tensor(weight.shape)}
    return parts if symmetric else parts | {"zero_point": _pack(zero.t()).t().contiguous()}


def _pack(codes: torch.Tensor) -> torch.Tensor:
    """Values -8..7 [O, I] -> int32 [O, I / 8], the first column in the lowest four bits, each plus 8."""
    shifts = 4 * torch.arange(8)
    return ((codes.long() + 8).unflatten(1, (-1, 8)) << shifts).sum(-1).to(torch.int32)


def _unpack(packed: torch.Tensor, columns: int) -> torch.Tensor:
    """int32 [O, W] -> values [O, I] of as many bits as fit, one after the other, over the borders of words, too."""
    bits = 32 * packed.shape[1] // columns
    single = (packed.long()[..., None] >> torch.arange(32)) & 1
    each = single.flatten(1)[:, : bits * columns].unflatten(1, (columns, bits))
    return (each << torch.arange(bits)).sum(-1) - 2 ** (bits - 1)


def _from_int4_groups(
    packed: torch.Tensor, scale: torch.Tensor, shape: torch.Tensor, zero_point: torch.Tensor | None
) -> torch.Tensor:
    """(code - zero point) * scale, each column with those of its group."""
    rows, columns = shape.tolist()
    group = torch.arange(columns) // (columns // scale.shape[1])
    codes = _unpack(packed, columns).float()
    if zero_point is not None:
        codes = codes - _unpack(zero_point.t(), rows).t().float()[:, group]
    return codes * scale.float()[:, group]
