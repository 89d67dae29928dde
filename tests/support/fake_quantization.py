"""What a stock model's weights are once quantised, by compressed-tensors' formulas alone; test support."""

import re
from collections.abc import Iterable
from typing import Any

import torch
from compressed_tensors.compressors import decompress_module
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from torch import Tensor, nn

from tests.support import zoo

PRESETS = {"fp8": "FP8_DYNAMIC", "mxfp4": "MXFP4A16", "nvfp4": "NVFP4A16"}
FUSED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}, {"w1", "w3"})  # by servers
ROUTERS = re.compile(r"\.(gate|router)(\.|$)")


def args_of(scheme: str, group: int) -> QuantizationArgs:
    if scheme in PRESETS:
        return preset_name_to_scheme(PRESETS[scheme], ["Linear"]).weights
    sizes = {"strategy": "channel"} if group == -1 else {"strategy": "group", "group_size": group}
    return QuantizationArgs(num_bits=int(scheme[3:]), type="int", symmetric=True, dynamic=False, **sizes)


def fake(together: list[Tensor], scheme: str, group: int) -> list[Tensor]:
    """Matrices [O, I] that share NVFP4's global scale, rounded to nearest and in their own dtype again."""
    args, dtype = args_of(scheme, group), together[0].dtype
    floats = [matrix.float() for matrix in together]
    overall = None
    if scheme == "nvfp4":
        overall = generate_gparam(min(x.min() for x in floats), max(x.max() for x in floats))
    rounded = []
    for matrix in floats:
        size = args.group_size or 0
        grouped = matrix.unflatten(1, (-1, size if size > 0 else matrix.shape[1]))
        scale = calculate_qparams(grouped.amin(2), grouped.amax(2), args, overall)[0]
        if scheme not in ("mxfp4", "nvfp4"):
            scale = scale.to(dtype).float()
        value = fake_quantize(matrix, scale, None, args, overall)
        rounded.append((value.bfloat16() if scheme in ("mxfp4", "nvfp4") else value).to(dtype))
    return rounded


def expert_matrices(experts: Any, expert: int) -> list[list[Tensor]]:
    """Views [out, in] of one expert's projections, those that servers fuse together."""
    inner, down = (
        (experts.gate_up_proj if experts.has_gate else experts.up_proj).data[expert],
        experts.down_proj.data[expert],
    )
    if experts.is_transposed:
        inner, down = inner.T, down.T
    if not experts.has_gate:
        return [[inner], [down]]
    return [[*inner.chunk(2)] if experts.is_concatenated else [inner[0::2], inner[1::2]], [down]]


STORED_OTHERWISE = {  # than as one tensor called weight, by the config's model type
    "lara_mini": r"linear_attn\.in_proj_",
    "inkling2_loop_text": "_message_gate",
}


def dense(model: Any) -> dict[str, nn.Linear]:
    """Linear layers of attention and MLP in decoder layers, by name: no router, no gate of one output, no head."""
    otherwise = STORED_OTHERWISE.get(model.config.model_type, "vision")
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and ".layers." in name
        and not ROUTERS.search(name)
        and module.out_features > 1
        and "weight" not in name
        and not re.search(f"vision|visual|audio|{otherwise}", name)
    }


@torch.no_grad()
def quantize(model: Any, scheme: str, group: int, targets: str = "experts") -> None:
    """Round a stock model's weights in place."""
    tied = model.all_tied_weights_keys or {}
    for name, experts in zoo.experts(model).items():
        if f"{name}.down_proj" in tied:
            continue
        for expert in range(len(experts.down_proj)):
            for together in expert_matrices(experts, expert):
                for view, value in zip(together, fake(together, scheme, group), strict=True):
                    view.copy_(value)
    linear = dense(model) if targets == "all" else {}
    linear = {name: module for name, module in linear.items() if f"{name}.weight" not in tied}
    while linear:
        name, module = linear.popitem()
        parent, _, leaf = name.rpartition(".")
        others = next((names for names in FUSED if leaf in names), set()) - {leaf}
        beside = [linear.pop(f"{parent}.{other}") for other in sorted(others) if f"{parent}.{other}" in linear]
        modules = [module, *beside]
        for each, value in zip(modules, fake([m.weight.data for m in modules], scheme, group), strict=True):
            each.weight.data.copy_(value)


def decompressed(model: nn.Module) -> nn.Module:
    """A stock model of packed linear layers, with their weights unpacked in place."""
    for module in model.modules():
        if hasattr(module, "quantization_scheme"):
            decompress_module(module, leave_decompressed=False)
    return model


def packed_modules(names: Iterable[str]) -> set[str]:
    """Modules of whose stored tensors one is a scale."""
    return {name.removesuffix(".weight_scale") for name in names if name.endswith(".weight_scale")}
