"""Weights that are not in memory while a graph is traced: their shapes stand for them, and turning is noted.

The optimiser after the trace turns weights over (a linear layer's W to its transpose) and does nothing else to large
ones. It looks at the values of small tensors alone, and those are read before the trace.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from compressor.errors import CompressionError
from compressor.model.architecture import experts_modules
from compressor.model.experts import parameter_names
from compressor.model.loading import PartialModel, set_tensor
from exporters.onnx_experts import WeightFormat

SMALL = 8192  # elements; larger constants the optimiser only turns over, smaller ones it computes with


@dataclass(frozen=True, slots=True)
class Recipe:
    """How an initialiser is made of a tensor of the traced model: its name, and the order of its axes if changed."""

    source: str
    order: tuple[int, ...] | None = None

    def made_of(self, value: Tensor) -> Tensor:
        """The initialiser's values, contiguous."""
        return (value if self.order is None else value.permute(self.order)).contiguous()


class Absent(np.ndarray):
    """What the optimiser sees of a weight that is not there: its shape. It can be turned over and nothing else."""

    recipe: Recipe | None = None  # None too for what was made of it in another way

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], dtype: Any) -> "Absent":
        """The stand-in of a tensor; takes no memory."""
        found = np.broadcast_to(np.zeros((), dtype), shape).view(cls)
        found.recipe = Recipe(name)
        return found

    def transpose(self, *axes: Any) -> "Absent":
        """With its axes in another order, which is noted."""
        order = axes[0] if len(axes) == 1 and not isinstance(axes[0], int) else axes
        order = tuple(order) if order else tuple(reversed(range(self.ndim)))
        found: Absent = super().transpose(order)
        if self.recipe is not None:
            before = self.recipe.order or tuple(range(self.ndim))
            found.recipe = Recipe(self.recipe.source, tuple(before[axis] for axis in order))
        return found

    def view(self, *kind: Any, **more: Any) -> Any:
        """Itself where its own dtype is asked for."""
        return self if not more and kind == (self.dtype,) else super().view(*kind, **more)

    def tobytes(self, order: Any = "C") -> bytes:
        """A name for its bytes: equal tensors are found by them, and an absent one equals only itself."""
        return repr(self.recipe).encode()

    def __array_ufunc__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("this weight is not in memory")

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if function is np.transpose:
            return self.transpose(*(tuple(value) for value in (*args[1:], *kwargs.values()) if value is not None))
        raise TypeError("this weight is not in memory")


@contextmanager
def standing_in() -> Iterator[None]:
    """Let the exporter's tensors of absent weights show their shapes instead of failing for their values."""
    from torch.onnx._internal.exporter import _core

    stock = _core.TorchTensor

    class Standing(stock):  # type: ignore[misc, valid-type]
        def numpy(self) -> Any:
            if not isinstance(self.raw, FakeTensor):
                return super().numpy()
            return Absent.of(self.source, tuple(self.raw.shape), self.dtype.numpy())

        def tobytes(self) -> bytes:
            found: bytes = self.numpy().tobytes() if isinstance(self.raw, FakeTensor) else super().tobytes()
            return found

        def __init__(self, tensor: Tensor, name: str | None = None) -> None:
            super().__init__(tensor, name)
            self.source = name or ""

    _core.TorchTensor = Standing  # type: ignore[misc]
    try:
        yield
    finally:
        _core.TorchTensor = stock  # type: ignore[misc]


def recipe_of(value: Any) -> Recipe | None:
    """How an initialiser of the finished graph is made; None for one whose values are there."""
    raw = getattr(value.const_value, "raw", None)
    if isinstance(raw, FakeTensor):
        return Recipe(value.const_value.source)
    if not isinstance(raw, Absent):
        return None
    if raw.recipe is None:
        raise CompressionError(
            f"the graph's tensor {value.name!r} was made of weights in an unknown way; please report this model"
        )
    return raw.recipe


def traced_model(partial: PartialModel, weights: WeightFormat) -> tuple[Any, FakeTensorMode]:
    """The stock model of an empty `partial` to be traced, with the mode of its absent weights.

    Small tensors are read. Both weights of experts are there or neither, rounded if `weights` are. Tied ones stay tied.
    """
    absent = {key for key, value in partial.empty.items() if value.numel() > SMALL}
    pairs = {name: [f"{name}.{key}" for key in parameter_names(module)[:2]] for name, module in _experts(partial)}
    for pair in pairs.values():
        absent |= set(pair) if absent & set(pair) else set()
    absent |= {key for key in partial.empty if partial.tied.get(key, key) in absent}
    partial.load(key for key in partial.empty if key not in absent)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    standing: dict[str, nn.Parameter] = {}
    for key in sorted(absent):
        source, value = partial.tied.get(key, key), partial.empty[key]
        if source not in standing:
            with mode:
                standing[source] = nn.Parameter(torch.empty_like(value, device="cpu"), requires_grad=False)
        set_tensor(partial.model, key, standing[source])
    for name, module in _experts(partial):
        rounding = weights.outlined if absent & set(pairs[name]) else weights.rounded
        if rounding is not None:
            rounding(module)
    return partial.model, mode


def _experts(partial: PartialModel) -> list[tuple[str, Any]]:
    return list(experts_modules(partial.model))
