"""What lm-eval asks instead of a model: the model on optimised pathways, watched as a plain one is.

Importing this module imports lm-eval; only functions that evaluate do so.
"""

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
from lm_eval.api.model import LM

from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError
from compressor.evaluation.model import AnswerWatch
from compressor.evaluation.scores import Spent
from compressor.evaluation.tasks import EvaluationOptions
from compressor.pathways.answering import Answering, load_answering, opened_with
from compressor.pathways.options import Routing
from compressor.pathways.reference import ReferenceSet

logger = logging.getLogger(__name__)

ONLY = "moe-c3po answers multiple choice alone, items of another kind have no prompt to optimise; ask the plain model"


class RoutedModel(LM):
    """Answers requests of one prompt together; a prompt of its own for each choice is a pathway for each choice."""

    def __init__(self, answering: Answering) -> None:
        super().__init__()
        self.answering = answering
        self.watcher: AnswerWatch | None = None
        self._before = self._counted()

    def watch(self, watch: AnswerWatch) -> None:
        """Who sees the next answers; what they take is counted from here."""
        self.watcher, self._before = watch, self._counted()
        self.set_cache_hook(watch)

    @property
    def spent(self) -> Spent:
        """What the answers took since `watch`."""
        return Spent(*(now - before for now, before in zip(self._counted(), self._before, strict=True)))

    def _counted(self) -> tuple[int, int, int]:
        return self.answering.model.work, self.answering.plain_work, self.answering.left_plain

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log likelihood in nats, whether it is greedy) of each continuation."""
        if self.watcher is not None:
            self.watcher.start(len(requests))
        found = list[tuple[float, bool]]()
        for prompt, asked in groupby((request.args for request in requests), key=lambda pair: pair[0]):
            pairs = list(asked)
            answers = self.answering.answer(prompt, [continuation for _, continuation in pairs])
            for pair, answer in zip(pairs, answers, strict=True):
                found.append((answer.likelihood, answer.greedy))
                self.cache_hook.add_partial("loglikelihood", pair, found[-1])
        if self.watcher is None:
            logger.warning("moe-c3po has cost %.2f plain forwards of these items", self.answering.cost)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        raise CompressionError(ONLY)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        raise CompressionError(ONLY)


@contextmanager
def routed_model(
    source: ModelSource, options: EvaluationOptions, routing: Routing, reference: ReferenceSet
) -> Iterator[RoutedModel]:
    """A model on optimised pathways while it is needed; its memory is free again afterwards."""
    opened, tokenizer = opened_with(reference, source, options.dtype, options.device)
    try:
        yield RoutedModel(load_answering(opened, tokenizer, reference, routing.options))
    finally:
        opened.partial.release("")
        gc.collect()
        if opened.partial.device.type == "cuda":
            torch.cuda.empty_cache()
