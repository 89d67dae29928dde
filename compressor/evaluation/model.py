"""lm-eval's transformers model, watched: it tells how far it is, and stops at the first number that is none.

It is in memory, or answers one layer at a time. Importing this module imports lm-eval; only functions that evaluate do.
"""

import gc
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError
from compressor.evaluation.streamed import stream_answers
from compressor.evaluation.tasks import EvaluationOptions
from compressor.model.opened import OpenModel, load_whole, open_model, pick_device
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Progress, Silent

CPU_BATCH = 8  # `auto` would try ever larger batches until memory runs out, which ends the process on a CPU
GPU_BATCH = 32  # rows of a streamed model where nobody says how many; all of the device but a layer is free for them


class AnswerWatch:
    """Takes each answer as lm-eval gets it: counts it, and refuses a log-likelihood that is not finite."""

    def __init__(self, model: str, task: str, progress: Progress) -> None:
        self.model, self.task, self.progress = model, task, progress

    def start(self, total: int) -> None:
        """So many requests come."""
        self.progress.start(f"Evaluating {self.model} on {self.task}", total)

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        """One answer: (log-likelihood, is greedy), a log-likelihood, or text."""
        if kind != "generate_until":
            value = answer[0] if isinstance(answer, tuple) else answer
            if not math.isfinite(value):
                raise self.fault(f"a log-likelihood of {value}")
        self.progress.advance("")

    def check_logits(self, module: Any, inputs: Any, output: Any) -> None:
        """Refuse NaN where the next token is chosen, which would choose one without a word: [B, S, V]."""
        if not bool((output.logits[:, -1] < torch.inf).all()):
            raise self.fault("logits that are NaN or infinite")

    def fault(self, what: str) -> CompressionError:
        """What is wrong with the model."""
        return CompressionError(
            f"{self.model} gives {what} on task {self.task!r}, so its results mean nothing; check its weights, or "
            "pass --dtype float32 if they are sound"
        )


class _WholeModel:
    """Loads a causal language model, refusing a checkpoint that lacks weights: they would be random."""

    @staticmethod
    def from_pretrained(folder: str, **settings: Any) -> Any:
        """The model, as transformers loads it."""
        return load_whole(Path(folder), **settings)


class WatchedModel(HFLM):
    """A causal language model whose answers a `AnswerWatch` sees."""

    AUTO_MODEL_CLASS = _WholeModel
    spent = None  # each item is run once

    def watch(self, watch: AnswerWatch) -> None:
        """Who sees the next answers."""
        self.watcher = watch
        self.set_cache_hook(watch)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        self.watcher.start(len(requests))
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        self.watcher.start(len(requests))
        return super().loglikelihood_rolling(requests, disable_tqdm=True)

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        self.watcher.start(len(requests))
        return super().generate_until(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None) -> Any:
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)

    def _model_generate(self, *arguments: Any, **named: Any) -> Any:
        handle = self.model.register_forward_hook(self.watcher.check_logits)
        try:
            return super()._model_generate(*arguments, **named)
        finally:
            handle.remove()


@contextmanager
def loaded_model(folder: Path, options: EvaluationOptions) -> Iterator[WatchedModel]:
    """A model while it is needed; its memory is free again afterwards."""
    device = pick_device(options.device)
    load_tokenizer(folder)  # which refuses one that transformers makes up; lm-eval would not
    batch = CPU_BATCH if options.batch_size == "auto" and device.type == "cpu" else options.batch_size
    model = WatchedModel(
        pretrained=str(folder.resolve()),  # an absolute path is never asked for on the Hub
        device=str(device),
        dtype=options.dtype,
        batch_size=batch,
        softmax_dtype="float32",  # sums in bfloat16 would round a perplexity by more than a compression costs
    )
    try:
        if torch.device(model.device).type != device.type:
            raise CompressionError(f"lm-eval cannot use device {options.device!r}; pass --device cpu or cuda")
        yield model
    finally:
        model._model = None
        del model
        free(device)


def free(device: torch.device) -> None:
    """Give back the memory of a model that nobody holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


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
        free(opened.partial.device)
