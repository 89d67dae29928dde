"""Tokens that count more than others where something is fitted to text: those that end an answer, or its thinking.

What a model says next is decided where it predicts it, so that the weight is that of the position before the token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.model.inputs import Inputs


@dataclass(frozen=True, slots=True)
class Marked:
    """Runs of token ids, each of which has the same weight."""

    name: str
    weight: float
    tokens: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Emphasis:
    """What is emphasised; nothing by default."""

    marked: tuple[Marked, ...] = ()

    def weights(self, tokens: Tensor) -> Tensor:
        """Token ids [B, L] -> [B, L] in float32: of a position whose next token is marked that weight, of others 1."""
        found = torch.ones(tokens.shape)
        for each in self.marked:
            found[:, :-1][_covered(tokens, each.tokens)[:, 1:]] = each.weight
        return found

    def loss_weights(self, tokens: Tensor) -> Tensor:
        """Weights [B, L] of what is predicted after each token: nothing where a picture's token comes next."""
        own = self.weights(tokens)
        return own * tokens.before_text if isinstance(tokens, Inputs) else own

    def counts(self, batches: Sequence[Tensor]) -> dict[str, int]:
        """How many tokens of batches [B, L] are marked, by name."""
        return {each.name: sum(int(_covered(batch, each.tokens).sum()) for batch in batches) for each in self.marked}

    def asked(self) -> dict[str, float]:
        """The weights by name, as a recipe has them."""
        return {each.name: each.weight for each in self.marked}

    def to_dict(self) -> dict[str, Any]:
        """As a plan has it."""
        return {
            each.name: {"weight": each.weight, "tokens": [list(run) for run in each.tokens]} for each in self.marked
        }

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> "Emphasis":
        """What `to_dict` gave."""
        return cls(
            tuple(
                Marked(name, float(each["weight"]), tuple(map(tuple, each["tokens"]))) for name, each in content.items()
            )
        )


PLAIN = Emphasis()  # all tokens count alike


def _covered(tokens: Tensor, runs: Sequence[Sequence[int]]) -> Tensor:
    """Where in [B, L] one of the runs of token ids lies: [B, L], true or false."""
    found = torch.zeros(tokens.shape, dtype=torch.bool)
    for run in runs:
        if (length := len(run)) <= tokens.shape[1]:
            begins = (tokens.unfold(1, length, 1) == torch.tensor(run)).all(-1)  # [B, L - length + 1]
            for place in range(length):
                found[:, place : place + begins.shape[1]] |= begins
    return found
