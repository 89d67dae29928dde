"""What number formats round: weights, and where servers do so what weights are multiplied by.

Only 8-bit and 4-bit weights in blocks, as llama.cpp has them, and fp8 are measured. Of a quantised
model whose own format rounds activations, `fp8` is that alone: its weights are what they are."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compressor.checkpoint.quantized import scheme_of
from compressor.model.constant_experts import (
    SubstitutedCheckpoint,
    Substitutes,
    substitute,
    substituted_forward,
)
from compressor.model.experts import Change
from compressor.model.loading import set_tensor
from compressor.model.opened import OpenModel
from compressor.model.streaming import TINY, PassPosition

BLOCK = 32  # weights that share a scale in llama.cpp's Q8_0 and Q4_0
FP8 = "fp8"


def constants_of(model: OpenModel) -> Mapping[str, Substitutes]:
    """Return the constants of an opened model, by experts module."""
    if not isinstance(model.checkpoint, SubstitutedCheckpoint):
        return {}
    return model.checkpoint.substitutes(
        model.architecture.layers, model.partial.dtype, model.partial.device
    )


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


def _to_e4m3(value: Tensor) -> Tensor:
    return value.to(torch.float8_e4m3fn).float()


# one scale a row: an output of weights, or a token
to_fp8: Change = partial(rounded, largest=448.0, nearest=_to_e4m3, block=sys.maxsize)
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


class Rounding:
    """Rounds a loaded layer's matrices before batches pass it, upon the kinds of rounding before,
    and fp8's inputs.

    Routers stay, as quantisers leave them. A layer that is loaded again is as it was.
    """

    def __init__(self, model: OpenModel) -> None:
        self.partial = model.partial
        self.routers = tuple(f"{layer.router}." for layer in model.architecture.layers)
        self.constants = constants_of(model)
        self.own = own_rounding(model)
        # each is finer than what follows
        self.kinds = (FP8, "8-bit", "4-bit") if self.own else ("8-bit", FP8, "4-bit")
        self._done = ("", "")

    def __call__(self, kind: str, position: PassPosition) -> AbstractContextManager[Any]:
        matrices = {}
        for key in self.partial.keys_under(position.layer):
            value = position.model.get_parameter_or_buffer(key)
            if value.dim() > 1 and value.is_floating_point() and not key.startswith(self.routers):
                matrices[key] = value
        if self._done != (position.layer, kind) and not (kind == FP8 and self.own):
            for key, value in matrices.items():
                set_tensor(position.model, key, self._rounded(value, kind))
        self._done = (position.layer, kind)
        if kind != FP8:
            return nullcontext()
        modules = {key.rpartition(".")[0] for key in matrices}
        changes = self.own or dict.fromkeys(modules, to_fp8)
        return self._inputs({name: changes[name] for name in modules & changes.keys()}, position)

    @contextmanager
    def _inputs(self, changes: Mapping[str, Change], position: PassPosition) -> Iterator[None]:
        """Change what the matrices of a layer's linear modules and experts are multiplied by."""
        experts = {layer.name for layer in position.moe_layers}
        with ExitStack() as undo:
            for name, change in changes.items():
                module: Any = position.model.get_submodule(name)
                if name in experts:
                    constants = self.constants.get(name)
                    module.forward = partial(substituted_forward, module, constants, change=change)
                    undo.callback(substitute, module, constants)
                elif isinstance(module, nn.Linear):
                    hook = module.register_forward_pre_hook(
                        lambda _, args, change=change: (change(args[0]), *args[1:])
                    )
                    undo.enter_context(hook)
            yield

    def _rounded(self, value: Tensor, kind: str) -> Tensor:
        """Round the matrices of [..., O, I] one by one in float32, in place if the tensor can be
        written to."""
        matrices = value if value.dim() > 2 else value[None]
        targets = torch.empty_like(matrices) if self.partial.is_mapped(value) else matrices
        for matrix, target in zip(matrices, targets, strict=True):
            target.copy_(WEIGHTS[kind](matrix))
        return targets.view_as(value)
