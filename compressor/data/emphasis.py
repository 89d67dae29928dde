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
        weights = torch.ones(tokens.shape)
        for marked in self.marked:
            is_next = _covered(tokens, marked.tokens)[:, 1:]
            weights[:, :-1][is_next] = marked.weight
        return weights

    def loss_weights(self, tokens: Tensor) -> Tensor:
        """Weights [B, L] of what is predicted after each token: nothing where a picture's token comes next."""
        weights = self.weights(tokens)
        return weights * tokens.before_text if isinstance(tokens, Inputs) else weights

    def counts(self, batches: Sequence[Tensor]) -> dict[str, int]:
        """How many tokens of batches [B, L] are marked, by name."""
        counts = dict[str, int]()
        for marked in self.marked:
            counts[marked.name] = sum(int(_covered(batch, marked.tokens).sum()) for batch in batches)
        return counts

    def asked(self) -> dict[str, float]:
        """The weights by name, as a recipe has them."""
        return {marked.name: marked.weight for marked in self.marked}

    def to_dict(self) -> dict[str, Any]:
        """As a plan has it."""
        content = dict[str, Any]()
        for marked in self.marked:
            content[marked.name] = {"weight": marked.weight, "tokens": [list(run) for run in marked.tokens]}
        return content

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> "Emphasis":
        """Read what `to_dict` gave."""
        marked = list[Marked]()
        for name, entry in content.items():
            marked.append(Marked(name, float(entry["weight"]), tuple(map(tuple, entry["tokens"]))))
        return cls(tuple(marked))


PLAIN = Emphasis()  # all tokens count alike


def _covered(tokens: Tensor, runs: Sequence[Sequence[int]]) -> Tensor:
    """Where in [B, L] one of the runs of token ids lies: [B, L], true or false."""
    covered = torch.zeros(tokens.shape, dtype=torch.bool)
    for run in runs:
        length = len(run)
        if length <= tokens.shape[1]:
            begins = (tokens.unfold(1, length, 1) == torch.tensor(run)).all(-1)  # [B, L - length + 1]
            for offset in range(length):
                covered[:, offset : offset + begins.shape[1]] |= begins
    return covered
