"""lm-eval's model of a completions API, with requests of our own: several at once, and each answer kept as it comes.

A run that a server's timeout ended goes on from what it has been answered. Importing this module imports lm-eval.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.openai_completions import LocalCompletionsAPI
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from pydantic import FiniteFloat, TypeAdapter

from compressor.errors import CompressionError
from compressor.evaluation.generate import read_facts
from compressor.evaluation.model import Watched
from compressor.evaluation.server import AT_ONCE, PromptScores, Server
from compressor.evaluation.server_client import Completion
from compressor.evaluation.tasks import WRITTEN, EvaluationOptions
from compressor.files import wrap_full_disk
from compressor.model.tokenizer import load_tokenizer

POSITIONS = 2048  # of a model that doesn't say how many it was made for
LINE = TypeAdapter(tuple[str, str | tuple[FiniteFloat, bool]])  # a digest, and the text or the log-likelihood
Question = tuple[str, Mapping[str, Any], Callable[[Completion], Any]]  # its key, payload, and how to read it


class ServedModel(Watched, LocalCompletionsAPI):
    """A served model whose log-likelihoods are those of its own tokens, and texts as the server ends them."""

    def __init__(self, server: Server, folder: Path, options: EvaluationOptions, kept: Path) -> None:
        TemplateLM.__init__(self)  # an API's own asks for packages that its own requests take
        self.server, self.kept = server, kept
        self.tokenizer = load_tokenizer(folder)
        self.tokenizer_backend, self.tokenized_requests = "huggingface", server.scored == "tokens"
        positions = read_facts(folder).positions or POSITIONS
        self.max_length = min(positions, server.max_length or positions) - 1  # one token is always written
        self.model, self._seed, self._max_gen_toks = server.model, options.seed, 256
        self.add_bos_token, self.custom_prefix_token_id, self._eos_string = False, None, None
        self._batch_size = 1
        self.at_once = options.batch_size if isinstance(options.batch_size, int) else AT_ONCE

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """The answers to requests, each a key of the cache, a context's tokens and a continuation's."""
        inputs, contexts, keys = self.batch_loglikelihood_requests([requests])
        questions = []
        for tokens, begin in zip(inputs, contexts, strict=True):
            payload = self._create_payload(self._prompt(tokens), seed=self._seed)
            read = partial(self._likelihood, tokens, max(1, begin))
            questions.append((_digest(payload, begin), payload, read))
        return [(float(value), bool(greedy)) for value, greedy in self._answers("loglikelihood", questions, keys)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        self.watcher.start(len(requests))
        questions, keys = [], []
        for context, settings in (request.args for request in requests):
            most = settings.get("max_gen_toks", self._max_gen_toks)
            room = max(1, self.max_length - most)
            prompt = self.tok_encode(context)[-room:] if self.tokenized_requests else context
            settings = copy.deepcopy(settings)
            payload = self._create_payload(
                self._prompt(prompt), generate=True, gen_kwargs=settings, seed=self._seed, eos=self.eos_string
            )
            payload |= self.server.plain
            questions.append((_digest(payload), payload, lambda response: response.choices[0].text))
            keys.append((context, settings))
        return self._answers(WRITTEN, questions, keys)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihoods of whole texts, of which all windows are asked together."""
        self.watcher.start(len(requests))
        texts = (self.tok_encode(text) for (text,) in (request.args for request in requests))
        # the token before a text, the tokens of a window, and of the context of each
        cuts = (get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length - 1, 1) for tokens in texts)
        windows = [list(map(make_disjoint_window, own)) for own in cuts]
        every = iter(self._loglikelihood_tokens([(None, *window) for own in windows for window in own]))
        found = [sum(next(every)[0] for _ in own) for own in windows]
        for request, value in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return found

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

    def _answers(self, kind: str, questions: Sequence[Question], keys: Sequence[Any]) -> list[Any]:
        """The answer to each question, which is kept under its key; the same one is asked once."""
        known = dict(_lines(self.kept))
        places: dict[str, list[int]] = {}
        for number, (key, _, _) in enumerate(questions):
            places.setdefault(key, []).append(number)

        def seen(key: str) -> None:
            for number in places[key]:
                if keys[number] is not None:  # windows of a longer text are watched as one
                    self.cache_hook.add_partial(kind, keys[number], known[key])

        for key in known.keys() & places.keys():
            seen(key)
        missing = [questions[numbers[0]] for key, numbers in places.items() if key not in known]
        ask = partial(self.server.ask, "/completions", Completion)
        asking = self.server.all(missing, lambda question: ask(question[1]), self.at_once)
        with wrap_full_disk(self.kept.parent):
            self.kept.parent.mkdir(parents=True, exist_ok=True)
            with self.kept.open("a", encoding="utf-8") as stream:
                for (key, _, read), response in asking:
                    known[key] = read(response)
                    stream.write(f"\n{json.dumps([key, known[key]])}")
                    stream.flush()
                    seen(key)
        return [known[key] for key, _, _ in questions]


@contextmanager
def served_model(server: Server, folder: Path, options: EvaluationOptions, journal: Path) -> Iterator[ServedModel]:
    """A served model, whose answers the file `journal` keeps until all tasks have their results."""
    yield ServedModel(server, folder, options, journal)
    journal.unlink(missing_ok=True)


def _digest(*asked: Any) -> str:
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()


def _lines(kept: Path) -> Iterator[tuple[str, Any]]:
    with suppress(OSError), kept.open("rb") as stream:
        for line in stream:
            with suppress(ValueError):  # a line that was cut off
                yield LINE.validate_json(line)
