"""Logits of chosen positions of batches, read while these pass a model or variants of it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self, TypeVar

from torch import Tensor, nn

from compressor.errors import CompressionError
from compressor.model.architecture import head_of
from compressor.model.opened import OpenModel
from compressor.model.streaming import LayerVisitor, Pass
from compressor.model.substitution import SideBySide, Substitution
from compressor.progress import SILENT, Progress

Answer = TypeVar("Answer")


def require_head(model: Any) -> nn.Module:
    """Return the language-model head; raises `CompressionError` for a model without one."""
    head = head_of(model)
    if head is None:
        raise CompressionError(
            f"{type(model).__name__} has no language-model head, so its next-token distributions "
            "cannot be compared"
        )
    return head


class LogitReader(LayerVisitor):
    """Reads the logits [N, V] of chosen positions, and has the head compute no others.

    `positions` are masks [B, L] of the pass's batches from `first` on; `read` takes the number of a
    mask and the logits. Other batches pass as they are."""

    repeatable = True

    def __init__(
        self,
        positions: Sequence[Tensor],
        read: Callable[[int, Tensor], object],
        first: int = 0,
    ) -> None:
        self.positions = positions
        self.read = read
        self.first = first
        self.running: int | None = None  # the number of the running batch's mask
        self.is_selected = False  # the head sees the chosen positions alone

    @contextmanager
    def attached(self, model: Any) -> Iterator[Self]:
        """Choose positions before the head of a live model."""
        with require_head(model).register_forward_pre_hook(self.before_head):
            yield self

    def on_batch_start(self, batch: int) -> None:
        number = batch - self.first
        self.running = number if 0 <= number < len(self.positions) else None

    def before_head(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Hidden states [B, L, H] -> [1, N, H] of the positions; those of a head of another form
        stay."""
        if self.running is None:
            return None
        positions = self.positions[self.running]
        hidden = args[0]
        self.is_selected = hidden.shape[:-1] == positions.shape
        if self.is_selected:
            hidden = hidden[positions.to(hidden.device)][None]
        return (hidden, *args[1:])

    def on_batch_end(self, batch: int, output: Any) -> None:
        """Read the logits; a hook may have put more of the same shape below those of the head."""
        if self.running is None:
            return
        logits = output.logits
        if self.is_selected:
            logits = logits.flatten(0, 1)
        else:
            positions = self.positions[self.running].to(logits.device)
            logits = logits[positions.repeat(len(logits) // len(positions), 1)]
        self.read(self.running, logits)


def read_logits(
    model: OpenModel,
    batches: Sequence[tuple[Substitution, Tensor, Tensor]],
    read: Callable[[Tensor], Answer],
    progress: Progress = SILENT,
    phase: str = "",
) -> list[Answer]:
    """Return what `read` makes of each batch's logits [N, V], from one pass.

    A batch is a variant of the model, token ids [B, L], and a mask [B, L] of the positions that are
    read; those of a variant follow one another."""
    answers = []
    positions = [chosen for _, _, chosen in batches]
    reader = LogitReader(positions, lambda _, logits: answers.append(read(logits)))
    variants = SideBySide(model, [variant for variant, _, _ in batches])
    tokens = [batch for _, batch, _ in batches]
    with reader.attached(model.partial.model):
        Pass(model, tokens, progress, phase, to_end=True).run(variants, reader)
    return answers
