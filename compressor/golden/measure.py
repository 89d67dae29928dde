"""Asks a checkpoint for its answers in streamed passes, as it is and changed, and measures what
rounding does."""

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

from compressor.checkpoint.reader import CONFIG, Size
from compressor.checkpoint.source import ModelSource
from compressor.divergence.evaluator import require_head
from compressor.errors import CompressionError, wrap_faults
from compressor.golden.answers import BANDS, FORMAT, KEPT, GoldenAnswers, GoldenPrompt, Top
from compressor.golden.fingerprints import fingerprints
from compressor.golden.prompts import LONGEST, golden_prompts, tokenizer_of
from compressor.golden.rounding import Rounding, constants_of
from compressor.model.constant_experts import Substitutes, declared, substitute
from compressor.model.opened import OpenModel, memory_budget, open_model, open_substituted
from compressor.model.streaming import Forward, LayerVisitor, Pass, PassPosition
from compressor.model.tokenizer import has_chat_template
from compressor.progress import Progress, Silent
from compressor.prompt_date import dated
from compressor.records import read_object

DIGITS = 5  # of a log-probability
LAYERS = 3  # in memory at once: the model's, rounded matrices of it, and what is computed
AT_ONCE = 4  # prompts in a batch
IN_OTHERS = 6  # in batches that show what their order changes
CONTINUED = 4  # prompts, the shortest ones
APPENDED = 2  # tokens; the second step of a decoder reads what the first has left in its cache
BITS = re.compile(r'"(?:num_)?bits": (\d+)')
# of a config, in a forward
UNUSED = {"use_cache", "return_dict", "output_hidden_states", "max_position_embeddings"}
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
    """Passes batches through layers with the change of their variant, and keeps the most probable
    tokens."""

    repeatable = True

    def __init__(self, constants: Mapping[str, Substitutes]) -> None:
        self.constants = constants
        self.variants = list[Variant]()  # by batch, as all of these
        self.tokens = list[Tensor]()  # [B, L]
        self.places = list[list[tuple[int, int]]]()  # rows and positions
        self.top = list[list[Top]]()
        self._selected = False

    def on_layer_loaded(self, decoder_layer: str) -> None:
        for layer in self.at.moe_layers:
            substitute(self.at.model.get_submodule(layer.name), self.constants.get(layer.name))

    def wrap_forward(self, decoder_layer: str, layer_forward: Forward) -> Forward:
        variant = self.variants[self.at.batch]

        def forward(*args: Any, **kwargs: Any) -> Any:
            with variant.change(self.at) if variant.change else nullcontext():
                return layer_forward(*args, **kwargs)

        return forward

    def before_head(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Hidden states [B, L, H] -> [1, N, H] of the positions; those of a head of another form
        stay."""
        hidden = args[0]
        self._selected = hidden.shape[:-1] == self.tokens[self.at.batch].shape
        return (self._at_places(hidden)[None], *args[1:]) if self._selected else None

    def on_batch_end(self, batch: int, output: Any) -> None:
        self.top.append(
            top_of(output.logits[0] if self._selected else self._at_places(output.logits))
        )

    def _at_places(self, values: Tensor) -> Tensor:
        rows, positions = zip(*self.places[self.at.batch], strict=True)
        return values[list(rows), list(positions)]


def top_of(logits: Tensor) -> list[Top]:
    """Return the most probable tokens of logits [N, V]."""
    best = logits.float().log_softmax(-1).topk(min(KEPT, logits.shape[-1]))
    values = best.values.double().cpu().numpy().round(DIGITS).tolist()
    return [
        Top(tuple(tokens), tuple(logs))
        for tokens, logs in zip(best.indices.tolist(), values, strict=True)
    ]


def ask_model(
    model: OpenModel,
    prompts: Sequence[GoldenPrompt],
    variants: Sequence[Variant] = (Variant(),),
    progress: Progress = _SILENT,
    at_once: int = AT_ONCE,
) -> list[list[Top]]:
    """Return the answers of each variant of a model, in one pass."""
    head = require_head(model.partial.model)
    answers = _Answers(constants_of(model))
    for variant, begin in product(variants, range(0, len(prompts), at_once)):
        rows = prompts[begin : begin + at_once]
        tokens = pad_sequence([torch.tensor(prompt.ids) for prompt in rows], batch_first=True)
        answers.variants.append(variant)
        answers.tokens.append((tokens + variant.inputs) % model.vocabulary)
        answers.places.append(
            [(row, position) for row, prompt in enumerate(rows) for position in prompt.positions]
        )
    name = type(model.partial.model).__name__
    faults = wrap_faults(
        f"{name} cannot be asked",
        "free some memory",
        "see whether stock transformers runs it on text",
    )
    with faults, head.register_forward_pre_hook(answers.before_head):
        Pass(model, answers.tokens, progress, "golden answers", to_end=True).run(answers)
    positions = sum(len(prompt.positions) for prompt in prompts)
    in_order = chain.from_iterable(answers.top)
    return [list(islice(in_order, positions)) for _ in variants]


def open_exactly(source: ModelSource, device: str) -> OpenModel:
    """Open a checkpoint in float32, or in its own dtype where its layers in float32 exceed the
    memory."""
    opening = open_substituted if declared(read_object(source.folder / CONFIG)) else open_model
    model = opening(source, "float32", device)
    budget = memory_budget(model.partial.device)
    if budget is not None and LAYERS * model.largest_layer > budget:
        return opening(source, "auto", device)
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
    return {
        name: value
        for name, value in fields.items()
        if isinstance(value, kinds) and name not in UNUSED
    }


def make_golden(
    source: ModelSource, device: str = "auto", progress: Progress = _SILENT
) -> GoldenAnswers:
    """Return the golden answers of a checkpoint, from four streamed passes, two of them with few
    prompts.

    Raises `CompressionError` without a head, and for answers that are not finite.
    """
    model = open_exactly(source, device)
    tokenizer = tokenizer_of(source.folder)
    longest = min(LONGEST, (model.positions or LONGEST) - APPENDED)
    with dated() as date:
        prompts: Sequence[GoldenPrompt] = golden_prompts(tokenizer, model.vocabulary, longest)
    halved = replace(
        model, partial=model.partial.computing_in(torch.bfloat16, model.partial.device)
    )
    try:
        prompts = _continued(halved, prompts, progress)
    except CompressionError:  # a kernel may take no bfloat16 of odd widths
        halved = model
        prompts = _continued(model, prompts, progress)
    rounding = Rounding(model)
    roundings = {kind: Variant(partial(rounding, kind)) for kind in rounding.kinds}
    exact, *rounded = ask_model(model, prompts, [Variant(), *roundings.values()], progress)
    by_kind = dict(zip(roundings, rounded, strict=True))
    by_kind["bfloat16"] = by_kind["8-bit"]  # moves answers about as far
    if halved.dtype_name == "bfloat16":
        (by_kind["bfloat16"],) = ask_model(halved, prompts, progress=progress, at_once=IN_OTHERS)
    bands = dict[str, tuple[float, ...]]()
    for name in BANDS:
        pairs = zip(exact, by_kind[name], strict=True)
        bands[name] = tuple(round(first.distance(second), DIGITS) for first, second in pairs)
        if not all(map(isfinite, bands[name])):
            raise CompressionError(
                f"{source.label} answers with numbers that are not finite, exactly or in {name}; "
                "see its weights"
            )
    return GoldenAnswers(
        format=FORMAT,
        vocabulary=model.vocabulary,
        parameters=parameters_of(model),
        dtype=model.dtype_name,
        rounds_inputs=bool(rounding.own),
        prompts=tuple(with_answers(prompts, exact)),
        bands=bands,
        texts=_texts(tokenizer, exact),
        is_chat=tokenizer is not None and has_chat_template(tokenizer),
        config=config_of(model),
        fingerprints=fingerprints(model),
        date=str(date) if date.is_used else None,
    )


def with_answers(prompts: Sequence[GoldenPrompt], answers: Iterable[Top]) -> list[GoldenPrompt]:
    """Return the prompts with their answers."""
    rest = iter(answers)
    return [replace(prompt, top=tuple(islice(rest, len(prompt.positions)))) for prompt in prompts]


def _continued(
    model: OpenModel, prompts: Sequence[GoldenPrompt], progress: Progress
) -> list[GoldenPrompt]:
    """Append greedy tokens to the first prompts."""
    continued = list(prompts[:CONTINUED])
    for _ in range(APPENDED):
        (answers,) = ask_model(model, continued, progress=progress)
        for number, prompt in enumerate(with_answers(continued, answers)):
            ids = (*prompt.ids, prompt.top[-1].tokens[0])
            positions = (*prompt.positions, len(prompt.ids))
            continued[number] = replace(
                prompt, ids=ids, positions=positions, top=(), continued=prompt.continued + 1
            )
    return [*continued, *prompts[CONTINUED:]]


def _texts(tokenizer: Any, answers: Sequence[Top]) -> Mapping[str, str]:
    """Return the texts of the tokens among the answers, by which some servers name them."""
    if tokenizer is None:
        return {}
    tokens = {token for top in answers for token in top.tokens}
    return {str(token): str(tokenizer.decode([token])) for token in sorted(tokens)}
