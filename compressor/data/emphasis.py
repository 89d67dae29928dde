"""Emphasis on tokens that end an answer, or its thinking, and weights of sources, when something is
fitted to text.

A model predicts a token at the position before it, so that position gets the token's weight.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.frozen import frozen
from compressor.model.inputs import Inputs


@frozen
class MarkedTokens:
    """Runs of token ids with one weight."""

    weight: float
    tokens: tuple[tuple[int, ...], ...]


@frozen
class Emphasis:
    """Emphasised tokens by name; none by default."""

    marked: Mapping[str, MarkedTokens] = field(default_factory=dict)

    def weights(self, tokens: Tensor) -> Tensor:
        """Return the weights of positions: token ids [B, L] -> [B, L], 1 unless the next token is
        marked."""
        weights = torch.ones(tokens.shape)
        for marked in self.marked.values():
            is_next = _covered(tokens, marked.tokens)[:, 1:]
            weights[:, :-1][is_next] = marked.weight
        return weights

    def loss_weights(self, tokens: Tensor) -> Tensor:
        """Return the weights [B, L] of predictions: those of `weights`, and 0 if the next token is
        a picture's."""
        weights = self.weights(tokens)
        if isinstance(tokens, Inputs):
            weights = weights * ~pad(tokens.media[:, 1:], (0, 1))
        return weights

    def missing(self, batches: Sequence[Tensor]) -> list[str]:
        """Return the names without a marked token in the batches [B, L]."""
        missing = []
        for name, marked in self.marked.items():
            if not any(bool(_covered(batch, marked.tokens).any()) for batch in batches):
                missing.append(name)
        return missing


RATE = 1.0  # of the growth of a source's weight, in the exponent
PLAIN = Emphasis()  # all tokens count alike


def rebalanced(weights: Tensor, errors: Tensor) -> Tensor:
    """Return weights [S] of sources, of mean 1, that have grown with the sources' errors [S]."""
    grown = weights * (RATE * errors / errors.max().clamp(min=torch.finfo(errors.dtype).tiny)).exp()
    return grown / grown.mean()


def _covered(tokens: Tensor, runs: Sequence[Sequence[int]]) -> Tensor:
    """Return the mask [B, L] of tokens in one of the runs of ids."""
    covered = torch.zeros(tokens.shape, dtype=torch.bool)
    for run in runs:
        length = len(run)
        if length <= tokens.shape[1]:
            # [B, L - length + 1]
            begins = (tokens.unfold(1, length, 1) == torch.tensor(run)).all(-1)
            for offset in range(length):
                covered[:, offset : offset + begins.shape[1]] |= begins
    return covered
