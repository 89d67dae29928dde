"""The stock model's logits on everything that an ONNX graph is verified on: many shapes, chunks,
padding, decoding.

They come first, one decoder layer in memory at a time, so that model and graph need not be in
memory together."""

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, replace
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.model.loading import PartialModel
from compressor.model.moe_layer import decoder_layer_of
from compressor.model.opened import OpenModel
from compressor.model.streaming import Forward, LayerVisitor, Pass
from compressor.progress import Progress

TRACED = (2, 3)  # batch and sequence of the example that a graph is traced with
SHAPES = (TRACED, (1, 1), (1, 7), (3, 5), (2, 33), (4, 16), (1, 300))  # with an empty past
CHUNKS = (1, 9, 1, 14)  # of 25 tokens, two sequences: prefill, chunks and single tokens in turn
PADDING = (0, 3, 6)  # tokens of padding on the left of three sequences of 12 places
PADDED_LENGTH = 12
PROMPT = 8
CONTINUED = "token by token"  # the case of a text of which the argmax tokens are compared, too
DRAWS = 3  # of nudges of every case, by one unit in the last place
TIE_DRAWS = 5  # and of wider ones, of which half break a router's near tie in another way
WIDE = 64  # units
NUDGED_NAME = "nudged"
PROMPT_SEED = 13
TEXT_SEED = 15
NUDGE_SEED = 16


@frozen
class Case:
    """Some tokens [B, S] with their mask [B, S], cut into chunks, and once observed the stock
    model's logits."""

    name: str
    tokens: Tensor
    mask: Tensor
    chunks: tuple[int, ...]
    logits: Tensor = field(default_factory=lambda: torch.empty(0))  # [B, S, V]
    # how far wide nudges move a logit of each token that is no padding at most: [T], or [1] for all
    moved: Tensor = field(default_factory=lambda: torch.zeros(1))

    @property
    def real(self) -> Tensor:
        """Logits [T, V] of the tokens that are no padding."""
        return self.logits[self.mask.bool()]


@frozen
class Reference:
    """The stock model's answers."""

    model: str
    cases: tuple[Case, ...]
    # how far a logit moves at most if every layer's input does by one unit in its last place
    sensitivity: float = 0.0


def random_tokens(config: Any, rows: int, length: int, seed: int) -> Tensor:
    """Ordinary token ids [rows, length], the same ones for the same seed; none to which the config
    gives a meaning: padding, images and so on."""
    text = config.get_text_config(decoder=True)
    special = set[Any]()
    for name, value in (*vars(config).items(), *vars(text).items()):
        if name.endswith(("_token_id", "_token_index")):
            special.update(value if isinstance(value, list | tuple) else [value])
    vocabulary = getattr(text, "unpadded_vocab_size", None) or text.vocab_size
    ordinary = torch.tensor(sorted(set(range(vocabulary)) - special))
    generator = torch.Generator().manual_seed(seed)
    return ordinary[torch.randint(len(ordinary), (rows, length), generator=generator)]


def model_inputs(
    model: Any, tokens: Tensor, past: int = 0, mask: Tensor | None = None
) -> dict[str, Tensor]:
    """Tokens [B, S] after `past` others with mask [B, past + S] and positions, as far as the model
    takes them."""
    rows, length = tokens.shape
    mask = torch.ones(rows, past + length, dtype=torch.long) if mask is None else mask
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, past:].contiguous()
    inputs = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
    taken = inspect.signature(type(model).forward).parameters
    return {name: value for name, value in inputs.items() if name in taken}


def questions(model: Any, past: bool, tokens: int) -> tuple[Case, ...]:
    """Return all cases that stock model and graph compute; for a model that generates, also
    `tokens` after a prompt.

    With `past` some come in chunks, with the cache of one handed to the next.
    """
    config = model.config
    cases = []
    text_config = config.get_text_config(decoder=True)
    longest = getattr(text_config, "max_position_embeddings", None) or 10**9
    rotation = getattr(text_config, "rope_parameters", None) or {}
    turn = None
    if rotation.get("rope_type") == "longrope":
        turn = rotation.get("original_max_position_embeddings")

    def ask(
        name: str, tokens: Tensor, chunks: tuple[int, ...] = (), mask: Tensor | None = None
    ) -> None:
        mask = torch.ones_like(tokens) if mask is None else mask
        if turn and chunks and chunks[0] <= turn < tokens.shape[1]:
            # keys in the cache keep the rotations for short texts, those of the whole text don't
            chunks = ()
        cases.append(Case(name, tokens, mask, chunks or (tokens.shape[1],)))

    for number, (rows, wanted) in enumerate(SHAPES):
        # 300 is beyond the chunks of recurrent layers, whose loop a trace may unroll
        length = min(wanted, longest)
        ask(f"prefill {rows} x {length}", random_tokens(config, rows, length, number))
    mask = (torch.arange(PADDED_LENGTH) >= torch.tensor(PADDING)[:, None]).long()
    ask("left padding", random_tokens(config, len(PADDING), PADDED_LENGTH, 11), mask=mask)
    if past:
        ask("chunked prefill", random_tokens(config, 2, sum(CHUNKS), 12), CHUNKS)
        drawn = random_tokens(config, len(PADDING), PADDED_LENGTH, 14)
        ask("left padding, cached decode", drawn, (PADDED_LENGTH - 4, 1, 1, 1, 1), mask)
    count = min(tokens, longest - PROMPT)
    if model.can_generate() and count > 0:
        prompt = random_tokens(config, 1, PROMPT, PROMPT_SEED)
        text = random_tokens(config, 1, count - 1, TEXT_SEED)
        chunks = (PROMPT, *[1] * (count - 1)) if past else ()
        ask(CONTINUED, torch.cat((prompt, text), dim=1), chunks)
    return tuple(cases)


