"""Continues a prompt with a model on disk, token by token: one loop, whatever computes the logits."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from compressor.checkpoint.reader import INDEX_NAME, MODEL_NAME, PICKLE_PATTERNS, SINGLE_NAME
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError, faults_told
from compressor.generation.decoders import onnx_decoder, stock_decoder
from compressor.generation.sampling import Choose, GenerationOptions, chooser
from compressor.generation.text import TextStream, encode_prompt
from compressor.model.tokenizer import load_tokenizer
from compressor.progress import Progress
from compressor.records import read_object

logger = logging.getLogger(__name__)

Decoder = Callable[[Sequence[int]], Tensor]  # token ids it has not seen, [S] -> logits of the token after them, [V]
Stopped = Literal["end", "length", "interrupted"]  # an end token came, enough tokens came, or nobody asked for more
DEFAULTS = GenerationOptions()
REMEDIES = ("pass --device cpu, or a shorter prompt", "see whether its own library alone can do it")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the JSON files beside the weights say; None where they say nothing."""

    stops: frozenset[int]  # tokens that end a text
    vocabulary: int | None
    positions: int | None  # that the model was made for


@dataclass(slots=True)
class Continuation:
    """A prompt being continued: iterating gives pieces of text, and fills in the rest."""

    decoder: Decoder
    choose: Choose
    stops: frozenset[int]
    most: int
    prompt: tuple[int, ...]  # [S]
    stream: TextStream
    tokens: list[int] = field(default_factory=list)  # chosen so far, an end token included
    stopped: Stopped = "interrupted"
    first_seconds: float | None = None  # from the start to the first token
    seconds: float = 0.0  # from the start to the last token

    def __iter__(self) -> Iterator[str]:
        start = time.perf_counter()
        for token in continue_tokens(self.decoder, self.prompt, self.choose, self.stops, self.most):
            self.tokens.append(token)
            self.seconds = time.perf_counter() - start
            self.first_seconds = self.first_seconds or self.seconds
            if token not in self.stops and (piece := self.stream.push(token)):
                yield piece
        self.stopped = "end" if self.tokens[-1] in self.stops else "length"
        if rest := self.stream.finish():
            yield rest

    @property
    def tokens_per_second(self) -> float | None:
        """Rate of all tokens after the first; None if there are none."""
        if self.first_seconds is None or self.seconds <= self.first_seconds:
            return None
        return (len(self.tokens) - 1) / (self.seconds - self.first_seconds)


def prepare(
    model: str, prompt: str, options: GenerationOptions = DEFAULTS, progress: Progress | None = None
) -> Continuation:
    """Read the prompt and load the model, the weights last; every fault is a `CompressionError`."""
    folder = locate(model, options.revision, progress, weights="any").folder
    open_decoder = _opener(folder)
    facts, tokenizer = read_facts(folder), load_tokenizer(folder)
    ids = encode_prompt(tokenizer, prompt, options.chat)
    check_tokens(ids, facts)
    own = tokenizer.eos_token_id
    stops = facts.stops or frozenset(() if own is None else (int(own),))
    before = () if options.chat else ids  # an answer opens a text of its own
    told = faults_told(f"{folder} cannot be run", *REMEDIES)
    decoder = told(told(open_decoder)(folder, options.device, options.dtype))  # the opening and each call
    warn_of_length(len(ids), options.max_new_tokens, facts)
    return Continuation(decoder, chooser(options), stops, options.max_new_tokens, ids, TextStream(tokenizer, before))


def continue_tokens(
    decoder: Decoder, prompt: Sequence[int], choose: Choose, stops: frozenset[int], most: int
) -> Iterator[int]:
    """Tokens that follow the prompt [S]: at most so many, and none after an end token, which is the last one then."""
    fresh = tuple(prompt)
    for _ in range(most):
        token = choose(decoder(fresh))
        yield token
        if token in stops:
            return
        fresh = (token,)


def _opener(folder: Path) -> Callable[[Path, str, str], Decoder]:
    """How the folder's model is opened; of both kinds of weights, safetensors are the original."""
    if (folder / MODEL_NAME).is_file() and not any((folder / name).is_file() for name in (SINGLE_NAME, INDEX_NAME)):
        return onnx_decoder
    if any(True for pattern in ("*.safetensors", INDEX_NAME, *PICKLE_PATTERNS) for _ in folder.glob(pattern)):
        return stock_decoder  # whose errors tell what is wrong with them
    raise CompressionError(
        f"{folder} has neither {SINGLE_NAME} nor {MODEL_NAME}; name the folder of a safetensors checkpoint or of "
        "an ONNX export"
    )


def read_facts(folder: Path) -> ModelFacts:
    """End tokens of the generation config, else of the config; sizes of the config, or of its part for text."""
    paths = (folder / "generation_config.json", folder / "config.json")
    generation, config = (read_object(path) if path.is_file() else {} for path in paths)
    nodes = [config, *(part for part in (config.get("text_config"),) if isinstance(part, dict))]
    stops = _first([generation, *nodes], "eos_token_id")
    stops = [] if stops is None else stops if isinstance(stops, list) else [stops]
    if not all(isinstance(stop, int) for stop in stops):
        raise CompressionError(f"{folder}: eos_token_id {stops!r} is no token id and no list of them; correct it")
    sizes = (_first(nodes, name) for name in ("vocab_size", "max_position_embeddings"))
    return ModelFacts(frozenset(stops), *(size if isinstance(size, int) else None for size in sizes))


def _first(nodes: Sequence[Mapping[str, Any]], name: str) -> Any:
    return next((node[name] for node in nodes if node.get(name) is not None), None)


def check_tokens(ids: Sequence[int], facts: ModelFacts) -> None:
    """Refuse tokens that the model does not know."""
    if facts.vocabulary is not None and max(ids) >= facts.vocabulary:
        raise CompressionError(
            f"the tokenizer makes token {max(ids)}, the model knows {facts.vocabulary}; they do not belong together"
        )


def warn_of_length(length: int, most: int, facts: ModelFacts) -> None:
    """Warn of a prompt and new tokens that go beyond the positions that the model was made for."""
    if facts.positions is not None and length + most > facts.positions:
        logger.warning(
            "a prompt of %d tokens and up to %d new ones go beyond the %d positions that the model was made for; "
            "what comes after them may be nonsense",
            length,
            most,
            facts.positions,
        )
