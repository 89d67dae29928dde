"""A router's logits where they arise: the matrix product of what the router is given and its weight.

T tokens, E experts (and any rows beyond them), H width.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer

PRODUCTS = {"linear", "matmul", "mm", "__matmul__", "__rmatmul__"}


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
        bias = (*args[2:3], (kwargs or {}).get("bias"))[0] if func.__name__ == "linear" else None
        changed = self.show(Product(inputs.reshape(-1, inputs.shape[-1]), result, weight, bias))
        return result if changed is None else changed


def router_weight(layer: MoeLayer) -> str:
    """The state-dict key of the matrix [E, H] whose product with a token gives the layer's logits.

    Raises `CompressionError` for a router that has none, or several.
    """
    own = [
        tensor.key
        for tensor in layer.tensors
        if tensor.key.startswith(f"{layer.router}.") and tensor.dim == 0 and tensor.key.endswith("weight")
    ]
    if len(own) != 1:
        raise CompressionError(
            f"{layer.router} has {len(own)} matrices with a row for each expert where one is needed, so its logits "
            "cannot be moved; leave out what moves them"
        )
    return own[0]


@contextmanager
def watched(model: nn.Module, layer: MoeLayer, show: Callable[[Product], Tensor | None]) -> Iterator[None]:
    """While the block runs, `show` gets the product of each call of the layer's router, and may return other logits."""
    router = model.get_submodule(layer.router)
    widths = {layer.experts + tensor.extra for tensor in layer.tensors if tensor.key == router_weight(layer)}
    own = router.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        watch = _Watch(widths, show)
        with watch:
            output = own(*args, **kwargs)
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
