"""Whose tokens are whose: what all ranks have recorded of one layer, piece by piece in the order of the batches.

A piece is what one batch showed in one call of the layer. Sums over tokens are sums over pieces in this order, so that
they do not depend on how many ranks there are.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.distributed.present import here
from compressor.model.buffers import allocate


@dataclass(frozen=True, slots=True)
class Pieces:
    """Of each piece: the rank that has it, and its span [begin, end) among the tokens of this rank; empty elsewhere."""

    owners: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, calls: list[tuple[int, int]]) -> "Pieces":
        """Of this rank's calls in their order: number of the batch, and tokens. All ranks must ask at once."""
        begin, own = 0, list[tuple[int, int, int, int, int]]()
        for number, (batch, size) in enumerate(calls):
            own.append((batch, number, here().rank, begin, begin + size))
            begin += size
        found = sorted(tuple(piece) for pieces in here().listed(own) for piece in pieces)
        spans = [(begin, end) if owner == here().rank else (0, 0) for _, _, owner, begin, end in found]
        return cls(tuple(owner for _, _, owner, _, _ in found), tuple(spans))

    def split(self, rows: Tensor) -> list[Tensor]:
        """Of each piece those of this rank's tokens at `rows` [n], ascending, that lie in it."""
        edges = torch.searchsorted(rows, torch.tensor(self.spans).reshape(-1, 2)).tolist()
        return [rows[begin:end] for begin, end in edges]

    def counts(self, rows: Tensor) -> Tensor:
        """How many of the tokens at `rows` of all ranks lie in each piece."""
        return here().summed(torch.tensor([len(part) for part in self.split(rows)], dtype=torch.int64))

    def every(self, rows: Tensor, step: int) -> Tensor:
        """This rank's part of every step-th of all ranks' tokens at `rows`."""
        begin, found = 0, [rows[:0]]
        for part, count in zip(self.split(rows), self.counts(rows).tolist(), strict=True):
            found.append(part[(-begin) % step :: step])
            begin += count
        return torch.cat(found)

    def everywhere(self, values: Tensor, rows: Tensor) -> Tensor:
        """What all ranks have at `rows` of their `values` [T, ...], in the order of the pieces, at every rank.

        A rank without tokens has values of any shape; they become those of the first one.
        """
        counts, parts, begin = self.counts(rows).tolist(), self.split(rows), 0
        dtype, *shape = here().told(lambda: [str(values.dtype).removeprefix("torch."), *values.shape[1:]])
        found = allocate((sum(counts), *shape), getattr(torch, dtype), values.device)
        for owner, part, count in zip(self.owners, parts, counts, strict=True):
            if len(part):
                found[begin : begin + count] = values[part]
            here().spread([found[begin : begin + count]], [owner])
            begin += count
        return found

    def sum(self, like: Tensor, make: Callable[[int], Tensor]) -> Tensor:
        """The sum of what the owners make of each piece, in a fixed order; `like` has its shape and dtype."""
        return here().grouped_sum(like, self.owners, make)
