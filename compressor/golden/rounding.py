"""What number formats round: weights, and where servers do so what weights are multiplied by.

Only 8-bit and 4-bit weights in blocks, as llama.cpp has them, and fp8 are measured. Of a quantised model whose own
format rounds activations, `fp8` is that alone: its weights are what they are.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from compressor.checkpoint.quantized import scheme_of
from compressor.model.constant_experts import SubstitutedCheckpoint, Substitutes, substitute, substituted_forward
from compressor.model.experts import Change
from compressor.model.loading import set_tensor
from compressor.model.opened import OpenModel
from compressor.model.streaming import TINY, PassPosition

BLOCK = 32  # weights that share a scale in llama.cpp's Q8_0 and Q4_0
LARGEST = {"8-bit": 127, "4-bit": 7}  # whole number by kind of rounding
FP8 = "fp8"
FP8_MAX = 448.0


def constants_of(model: OpenModel) -> Mapping[str, Substitutes]:
    """Return the constants of an opened model, by experts module."""
    if not isinstance(model.checkpoint, SubstitutedCheckpoint):
        return {}
    return model.checkpoint.substitutes(model.architecture.layers, model.partial.dtype, model.partial.device)


def to_fp8(value: Tensor) -> Tensor:
    """Round [..., I] to e4m3 with one scale a row, as servers do with weights and with each token's activations."""
    scale = value.float().abs().amax(-1, keepdim=True).clamp(min=TINY * FP8_MAX) / FP8_MAX
    codes = (value.float() / scale).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(value.dtype)


def _by_scheme(args: Any, value: Tensor) -> Tensor:
    """Round [..., I] by compressed-tensors' arguments of activations; static ones as if they were dynamic."""
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam

    rows = value.float().flatten(0, -2)[None]  # which takes the first two dimensions for tokens
    overall = generate_gparam(rows.amin(), rows.amax()) if args.strategy == "tensor_group" else None
    scale, zero_point = compute_dynamic_scales_and_zp(rows, args, nn.Identity(), overall)
    rounded: Tensor = fake_quantize(rows, scale, zero_point, args, overall)
    return rounded.view_as(value).to(value.dtype)


def own_rounding(model: OpenModel) -> dict[str, Change]:
    """Return how a quantised model's format rounds the inputs of modules, by name; empty if it does not."""
    changes = dict[str, Change]()
    quantizer: Any = model.partial.quantizer
    quantization = model.checkpoint.quantization
    is_fp8 = "fp8" in f"{quantization.get('quant_method')} {quantization.get('quant_algo')}".lower()
    for name, key in model.partial.keys.targets.items():
        module, _, part = name.rpartition(".")
        if not part.endswith(("_scale", "_scale_inv")):
            continue
        change: Change | None = to_fp8 if is_fp8 else None
        if hasattr(quantizer, "compressor"):
            args = scheme_of(quantizer.compressor.quantization_config, module).input_activations
            change = args and partial(_by_scheme, args)
        if change is not None:
            changes[key.rpartition(".")[0]] = change
    return changes


class Rounding:
    """Rounds a loaded layer's matrices before batches pass it, upon the kinds of rounding before, and fp8's inputs.

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
                    hook = module.register_forward_pre_hook(lambda _, args, change=change: (change(args[0]), *args[1:]))
                    undo.enter_context(hook)
            yield

    def _rounded(self, value: Tensor, kind: str) -> Tensor:
        """Round the matrices of [..., O, I] one by one in float32, in place if the tensor can be written to."""
        matrices = value if value.dim() > 2 else value[None]
        targets = torch.empty_like(matrices) if self.partial.is_mapped(value) else matrices
        for matrix, target in zip(matrices, targets, strict=True):
            target.copy_(to_fp8(matrix) if kind == FP8 else round_blocks(matrix.float(), LARGEST[kind]))
        return targets.view_as(value)


def round_blocks(weight: Tensor, largest: int) -> Tensor:
    """Return [O, I] rounded to whole numbers up to `largest` times a scale for each block of a row."""
    columns = weight.shape[-1]
    blocks = weight.unflatten(-1, (-1, columns if columns % BLOCK else BLOCK))
    most = torch.maximum(blocks.amax(-1, keepdim=True), -blocks.amin(-1, keepdim=True))
    scales = most.clamp(min=TINY * largest) / largest
    rounded: Tensor = (blocks / scales).round_().mul_(scales)
    return rounded.view_as(weight)
