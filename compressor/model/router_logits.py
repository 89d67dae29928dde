"""A router's logits at their origin, the product of its input and weight, and the expert weights
made of them.

T tokens, E experts (and any rows beyond them), H width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus
from torch.overrides import TorchFunctionMode

from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.model.moe_layer import MoeLayer

PRODUCTS = {"linear", "matmul", "mm", "__matmul__", "__rmatmul__"}
Score = Literal["softmax", "sigmoid", "sqrt-softplus"]
SCORES: tuple[Score, ...] = get_args(Score)
# largest error of a logarithm: two chosen experts' weights and their scores differ by less in
# bfloat16
EXACT = 0.05
LEAST = 1e-30  # weight in place of 0, so that its logarithm is finite


@frozen
class Product:
    """One call of a router: the inputs [T, H] and logits [T, E] of its product."""

    inputs: Tensor
    logits: Tensor
    weight: Tensor
    bias: Tensor | None = None  # [E], if the product adds one


class _Watch(TorchFunctionMode):
    """Shows the first matrix product with a column for every expert."""

    def __init__(self, widths: set[int], show: Callable[[Product], Tensor | None]) -> None:
        super().__init__()
        self.widths = widths
        self.show = show
        self.seen = False

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.seen or getattr(func, "__name__", "") not in PRODUCTS or len(args) < 2:
            return result
        if not isinstance(result, Tensor) or result.shape[-1] not in self.widths:
            return result
        self.seen = True
        inputs = args[0]
        weight = args[1]
        bias = None
        if func.__name__ == "linear":
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
        changed = self.show(Product(inputs.reshape(-1, inputs.shape[-1]), result, weight, bias))
        return result if changed is None else changed


def router_weight(layer: MoeLayer) -> str:
    """Return the state-dict key of the matrix [E, H] whose product with a token gives the layer's
    logits.

    Raises `CompressionError` for a router that has none, or several.
    """
    matrices = []
    for tensor in layer.tensors:
        inside = tensor.key.startswith(f"{layer.router}.")
        if inside and tensor.dim == 0 and tensor.key.endswith("weight"):
            matrices.append(tensor.key)
    if len(matrices) != 1:
        raise CompressionError(
            f"{layer.router} has {len(matrices)} matrices with a row for each expert where one is "
            "needed, so its logits cannot be moved; leave out what moves them"
        )
    return matrices[0]


@contextmanager
def watched(
    model: nn.Module, layer: MoeLayer, show: Callable[[Product], Tensor | None]
) -> Iterator[None]:
    """Show the product of each call of the layer's router while the block runs; `show` may return
    other logits."""
    router = model.get_submodule(layer.router)
    weight = router_weight(layer)
    widths = {layer.experts + tensor.extra for tensor in layer.tensors if tensor.key == weight}
    stock_forward = router.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        watch = _Watch(widths, show)
        with watch:
            output = stock_forward(*args, **kwargs)
        if not watch.seen:
            raise CompressionError(
                f"{layer.router} computes its logits by no matrix product, so they cannot be "
                "moved; leave out what moves them"
            )
        return output

    router.forward = forward
    try:
        yield
    finally:
        router.__dict__.pop("forward", None)


def log_weights(logits: Tensor, score: Score) -> Tensor:
    """Return the logarithms of the weights over all experts, in float32: [..., E] -> [..., E]."""
    logits = logits.float()
    if score == "softmax":
        return logits.log_softmax(-1)
    return logsigmoid(logits) if score == "sigmoid" else softplus(logits).clamp_min(LEAST).log() / 2


def weights_of(logits: Tensor, score: Score) -> Tensor:
    """Return the weights over all experts as the router scores them, in float32: [..., E] -> [...,
    E]."""
    return log_weights(logits, score).exp()


def logits_of(weights: Tensor, score: Score) -> Tensor:
    """Return logits with these weights: [..., E] -> [..., E]; for softmax, their logarithms."""
    weights = weights.float().clamp_min(LEAST)
    if score == "softmax":
        return weights.log()
    if score == "sigmoid":
        return torch.logit(weights.clamp_max(1 - torch.finfo(torch.float32).eps))
    squared = weights.square().clamp_min(LEAST)
    return squared + (-torch.expm1(-squared)).log()  # the inverse of softplus without overflow


def find_score(logits: Tensor, chosen: Tensor, given: Tensor) -> Score:
    """Return the score by which a router with logits [T, E] gives the experts `chosen` [T, k] the
    weights `given`.

    A common factor of a token's experts is ignored, or of all tokens if each has one expert. If no
    score fits, softmax is returned, which has a logit for every weight."""
    logits, chosen, given = (value.detach().flatten(0, -2) for value in (logits, chosen, given))
    known = given.float().clamp_min(LEAST).log()
    among = 1 if chosen.shape[1] > 1 else 0
    misfits = {}
    for score in SCORES:
        ratio = known - log_weights(logits, score).gather(1, chosen.long())
        misfits[score] = float((ratio - ratio.mean(among, keepdim=True)).abs().median())
    best = min(misfits, key=misfits.__getitem__)
    return best if misfits[best] <= EXACT else "softmax"
