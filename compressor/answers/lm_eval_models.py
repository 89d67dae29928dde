"""lm-eval's transformers model, watched: it reports progress, and stops at the first number that is
not finite.

It is in memory, or answers log likelihoods from one streamed pass: equal inputs run once, and there
are logits only where they count. Importing this module imports lm-eval. B rows of a batch, S
tokens, N scored positions, H hidden size, V words of the vocabulary.

Or a server answers, by lm-eval's model of a completions API with requests of our own: several at
once, and each answer kept as it comes, so that a run that a server's timeout ended goes on from
what it has been answered."""

import math
import sys
from collections import ChainMap, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from pydantic import FiniteFloat, TypeAdapter
from torch import Tensor

from compressor.answers.asking import padded
from compressor.answers.decoding import free, read_facts
from compressor.answers.journal import Journal
from compressor.answers.server import AT_ONCE, ChatChoice, PromptScores, Server, TextChoice
from compressor.answers.tasks import EvaluationOptions
from compressor.checkpoint.source import ModelSource
from compressor.devices import pick_device
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.memory import available
from compressor.model.architecture import head_of
from compressor.model.opened import OpenModel, load_whole, open_model
from compressor.model.streaming import DEFAULT_ACTIVATION_BUDGET, LayerVisitor, Pass
from compressor.model.tokenizer import has_chat_template, load_tokenizer, templates_of
from compressor.progress import Progress, Silent
from compressor.prompt_date import dated_template
from compressor.run_record import request_key

# `auto` would try ever larger batches until memory runs out, which ends the process on a CPU
CPU_BATCH = 8
# of a batch of scored items on a CPU: experts that get few tokens each compute slowly
CPU_TOKENS = 1024
# rows of a streamed model where nobody says how many; all of the device but a layer is free for
# them
GPU_BATCH = 32
LOGIT_BYTES = 2**29  # of a batch's logits in float32, unless one row alone has more
TOGETHER = 256  # positions whose probabilities are held at once
# a part this large of free memory holds hidden states; what is beyond goes to disk
WAITING_SHARE = 4
POSITIONS = 2048  # of a model that doesn't say how many it was made for
MOST_STOPS = 4  # that a chat may name
# a digest, and the text and whether it is cut, or the log-likelihood
LINE = TypeAdapter(tuple[str, tuple[str, bool] | tuple[FiniteFloat, bool]])

# log likelihood in nats, and whether every token of it is the argmax
Likelihood = tuple[float, bool]


class Watched(TemplateLM):
    """One of lm-eval's models that reports progress and refuses a log-likelihood that is not
    finite."""

    tok_encode: Any  # of lm-eval's model
    sampling_seed = 0

    def watch(self, label: str, task: str, progress: Progress) -> None:
        """Report the answers to come under these names."""
        self.label = label
        self.task = task
        self.answered = progress
        self.cut = set[str]()  # contexts whose answers reached the token limit
        self.set_cache_hook(self)

    def start(self, total: int) -> None:
        self.answered.start(f"Evaluating {self.label} on {self.task}", total)

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        """Take one answer: (log-likelihood, is greedy), a log-likelihood, or text."""
        if kind != "generate_until":
            value = answer[0] if isinstance(answer, tuple) else answer
            if not math.isfinite(value):
                raise self.fault(f"a log-likelihood of {value}")
        self.answered.advance("")

    def fault(self, what: str) -> CompressionError:
        return CompressionError(
            f"{self.label} gives {what} on task {self.task!r}, so its results mean nothing; check "
            "its weights, or pass --dtype float32 if they are sound"
        )

    def loglikelihood(self, requests: Any, disable_tqdm: bool = False) -> Any:
        self.start(len(requests))
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> Any:
        self.start(len(requests))
        encode = self.tok_encode
        # the prefix token already opens each text, and a tokenizer that does so too would open it
        # twice
        self.tok_encode = partial(encode, add_special_tokens=False)
        try:
            return HFLM.loglikelihood_rolling(self, requests, disable_tqdm=True)
        finally:
            del self.tok_encode

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> Any:
        self.start(len(requests))
        return super().generate_until(requests, disable_tqdm=True)


class WatchedModel(Watched, HFLM):
    """A causal language model of transformers."""

    batch_begin = 0  # first request of the batch in the making
    reached: deque[bool]  # of a batch's answers to come: whether they reached the token limit

    # refuses a checkpoint that lacks weights: they would be random
    AUTO_MODEL_CLASS = SimpleNamespace(
        from_pretrained=lambda folder, **settings: load_whole(Path(folder), **settings)
    )

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

    def _loglikelihood_tokens(
        self, requests: Any, disable_tqdm: bool = False, override_bs: int | None = None
    ) -> Any:
        return super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=override_bs)

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **named: Any) -> Any:
        """Return context and answers as tokens, [B, S]; an answer that has no end is as long as it
        may be."""

        def check_logits(module: Any, inputs: Any, output: Any) -> None:
            # NaN would choose a token in silence
            if not bool((output.logits[:, -1] < torch.inf).all()):
                raise self.fault("logits that are NaN or infinite")

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

    def add_partial(self, kind: str, request: Any, answer: Any) -> None:
        if kind == "generate_until" and self.reached.popleft():
            self.cut.add(request[0])
        super().add_partial(kind, request, answer)


