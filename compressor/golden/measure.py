"""Asks a checkpoint for its answers in one streamed pass, and measures what kinds of rounding change of them.

In the pass the prompts go through each layer several times, as it is and rounded ever more coarsely.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from compressor.checkpoint.reader import Size
from compressor.checkpoint.source import ModelSource
from compressor.divergence.evaluator import require_head
from compressor.errors import CompressionError, wrap_faults
from compressor.golden.answers import FORMAT, KEPT, Band, GoldenAnswers, GoldenPrompt, Top
from compressor.golden.fingerprints import config_of, fingerprints
from compressor.golden.prompts import LONGEST, golden_prompts, tokenizer_of
from compressor.model.loading import set_tensor
from compressor.model.opened import OpenModel, memory_budget, open_model
from compressor.model.streaming import Forward, LayerVisitor, Pass
from compressor.model.tokenizer import has_chat_template
from compressor.progress import Progress, Silent

DIGITS = 5  # of a log-probability
BLOCK = 32  # weights that share a scale in llama.cpp's Q8_0 and Q4_0
FP8_MAX = 448.0
LAYERS = 3  # in memory at once: the model's, rounded matrices of it, and what is computed
AT_ONCE = 4  # prompts in a batch
IN_OTHERS = 6  # in batches that show what their order changes
BITS = re.compile(r'"(?:num_)?bits": (\d+)')
_SILENT = Silent()

Rounding = Callable[[Tensor], Tensor]


def to_blocks(most: int, weight: Tensor) -> Tensor:
    """Round to whole numbers up to `most` times a scale for each block of a row."""
    columns = weight.shape[-1]
    blocks = pad(weight, (0, -columns % BLOCK)).unflatten(-1, (-1, BLOCK))
    scales = blocks.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / most
    rounded: Tensor = ((blocks / scales).round() * scales).flatten(-2)[..., :columns]
    return rounded


def to_fp8(weight: Tensor) -> Tensor:
    """Round to e4m3 with a scale for each row."""
    scales = weight.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / FP8_MAX
    return (weight / scales).to(torch.float8_e4m3fn).to(weight.dtype) * scales


ROUNDINGS: Mapping[str, Rounding] = {
    "8-bit": partial(to_blocks, 127),
    "fp8": to_fp8,
    "4-bit": partial(to_blocks, 7),
}


class _Answers(LayerVisitor):
    """Keeps the most probable tokens after positions of each batch; the head sees no other ones."""

    repeatable = True

    def __init__(self, batches: Sequence[Tensor], places: Sequence[Sequence[tuple[int, int]]]) -> None:
        self.batches = batches
        self.places = places  # rows and positions, by batch
        self.top = dict[int, tuple[Top, ...]]()
        self._selected = False

    def before_head(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Hidden states [B, L, H] -> [1, N, H] of the positions; those of a head of another form stay."""
        hidden = args[0]
        batch = self.at.batch
        self._selected = hidden.shape[:-1] == self.batches[batch].shape
        return (self._at_places(hidden, batch)[None], *args[1:]) if self._selected else None

    def on_batch_end(self, batch: int, output: Any) -> None:
        logits = output.logits
        self.top[batch] = tuple(top_of(logits[0] if self._selected else self._at_places(logits, batch)))

    def _at_places(self, values: Tensor, batch: int) -> Tensor:
        rows, positions = zip(*self.places[batch], strict=True)
        return values[list(rows), list(positions)]


def top_of(logits: Tensor) -> list[Top]:
    """Return the most probable tokens of logits [N, V]."""
    best = logits.float().log_softmax(-1).topk(min(KEPT, logits.shape[-1]))
    values = best.values.double().cpu().numpy().round(DIGITS).tolist()
    return [Top(tuple(tokens), tuple(logs)) for tokens, logs in zip(best.indices.tolist(), values, strict=True)]


class _Rounded(LayerVisitor):
    """Rounds a layer's matrices before the batches of each kind of rounding pass it, upon the finer kinds before.

    Routers stay, as quantisers leave them. A layer that is loaded again is as it was.
    """

    repeatable = True

    def __init__(self, model: OpenModel, roundings: Sequence[Rounding | None]) -> None:
        self.partial = model.partial
        self.roundings = roundings  # by batch
        self.routers = tuple(f"{layer.router}." for layer in model.architecture.layers)
        self._done: tuple[str, Rounding | None] = ("", None)

    def wrap_forward(self, decoder_layer: str, layer_forward: Forward) -> Forward:
        rounding = self.roundings[self.at.batch]
        if rounding is not None and self._done != (decoder_layer, rounding):
            self._done = (decoder_layer, rounding)
            for key in self.partial.keys_under(decoder_layer):
                value = self.partial.model.get_parameter_or_buffer(key)
                if value.dim() > 1 and value.is_floating_point() and not key.startswith(self.routers):
                    set_tensor(self.partial.model, key, _rounded(rounding, value))
        return layer_forward


def _rounded(rounding: Rounding, value: Tensor) -> Tensor:
    """Round one matrix of [..., O, I] after the other, each in float32."""
    rounded = torch.empty_like(value)
    matrices = value.flatten(0, -3) if value.dim() > 2 else value[None]
    for matrix, target in zip(matrices, rounded.view_as(matrices), strict=True):
        target.copy_(rounding(matrix.float()))
    return rounded