def nudge(hidden_states: Tensor, draw: int = 0) -> Tensor:
    """A layer's input with each value moved to a neighbouring one, up or down by a fixed draw; from
    the draw `DRAWS` on by `WIDE` units in the last place."""
    generator = torch.Generator().manual_seed(NUDGE_SEED + draw)
    up = torch.rand(hidden_states.shape, generator=generator) < 0.5
    if draw >= DRAWS:
        step = WIDE * torch.finfo(hidden_states.dtype).eps
        return hidden_states * torch.where(up, 1 + step, 1 - step).to(hidden_states)
    return hidden_states.nextafter(torch.where(up, torch.inf, -torch.inf))


Shown = Callable[[PartialModel, str], None]


class _WidenedModel(PartialModel):
    """A model whose tensors outside the layers are brought into float32 as they are loaded."""

    decoder_layers: tuple[str, ...] = ()

    def load(self, keys: Iterable[str]) -> None:
        """Fill these entries; those of a layer keep their dtype, for they are still to be
        written."""
        wanted = list(keys)
        super().load(wanted)
        widen(self.model, (key for key in wanted if not decoder_layer_of(key, self.decoder_layers)))


def widen(model: Any, keys: Iterable[str]) -> None:
    """Bring tensors of a model into float32, in place; those of whole numbers stay."""
    for key in keys:
        value = model.get_parameter_or_buffer(key)
        if value.is_floating_point():
            value.data = value.data.float()


class _Observer(LayerVisitor):
    """Gives each batch its mask and positions, shows every loaded layer, and keeps the logits in
    the cases."""

    repeatable = True

    def __init__(self, partial: PartialModel, cases: Sequence[Case], shown: Shown | None) -> None:
        self.partial = partial
        self.count = len(cases)
        nudged = [replace(case, name=NUDGED_NAME) for case in cases]
        self.cases = [*cases, *(DRAWS + TIE_DRAWS) * nudged]
        self.shown = shown

    def arguments(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        case = self.cases[self.at.batch]
        return args, kwargs | model_inputs(model, case.tokens, 0, case.mask)

    def wrap_forward(self, decoder_layer: str, layer_forward: Forward) -> Forward:
        """The layer's own forward, of nudged values for the nudged batches."""
        batch = self.at.batch
        if self.cases[batch].name != NUDGED_NAME:
            return layer_forward
        return lambda hidden_states, *args, **kwargs: layer_forward(
            nudge(hidden_states, batch // self.count - 1), *args, **kwargs
        )

    def on_layer_loaded(self, decoder_layer: str) -> None:
        if self.shown is not None:
            self.shown(self.partial, decoder_layer)
        widen(self.partial.model, self.partial.keys_under(decoder_layer))

    def on_batch_end(self, batch: int, output: Any) -> None:
        case = self.cases[batch]
        if output.logits.shape[:2] != case.tokens.shape:
            name = type(self.partial.model).__name__
            raise CompressionError(
                f"{name} cannot be exported: it does not give one row of logits for each token"
            )
        self.cases[batch] = replace(case, logits=output.logits.float().clone())


def observe(
    opened: OpenModel, past: bool, tokens: int, progress: Progress, shown: Shown | None = None
) -> Reference:
    """Compute all logits that a graph of this model is compared with, in float32.

    Every layer is `shown` when it is loaded, in its own dtype, before anything passes it.
    """
    inner = opened.partial
    partial = _WidenedModel(inner.checkpoint, inner.config, inner.dtype, inner.device)
    partial.decoder_layers = opened.architecture.decoder_layers
    buffers = partial.model.named_buffers()
    widen(partial.model, [name for name, value in buffers if value.device.type != "meta"])
    cases = questions(partial.model, past, tokens)
    visitor = _Observer(partial, cases, shown)
    batches = [case.tokens for case in visitor.cases]
    phase = "the stock model, layer by layer"
    with partial.model.register_forward_pre_hook(visitor.arguments, with_kwargs=True):
        Pass(replace(opened, partial=partial), batches, progress, phase, to_end=True).run(visitor)
    answered = visitor.cases[: len(cases)]
    changes = [0.0]
    for place, moved in enumerate(visitor.cases[len(cases) :]):
        draw, number = divmod(place, len(cases))
        case = answered[number]
        by_token = (case.real - moved.real).abs().amax(-1)
        if draw < DRAWS:
            changes.append(float(by_token.max()))
        else:
            answered[number] = replace(case, moved=torch.maximum(case.moved, by_token))
    sensitivity = max(filter(math.isfinite, changes))
    return Reference(type(partial.model).__name__, tuple(answered), sensitivity)
