"""Tokens that count more than others where something is fitted to text: those that end an answer, or its thinking.

What a model says next is decided where it predicts it, so that the weight is that of the position before the token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from compressor.model.inputs import Inputs


@dataclass(frozen=True, slots=True)
class Marked:
    """Runs of token ids, each of which has the same weight."""

    weight: float
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Emphasis:
    """The emphasised tokens by name; none by default."""

    marked: Mapping[str, Marked] = field(default_factory=dict)

    def weights(self, tokens: Tensor) -> Tensor:
        """Token ids [B, L] -> [B, L] in float32: of a position whose next token is marked that weight, of others 1."""
        weights = torch.ones(tokens.shape)
        for marked in self.marked.values():
            is_next = _covered(tokens, marked.tokens)[:, 1:]
            weights[:, :-1][is_next] = marked.weight
        return weights

    def loss_weights(self, tokens: Tensor) -> Tensor:
        """Weights [B, L] of what is predicted after each token: nothing where a picture's token comes next."""
        weights = self.weights(tokens)
        return weights * tokens.before_text if isinstance(tokens, Inputs) else weights

    def missing(self, batches: Sequence[Tensor]) -> list[str]:
        """Return the names of what no token of the batches [B, L] is marked as."""
        names = list[str]()
        for name, marked in self.marked.items():
            if not any(_covered(batch, marked.tokens).any() for batch in batches):
                names.append(name)
        return names


PLAIN = Emphasis()  # all tokens count alike


def _covered(tokens: Tensor, runs: Sequence[Sequence[int]]) -> Tensor:
    """Return the mask [B, L] of the tokens that belong to one of the runs of ids."""
    covered = torch.zeros(tokens.shape, dtype=torch.bool)
    for run in runs:
        length = len(run)
        if length <= tokens.shape[1]:
            begins = (tokens.unfold(1, length, 1) == torch.tensor(run)).all(-1)  # [B, L - length + 1]
            for offset in range(length):
                covered[:, offset : offset + begins.shape[1]] |= begins
    return covered
