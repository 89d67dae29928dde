"""Asks a checkpoint for its answers in one streamed pass, and measures what kinds of rounding change of them.

In the pass every kind of rounding is a variant of the model that runs beside it, on all prompts as one batch.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from compressor.checkpoint.reader import Size
from compressor.checkpoint.source import ModelSource
from compressor.divergence.evaluator import require_head
from compressor.golden.answers import FORMAT, KEPT, Band, GoldenAnswers, GoldenPrompt, Top
from compressor.golden.prompts import LONGEST, golden_prompts, tokenizer_of
from compressor.model.opened import OpenModel, memory_budget, open_model
from compressor.model.streaming import LayerVisitor, Pass
from compressor.model.substitution import AS_IT_IS, SideBySide, Substitution
from compressor.model.tokenizer import has_chat_template
from compressor.progress import Progress, Silent

DIGITS = 5  # of a log-probability
BLOCK = 32  # weights that share a scale in llama.cpp's Q8_0 and Q4_0
FP8_MAX = 448.0
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
    """Keeps the most probable tokens after wanted positions, by batch."""

    repeatable = True

    def __init__(self, positions: Sequence[Sequence[Sequence[int]]]) -> None:
        self.positions = positions  # by batch and row
        self.top = dict[int, list[Top]]()

    def on_batch_end(self, batch: int, output: Any) -> None:
        answers = list[Top]()
        for logits, positions in zip(output.logits, self.positions[batch], strict=True):
            answers += top_of(logits[list(positions)])
        self.top[batch] = answers


def top_of(logits: Tensor) -> list[Top]:
    """Return the most probable tokens of logits [N, V]."""
    best = logits.float().log_softmax(-1).topk(min(KEPT, logits.shape[-1]))
    rows = zip(best.indices.tolist(), best.values.double().cpu().tolist(), strict=True)
    return [Top(tuple(tokens), tuple(round(log, DIGITS) for log in logs)) for tokens, logs in rows]


def ask_model(
    model: OpenModel,
    prompts: Sequence[GoldenPrompt],
    variants: Sequence[Substitution] = (AS_IT_IS,),
    progress: Progress = _SILENT,
) -> list[tuple[Top, ...]]:
    """Return the answers of the model to each prompt alone, and those of variants to all prompts as one batch."""
    require_head(model.partial.model)
    alone = [torch.tensor([prompt.ids]) for prompt in prompts]
    longest = max(len(prompt.ids) for prompt in prompts)
    rows = [pad(batch, (0, longest - batch.shape[1]), value=int(batch[0, -1])) for batch in alone]
    batches = [*alone, *[torch.cat(rows)] * len(variants)]
    positions = [prompt.positions for prompt in prompts]
    answers = _Answers([*([row] for row in positions), *[positions] * len(variants)])
    numbers = [*[None] * len(alone), *range(len(variants))]
    Pass(model, batches, progress, "golden answers", to_end=True).run(SideBySide(model, variants, numbers), answers)
    first = [top for number in range(len(alone)) for top in answers.top[number]]
    return [tuple(first), *(tuple(answers.top[len(alone) + number]) for number in range(len(variants)))]


def rounded_layers(model: OpenModel, rounding: Rounding) -> Substitution:
    """Return the variant whose decoder layers have rounded matrices; routers stay, as quantisers leave them."""
    routers = tuple(f"{layer.router}." for layer in model.architecture.layers)

    def tensors(decoder_layer: str) -> Mapping[str, Tensor]:
        rounded = dict[str, Tensor]()
        for key in model.partial.keys_under(decoder_layer):
            value = model.partial.model.get_parameter_or_buffer(key)
            if value.dim() >= 2 and value.is_floating_point() and not key.startswith(routers):
                rounded[key] = rounding(value.float()).to(value.dtype)
        return rounded

    return Substitution(tensors)


def open_exactly(source: ModelSource, device: str) -> OpenModel:
    """Open a checkpoint in float32, or in its own dtype where two of its layers in float32 exceed the memory."""
    model = open_model(source, "float32", device)
    budget = memory_budget(model.partial.device)
    if budget is not None and 2 * model.largest_layer > budget:
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
    prompts = golden_prompts(source.folder, model.vocabulary, longest)
    variants = [rounded_layers(model, rounding) for rounding in ROUNDINGS.values()]
    exact, reordered, *rounded = ask_model(model, prompts, [AS_IT_IS, *variants], progress)
    if model.dtype_name == "bfloat16":
        halved = reordered
    else:
        halved, _ = ask_model(open_model(source, "bfloat16", device), prompts, progress=progress)
    kinds = zip(("float32", "bfloat16", *ROUNDINGS), (reordered, halved, *rounded), strict=True)
    bands = tuple(Band(name, distances(exact, top)) for name, top in kinds)
    tokenizer = tokenizer_of(source.folder)
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
