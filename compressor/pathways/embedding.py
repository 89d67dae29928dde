"""An item as a vector, by which its neighbours are found."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressionError, reason_of
from compressor.evaluation.items import Item, Row
from compressor.pathways.engine import PathwayModel
from compressor.pathways.options import OWN

Embedder = Callable[[Item, Row], Tensor]  # an item and its tokens -> [D], float32 on the CPU


def embedder(name: str, model: PathwayModel) -> Embedder:
    """What embeds prompts: the loaded model's own embeddings, or a model of sentence-transformers.

    Raises `CompressionError` where that is not installed or knows no such model.
    """
    if name == OWN:
        return lambda item, row: _mean(model, row)
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise CompressionError(
            f"--embedding {name} takes sentence-transformers, which cannot be imported ({error}); install it with "
            f"`pip install sentence-transformers`, or leave --embedding out"
        ) from error
    try:
        sentences: Any = SentenceTransformer(name, trust_remote_code=False)
    except Exception as error:  # its loaders raise what they like
        raise CompressionError(
            f"sentence-transformers cannot load {name!r} ({reason_of(error)}); name another --embedding"
        ) from error
    return lambda item, row: torch.as_tensor(sentences.encode(item.prompt), dtype=torch.float32).flatten().cpu()


@torch.no_grad()
def _mean(model: PathwayModel, row: Row) -> Tensor:
    """The mean [H] of the prompt's token embeddings."""
    table = model.model.get_input_embeddings()
    tokens = torch.tensor(row.tokens[: row.start], device=table.weight.device)
    found: Tensor = table.weight[tokens].float().mean(0).cpu()
    return found
