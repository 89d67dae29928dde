"""Several processes that train one model together, on accelerate: each takes its share of every step's sequences.

Each holds the whole model and makes the same updates, of gradients that are summed. The first one judges, decides and
writes; with one process nothing of this is loaded.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.evaluation.teacher import Distributions
from compressor.steps.distill.text import Batch


@dataclass(slots=True)
class Ranks:
    """This process among all: its number, their count, and where it computes if there are several."""

    number: int = 0
    count: int = 1
    device: str = "auto"
    called: bool = False  # whether the first one has called the others to work

    @property
    def first(self) -> bool:
        """Whether this one judges, decides and writes."""
        return self.number == 0

    def share(self, batch: Batch) -> Batch:
        """This process's sequences of a batch, maybe none."""
        if self.count == 1:
            return batch
        own, every = slice(self.number, None, self.count), batch.original
        original = Distributions(every.tokens[own], every.logs[own], every.others[own])
        return Batch(batch.tokens[own], original, None if batch.hidden is None else batch.hidden[own])

    def summed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums over all processes of tensors that each has."""
        if self.count == 1:
            return dict(tensors)
        from accelerate.utils import reduce

        return {name: reduce(value, "sum") for name, value in tensors.items()}

    def told(self, value: Any) -> Any:
        """What the first process gives."""
        if self.count == 1:
            return value
        from accelerate.utils import broadcast_object_list

        said = [value]
        broadcast_object_list(said)
        return said[0]

    def call(self, place: str) -> None:
        """Have the other processes train with this one, the state kept in that folder."""
        self.called = True
        self.told(place)

    def dismiss(self) -> None:
        """Tell the others that there is nothing to do, if they were not called."""
        if self.first and not self.called:
            self.told(None)


ALONE = Ranks()


def present(device: str = "auto") -> Ranks:
    """This process among those that a launcher has started (`accelerate launch`, `torchrun`)."""
    if int(os.environ.get("WORLD_SIZE", "1")) <= 1:
        return ALONE
    try:
        from accelerate import PartialState
    except ImportError as error:
        raise CompressionError("several processes train together on accelerate; install it or start one") from error
    state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available())
    return Ranks(state.process_index, state.num_processes, str(state.device))