def ask_model(
    model: OpenModel,
    prompts: Sequence[GoldenPrompt],
    roundings: Sequence[Rounding | None] = (),
    progress: Progress = _SILENT,
) -> list[tuple[Top, ...]]:
    """Return a model's answers, and those with each kind of rounding, or with None in other batches alone."""
    head = require_head(model.partial.model)
    by_length = sorted(range(len(prompts)), key=lambda number: len(prompts[number].ids))
    asked = list[tuple[int, list[int]]]()  # the kind of rounding, and the numbers of the prompts, by batch
    for kind in range(1 + len(roundings)):
        size = IN_OTHERS if kind else AT_ONCE
        asked += [(kind, by_length[begin : begin + size]) for begin in range(0, len(by_length), size)]
    batches = list[Tensor]()
    places = list[list[tuple[int, int]]]()
    for _, numbers in asked:
        rows = [prompts[number] for number in numbers]
        batches.append(_padded(rows))
        places.append([(row, position) for row, prompt in enumerate(rows) for position in prompt.positions])
    answers = _Answers(batches, places)
    rounded = _Rounded(model, [(None, *roundings)[kind] for kind, _ in asked])
    run = Pass(model, batches, progress, "golden answers", to_end=True)
    name = type(model.partial.model).__name__
    faults = wrap_faults(
        f"{name} cannot be asked", "free some memory", "see whether stock transformers runs it on text"
    )
    with faults, head.register_forward_pre_hook(answers.before_head):
        run.run(rounded, answers)
    found = dict[tuple[int, int], tuple[Top, ...]]()
    for batch, (kind, numbers) in enumerate(asked):
        top = iter(answers.top[batch])
        for number in numbers:
            found[kind, number] = tuple(islice(top, len(prompts[number].positions)))
    answered = list[tuple[Top, ...]]()
    for kind in range(1 + len(roundings)):
        in_order = (found[kind, number] for number in range(len(prompts)))
        answered.append(tuple(chain.from_iterable(in_order)))
    return answered


def _padded(prompts: Sequence[GoldenPrompt]) -> Tensor:
    """Return the token ids of prompts [B, L], the shorter ones continued by their last token."""
    longest = max(len(prompt.ids) for prompt in prompts)
    rows = [(*prompt.ids, *prompt.ids[-1:] * (longest - len(prompt.ids))) for prompt in prompts]
    return torch.tensor(rows)


def open_exactly(source: ModelSource, device: str) -> OpenModel:
    """Open a checkpoint in float32, or in its own dtype where its layers in float32 exceed the memory."""
    model = open_model(source, "float32", device)
    budget = memory_budget(model.partial.device)
    if budget is not None and LAYERS * model.largest_layer > budget:
        return open_model(source, "auto", device)
    return model


def stored_bits(model: OpenModel) -> float:
    """Return the bits of a stored weight: by a quantisation's config, or on average."""
    quantization = model.checkpoint.quantization
    if quantization:
        named = [int(bits) for bits in BITS.findall(json.dumps(quantization, default=str))]
        return float(min(named, default=4 if "4" in str(quantization.get("quant_method")) else 8))
    return 8 * Size.of(model.checkpoint.tensors.values()).bytes / parameters_of(model)


def parameters_of(model: OpenModel) -> int:
    """Return the number of the model's weights."""
    empty = model.partial.empty
    return sum(value.numel() for key, value in empty.items() if key not in model.partial.tied)


def make_golden(source: ModelSource, device: str = "auto", progress: Progress = _SILENT) -> GoldenAnswers:
    """Return the golden answers of a checkpoint, from two streamed passes; raises `CompressionError` without a head."""
    model = open_exactly(source, device)
    longest = min(LONGEST, model.positions or LONGEST)
    tokenizer = tokenizer_of(source.folder)
    prompts = golden_prompts(tokenizer, model.vocabulary, longest)
    exact, reordered, *rounded = ask_model(model, prompts, [None, *ROUNDINGS.values()], progress)
    halved = reordered
    if model.dtype_name != "bfloat16":
        halved = rounded[0]  # moves answers about as far, where a kernel takes no bfloat16 of odd widths
        with suppress(CompressionError):
            in_bfloat16 = model.partial.computing_in(torch.bfloat16, model.partial.device)
            (halved,) = ask_model(replace(model, partial=in_bfloat16), prompts, progress=progress)
    kinds = zip(("float32", "bfloat16", *ROUNDINGS), (reordered, halved, *rounded), strict=True)
    bands = tuple(Band(name, distances(exact, top)) for name, top in kinds)
    answered = list[GoldenPrompt]()
    begin = 0
    for prompt in prompts:
        end = begin + len(prompt.positions)
        answered.append(replace(prompt, top=exact[begin:end]))
        begin = end
    return GoldenAnswers(
        format=FORMAT,
        model_type=model.architecture.family,
        vocabulary=model.vocabulary,
        parameters=parameters_of(model),
        bits=round(stored_bits(model), 2),
        dtype=model.dtype_name,
        prompts=tuple(answered),
        bands=bands,
        texts=_texts(tokenizer, answered),
        is_chat=tokenizer is not None and has_chat_template(tokenizer),
        config=config_of(model),
        fingerprints=fingerprints(model),
    )


def distances(first: Sequence[Top], second: Sequence[Top]) -> tuple[float, ...]:
    """Return the distance at each position."""
    return tuple(round(here.distance(there), DIGITS) for here, there in zip(first, second, strict=True))


def _texts(tokenizer: Any, prompts: Sequence[GoldenPrompt]) -> dict[str, str]:
    """Return the texts of the tokens among the answers, by which some servers name them."""
    if tokenizer is None:
        return {}
    tokens = {token for prompt in prompts for top in prompt.top for token in top.tokens}
    return {str(token): str(tokenizer.decode([token])) for token in sorted(tokens)}
