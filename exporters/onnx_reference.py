"""What the stock model says of everything that an ONNX graph will be asked: many shapes, chunks, padding, decoding.

It is asked first, and what it said is kept, so that model and graph need not be in memory together.
"""

import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressionError

TRACED = (2, 3)  # batch and sequence of the example that a graph is traced with
SHAPES = (TRACED, (1, 1), (1, 7), (3, 5), (2, 33), (4, 16), (1, 300))  # with an empty past
PREFILL = "prefill"
CHUNKS = (1, 9, 1, 14)  # of 25 tokens, two sequences: prefill, chunks and single tokens in turn
PADDING = (0, 3, 6)  # tokens of padding on the left of three sequences of 12 places
PADDED_LENGTH = 12
PROMPT = 8
TOKENS = 64
NUDGED = 4  # of the questions: 2 x 33, enough tokens to meet an unlucky one
NUDGED_NAME = "nudged"
NUDGE_SEED = 16


@dataclass(frozen=True, slots=True)
class Question:
    """Some tokens [B, S] with their mask [B, S], cut into chunks."""

    name: str
    tokens: Tensor
    mask: Tensor
    chunks: tuple[int, ...]

    def answered(self, logits: Tensor) -> "Case":
        """With what the stock model says, [B, S, V]."""
        return Case(self.name, self.tokens, self.mask, self.chunks, logits)


@dataclass(frozen=True, slots=True)
class Case(Question):
    """A question with the stock model's logits [B, S, V]."""

    logits: Tensor


@dataclass(frozen=True, slots=True)
class Reference:
    """What the stock model said: the cases, and one greedy continuation with its logits (none without a cache)."""

    model: str
    cases: tuple[Case, ...]
    prompt: Tensor  # [1, P]
    greedy: Tensor  # [N]
    greedy_logits: Tensor  # [N, V]: what each greedy token was chosen from
    given: Tensor | None = None  # [N] the tokens that followed the prompt, where those are not the greedy ones
    sensitivity: float = 0.0  # how far a logit moves if every layer's input does by one unit in its last place

    @property
    def largest(self) -> float:
        """The largest absolute logit of the real tokens."""
        sizes = [float(case.logits[case.mask.bool()].abs().max()) for case in self.cases]
        return max([*sizes, *(float(row.abs().max()) for row in self.greedy_logits)])

    @property
    def text(self) -> Tensor:
        """The prompt with what followed it, [1, P + N]."""
        return torch.cat([self.prompt, (self.greedy if self.given is None else self.given)[None]], dim=1)


def special_tokens(config: Any) -> frozenset[int]:
    """Token ids that the config gives a meaning: padding, images and so on."""
    fields = (*vars(config).items(), *vars(config.get_text_config(decoder=True)).items())
    named = [value for name, value in fields if name.endswith(("_token_id", "_token_index"))]
    several = (value if isinstance(value, list | tuple) else [value] for value in named)
    return frozenset(value for each in several for value in each if isinstance(value, int))


def random_tokens(config: Any, rows: int, length: int, seed: int) -> Tensor:
    """Ordinary token ids [rows, length], the same ones for the same seed."""
    text = config.get_text_config(decoder=True)
    vocabulary = getattr(text, "unpadded_vocab_size", None) or text.vocab_size
    ordinary = torch.tensor(sorted(set(range(vocabulary)) - special_tokens(config)))
    return ordinary[torch.randint(len(ordinary), (rows, length), generator=torch.Generator().manual_seed(seed))]