@dataclass(frozen=True, slots=True)
class Input:
    """Tokens [S] that a model runs once, and the continuations that end with the token it predicts
    last."""

    tokens: tuple[int, ...]
    continuations: tuple[tuple[int, tuple[int, ...]], ...]  # each with the number of its request

    @property
    def scored(self) -> int:
        """Number of positions, the last ones, whose logits are needed."""
        return max(len(tokens) for _, tokens in self.continuations)


class _LikelihoodVisitor(LayerVisitor):
    """Collect answers where a batch reaches the head, which computes logits of the scored positions
    alone."""

    repeatable = True

    def __init__(self, batches: Sequence[Sequence[Input]]) -> None:
        self.batches = batches
        self.answers = dict[int, Likelihood]()  # by request
        self.is_selected = False  # the head sees the scored positions alone

    def before_head(self, head: Any, args: tuple[Any, ...]) -> Any:
        """Return the scored positions alone: [B, S, H] -> [1, N, H]; inputs of another form stay as
        they are."""
        hidden = args[0]
        batch = self.batches[self.at.batch]
        self.is_selected = hidden.shape[:-1] == (len(batch), len(batch[0].tokens))
        if not self.is_selected:
            return None
        return (_scored(hidden, batch)[None], *args[1:])

    @torch.no_grad()
    def on_batch_end(self, batch: int, output: Any) -> None:
        rows = self.batches[batch]
        logits = output.logits[0] if self.is_selected else _scored(output.logits, rows)
        for row, of_row in zip(rows, logits.split([row.scored for row in rows]), strict=True):
            # Each ends where the row's logits [N, V] do.
            for number, tokens in row.continuations:
                targets = torch.tensor(tokens, device=logits.device)[:, None]
                scored = of_row[-len(tokens) :]
                value = 0.0
                for part, expected in zip(
                    scored.split(TOGETHER), targets.split(TOGETHER), strict=True
                ):
                    logs = part.log_softmax(-1, dtype=torch.float32)
                    value += float(logs.gather(1, expected).sum())
                is_greedy = torch.equal(scored.argmax(-1, keepdim=True), targets)
                self.answers[number] = value, is_greedy


def _scored(values: Tensor, batch: Sequence[Input]) -> Tensor:
    """Return each row's scored positions, the last ones of its own tokens: [B, S, ...] -> [N,
    ...]."""
    spans = []
    for row, of_row in zip(batch, values, strict=True):
        end = len(row.tokens)
        spans.append(of_row[end - row.scored : end])
    return torch.cat(spans)


