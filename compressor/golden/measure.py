"""Asks a checkpoint for its answers in streamed passes, as it is and changed, and measures what
rounding does."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import isfinite
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from compressor.checkpoint.source import ModelSource
from compressor.divergence.logits import read_logits
from compressor.errors import CompressionError, wrap_faults
from compressor.golden.answers import BANDS, FORMAT, KEPT, GoldenAnswers, GoldenPrompt, Top
from compressor.golden.fingerprints import fingerprints
from compressor.golden.prompts import LONGEST, golden_prompts, tokenizer_of
from compressor.golden.rounding import own_rounding, roundings
from compressor.model.constant_experts import SubstitutedCheckpoint, Substitutes
from compressor.model.opened import OpenModel, fits, memory_budget, open_substituted
from compressor.model.substitution import Substitution
from compressor.model.tokenizer import has_chat_template
from compressor.progress import SILENT, Progress
from compressor.prompt_date import dated

DIGITS = 5  # of a log-probability
LAYERS = 3  # in memory at once: the model's, rounded matrices of it, and what is computed
AT_ONCE = 4  # prompts in a batch
IN_OTHERS = 6  # in batches that show what their order changes
CONTINUED = 4  # prompts, the shortest ones
APPENDED = 2  # tokens; the second step of a decoder reads what the first has left in its cache
# of a config, in a forward
UNUSED = {"use_cache", "return_dict", "output_hidden_states", "max_position_embeddings"}


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
    variants: Sequence[tuple[Substitution, int]] = (),
    progress: Progress = SILENT,
    at_once: int = AT_ONCE,
) -> list[list[Top]]:
    """Return the answers of each variant of a model, by default of the model, in one pass.

    A number is added to the token ids that a variant is asked."""
    batches = list[tuple[Substitution, Tensor, Tensor]]()
    variants = variants or [(Substitution(constants=constants_of(model)), 0)]
    for variant, added in variants:
        for begin in range(0, len(prompts), at_once):
            rows = prompts[begin : begin + at_once]
            tokens = pad_sequence([torch.tensor(prompt.ids) for prompt in rows], batch_first=True)
            chosen = torch.zeros(tokens.shape, dtype=torch.bool)
            for row, prompt in enumerate(rows):
                chosen[row, list(prompt.positions)] = True
            batches.append((variant, (tokens + added) % model.vocabulary, chosen))
    name = type(model.partial.model).__name__
    hints = "free some memory", "see whether stock transformers runs it on text"
    with wrap_faults(f"{name} cannot be asked", *hints):
        top = read_logits(model, batches, top_of, progress, "golden answers")
    size = len(batches) // len(variants)
    return [
        list(chain.from_iterable(top[begin : begin + size]))
        for begin in range(0, len(batches), size)
    ]


def open_exactly(source: ModelSource, device: str) -> OpenModel:
    """Open a checkpoint in float32, or in its own dtype where its layers in float32 exceed the
    memory."""
    model = open_substituted(source, "float32", device)
    budget = memory_budget(model.partial.device)
    if budget is not None and LAYERS * model.largest_layer > budget:
        return open_substituted(source, "auto", device)
    return model


def constants_of(model: OpenModel) -> Mapping[str, Substitutes]:
    """Return the constants of an opened model, by experts module."""
    assert isinstance(model.checkpoint, SubstitutedCheckpoint)
    partial = model.partial
    return model.checkpoint.substitutes(model.architecture.layers, partial.dtype, partial.device)


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
    source: ModelSource,
    device: str = "auto",
    progress: Progress = SILENT,
    resident: bool = False,
) -> GoldenAnswers:
    """Return the golden answers of a checkpoint, from four streamed passes, two of them with few
    prompts. If it is to be `resident`, and fits twice, they read it once in each dtype.

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
    stays = resident and fits(model, model.partial.nbytes)
    model.partial.resident = halved.partial.resident = stays
    try:
        prompts = _continued(halved, prompts, progress)
    except CompressionError:  # a kernel may take no bfloat16 of odd widths
        halved = model
        prompts = _continued(model, prompts, progress)
    constants = constants_of(model)
    rounding = roundings(model, constants)
    variants = [(variant, 0) for variant in (Substitution(constants=constants), *rounding.values())]
    exact, *rounded = ask_model(model, prompts, variants, progress)
    by_kind = dict(zip(rounding, rounded, strict=True))
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
    texts = dict[str, str]()  # by which some servers name tokens
    if tokenizer is not None:
        tokens = {token for top in exact for token in top.tokens}
        texts = {str(token): str(tokenizer.decode([token])) for token in sorted(tokens)}
    return GoldenAnswers(
        format=FORMAT,
        vocabulary=model.vocabulary,
        parameters=parameters_of(model),
        dtype=model.dtype_name,
        rounds_inputs=bool(own_rounding(model)),
        prompts=tuple(with_answers(prompts, exact)),
        bands=bands,
        texts=texts,
        is_chat=tokenizer is not None and has_chat_template(tokenizer),
        config=config_of(model),
        fingerprints=fingerprints(model),
        date=str(date) if date.is_used else None,
    )


def with_answers(
    prompts: Sequence[GoldenPrompt], answers: Sequence[Top | None]
) -> list[GoldenPrompt]:
    """Return the prompts with their answers, which may lack some."""
    known = [answer or Top((), ()) for answer in answers]
    answered = list[GoldenPrompt]()
    for prompt in prompts:
        count = len(prompt.positions)
        answered.append(replace(prompt, top=tuple(known[:count])))
        del known[:count]
    return answered


def _continued(
    model: OpenModel, prompts: Sequence[GoldenPrompt], progress: Progress
) -> list[GoldenPrompt]:
    """Append greedy tokens to the first prompts."""
    continued = list(prompts[:CONTINUED])
    for _ in range(APPENDED):
        (answers,) = ask_model(model, continued, progress=progress)
        for number, prompt in enumerate(with_answers(continued, answers)):
            continued[number] = replace(
                prompt,
                ids=(*prompt.ids, prompt.top[-1].tokens[0]),
                positions=(*prompt.positions, len(prompt.ids)),
                top=(),
                continued=prompt.continued + 1,
            )
    return [*continued, *prompts[CONTINUED:]]
