"""Linear maps that act on each token alone, as chains of steps, and rows pulled back through them.

H width before, H' width after a chain. Everything is computed in float32.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Factor:
    """Multiplication by a number or, entry by entry, by a vector [H]."""

    by: float | Tensor

    def pull(self, rows: Tensor) -> Tensor:
        return rows * self.by


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean of the entries, in every entry."""

    def pull(self, rows: Tensor) -> Tensor:
        return rows.mean(-1, keepdim=True).expand_as(rows)


@dataclass(frozen=True, slots=True)
class Centre:
    """Subtraction of the mean of the entries."""

    def pull(self, rows: Tensor) -> Tensor:
        return rows - rows.mean(-1, keepdim=True)


@dataclass(frozen=True, slots=True)
class Matrix:
    """Multiplication by a weight [H', H]."""

    weight: Tensor

    def pull(self, rows: Tensor) -> Tensor:
        return rows @ self.weight.float()


Step = Factor | Mean | Centre | Matrix
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
    if isinstance(first, Factor) and isinstance(second, Factor):
        return torch.equal(torch.as_tensor(first.by).cpu(), torch.as_tensor(second.by).cpu())
    if isinstance(first, Matrix) and isinstance(second, Matrix):
        return first.weight is second.weight or torch.equal(first.weight, second.weight)
    return type(first) is type(second)


def same_chains(first: Sequence[Chain], second: Sequence[Chain]) -> bool:
    """Whether two sums of chains have the same steps."""
    return [len(chain) for chain in first] == [len(chain) for chain in second] and all(
        same_step(a, b) for one, other in zip(first, second, strict=True) for a, b in zip(one, other, strict=True)
    )


def digest(chains: Sequence[Chain]) -> str:
    """A digest that is equal for sums of chains with the same steps."""
    found = hashlib.sha256()
    for chain in chains:
        for step in (*chain, None):
            found.update(type(step).__name__.encode())
            if isinstance(step, Factor | Matrix):
                value = torch.as_tensor(step.by if isinstance(step, Factor) else step.weight).detach().float().cpu()
                found.update(str(tuple(value.shape)).encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


def kept(chain: Chain) -> Chain:
    """A copy of the chain's small tensors in float32 that outlives the layer's weights."""
    return tuple(
        Factor(step.by.detach().float().clone()) if isinstance(step, Factor) and isinstance(step.by, Tensor) else step
        for step in chain
    )