class StreamedModel(WatchedModel):
    """A causal language model that answers requests of likelihood alone, one layer in memory at a
    time."""

    def __init__(self, opened: OpenModel, rows: int, **chat: Any) -> None:
        self.opened = opened
        self.rows = rows
        self.layers: Progress = Silent()
        super().__init__(
            pretrained=str(opened.source.folder.resolve()),
            device=str(opened.partial.device),
            # all windows of long texts come at once, to be cut into batches here
            batch_size=sys.maxsize,
            **chat,
        )

    def variants(self, batches: Sequence[Sequence[Input]]) -> Sequence[LayerVisitor]:
        """Return what has a variant of the model answer the batches; nothing for the model as it
        is."""
        return ()

    def _create_model(self, *_: Any, **settings: Any) -> None:
        # for what lm-eval asks of a model
        self._model = SimpleNamespace(config=self.config, to=lambda device: None)

    def watch(self, label: str, task: str, progress: Progress) -> None:
        """Report progress in layers, not in answers."""
        self.layers = progress
        super().watch(label, task, Silent())

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Likelihood]:
        """Return the answer to each request; all batches pass one layer after the other.

        Several ranks share the batches, and each gets all answers.
        """
        continuations = defaultdict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]](list)
        for number, (_, before, after) in enumerate(requests):
            if not before or not after:
                raise CompressionError(
                    "an item has a prompt or an answer without a token; give both some text"
                )
            if len(after) > self.max_length:
                raise CompressionError(
                    f"an answer has {len(after):,} tokens, the model takes {self.max_length:,}; "
                    "shorten it"
                )
            # The answers A and B to one question differ in their last token alone, so they share
            # an input, cut on the left like lm-eval's.
            tokens = (*before, *after)[-self.max_length - 1 : -1]
            continuations[tokens].append((number, tuple(after)))
        inputs = [Input(tokens, tuple(after)) for tokens, after in continuations.items()]
        inputs.sort(key=lambda row: (-len(row.tokens), row.tokens))
        model = self.opened
        batches: list[list[Input]] = []
        left = 0  # positions whose logits the batch has room for
        for row in inputs:
            if not batches or len(batches[-1]) == self.rows or row.scored > left:
                batches.append([])
                left = LOGIT_BYTES // (4 * model.vocabulary)
            batches[-1].append(row)
            left -= row.scored
        budget = DEFAULT_ACTIVATION_BUDGET
        if (free_memory := available()) is not None:
            budget = min(budget, free_memory // WAITING_SHARE)
        # padded on the right: what follows a token does not reach it, so no mask is needed
        input_ids = []
        for batch in batches:
            input_ids.append(padded([row.tokens for row in batch], 0)[0])
        visitor = _LikelihoodVisitor(batches)
        phase = f"Evaluating {self.label} on {self.task}, layer by layer"
        head = head_of(model.partial.model)
        with (
            head.register_forward_pre_hook(visitor.before_head)
            if head is not None
            else nullcontext()
        ):
            streamed = Pass(
                model,
                input_ids,
                self.layers,
                phase,
                to_end=True,
                shared=True,
                activation_budget=budget,
            )
            streamed.run(*self.variants(batches), visitor)
        answers = dict(ChainMap(*ranks().all_gather(visitor.answers)))
        for number, (request, _, _) in enumerate(requests):
            if request is not None:  # windows of a longer text are watched as one
                self.cache_hook.add_partial("loglikelihood", request, answers[number])
        return [answers[number] for number in range(len(requests))]


# of the journal; the question; and the reader of what is written
ServedQuestion = tuple[str, Mapping[str, Any], Callable[[Any], Any]]


class ChatPrompt(str):
    """The text of a conversation with its messages, of which a server makes the text itself."""

    messages: list[dict[str, Any]]


class ServedModel(Watched, LocalCompletionsAPI):
    """A served model whose log-likelihoods are those of its own tokens, and texts as the server
    ends them."""

    # what the constructor of lm-eval's model would set
    tokenizer_backend = "huggingface"
    add_bos_token = False
    custom_prefix_token_id = None
    _eos_string = None
    _max_gen_toks = 256
    batch_size = sys.maxsize  # all windows of long texts are asked together

    def __init__(
        self,
        server: Server,
        source: ModelSource,
        options: EvaluationOptions,
        journal: Journal,
        template_args: Mapping[str, Any],
    ) -> None:
        TemplateLM.__init__(self)  # an API's own asks for packages that its own requests take
        self.server = server
        self.journal = journal
        self.tokenizer = load_tokenizer(source.folder)
        self.options = options
        self.chat_template_args = dict(template_args)
        if options.enable_thinking is not None:
            self.chat_template_args["enable_thinking"] = options.enable_thinking
        self.tokenized_requests = server.scored == "tokens"
        positions = read_facts(source.folder).positions or POSITIONS
        # tokens before the last one of a request, to which a server always adds another
        self.max_length = min(positions, server.max_length or positions) - 2
        self.model = server.model
        self.at_once = options.batch_size if isinstance(options.batch_size, int) else AT_ONCE

    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Likelihood]:
        """Return the answers to requests of a cache key, a context's tokens and a continuation's
        tokens."""
        questions = []
        for _, context, continuation in requests:
            tokens = [*context, *continuation][-self.max_length - 1 :]
            begin = max(1, len(tokens) - len(continuation))
            prompt = tokens if self.tokenized_requests else self.tokenizer.decode(tokens)
            payload = self._create_payload(prompt, seed=self.sampling_seed)
            read = partial(self._likelihood, tokens, begin)
            questions.append((request_key(payload, begin), payload, read))
        is_item = bool(requests) and requests[0][0] is not None  # not a window of a longer text
        return self._answers(questions, is_item)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        self.start(len(requests))
        questions = []
        for context, given in (request.args for request in requests):
            settings: Any = normalize_gen_kwargs(given, self._max_gen_toks)
            room = max(1, self.max_length + 1 - settings["max_gen_toks"])
            payload = self._create_payload(
                self.tok_encode(context)[-room:] if self.tokenized_requests else context,
                generate=True,
                gen_kwargs=settings,
                seed=self.sampling_seed,
                eos=self.eos_string,
            )
            payload |= self.server.plain
            read = partial(self._text, list(payload["stop"]))
            if isinstance(context, ChatPrompt):
                del payload["prompt"]
                payload["messages"] = context.messages
                payload["stop"] = payload["stop"][:MOST_STOPS]
                if self.options.enable_thinking is not None:
                    thinking = {"enable_thinking": self.options.enable_thinking}
                    payload["chat_template_kwargs"] = thinking
                if context.messages[-1]["role"] == "assistant":  # it goes on where that ends
                    payload |= {"add_generation_prompt": False, "continue_final_message": True}
            questions.append((request_key(payload), payload, read))
        answers = []
        for request, (text, is_cut) in zip(requests, self._answers(questions), strict=True):
            answers.append(text)
            if is_cut:
                self.cut.add(request.args[0])
        return answers

    def apply_chat_template(
        self, chat_history: Any, add_generation_prompt: bool = True
    ) -> ChatPrompt:
        """Return the messages, and their text by the tokenizer's template if it has one."""
        prompt = ChatPrompt()
        if has_chat_template(self.tokenizer):
            prompt = ChatPrompt(HFLM.apply_chat_template(self, chat_history, add_generation_prompt))
        prompt.messages = chat_history
        return prompt

    def _text(self, stops: list[str], choice: TextChoice | ChatChoice) -> tuple[str, bool]:
        """Return an answer without thinking, ended like one of lm-eval's own model, and True if it
        has no end."""
        text = choice.text if isinstance(choice, TextChoice) else choice.message.text
        end = self.options.think_end_token
        if str(end).isdigit():
            end = self.tokenizer.decode([int(str(end))])
        ended = str(postprocess_generated_text(text, stops, end))
        return ended, choice.finish_reason == "length"

    def _likelihood(self, tokens: Sequence[int], begin: int, choice: TextChoice) -> Likelihood:
        pieces = None
        if not self.tokenized_requests:
            pieces = [self.tokenizer.decode([token]) for token in tokens]
        scores = PromptScores.of(choice.logprobs, len(tokens), pieces)
        likelihood = None if scores is None else scores.likelihood(begin)
        if likelihood is not None:
            return likelihood
        raise CompressionError(
            f"task {self.task!r} takes log-probabilities of the {len(tokens)} tokens of a prompt, "
            f"and {self.server.label} gives others: it hides the token that opens a text, cuts "
            "long prompts, or has another tokenizer; name another task, or serve the model by vLLM"
        )

    def _answers(self, questions: Sequence[ServedQuestion], are_items: bool = True) -> list[Any]:
        """Return the answer to each question, from the journal or the server."""
        answers = dict(self.journal.read())

        def ask(question: ServedQuestion) -> tuple[str, Any]:
            key, payload, read = question
            if key in answers:
                return key, answers[key]
            return key, read(self.server.complete(payload))

        for key, answer in self.server.all(questions, ask, self.at_once):
            if key not in answers:
                answers[key] = answer
                self.journal.add((key, answer))
            if are_items:
                self.answered.advance("")
        return [answers[key] for key, *_ in questions]


