"""lm-eval's transformers model without a model in memory: its tokens and batches, answered by a streamed pass.

Importing this module imports lm-eval; only functions that evaluate do so.
"""

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError
from compressor.evaluation.model import CPU_BATCH, AnswerWatch, WatchedModel
from compressor.evaluation.streamed import stream_answers
from compressor.evaluation.tasks import EvaluationOptions
from compressor.model.opened import OpenModel, open_model
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Progress, Silent

GPU_BATCH = 32  # rows where nobody says how many; all of the device but a layer is free for them


@dataclass(frozen=True, slots=True)
class _NotLoaded:
    """What lm-eval holds in the place of a model in memory."""

    config: Any

    def to(self, device: Any) -> None:
        """Nothing need be moved."""


class StreamedModel(WatchedModel):
    """A causal language model that answers requests of likelihood, one layer in memory at a time."""

    def __init__(self, opened: OpenModel, rows: int) -> None:
        self.opened, self.rows = opened, rows
        self.told: Progress = Silent()
        # all windows of long texts are handed over at once, to be cut into batches here
        super().__init__(
            pretrained=str(opened.source.folder.resolve()), device=str(opened.partial.device), batch_size=sys.maxsize
        )

    def _create_model(self, *_: Any, **settings: Any) -> None:
        self._model = _NotLoaded(self.config)

    def watch(self, watch: AnswerWatch) -> None:
        """Who sees the next answers; how far they are is told by layers."""
        self.told = watch.progress
        super().watch(AnswerWatch(watch.model, watch.task, Silent()))

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        pairs = [(before, after) for _, before, after in requests]
        if not all(before and after for before, after in pairs):
            raise CompressionError("an item has a prompt or an answer without a token; give both some text")
        if longest := max((len(after) for _, after in pairs if len(after) > self.max_length), default=0):
            raise CompressionError(f"an answer has {longest:,} tokens, the model takes {self.max_length:,}; shorten it")
        phase = f"Evaluating {self.watcher.model} on {self.watcher.task}, layer by layer"
        found = stream_answers(self.opened, pairs, self.max_length, self.rows, self.told, phase) if pairs else []
        for (asked, _, _), answer in zip(requests, found, strict=True):
            if asked is not None:  # windows of a longer text are watched as one
                self.cache_hook.add_partial("loglikelihood", asked, answer)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        raise CompressionError("a streamed model writes no answers; pass --no-stream")


@contextmanager
def streamed_model(source: ModelSource, options: EvaluationOptions) -> Iterator[StreamedModel]:
    """A model that is read layer by layer whenever it is asked."""
    load_tokenizer(source.folder)  # which refuses one that transformers makes up; lm-eval would not
    opened = open_model(source, options.dtype, options.device)
    usual = CPU_BATCH if opened.partial.device.type == "cpu" else GPU_BATCH
    try:
        yield StreamedModel(opened, usual if isinstance(options.batch_size, str) else options.batch_size)
    finally:
        opened.partial.release("")
        gc.collect()
        if opened.partial.device.type == "cuda":
            torch.cuda.empty_cache()
