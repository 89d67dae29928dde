"""A reference set as blocks."""

from collections.abc import Sequence

from compressor.document.blocks import Block, Table, Text
from compressor.pathways.building import Asked
from compressor.pathways.options import OWN
from compressor.pathways.reference import ReferenceFacts
from compressor.words import counted, share

COLUMNS = ("task", "items", "right", "share")


def reference_blocks(facts: ReferenceFacts, asked: Sequence[Asked]) -> tuple[Block, ...]:
    """What the model was asked and answered right, by task, and what is kept of it."""
    rows = tuple(
        (each.task or "-", f"{each.items:,}", f"{each.right:,}", share(each.right, each.items)) for each in asked
    )
    how = "the mean of the model's own token embeddings" if facts.embedding == OWN else facts.embedding
    return (
        Table(f"Items that {facts.model} answers right", COLUMNS, rows),
        Text(
            f"Each is kept with its pathway through {counted(len(facts.layers), 'MoE layer')} of {facts.experts} "
            f"experts, and embedded by {how}."
        ),
    )
