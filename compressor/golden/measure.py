"""Asks a checkpoint for its answers in streamed passes, as it is and changed, and measures what rounding does."""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, product
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from compressor.checkpoint.reader import Size
from compressor.checkpoint.source import ModelSource
from compressor.divergence.evaluator import require_head
from compressor.errors import CompressionError, wrap_faults
from compressor.golden.answers import FORMAT, KEPT, GoldenAnswers, GoldenPrompt, Top
from compressor.golden.fingerprints import fingerprints
from compressor.golden.prompts import LONGEST, golden_prompts, tokenizer_of
from compressor.model.loading import set_tensor
from compressor.model.opened import OpenModel, memory_budget, open_model
from compressor.model.streaming import TINY, Forward, LayerVisitor, Pass, PassPosition
from compressor.model.tokenizer import has_chat_template
from compressor.progress import Progress, Silent

DIGITS = 5  # of a log-probability
BLOCK = 32  # weights that share a scale in llama.cpp's Q8_0 and Q4_0
LARGEST = {"8-bit": 127, "4-bit": 7}  # whole number by kind of rounding
LAYERS = 3  # in memory at once: the model's, rounded matrices of it, and what is computed
AT_ONCE = 4  # prompts in a batch
IN_OTHERS = 6  # in batches that show what their order changes
CONTINUED = 4  # prompts, the shortest ones
APPENDED = 2  # tokens; the second step of a decoder reads what the first has left in its cache
BITS = re.compile(r'"(?:num_)?bits": (\d+)')
UNUSED = {"use_cache", "return_dict", "output_hidden_states", "max_position_embeddings"}  # of a config, in a forward
_SILENT = Silent()

Change = Callable[[PassPosition], AbstractContextManager[Any]]


@dataclass(frozen=True, slots=True)
class Variant:
    """A model that is changed while batches pass a loaded layer; by default, it is not."""

    change: Change | None = None
    sentence: str = ""  # that names the change
    inputs: int = 0  # added to the token ids of prompts
    outputs: int = 0  # added to the token ids of answers


