"""A router's logits where they arise, in the product of its input and weight, and the expert weights made of them.

T tokens, E experts (and any rows beyond them), H width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, softplus
from torch.overrides import TorchFunctionMode

from compressor.errors import CompressionError
from compressor.model.moe_layer import MoeLayer

PRODUCTS = {"linear", "matmul", "mm", "__matmul__", "__rmatmul__"}
Score = Literal["softmax", "sigmoid", "sqrt-softplus"]
SCORES: tuple[Score, ...] = get_args(Score)
EXACT = 0.05  # of a logarithm: what bfloat16 leaves between two chosen experts' weights and their scores
LEAST = 1e-30  # weight of an expert that counts for nothing, whose logarithm must stay a number


@dataclass(frozen=True, slots=True)
class Product:
    """One call of a router: what enters the product [T, H], and the logits [T, E] that come out of it."""

    inputs: Tensor
    logits: Tensor
    weight: Tensor
    bias: Tensor | None = None  # [E], where the product adds one


class _Watch(TorchFunctionMode):
    """Shows the first matrix product that has a column for every expert."""

    def __init__(self, widths: set[int], show: Callable[[Product], Tensor | None]) -> None:
        super().__init__()
        self.widths, self.show, self.seen = widths, show, False

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.seen or getattr(func, "__name__", "") not in PRODUCTS or len(args) < 2:
            return result
        if not isinstance(result, Tensor) or result.shape[-1] not in self.widths:
            return result
        self.seen = True
        inputs, weight = args[0], args[1]
        bias = None
        if func.__name__ == "linear":
            bias = args[2] if len(args) > 2 else (kwargs or {}).get("bias")
        changed = self.show(Product(inputs.reshape(-1, inputs.shape[-1]), result, weight, bias))
        return result if changed is None else changed


def router_weight(layer: MoeLayer) -> str:
    """Return the state-dict key of the matrix [E, H] whose product with a token gives the layer's logits.

    Raises `CompressionError` for a router that has none, or several.
    """
    inside = [tensor for tensor in layer.tensors if tensor.key.startswith(f"{layer.router}.")]
    matrices = [tensor.key for tensor in inside if tensor.dim == 0 and tensor.key.endswith("weight")]
    if len(matrices) != 1:
        raise CompressionError(
            f"{layer.router} has {len(matrices)} matrices with a row for each expert where one is needed, so its "
            "logits cannot be moved; leave out what moves them"
        )
    return matrices[0]


@contextmanager
def watched(model: nn.Module, layer: MoeLayer, show: Callable[[Product], Tensor | None]) -> Iterator[None]:
    """While the block runs, `show` gets the product of each call of the layer's router, and may return other logits."""
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
                f"{layer.router} computes its logits by no matrix product, so they cannot be moved; leave out what "
                "moves them"
            )
        return output

    router.forward = forward
    try:
        yield
    finally:
        router.__dict__.pop("forward", None)


def log_weights(logits: Tensor, score: Score) -> Tensor:
    """[..., E] -> logarithms of the weights over all experts, in float32."""
    logits = logits.float()
    if score == "softmax":
        return logits.log_softmax(-1)
    return logsigmoid(logits) if score == "sigmoid" else softplus(logits).clamp_min(LEAST).log() / 2


def weights_of(logits: Tensor, score: Score) -> Tensor:
    """[..., E] -> the weights over all experts, as the router scores them, in float32."""
    return log_weights(logits, score).exp()


def logits_of(weights: Tensor, score: Score) -> Tensor:
    """[..., E] -> logits that have these weights; of softmax those whose exponentials are the weights themselves."""
    weights = weights.float().clamp_min(LEAST)
    if score == "softmax":
        return weights.log()
    if score == "sigmoid":
        return torch.logit(weights.clamp_max(1 - torch.finfo(torch.float32).eps))
    squared = weights.square().clamp_min(LEAST)
    return squared + (-torch.expm1(-squared)).log()  # the inverse of softplus, without an overflow


def find_score(logits: Tensor, chosen: Tensor, given: Tensor) -> Score:
    """The score by which a router with logits [T, E] gives its `chosen` experts [T, k] the weights `given` [T, k].

    A factor that all of a token's experts share does not count, nor does one of all tokens if each has one expert.
    Softmax, where no score fits: it takes every logit and gives it back.
    """
    logits, chosen, given = (value.reshape(-1, value.shape[-1]).detach() for value in (logits, chosen, given))
    known = given.float().clamp_min(LEAST).log()
    among = 1 if chosen.shape[1] > 1 else 0

    def misfit(score: Score) -> float:
        ratio = known - log_weights(logits, score).gather(1, chosen.long())
        return float((ratio - ratio.mean(among, keepdim=True)).abs().median())

    best = min(SCORES, key=misfit)
    return best if misfit(best) <= EXACT else "softmax"
