"""A model of ours as lm-eval asks it, in tokens and chats as lm-eval's own models make them.
Importing this module imports lm-eval."""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import handle_stop_sequences, postprocess_generated_text
from pydantic import FiniteFloat, TypeAdapter

from compressor.answers.answering import Answer, Likelihood, Model, TaskWriting
from compressor.answers.journal import Journal, keep
from compressor.answers.models import model_of
from compressor.answers.prompts import Prompt
from compressor.answers.server import Server
from compressor.answers.tasks import EvaluationOptions
from compressor.checkpoint.source import ModelSource
from compressor.model.tokenizer import has_chat_template, load_tokenizer, templates_of
from compressor.progress import Progress
from compressor.prompt_date import dated_template
from compressor.run_record import request_key

LINE = TypeAdapter(tuple[str, Answer | tuple[FiniteFloat, bool]])  # of the journal


class ChatText(str):
    """The text of a conversation, with its messages, of which a server makes the text itself."""

    messages: list[dict[str, Any]]


def prompt_of(context: str) -> Prompt:
    """Return the prompt of a context: a chat, where it has messages."""
    return Prompt.of(getattr(context, "messages", ()) or str(context), text=str(context))


class LmEvalModel(TemplateLM):
    """Answers lm-eval by `complete` and `score` of a model; a journal keeps the answers."""

    tokenizer_name = ""  # of a cache of requests, which we don't use
    batch_size = sys.maxsize  # all windows of long texts come at once
    sampling_seed = 0

    def __init__(
        self,
        model: Model,
        options: EvaluationOptions,
        journal: Journal | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.options = options
        self.journal = journal
        self.tokenizer = load_tokenizer(model.source.folder)
        templates = templates_of(self.tokenizer)
        name = options.apply_chat_template
        self.chat_template_args: dict[str, Any] = {}
        # lm-eval itself takes a template's name and renders the default one
        if isinstance(name, str) and name in templates:
            self.chat_template_args["chat_template"] = templates[name]
        chosen = str(name) if self.chat_template_args else "default"
        self.chat_template_args |= dated_template(templates, chosen)
        if options.enable_thinking is not None:
            self.chat_template_args["enable_thinking"] = options.enable_thinking

    def watch(self, task: str, progress: Progress) -> None:
        """Report the answers to come under a task's name."""
        self.task = task
        self.progress = progress

    @cached_property
    def max_length(self) -> int:
        return self.model.max_length

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        opening = self.tokenizer.bos_token_id
        return self.eot_token_id if opening is None else int(opening)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        special = add_special_tokens
        if special is None:
            # where nothing opens texts, a tokenizer need have no token for it
            special = self.model.opens_texts and not string.startswith(
                self.tokenizer.decode(self.prefix_token_id)
            )
        return list(self.tokenizer.encode(string, add_special_tokens=special))

    def apply_chat_template(
        self, chat_history: Any, add_generation_prompt: bool = True
    ) -> ChatText:
        text = ChatText()
        if has_chat_template(self.tokenizer):
            text = ChatText(HFLM.apply_chat_template(self, chat_history, add_generation_prompt))
        text.messages = chat_history
        return text

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        encode = self.tok_encode
        # the prefix token already opens each text, and a tokenizer that does so too would open it
        # twice
        self.tok_encode = partial(encode, add_special_tokens=False)  # type: ignore[method-assign]
        try:
            return HFLM.loglikelihood_rolling(self, requests, disable_tqdm=True)
        finally:
            del self.tok_encode

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[Likelihood]:
        pairs = [(before, after) for _, before, after in requests]
        is_rolling = bool(requests) and requests[0][0] is None

        def ask(missing: Sequence[int]) -> Iterator[tuple[int, Likelihood]]:
            asked = [pairs[number] for number in missing]
            for place, answer in self.model.score(asked, self.task, self.progress, is_rolling):
                if not math.isfinite(answer[0]):
                    raise self.model.unsound(f"a log-likelihood of {answer[0]}", self.task)
                yield place, answer

        return keep(self.journal, [request_key(*pair) for pair in pairs], ask)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the texts that are written, without thinking, up to what ends an answer."""
        end = self.options.think_end_token
        if str(end).isdigit():
            end = self.tokenizer.decode([int(str(end))])
        seed, thinking = self.sampling_seed, self.options.enable_thinking
        prompts = list[Prompt]()
        keys = list[str]()
        for context, settings in (request.args for request in requests):
            prompts.append(prompt_of(context))
            keys.append(request_key(prompts[-1].id, str(context), settings, seed, thinking))

        def ask(missing: Sequence[int]) -> Iterator[tuple[int, Answer]]:
            settings = [requests[number].args[1] for number in missing]
            writing = TaskWriting(self.task, settings, seed, thinking)
            asked = [(prompts[number], seed) for number in missing]
            return self.model.complete(asked, writing, self.progress)

        texts = list[str]()
        self.cut = set[str]()  # prompts, by id, whose answers reached the token limit
        for request, answer in zip(requests, keep(self.journal, keys, ask), strict=True):
            until = request.args[1].get("until") or []
            until = [until] if isinstance(until, str) else [*until]
            stop = handle_stop_sequences(until, self.tokenizer.eos_token)
            texts.append(str(postprocess_generated_text(answer.text, stop, end)))
            if answer.ended == "length":
                self.cut.add(answer.prompt)
        return texts

    def was_cut(self, context: str) -> bool:
        """Return True if the answer that was written last to a context reached the token limit."""
        return prompt_of(context).id in self.cut


@contextmanager
def lm_eval_model(
    source: ModelSource,
    options: EvaluationOptions,
    streamed: bool = False,
    server: Server | None = None,
    journal: Path | None = None,
) -> Iterator[LmEvalModel]:
    """Open the model that answers lm-eval: a checkpoint, streamed or in memory, or a server's.

    A checkpoint is freed afterwards; the `journal` keeps answers until all tasks have results.
    Raises `CompressionError` for a tokenizer that transformers makes up, which lm-eval would not
    refuse."""
    rows = options.batch_size if isinstance(options.batch_size, int) else None
    model = model_of(
        source, server, rows, options.device, options.dtype, streamed, options.think_end_token
    )
    # refused, if need be, before weights are read
    answering = LmEvalModel(model, options, None if journal is None else Journal(journal, LINE))
    with model.loaded():
        yield answering
    if journal is not None:
        journal.unlink(missing_ok=True)
