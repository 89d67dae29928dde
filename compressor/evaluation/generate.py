"""Continues a prompt with a model on disk, token by token: one loop, whatever computes the logits.

A token is the most probable, or drawn from the softmax that temperature, top-k and top-p leave. Top-p, or nucleus
sampling: Holtzman et al., ICLR 2020, arXiv:1904.09751; top-k: Fan et al., ACL 2018, arXiv:1805.04833.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compressor.checkpoint.reader import INDEX_NAME, MODEL_NAME, PICKLE_PATTERNS, SINGLE_NAME
from compressor.checkpoint.source import locate
from compressor.devices import as_float64
from compressor.errors import CompressionError, reason_of, wrap_faults
from compressor.evaluation.decoders import onnx_decoder, stock_decoder
from compressor.evaluation.options import GenerationOptions
from compressor.model.tokenizer import has_chat_template, load_tokenizer, no_token, render_chat, says_something
from compressor.progress import Progress
from compressor.records import read_object

logger = logging.getLogger(__name__)

Choose = Callable[[Tensor], int]  # [V] logits -> token id
Decoder = Callable[[Sequence[int]], Tensor]  # token ids it has not seen, [S] -> logits of the token after them, [V]
Stopped = Literal["end", "length", "interrupted"]  # an end token came, enough tokens came, or nobody asked for more
DEFAULTS = GenerationOptions()
REMEDIES = ("pass --device cpu, or a shorter prompt", "see whether its own library alone can do it")
UNFINISHED = "\ufffd"  # what a decoder shows for bytes that are no character, or not yet


def probabilities(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None) -> Tensor:
    """Distributions that next tokens are drawn from: [..., V] -> [..., V] in float64, summing to 1.

    Top-k comes first; top-p then takes, of what is left, the fewest of the most probable tokens that hold that share.
    Ties favour lower ids.
    """
    values = as_float64(logits)
    scaled = (values - values.amax(-1, keepdim=True)) / temperature  # the largest is 0: no temperature overflows
    if top_k is None and top_p is None:
        return torch.softmax(scaled, dim=-1)
    order = scaled.argsort(dim=-1, descending=True, stable=True)[..., :top_k]
    ranked = torch.softmax(scaled.gather(-1, order), dim=-1)
    if top_p is not None:
        before = ranked.cumsum(-1) - ranked
        ranked = ranked.where(before < top_p, 0.0)
    return torch.zeros_like(scaled).scatter(-1, order, ranked / ranked.sum(-1, keepdim=True))


def chooser(options: GenerationOptions) -> Choose:
    """The rule that these options ask for; what it draws depends on the seed alone."""
    generator = torch.Generator().manual_seed(options.seed)

    def choose(logits: Tensor) -> int:
        if not bool(logits.max().isfinite()):  # NaN and infinity both come out of a maximum
            raise CompressionError(
                "the model's logits are not finite; try --dtype float32, and check its weights if that does not help"
            )
        if options.temperature == 0:
            return int(logits.argmax())
        drawn = probabilities(logits, options.temperature, options.top_k, options.top_p)
        return int(torch.multinomial(drawn, 1, generator=generator))

    return choose


def encode_prompt(tokenizer: Any, prompt: str, chat: bool) -> tuple[int, ...]:
    """Token ids of the prompt, [S]; of an empty one, the token that opens a text."""
    with wrap_faults("the tokenizer cannot take the prompt", "shorten it", "restore the tokenizer or mend the prompt"):
        encoded = tokenizer(prompt, return_special_tokens_mask=True)
    ids, added = encoded["input_ids"], encoded["special_tokens_mask"]
    if prompt.strip() and not says_something(tokenizer, [x for x, own in zip(ids, added, strict=True) if not own]):
        raise no_token("the prompt")
    if chat:
        if not has_chat_template(tokenizer):
            raise CompressionError(
                "the tokenizer has no chat template; leave out --chat to continue the prompt as it is"
            )
        try:
            text = render_chat(tokenizer, [{"role": "user", "content": prompt}], add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # templates are programs
            fault = f"the tokenizer's chat template fails ({reason_of(error)}); leave out --chat"
            raise CompressionError(fault) from error
        if not ids:
            raise CompressionError("the tokenizer's chat template makes nothing of the prompt; leave out --chat")
    if ids:
        return tuple(map(int, ids))
    if tokenizer.bos_token_id is not None:
        return (int(tokenizer.bos_token_id),)
    raise CompressionError(
        "the prompt is empty, and the tokenizer has no token that opens a text; give some text to go on from"
    )


class TextStream:
    """Turns tokens into text as they come; the pieces joined are the decoded whole, less the text of `before`.

    All tokens are decoded anew each time: some decoders drop the space that opens a text, or judge a run of bytes as
    one. What is out stays, also where such a decoder takes it back.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()) -> None:
        self._tokenizer, self._tokens = tokenizer, list(before)
        self._shown = len(self._decode())  # letters that are out

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def push(self, token: int) -> str:
        """What this token adds to the text; '' while a character is incomplete."""
        self._tokens.append(token)
        return self._show(self._decode().rstrip(UNFINISHED))

    def finish(self) -> str:
        """What was held back; a character that never became whole shows as a mark."""
        return self._show(self._decode())

    def _show(self, text: str) -> str:
        piece = text[self._shown :]
        self._shown += len(piece)
        return piece


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
    # of both kinds of weights, safetensors are the base of the other
    is_onnx = (folder / MODEL_NAME).is_file() and not any(
        (folder / name).is_file() for name in (SINGLE_NAME, INDEX_NAME)
    )
    stored = (path for pattern in ("*.safetensors", INDEX_NAME, *PICKLE_PATTERNS) for path in folder.glob(pattern))
    if not is_onnx and next(stored, None) is None:
        raise CompressionError(
            f"{folder} has neither {SINGLE_NAME} nor {MODEL_NAME}; name the folder of a safetensors checkpoint or of "
            "an ONNX export"
        )
    facts, tokenizer = read_facts(folder), load_tokenizer(folder)
    ids = encode_prompt(tokenizer, prompt, options.chat)
    stops = facts.stops or frozenset(() if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),))
    stream = TextStream(tokenizer, () if options.chat else ids)  # an answer opens a text of its own
    if facts.vocabulary is not None and max(ids) >= facts.vocabulary:
        raise CompressionError(
            f"the tokenizer makes token {max(ids)}, the model knows {facts.vocabulary}; they do not belong together"
        )
    in_a_sentence = wrap_faults(f"{folder} cannot be run", *REMEDIES)
    open_decoder = in_a_sentence(onnx_decoder if is_onnx else stock_decoder)
    decoder = in_a_sentence(open_decoder(folder, options.device, options.dtype))
    most = options.max_new_tokens
    if facts.positions is not None and len(ids) + most > facts.positions:
        text = (
            "a prompt of %d tokens and up to %d new ones go beyond the %d positions that the model was made for; what "
            "comes after them may be nonsense"
        )
        logger.warning(text, len(ids), most, facts.positions)
    return Continuation(decoder, chooser(options), stops, most, ids, stream)


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


def read_facts(folder: Path) -> ModelFacts:
    """End tokens of the generation config, else of the config; sizes of the config, or of its part for text."""
    paths = (folder / "generation_config.json", folder / "config.json")
    generation, config = (read_object(path) if path.is_file() else {} for path in paths)
    text = config.get("text_config")
    nodes = [config, text] if isinstance(text, dict) else [config]

    def first(name: str, *nodes: Mapping[str, Any]) -> Any:
        return next((node[name] for node in nodes if node.get(name) is not None), None)

    stops = first("eos_token_id", generation, *nodes)
    stops = [] if stops is None else stops if isinstance(stops, list) else [stops]
    if not all(isinstance(stop, int) for stop in stops):
        raise CompressionError(f"{folder}: eos_token_id {stops!r} is no token id and no list of them; correct it")
    sizes = (first(name, *nodes) for name in ("vocab_size", "max_position_embeddings"))
    return ModelFacts(frozenset(stops), *(size if isinstance(size, int) else None for size in sizes))