@contextmanager
def lm_eval_model(
    source: ModelSource,
    options: EvaluationOptions,
    streamed: bool = False,
    server: Server | None = None,
    journal: Path | None = None,
) -> Iterator[Any]:
    """Open the model that answers lm-eval: a checkpoint, streamed or in memory, or a server's.

    A checkpoint is freed afterwards; the `journal` keeps a server's answers until all tasks have
    results. Raises `CompressionError` for a tokenizer that transformers makes up, which lm-eval
    would not refuse."""
    templates = templates_of(load_tokenizer(source.folder))
    name = options.apply_chat_template
    # lm-eval itself takes a template's name and renders the default one
    chosen = (
        {"chat_template": templates[name]} if isinstance(name, str) and name in templates else {}
    )
    chosen |= dated_template(templates, str(name) if chosen else "default")
    if server is not None and journal is not None:
        yield ServedModel(server, source, options, Journal(journal, LINE), chosen)
        journal.unlink(missing_ok=True)
        return
    chat: dict[str, Any] = {
        "enable_thinking": options.enable_thinking,
        "think_end_token": options.think_end_token,
        "chat_template_args": chosen,
    }
    device = pick_device(options.device)
    if streamed:
        opened = open_model(source, options.dtype, options.device)
        rows = CPU_BATCH if device.type == "cpu" else GPU_BATCH
        if isinstance(options.batch_size, int):
            rows = options.batch_size
        try:
            yield StreamedModel(opened, rows, **chat)
        finally:
            opened.partial.release("")
            free(device)
        return
    model = WatchedModel(
        pretrained=str(source.folder.resolve()),  # an absolute path is never asked for on the Hub
        device=str(device),
        dtype=options.dtype,
        batch_size=options.batch_size,
        # sums in bfloat16 would round a perplexity by more than a compression costs
        softmax_dtype="float32",
        **chat,
    )
    try:
        if torch.device(model.device).type != device.type:
            raise CompressionError(
                f"lm-eval cannot use device {options.device!r}; pass --device cpu or cuda"
            )
        yield model
    finally:
        model._model = None
        del model
        free(device)
