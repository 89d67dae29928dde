"""One model's results on tasks, item by item, wherever they were recorded. Importing this loads no
torch."""

from dataclasses import field
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field

from compressor.frozen import frozen
from compressor.records import Finite, Share

REPORT = "gate.json"  # written beside the weights once they are evaluated; no part of the model
HASH_DIGITS = 8  # of an item's hashes, which are compared but never searched for

Kind = Literal["score", "likelihood"]


@frozen
class AnsweredItem:
    """An item of a task as one model has answered it."""

    id: str  # unique in its task
    score: Finite  # greater is better; of a likelihood task the log-likelihood in nats
    # words or bytes of an item of a likelihood task
    weight: Annotated[Finite, Field(ge=1e-9)] = 1.0
    # first digits of a hash of the item, and of the prompt made of it; empty where unknown
    content: str = ""
    prompt: str = ""
    # share of its answers that reached the token limit; None where unknown
    cut: Share | None = None


@frozen
class ItemScores:
    """One model's results on one task, item by item."""

    task: str  # as it was requested: a task or a group of tasks
    metric: str
    version: str  # of the task's definition
    kind: Kind
    items: tuple[AnsweredItem, ...]
    streamed: bool = False  # one layer in memory at a time
    # share of items that guessing gets right, 0 of generated answers; None if unknown
    chance: Share | None = None
    seconds: float = field(default=0.0, compare=False)  # that the answers took, without loading

    @property
    def values(self) -> tuple[float, ...]:
        """The scores of the items."""
        return tuple(item.score for item in self.items)

    @property
    def cut(self) -> float | None:
        """Share of the answers that reached the token limit; None where that is unknown."""
        shares = [item.cut for item in self.items if item.cut is not None]
        return fmean(shares) if shares else None

    def differing(self, other: "ItemScores", hashed: Literal["content", "prompt"]) -> int:
        """Count the items of both that are known to differ in their content or prompt."""
        hashes = {item.id: getattr(item, hashed) for item in self.items}
        count = 0
        for item in other.items:
            pair = {hashes.get(item.id, ""), getattr(item, hashed)}
            count += len(pair - {""}) == 2
        return count
