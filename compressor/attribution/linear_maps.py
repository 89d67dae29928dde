"""Linear maps that act on each token alone, as chains of steps: pushed onto vectors or pulled back onto rows.

H width before, H' width after a chain. Everything is computed in float32.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Scale:
    """Multiplication by a number or, entry by entry, by a vector [H]."""

    by: float | Tensor

    def push(self, vectors: Tensor) -> Tensor:
        return vectors * self.by

    pull = push


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of the entries, in every entry."""

    def push(self, vectors: Tensor) -> Tensor:
        return vectors.mean(-1, keepdim=True).expand_as(vectors)

    pull = push


@dataclass(frozen=True, slots=True)
class Centre:
    """Subtraction of the mean of the entries."""

    def push(self, vectors: Tensor) -> Tensor:
        return vectors - vectors.mean(-1, keepdim=True)

    pull = push


@dataclass(frozen=True, slots=True)
class Matrix:
    """Multiplication by a weight [H', H]."""

    weight: Tensor

    def push(self, vectors: Tensor) -> Tensor:
        return vectors @ self.weight.float().T

    def pull(self, rows: Tensor) -> Tensor:
        return rows @ self.weight.float()


Step = Scale | Mean | Centre | Matrix
Chain = tuple[Step, ...]


def pull(rows: Tensor, chain: Chain) -> Tensor:
    """[M, H'] -> [M, H]: rows whose products with a vector are those of `rows` with the chain's image of it."""
    for step in reversed(chain):
        rows = step.pull(rows)
    return rows


def pull_sum(rows: Tensor, chains: Iterable[Chain]) -> Tensor:
    """The same for a sum of chains."""
    return torch.stack([pull(rows, chain) for chain in chains]).sum(0)


def same_step(first: Step, second: Step) -> bool:
    """Whether two steps do the same."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Scale) and isinstance(second, Scale):
        return torch.equal(torch.as_tensor(first.by).cpu(), torch.as_tensor(second.by).cpu())
    if isinstance(first, Matrix) and isinstance(second, Matrix):
        return first.weight is second.weight or torch.equal(first.weight, second.weight)
    return True


def same_chains(first: Sequence[Chain], second: Sequence[Chain]) -> bool:
    """Whether two sums of chains have the same steps."""
    return [len(chain) for chain in first] == [len(chain) for chain in second] and all(
        same_step(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)
    )


def kept(chain: Chain) -> Chain:
    """A copy of the chain's small tensors in float32 that outlives the layer's weights."""
    return tuple(
        Scale(step.by.detach().float().clone()) if isinstance(step, Scale) and isinstance(step.by, Tensor) else step
        for step in chain
    )
