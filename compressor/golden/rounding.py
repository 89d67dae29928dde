"""What number formats round: weights, and where servers do so what weights are multiplied by.

Only 8-bit and 4-bit weights in blocks, as llama.cpp has them, and fp8 are measured. Of a quantised
model whose own format rounds activations, `fp8` is that alone: its weights are what they are."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compressor.checkpoint.quantized import scheme_of
from compressor.model.constant_experts import Substitutes, substitute, substituted_forward
from compressor.model.experts import Change
from compressor.model.opened import OpenModel
from compressor.model.streaming import TINY
from compressor.model.substitution import Substitution

BLOCK = 32  # weights that share a scale in llama.cpp's Q8_0 and Q4_0
FP8 = "fp8"


def rounded(
    value: Tensor, largest: float, nearest: Change = torch.round, block: int = BLOCK
) -> Tensor:
    """Round [..., I] to numbers up to `largest` times a scale for each block of a row, or for rows
    of another width."""
    columns = value.shape[-1]
    blocks = value.float().unflatten(-1, (-1, columns if columns % block else block))
    scales = blocks.abs().amax(-1, keepdim=True).clamp(min=TINY * largest) / largest
    result: Tensor = (nearest(blocks / scales) * scales).flatten(-2).to(value.dtype)
    return result


def to_fp8(value: Tensor) -> Tensor:
    """Round [..., I] to e4m3 with one scale for each row: an output of weights, or a token."""
    return rounded(value, 448.0, lambda part: part.to(torch.float8_e4m3fn).float(), sys.maxsize)


WEIGHTS: Mapping[str, Change] = {  # by kind of rounding
    "8-bit": partial(rounded, largest=127),
    FP8: to_fp8,
    "4-bit": partial(rounded, largest=7),
}


def _by_scheme(args: Any, value: Tensor) -> Tensor:
    """Round [..., I] by compressed-tensors' arguments of activations; static ones as if they were
    dynamic."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam

    rows = value.float().flatten(0, -2)[None]  # which takes the first two dimensions for tokens
    overall = generate_gparam(rows.amin(), rows.amax()) if args.strategy == "tensor_group" else None
    scale, zero_point = compute_dynamic_scales_and_zp(rows, args, nn.Identity(), overall)
    nearest: Tensor = fake_quantize(rows, scale, zero_point, args, overall)
    return nearest.view_as(value).to(value.dtype)


def own_rounding(model: OpenModel) -> dict[str, Change]:
    """Return how a quantised model's format rounds the inputs of modules, by name; empty if it does
    not.

    Blocks of fp8, and modelopt's formats, count as fp8 with one scale a token, whose errors are
    about as large."""
    changes = dict[str, Change | None]()
    quantizer: Any = model.partial.quantizer
    for name, key in model.partial.keys.targets.items():
        if name.endswith(("_scale", "_scale_inv")):
            change: Change | None = to_fp8
            if hasattr(quantizer, "compressor"):
                config = quantizer.compressor.quantization_config
                args = scheme_of(config, name.rpartition(".")[0]).input_activations
                change = args and partial(_by_scheme, args)
            changes[key.rpartition(".")[0]] = change
    return {module: change for module, change in changes.items() if change}


def roundings(model: OpenModel, constants: Mapping[str, Substitutes]) -> dict[str, Substitution]:
    """Return the variant of a model for each kind of rounding, each upon the finer ones before it.

    They follow the model itself in a pass, for a loaded layer is rounded in place if it can be
    written to. Routers stay, as quantisers leave them. With fp8 what modules multiply by matrices
    is rounded, too."""
    own = own_rounding(model)
    kinds = (FP8, "8-bit", "4-bit") if own else ("8-bit", FP8, "4-bit")  # the finest first
    experts = {layer.name for layer in model.architecture.layers}
    routers = tuple(f"{layer.router}." for layer in model.architecture.layers)
    matrices = [
        key
        for key, value in model.partial.empty.items()
        if value.dim() > 1 and value.is_floating_point() and not key.startswith(routers)
    ]
    modules = {key.rpartition(".")[0] for key in matrices}
    rounding = own or dict.fromkeys(modules, to_fp8)
    values = dict[str, Tensor]()  # of a layer, as rounded last

    def tensors(kind: str, decoder_layer: str) -> Mapping[str, Tensor] | None:
        if kind == FP8 and own:
            return None
        for key in matrices:
            if key.startswith(f"{decoder_layer}."):
                source = values.get(key, model.partial.model.get_parameter_or_buffer(key))
                is_mapped = model.partial.is_mapped(source)
                target = torch.empty_like(source) if is_mapped else source
                parts = (source, target) if source.dim() > 2 else (source[None], target[None])
                for matrix, rounded_matrix in zip(*parts, strict=True):
                    rounded_matrix.copy_(WEIGHTS[kind](matrix))
                values[key] = target
        last = dict(values)
        if kind == kinds[-1]:
            values.clear()
        return last

    @contextmanager
    def around(live: Any, decoder_layer: str) -> Iterator[None]:
        """Round what the linear modules and experts of a layer are given."""
        with ExitStack() as undo:
            for name in sorted(modules & rounding.keys()):
                if not name.startswith(f"{decoder_layer}."):
                    continue
                change = rounding[name]
                module = live.get_submodule(name)
                if name in experts:
                    substitutes = constants.get(name)
                    module.forward = partial(
                        substituted_forward, module, substitutes, change=change
                    )
                    undo.callback(substitute, module, substitutes)
                elif isinstance(module, nn.Linear):
                    hook = module.register_forward_pre_hook(
                        lambda _, args, change=change: (change(args[0]), *args[1:])
                    )
                    undo.enter_context(hook)
            yield

    variants = dict[str, Substitution]()
    for kind in kinds:
        inputs = around if kind == FP8 else None
        variants[kind] = Substitution(partial(tensors, kind), constants=constants, around=inputs)
    return variants