class _Answers(LayerVisitor):
    """Passes batches through layers with the change of their variant, and keeps the most probable tokens."""

    repeatable = True

    def __init__(self) -> None:
        self.variants = list[Variant]()  # by batch, as all of these
        self.tokens = list[Tensor]()  # [B, L]
        self.places = list[list[tuple[int, int]]]()  # rows and positions
        self.top = list[list[Top]]()
        self._selected = False

    def wrap_forward(self, decoder_layer: str, layer_forward: Forward) -> Forward:
        variant = self.variants[self.at.batch]

        def forward(*args: Any, **kwargs: Any) -> Any:
            with variant.change(self.at) if variant.change else nullcontext():
                return layer_forward(*args, **kwargs)

        return forward

    def before_head(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Hidden states [B, L, H] -> [1, N, H] of the positions; those of a head of another form stay."""
        hidden = args[0]
        self._selected = hidden.shape[:-1] == self.tokens[self.at.batch].shape
        return (self._at_places(hidden)[None], *args[1:]) if self._selected else None

    def on_batch_end(self, batch: int, output: Any) -> None:
        self.top.append(top_of(output.logits[0] if self._selected else self._at_places(output.logits)))

    def _at_places(self, values: Tensor) -> Tensor:
        rows, positions = zip(*self.places[self.at.batch], strict=True)
        return values[list(rows), list(positions)]


def top_of(logits: Tensor) -> list[Top]:
    """Return the most probable tokens of logits [N, V]."""
    best = logits.float().log_softmax(-1).topk(min(KEPT, logits.shape[-1]))
    values = best.values.double().cpu().numpy().round(DIGITS).tolist()
    return [Top(tuple(tokens), tuple(logs)) for tokens, logs in zip(best.indices.tolist(), values, strict=True)]


def ask_model(
    model: OpenModel,
    prompts: Sequence[GoldenPrompt],
    variants: Sequence[Variant] = (Variant(),),
    progress: Progress = _SILENT,
    at_once: int = AT_ONCE,
) -> list[list[Top]]:
    """Return the answers of each variant of a model, in one pass."""
    head = require_head(model.partial.model)
    answers = _Answers()
    for variant, begin in product(variants, range(0, len(prompts), at_once)):
        rows = prompts[begin : begin + at_once]
        tokens = pad_sequence([torch.tensor(prompt.ids) for prompt in rows], batch_first=True)
        answers.variants.append(variant)
        answers.tokens.append((tokens + variant.inputs) % model.vocabulary)
        answers.places.append([(row, position) for row, prompt in enumerate(rows) for position in prompt.positions])
    name = type(model.partial.model).__name__
    faults = wrap_faults(
        f"{name} cannot be asked", "free some memory", "see whether stock transformers runs it on text"
    )
    with faults, head.register_forward_pre_hook(answers.before_head):
        Pass(model, answers.tokens, progress, "golden answers", to_end=True).run(answers)
    positions = sum(len(prompt.positions) for prompt in prompts)
    in_order = chain.from_iterable(answers.top)
    return [list(islice(in_order, positions)) for _ in variants]


class _Rounding:
    """Rounds a loaded layer's matrices before batches pass it, upon the finer kinds of rounding before.

    Routers stay, as quantisers leave them. A layer that is loaded again is as it was.
    """

    def __init__(self, model: OpenModel) -> None:
        self.partial = model.partial
        self.routers = tuple(f"{layer.router}." for layer in model.architecture.layers)
        self._done = ("", 0)

    def __call__(self, largest: int, position: PassPosition) -> AbstractContextManager[Any]:
        if self._done != (position.layer, largest):
            self._done = (position.layer, largest)
            for key in self.partial.keys_under(position.layer):
                value = position.model.get_parameter_or_buffer(key)
                if value.dim() > 1 and value.is_floating_point() and not key.startswith(self.routers):
                    set_tensor(position.model, key, self._rounded(value, largest))
        return nullcontext()

    def _rounded(self, value: Tensor, largest: int) -> Tensor:
        """Round the matrices of [..., O, I] one by one in float32, in place if the tensor can be written to."""
        matrices = value if value.dim() > 2 else value[None]
        targets = torch.empty_like(matrices) if self.partial.is_mapped(value) else matrices
        for matrix, target in zip(matrices, targets, strict=True):
            rounded = target.copy_(matrix).float()
            round_blocks(rounded, largest)
            target.copy_(rounded)
        return targets.view_as(value)


def round_blocks(weight: Tensor, largest: int) -> None:
    """Round in place to whole numbers up to `largest` times a scale for each block of a row."""
    columns = weight.shape[-1]
    blocks = weight.unflatten(-1, (-1, columns if columns % BLOCK else BLOCK))
    most = torch.maximum(blocks.amax(-1, keepdim=True), -blocks.amin(-1, keepdim=True))
    scales = most.clamp(min=TINY * largest) / largest
    blocks.div_(scales).round_().mul_(scales)


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


def config_of(model: OpenModel) -> dict[str, Any]:
    """Return the numbers and switches in a model's config."""
    fields = model.config.get_text_config().to_dict()
    kinds = (bool, int, float)
    return {name: value for name, value in fields.items() if isinstance(value, kinds) and name not in UNUSED}


def make_golden(source: ModelSource, device: str = "auto", progress: Progress = _SILENT) -> GoldenAnswers:
    """Return the golden answers of a checkpoint, from four streamed passes, two of them with few prompts.

    Raises `CompressionError` without a head, and for answers that are not finite.
    """
    model = open_exactly(source, device)
    tokenizer = tokenizer_of(source.folder)
    longest = min(LONGEST, (model.positions or LONGEST) - APPENDED)
    prompts: Sequence[GoldenPrompt] = golden_prompts(tokenizer, model.vocabulary, longest)
    halved = replace(model, partial=model.partial.computing_in(torch.bfloat16, model.partial.device))
    try:
        prompts = _continued(halved, prompts, progress)
    except CompressionError:  # a kernel may take no bfloat16 of odd widths
        halved = model
        prompts = _continued(model, prompts, progress)
    rounding = _Rounding(model)
    roundings = [Variant(partial(rounding, largest)) for largest in LARGEST.values()]
    exact, *rounded = ask_model(model, prompts, [Variant(), *roundings], progress)
    in_bfloat16 = rounded[0]  # moves answers about as far
    if halved.dtype_name == "bfloat16":
        (in_bfloat16,) = ask_model(halved, prompts, progress=progress, at_once=IN_OTHERS)
    bands = dict[str, tuple[float, ...]]()
    for name, moved in zip(("bfloat16", *LARGEST), (in_bfloat16, *rounded), strict=True):
        pairs = zip(exact, moved, strict=True)
        bands[name] = tuple(round(first.distance(second), DIGITS) for first, second in pairs)
        if not all(map(isfinite, bands[name])):
            raise CompressionError(
                f"{source.label} answers with numbers that are not finite, exactly or in {name}; see its weights"
            )
    return GoldenAnswers(
        format=FORMAT,
        vocabulary=model.vocabulary,
        parameters=parameters_of(model),
        dtype=model.dtype_name,
        prompts=tuple(with_answers(prompts, exact)),
        bands=bands,
        texts=_texts(tokenizer, exact),
        is_chat=tokenizer is not None and has_chat_template(tokenizer),
        config=config_of(model),
        fingerprints=fingerprints(model),
    )


def with_answers(prompts: Sequence[GoldenPrompt], answers: Iterable[Top]) -> list[GoldenPrompt]:
    """Return the prompts with their answers."""
    rest = iter(answers)
    return [replace(prompt, top=tuple(islice(rest, len(prompt.positions)))) for prompt in prompts]


def _continued(model: OpenModel, prompts: Sequence[GoldenPrompt], progress: Progress) -> list[GoldenPrompt]:
    """Append greedy tokens to the first prompts."""
    continued = list(prompts[:CONTINUED])
    for _ in range(APPENDED):
        (answers,) = ask_model(model, continued, progress=progress)
        for number, prompt in enumerate(with_answers(continued, answers)):
            ids = (*prompt.ids, prompt.top[-1].tokens[0])
            positions = (*prompt.positions, len(prompt.ids))
            continued[number] = replace(prompt, ids=ids, positions=positions, top=(), continued=prompt.continued + 1)
    return [*continued, *prompts[CONTINUED:]]


def _texts(tokenizer: Any, answers: Sequence[Top]) -> Mapping[str, str]:
    """Return the texts of the tokens among the answers, by which some servers name them."""
    if tokenizer is None:
        return {}
    tokens = {token for top in answers for token in top.tokens}
    return {str(token): str(tokenizer.decode([token])) for token in sorted(tokens)}
