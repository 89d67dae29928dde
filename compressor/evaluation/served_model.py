"""lm-eval's model of a completions API, with requests of our own: several at once, and each answer kept as it comes.

A run that a server's timeout ended goes on from what it has been answered. Importing this module imports lm-eval.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from pydantic import FiniteFloat, TypeAdapter

from compressor.errors import CompressionError
from compressor.evaluation.generate import read_facts
from compressor.evaluation.journal import Journal
from compressor.evaluation.model import Watched
from compressor.evaluation.server import AT_ONCE, PromptScores, Server
from compressor.evaluation.server_client import Completion
from compressor.evaluation.tasks import EvaluationOptions
from compressor.model.tokenizer import load_tokenizer

POSITIONS = 2048  # of a model that doesn't say how many it was made for
LINE = TypeAdapter(tuple[str, str | tuple[FiniteFloat, bool]])  # a digest, and the text or the log-likelihood


@dataclass(frozen=True, slots=True)
class Question:
    """A request, and how its answer is read; `item` is lm-eval's key of it, None for a window of a longer text."""

    key: str  # of the journal
    payload: Mapping[str, Any]
    read: Callable[[Completion], Any]
    item: Any


class ServedModel(Watched, LocalCompletionsAPI):
    """A served model whose log-likelihoods are those of its own tokens, and texts as the server ends them."""

    def __init__(self, server: Server, folder: Path, options: EvaluationOptions, journal: Journal) -> None:
        TemplateLM.__init__(self)  # an API's own asks for packages that its own requests take
        self.server = server
        self.journal = journal
        self.tokenizer = load_tokenizer(folder)
        self.tokenizer_backend = "huggingface"
        self.tokenized_requests = server.scored == "tokens"
        positions = read_facts(folder).positions or POSITIONS
        self.max_length = min(positions, server.max_length or positions) - 1  # one token is always written
        self.model = server.model
        self._seed = options.seed
        self._max_gen_toks = 256
        self.add_bos_token = False
        self.custom_prefix_token_id = None
        self._eos_string = None
        self._batch_size = 1
        self.at_once = options.batch_size if isinstance(options.batch_size, int) else AT_ONCE

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """The answers to requests, each a key of the cache, a context's tokens and a continuation's."""
        inputs, contexts, items = self.batch_loglikelihood_requests([requests])
        questions = []
        for tokens, begin, item in zip(inputs, contexts, items, strict=True):
            payload = self._create_payload(self._prompt(tokens), seed=self._seed)
            read = partial(self._likelihood, tokens, max(1, begin))
            questions.append(Question(_digest(payload, begin), payload, read, item))
        return [(float(value), bool(greedy)) for value, greedy in self._answers("loglikelihood", questions)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        self.watcher.start(len(requests))
        questions = []
        for context, settings in (request.args for request in requests):
            room = max(1, self.max_length - settings.get("max_gen_toks", self._max_gen_toks))
            prompt = self.tok_encode(context)[-room:] if self.tokenized_requests else context
            settings = copy.deepcopy(settings)
            payload = self._create_payload(
                self._prompt(prompt), generate=True, gen_kwargs=settings, seed=self._seed, eos=self.eos_string
            )
            payload |= self.server.plain
            item = (context, settings)
            questions.append(Question(_digest(payload), payload, lambda response: response.choices[0].text, item))
        return self._answers("generate_until", questions)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihoods of whole texts, of which all windows are asked together."""
        self.watcher.start(len(requests))
        windows = list[Any]()
        counts = list[int]()
        for (text,) in (request.args for request in requests):
            # the token before a text, the tokens of a window, and of the context of each
            cuts = get_rolling_token_windows(self.tok_encode(text), self.prefix_token_id, self.max_length - 1, 1)
            of_text = [(None, *make_disjoint_window(cut)) for cut in cuts]
            windows += of_text
            counts.append(len(of_text))
        likelihoods = iter([value for value, _ in self._loglikelihood_tokens(windows)])
        sums = [sum(islice(likelihoods, count)) for count in counts]
        for request, value in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return sums

    def _prompt(self, prompt: Any) -> Any:
        """Token ids as they are where the server takes them, or else text."""
        return prompt if self.tokenized_requests or isinstance(prompt, str) else self.tokenizer.decode(prompt)

    def _likelihood(self, tokens: Sequence[int], begin: int, response: Completion) -> tuple[float, bool]:
        pieces = None if self.tokenized_requests else [self.tokenizer.decode([token]) for token in tokens]
        scores = PromptScores.of(response.choices[0].logprobs, len(tokens), pieces)
        likelihood = None if scores is None else scores.likelihood(begin)
        if likelihood is not None:
            return likelihood
        raise CompressionError(
            f"task {self.watcher.task!r} takes log-probabilities of the {len(tokens)} tokens of a prompt, and "
            f"{self.server.label} gives others: it hides the token that opens a text, cuts long prompts, or has "
            "another tokenizer; name another task, or serve the model by vLLM"
        )

    def _answers(self, kind: str, questions: Sequence[Question]) -> list[Any]:
        """The answer to each question, which the journal keeps under its key."""
        known = dict(self.journal.read())

        def ask(question: Question) -> tuple[Question, Any]:
            if question.key in known:
                return question, known[question.key]
            return question, question.read(self.server.ask("/completions", Completion, question.payload))

        for question, answer in self.server.all(questions, ask, self.at_once):
            if question.key not in known:
                known[question.key] = answer
                self.journal.add((question.key, answer))
            if question.item is not None:
                self.cache_hook.add_partial(kind, question.item, answer)
        return [known[question.key] for question in questions]


@contextmanager
def served_model(server: Server, folder: Path, options: EvaluationOptions, journal: Path) -> Iterator[ServedModel]:
    """A served model, whose answers the file `journal` keeps until all tasks have their results."""
    yield ServedModel(server, folder, options, Journal(journal, LINE))
    journal.unlink(missing_ok=True)


def _digest(*asked: Any) -> str:
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()