def model_inputs(model: Any, tokens: Tensor, past: int = 0, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Tokens [B, S] after `past` others with mask [B, past + S] and positions, as far as the model takes them."""
    rows, length = tokens.shape
    mask = torch.ones(rows, past + length, dtype=torch.long) if mask is None else mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, past:].contiguous()
    found = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    taken = inspect.signature(type(model).forward).parameters
    return {name: value for name, value in found.items() if name in taken}


def per_token(model: Any, tokens: Tensor, logits: Tensor) -> Tensor:
    """A copy of logits [B, S, V] in float32; raises `CompressionError` where they are not those of tokens [B, S]."""
    if logits.shape[:2] != tokens.shape:
        raise CompressionError(
            f"{type(model).__name__} does not give one row of logits for each token; only language models that "
            "do can be exported"
        )
    return logits.float().clone()


@torch.no_grad()
def _case(model: Any, asked: Question) -> Case:
    output = model(**model_inputs(model, asked.tokens, 0, asked.mask), use_cache=False)
    return asked.answered(per_token(model, asked.tokens, output.logits))


@torch.no_grad()
def _greedy(model: Any, prompt: Tensor, count: int, past: bool) -> tuple[Tensor, Tensor]:
    """The stock model's greedy continuation, [N] and [N, V] logits: with its own cache, or from the start each time."""
    tokens, logits, cache, fed = prompt, [], None, 0
    for _ in range(count):
        output = model(**model_inputs(model, tokens[:, fed:], fed), use_cache=past, past_key_values=cache)
        if past:
            cache, fed = output.past_key_values, tokens.shape[1]
        logits.append(output.logits[0, -1].float().clone())
        tokens = torch.cat([tokens, logits[-1].argmax().view(1, 1)], dim=1)
    return tokens[0, prompt.shape[1] :], torch.stack(logits) if logits else torch.zeros(0, 1)


def questions(config: Any, past: bool) -> tuple[Question, ...]:
    """Everything that stock model and graph are asked, but for the continuation of a prompt."""
    longest, found = _longest(config), []
    for number, (rows, wanted) in enumerate(SHAPES):
        length = min(wanted, longest)  # 300 is beyond the chunks of recurrent layers, whose loop a trace may unroll
        drawn = random_tokens(config, rows, length, number)
        found.append(Question(f"{PREFILL} {rows} x {length}", drawn, torch.ones_like(drawn), (length,)))
    drawn = random_tokens(config, len(PADDING), PADDED_LENGTH, 11)
    mask = (torch.arange(PADDED_LENGTH) >= torch.tensor(PADDING)[:, None]).long()
    found.append(Question("left padding", drawn, mask, (PADDED_LENGTH,)))
    if past:
        drawn = random_tokens(config, 2, sum(CHUNKS), 12)
        found.append(Question("chunked prefill", drawn, torch.ones_like(drawn), CHUNKS))
        drawn = random_tokens(config, len(PADDING), PADDED_LENGTH, 14)
        found.append(Question("left padding, cached decode", drawn, mask, (PADDED_LENGTH - 4, 1, 1, 1, 1)))
    return tuple(found)


def prompt_of(config: Any) -> Tensor:
    """The tokens [1, P] of which a continuation is compared."""
    return random_tokens(config, 1, PROMPT, 13)


def continued(model: Any, tokens: int) -> int:
    """How many tokens after the prompt are compared: so many, as far as the model generates and is long enough."""
    return max(0, min(tokens, _longest(model.config) - PROMPT)) if model.can_generate() else 0


def _longest(config: Any) -> int:
    return getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or 10**9


def nudged(question: Question) -> Question:
    """The same question, whose values are to be nudged before every layer."""
    return replace(question, name=NUDGED_NAME)


def nudge(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A layer's arguments with each value of its input moved to a neighbouring float32, up or down by a fixed draw."""
    first, *others = args or (None,)
    key = next(iter(kwargs), "")
    value = first if args else kwargs.get(key)
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return args, kwargs
    up = torch.rand(value.shape, generator=torch.Generator().manual_seed(NUDGE_SEED)) < 0.5
    moved = value.nextafter(torch.where(up, torch.inf, -torch.inf))
    return ((moved, *others), kwargs) if args else (args, kwargs | {key: moved})


@contextmanager
def _nudging(model: Any, units: Sequence[str]) -> Iterator[None]:
    """Have the input of every one of these layers nudged."""
    layers = [model.get_submodule(unit) for unit in units]
    handles = [
        layer.register_forward_pre_hook(lambda _, args, kwargs: nudge(args, kwargs), with_kwargs=True)
        for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def sensitivity_of(plain: Tensor, moved: Tensor) -> float:
    """The largest difference of logits [B, S, V] from those with nudged layers; 0 where it is no number."""
    found = float((plain - moved).abs().max())
    return found if math.isfinite(found) else 0.0


def observe(model: Any, past: bool, tokens: int = TOKENS, units: Sequence[str] = ()) -> Reference:
    """Everything that a graph of this model is compared with; its sensitivity by nudging these decoder layers."""
    asked = questions(model.config, past)
    cases = tuple(_case(model, each) for each in asked)
    with _nudging(model, units):
        moved = _case(model, nudged(asked[NUDGED])).logits if units else cases[NUDGED].logits
    prompt = prompt_of(model.config)
    return Reference(
        type(model).__name__,
        cases,
        prompt,
        *_greedy(model, prompt, continued(model, tokens), past),
        sensitivity=sensitivity_of(cases[NUDGED].logits, moved),
    )
