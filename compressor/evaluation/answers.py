"""What a model thinks of the answers of items: likelihoods, and whether it would write them itself.

B rows, S tokens, V words of the vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from compressor.evaluation.items import Row


def likelihoods(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """The log likelihood [B] of each row's answer given its prompt, from logits [B, S, V]."""
    found = []
    for place, row in enumerate(rows):
        expected = logits[place, row.start - 1 : len(row.tokens) - 1].float().log_softmax(-1)
        answer = torch.tensor(row.tokens[row.start :], device=logits.device)
        found.append(expected.gather(1, answer[:, None]).sum())
    return torch.stack(found)


def is_greedy(logits: Tensor, row: Row) -> bool:
    """Whether each token of the answer of the first row is the likeliest one, from logits [B, S, V]."""
    likeliest = logits[0, row.start - 1 : len(row.tokens) - 1].argmax(-1)
    return likeliest.tolist() == list(row.tokens[row.start :])


def positions(config: Any) -> int | None:
    """Tokens that the model was made for at most; None where the config says nothing."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    return found if isinstance(found, int) and found > 1 else None
