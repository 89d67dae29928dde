"""Tensors that may lie on disk, and the arguments of a router: listed, and which dimension of one counts tokens."""

import tempfile
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import torch

BUDGET = 4 * 2**30  # bytes of one recorded tensor that are held in memory


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, budget: int = BUDGET) -> torch.Tensor:
    """An uninitialised tensor, in memory or, on the CPU past the budget, in a mapped file without a name."""
    count = torch.Size(shape).numel()
    if device.type != "cpu" or count * dtype.itemsize <= budget:
        return torch.empty(shape, dtype=dtype, device=device)
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(count * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype).view(shape)


class Spill:
    """Moves hidden states that wait between layers into unlinked mapped files once they pass a budget of bytes."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.held: dict[Hashable, int] = {}  # bytes in memory, by what waits: a batch, or a batch's call of a layer
        self.total = 0

    def keep(self, place: Hashable, value: Any) -> None:
        """Count what waits at a place, if it is a floating-point tensor, and move what is too much, in place."""
        if isinstance(value, torch.Tensor) and value.is_floating_point() and value.device.type == "cpu":
            self.forget(place)
            if value.numel() and self.total + value.nbytes > self.budget:
                self._to_file(value)
            else:
                self.held[place] = value.nbytes
                self.total += value.nbytes

    def forget(self, place: Hashable) -> None:
        """Nothing waits there any more."""
        self.total -= self.held.pop(place, 0)

    @staticmethod
    def _to_file(value: torch.Tensor) -> None:
        value.data = allocate(tuple(value.shape), value.dtype, value.device, budget=0).copy_(value)


def token_dim(value: Any, tokens: int) -> int | None:
    """The dimension of a router's argument that counts tokens: 0 of [T, ...], 1 of [B, L, ...], None of another."""
    if isinstance(value, torch.Tensor):
        if value.dim() >= 1 and len(value) == tokens:
            return 0
        if value.dim() >= 2 and value.shape[:2].numel() == tokens:
            return 1
    return None


def as_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[str | None, Any], ...]:
    """A call's arguments in order, each with its keyword or None."""
    return (*((None, value) for value in args), *kwargs.items())


def as_call(arguments: Iterable[tuple[str | None, Any]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional arguments and those by keyword: what `as_arguments` listed."""
    listed = list(arguments)
    return tuple(value for name, value in listed if name is None), {name: value for name, value in listed if name}


def picked(value: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[n, ...] rows by their places, which may be of another device; indexing gives the same in five times as long."""
    return value.index_select(0, rows.to(value.device))
