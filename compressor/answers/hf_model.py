"""lm-eval's own model of transformers, as `stock.py` asks it: whoever compares our figures with
lm-eval's finds the same ones. Importing this module imports lm-eval."""

import math
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.models.huggingface import HFLM

from compressor.answers.answering import Answer, Ended, Likelihood, Request, Scoring, TaskWriting
from compressor.devices import pick_device
from compressor.errors import CompressionError
from compressor.model.opened import load_whole
from compressor.progress import Progress

# `auto` would try ever larger batches until memory runs out, which ends the process on a CPU
CPU_BATCH = 8
# of a batch of scored items on a CPU: experts that get few tokens each compute slowly
CPU_TOKENS = 1024
LOGIT_BYTES = 2**29  # of a batch's logits in float32, unless one row alone has more


class HfModel(HFLM):
    """A causal language model that reports progress, and stops at the first number that is not
    finite; `owner` is the `StockModel` that asks it."""

    batch_begin = 0  # first request of the batch in the making
    reached: deque[bool]  # of a batch's answers to come: whether they reached the token limit

    # refuses a checkpoint that lacks weights: they would be random
    AUTO_MODEL_CLASS = SimpleNamespace(
        from_pretrained=lambda folder, **settings: load_whole(Path(folder), **settings)
    )

    def __init__(self, owner: Any) -> None:
        device = pick_device(owner.device)
        super().__init__(
            # an absolute path is never asked for on the Hub
            pretrained=str(owner.source.folder.resolve()),
            device=str(device),
            dtype=owner.dtype,
            batch_size=owner.rows or "auto",
            # sums in bfloat16 would round a perplexity by more than a compression costs
            softmax_dtype="float32",
            think_end_token=owner.think_end_token,
        )
        if self.device.type != device.type:
            raise CompressionError(
                f"lm-eval cannot use device {owner.device!r}; pass --device cpu or cuda"
            )
        self.owner = owner
        self.set_cache_hook(self)

    def scored(
        self, requests: Sequence[Scoring], task: str, progress: Progress, rolling: bool
    ) -> list[Likelihood]:
        """Return the likelihood of each request; windows of texts come in batches of their own."""
        self._watch(task, len(requests), progress)
        asked = [("", list(before), list(after)) for before, after in requests]
        answers: list[Likelihood] = []
        if not rolling:
            answers = self._loglikelihood_tokens(asked, disable_tqdm=True)
            return answers
        rows: Any = self._detect_batch_size() if self.batch_size == "auto" else self.batch_size
        for begin in range(0, len(asked), rows):
            batch = asked[begin : begin + rows]
            answers += self._loglikelihood_tokens(batch, disable_tqdm=True, override_bs=len(batch))
        return answers

    def written(
        self, requests: Sequence[Request], options: TaskWriting, progress: Progress
    ) -> list[Answer]:
        """Return the answer to each request."""
        self._watch(options.task, len(requests), progress)
        self.cut = set[str | None]()  # texts whose answers reached the token limit
        asked: Any = [
            SimpleNamespace(args=(prompt.text, settings))
            for (prompt, _), settings in zip(requests, options.settings, strict=True)
        ]
        answers = list[Answer]()
        texts = self.generate_until(asked, disable_tqdm=True)
        for (prompt, seed), text in zip(requests, texts, strict=True):
            ended: Ended = "length" if prompt.text in self.cut else "end"
            answers.append(Answer(prompt.id, seed, (), text, ended))
        return answers

    def _watch(self, task: str, total: int, progress: Progress) -> None:
        self.task = task
        self.progress = progress
        progress.start(f"Evaluating {self.owner.label} on {task}", total)

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        """Take one answer: (log-likelihood, is greedy), or text."""
        if kind == "generate_until":
            if self.reached.popleft():
                self.cut.add(request[0])
        elif not math.isfinite(answer[0]):
            raise self.owner.unsound(f"a log-likelihood of {answer[0]}", self.task)
        self.progress.advance("")

    def _get_config(self, *arguments: Any, **named: Any) -> None:
        super()._get_config(*arguments, **named)
        # the model is loaded dequantised, and lm-eval need not read it
        if hasattr(self.config, "quantization_config"):
            del self.config.quantization_config

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> Any:
        return CPU_BATCH if self.device.type == "cpu" else super()._detect_batch_size(requests, pos)

    def _batch_scheduler(self, pos: int, n_reordered_requests: Any) -> Any:
        """Return the rows of the batch that holds a request: on a CPU by the length of its first,
        longest row."""
        if self.device.type != "cpu":
            return super()._batch_scheduler(pos, n_reordered_requests)
        if pos == 0:
            self.batch_begin = 0
        _, context, continuation = n_reordered_requests[self.batch_begin]
        tokens = min(CPU_TOKENS, LOGIT_BYTES // (4 * len(self.tokenizer)))
        rows = max(1, tokens // len(context + continuation))
        if pos + 1 == self.batch_begin + rows:
            self.batch_begin = pos + 1
        return rows

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **named: Any) -> Any:
        """Return context and answers as tokens, [B, S]; an answer that has no end is as long as it
        may be."""

        def check_logits(module: Any, inputs: Any, output: Any) -> None:
            # NaN would choose a token in silence
            if not bool((output.logits[:, -1] < torch.inf).all()):
                raise self.owner.unsound("logits that are NaN or infinite", self.task)

        with self.model.register_forward_hook(check_logits):
            tokens = super()._model_generate(context, max_length, stop, **named)
        ends = self.model.generation_config.eos_token_id
        ends = {*(ends if isinstance(ends, list) else [ends])}
        self.reached = deque()
        for row in tokens[:, context.shape[1] :].tolist():
            text = self.tokenizer.decode(row)
            has_end = not ends.isdisjoint(row) or any(words and words in text for words in stop)
            self.reached.append(tokens.shape[1] >= max_length and not has_end)
        return tokens
