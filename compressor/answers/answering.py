"""Models that answer, by one interface wherever they run: they write texts, and score given ones.

A file each implements it: `stock.py` in memory, `streamed.py` a layer at a time, `server.py`,
`onnx.py`; `models.py` picks one. Everybody who asks a model asks it by these methods."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter

from compressor.answers.journal import Journal, keep
from compressor.answers.options import GenerationOptions
from compressor.answers.prompts import Prompt
from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.model.tokenizer import load_tokenizer, templates_of
from compressor.progress import Progress
from compressor.prompt_date import date_facts
from compressor.records import Json, read_object
from compressor.run_record import request_key

Request: TypeAlias = tuple[Prompt, int]  # and the seed that its answer is drawn with
Scoring: TypeAlias = tuple[Sequence[int], Sequence[int]]  # tokens of a context, of what follows
# log-likelihood of what follows in nats, and whether every token of it is the argmax
Likelihood: TypeAlias = tuple[float, bool]
POSITIONS = 2048  # of a model that doesn't say how many it was made for
Ended = Literal["end", "length"]  # by an end token, or since no more tokens were allowed


@frozen
class Answer:
    """One answer: its tokens with the end token, if there is one, and their text without it."""

    prompt: str  # the prompt's id
    seed: int
    tokens: tuple[int, ...]  # [S]; empty where they are not told
    text: str  # special tokens are shown
    ended: Ended


@frozen
class TaskWriting:
    """How answers to the items of one of lm-eval's tasks are written: by lm-eval's own rules."""

    task: str
    # of each request: limits, sampling and texts that end its answer, by lm-eval's names
    settings: Sequence[Json]
    seed: int = 0
    enable_thinking: bool | None = None


Writing: TypeAlias = GenerationOptions | TaskWriting


@frozen
class ModelFacts:
    """Facts on generation from the JSON files beside the weights."""

    stops: frozenset[int]  # tokens that end a text
    positions: int | None  # that the model was made for


class Model(ABC):
    """A model that answers; what it does not override it cannot do."""

    source: ModelSource  # of its tokenizer, at least
    opens_texts = True  # the tokenizer's special tokens open what is scored

    @property
    @abstractmethod
    def facts(self) -> Json:
        """All that decides its answers."""

    @property
    def label(self) -> str:
        return self.source.label

    @property
    def max_length(self) -> int:
        """Tokens that are read to score others."""
        return self.opened()[1].positions or POSITIONS

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Hold the model as tasks are asked of it, until the block ends."""
        yield

    def opened(self) -> tuple[Any, ModelFacts]:
        """Return the tokenizer, and facts on generation."""
        tokenizer = load_tokenizer(self.source.folder)
        return tokenizer, read_facts(self.source.folder, tokenizer)

    def complete(
        self, requests: Sequence[Request], options: Writing, progress: Progress
    ) -> Iterator[tuple[int, Answer]]:
        """Write what follows prompts: yield each answer when it's there, after its request's
        number."""
        raise CompressionError(f"{self.label} does not write; name another model")

    def score(
        self,
        requests: Sequence[Scoring],
        task: str,
        progress: Progress,
        rolling: bool = False,
    ) -> Iterator[tuple[int, Likelihood]]:
        """Score what follows contexts, for a task: yield each likelihood when it's there, after its
        request's number.

        `rolling` requests are windows of longer texts."""
        raise CompressionError(f"{self.label} does not score texts; name another model")

    def unsound(self, what: str, task: str) -> CompressionError:
        """Return the error for an answer that is no finite number."""
        return CompressionError(
            f"{self.label} gives {what} on task {task!r}, so its results mean nothing; check its "
            "weights, or pass --dtype float32 if they are sound"
        )


def read_facts(folder: Path, tokenizer: Any = None) -> ModelFacts:
    """Read end tokens of the generation config or else the config, and positions of the config or
    its part for text.

    With a `tokenizer` its own end token counts, too, as it does for servers.
    """

    def first(name: str, *nodes: Json) -> Any:
        return next((node[name] for node in nodes if node.get(name) is not None), None)

    written, config = (
        read_object(folder / name) if (folder / name).is_file() else {}
        for name in ("generation_config.json", "config.json")
    )
    nodes = [config, config.get("text_config") or {}]
    stops = first("eos_token_id", written, *nodes)
    if not isinstance(stops, list):
        stops = [] if stops is None else [stops]
    if not all(isinstance(stop, int) for stop in stops):
        raise CompressionError(
            f"{folder}: eos_token_id {stops!r} is no token id and no list of them; correct it"
        )
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        stops = [*stops, int(tokenizer.eos_token_id)]
    positions = first("max_position_embeddings", *nodes)
    return ModelFacts(frozenset(stops), positions if isinstance(positions, int) else None)


def answer_of(
    request: Request,
    before: Sequence[int],
    tokens: Sequence[int],
    stops: frozenset[int],
    tokenizer: Any,
    chat: bool,
) -> Answer:
    """Return an answer of these tokens, written after those of the prompt."""
    prompt, seed = request
    shown = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    # some decoders drop the space that opens a text: what is continued is decoded with its start
    opening = () if prompt.messages or chat else before
    ended: Ended = "end" if tokens[-1] in stops else "length"
    of_text = tokens[:-1] if ended == "end" else tokens
    text = tokenizer.decode([*opening, *of_text], **shown)
    text = text[len(tokenizer.decode(opening, **shown)) :]
    return Answer(prompt.id, seed, tuple(tokens), text, ended)


def seed_of(request: Request) -> int:
    """Return the seed that an answer is drawn with; each prompt has its own."""
    return int(hashlib.sha256(f"{request[0].id} {request[1]}".encode()).hexdigest()[:15], 16)


def journal_of(model: Model, options: GenerationOptions, folder: Path) -> Journal:
    """Return the journal of a model's answers in a folder: one for each model, options, and date in
    prompts."""
    facts = options.facts("max_new_tokens", "temperature", "top_p", "top_k", "chat")
    dates = date_facts(templates_of(load_tokenizer(model.source.folder)))
    name = "-".join(["answers", request_key(model.facts, facts)[:32], *dates.values()])
    return Journal(folder / f"{name}.jsonl", TypeAdapter(tuple[str, Answer]))


def answer_all(
    model: Model,
    requests: Sequence[Request],
    options: GenerationOptions,
    folder: Path,
    progress: Progress,
) -> list[Answer]:
    """Return the answers in the order of the requests; those in the folder's journal are not asked
    again."""

    def ask(missing: Sequence[int]) -> Iterator[tuple[int, Answer]]:
        return model.complete([requests[number] for number in missing], options, progress)

    keys = [f"{prompt.id} {seed}" for prompt, seed in requests]
    return keep(journal_of(model, options, folder), keys, ask)
