"""The likeliest cause of other answers: the fault that, planted in a reference, gives those that were observed."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError
from compressor.golden.answers import LEAST, GoldenAnswers, GoldenPrompt, Top
from compressor.golden.compare import Answered
from compressor.golden.faults import Cause, Fault, choosing, faults_of, in_layers, of_expert, of_vocabulary, scaled
from compressor.golden.fingerprints import cause_of_weights, config_of, fingerprints
from compressor.golden.measure import open_exactly
from compressor.golden.prompts import rendered, tokenizer_of
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.model.streaming import Forward, LayerVisitor, Pass
from compressor.progress import Progress, Silent
from compressor.tolerance import stable_argmin

NUDGE = 1.05  # a scale whose effect is linear
EXPLAINED = 0.2  # share of the distance that a fault may leave
SUSPECTS = 16  # experts tried
PROMPTS = 4  # on which faults of single layers and experts are tried
_SILENT = Silent()


class _Planted(LayerVisitor):
    """Passes each batch through layers with its own fault, and measures how far the answers are from those observed."""

    repeatable = True

    def __init__(self, faults: Sequence[Fault], prompts: Sequence[GoldenPrompt]) -> None:
        self.faults = faults
        self.prompts = prompts
        self.chosen = dict[str, Tensor]()  # experts [T, K] by layer, without a fault
        self.errors = list[Tensor]()  # of all log-probabilities, by fault
        self.distances = list[Tensor]()  # [N] at all positions, by fault

    def wrap_forward(self, decoder_layer: str, layer_forward: Forward) -> Forward:
        fault = self.faults[self.at.batch]
        layers = [layer for layer in self.at.moe_layers if fault.layer in (None, layer)]

        def forward(*args: Any, **kwargs: Any) -> Any:
            with ExitStack() as changes:
                for layer in layers:
                    plant = fault.plant or partial(choosing, choose=partial(self._record, layer))
                    changes.enter_context(plant(self.at.model, layer))
                return layer_forward(*args, **kwargs)

        return forward

    def _record(self, layer: MoeLayer, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        if self.at.batch == 0:
            self.chosen[layer.name] = index
        return index, weights

    def on_batch_end(self, batch: int, output: Any) -> None:
        errors = list[Tensor]()
        shift = self.faults[batch].outputs
        for logits, prompt in zip(output.logits, self.prompts, strict=True):
            logs = logits[list(prompt.positions)].float().log_softmax(-1).clamp(min=LEAST).roll(shift, -1).cpu()
            for row, top in zip(logs, prompt.top, strict=True):
                errors.append(row[list(top.tokens)] - torch.tensor(top.logs))
        self.errors.append(torch.cat(errors))
        self.distances.append(torch.stack([error.square().mean().sqrt() for error in errors]))


def _plant(model: OpenModel, faults: Sequence[Fault], prompts: Sequence[GoldenPrompt], progress: Progress) -> _Planted:
    """Run the faults side by side, the first of which is none."""
    rows = [torch.tensor(prompt.ids) for prompt in prompts]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=prompts[0].ids[0])
    planted = _Planted(faults, prompts)
    batches = [(tokens + fault.inputs) % model.vocabulary for fault in faults]
    Pass(model, batches, progress, "try causes", to_end=True).run(planted)
    return planted


def _explained(planted: _Planted, rounding: float) -> Cause | None:
    """Return the fault with the nearest answers, if they are near enough."""
    means = [float(distances.mean()) for distances in planted.distances]
    best = stable_argmin(means)
    fault = planted.faults[best]
    if not fault.name or means[best] > max(min(rounding, means[0] / 2), EXPLAINED * means[0]):
        return None
    return Cause(fault.name, fault.sentence)


def _suspects(planted: _Planted, layers: Sequence[MoeLayer], rounding: float) -> list[tuple[MoeLayer, int]]:
    """Return experts that were chosen before the positions at which answers differ, and not before others."""
    differs = planted.distances[0] > rounding
    agreements = list[Tensor]()
    for layer in layers:
        chosen = planted.chosen[layer.name].view(len(planted.prompts), -1, layer.top_k)
        is_used = (chosen[..., None] == torch.arange(layer.experts, device=chosen.device)).any(2).cummax(1).values.cpu()
        rows = zip(is_used, planted.prompts, strict=True)
        used = torch.cat([used[list(prompt.positions)] for used, prompt in rows])
        agreements.append((used == differs[:, None]).float().mean(0))
    order = torch.cat(agreements).argsort(descending=True, stable=True)[:SUSPECTS]
    return [(layers[number // layers[0].experts], number % layers[0].experts) for number in order.tolist()]


def cause_of_answers(
    reference: OpenModel, observed: Sequence[GoldenPrompt], rounding: float, progress: Progress = _SILENT
) -> Cause | None:
    """Return the fault that makes the reference answer as observed; None if no known one explains it.

    `observed` are prompts with the answers that came; `rounding` is the distance that rounding alone makes.
    """
    faults = faults_of(reference)
    planted = _plant(reference, [Fault(), *faults, *of_vocabulary()], observed, progress)
    cause = _explained(planted, rounding)
    if cause is not None:
        return cause
    layers = reference.architecture.layers
    single = in_layers([scaled(NUDGE), *faults], layers)
    for layer, expert in _suspects(planted, layers, rounding):
        single += of_expert(layer, expert)
    by_prompt = planted.distances[0].split([len(prompt.top) for prompt in observed])
    farthest = sorted(range(len(observed)), key=lambda number: -float(by_prompt[number].mean()))
    prompts = [observed[number] for number in farthest[:PROMPTS]]
    planted = _plant(reference, [Fault(), *single], prompts, progress)
    cause = _explained(planted, rounding)
    if cause is not None:
        return cause
    return _explained(_plant(reference, [Fault(), *_fitted(planted)], prompts, progress), rounding)


def _fitted(planted: _Planted) -> list[Fault]:
    """Return the scale of each layer's experts that would, to first order, come nearest to the answers."""
    faults = list[Fault]()
    for fault, error in zip(planted.faults, planted.errors, strict=True):
        if fault.sentence.startswith(scaled(NUDGE).sentence) and fault.layer is not None:
            effect = error - planted.errors[0]
            is_clear = effect.abs() > effect.abs().median()
            steps = -float((planted.errors[0] / effect)[is_clear].nanmedian())  # tokens that change experts are few
            faults += in_layers([scaled(1 + steps * (NUDGE - 1))], [fault.layer])
    return faults


def cause_of_tokens(folder: Path, prompt: GoldenPrompt) -> Cause:
    """Return why the tokenizer in a folder makes other tokens of a prompt."""
    tokenizer = tokenizer_of(folder)
    own: Sequence[int] = (
        () if tokenizer is None or prompt.text is None else rendered(tokenizer, prompt.text, prompt.tools)
    )
    steps = [token - golden for token, golden in zip(own, prompt.ids, strict=False)]
    step = max(steps, key=steps.count, default=0)
    if step and 2 * steps.count(step) > len(steps):
        return Cause("vocabulary shifted", f"the tokenizer's ids are shifted by {step}")
    return Cause("template", "the chat template, or the tokenizer, makes other tokens of the same text")


def cause_of_config(golden: Mapping[str, Any], own: Mapping[str, Any]) -> Cause | None:
    """Return the first field of the config that differs."""
    for name, value in golden.items():
        if own.get(name) != value:
            return Cause(name, f"config.json has {name} {own.get(name)}, and the model had {value}")
    return None


def _observed(golden: GoldenAnswers, answers: Sequence[Top | None]) -> list[GoldenPrompt]:
    """Return the prompts with the answers that came, as far as these are of known tokens."""
    observed = [replace(prompt, positions=(), top=()) for prompt in golden.prompts]
    for (number, position), top in zip(golden.places, answers, strict=True):
        known = {token: log for token, log in zip(top.tokens, top.logs, strict=True) if token >= 0} if top else {}
        if known:
            prompt = observed[number]
            answer = Top(tuple(known), tuple(known.values()))
            observed[number] = replace(prompt, positions=(*prompt.positions, position), top=(*prompt.top, answer))
    return [prompt for prompt in observed if prompt.top]


def find_cause(
    golden: GoldenAnswers,
    reference: Path,
    answered: Answered,
    thing: ModelSource | None,
    rounding: float,
    device: str = "auto",
    progress: Progress = _SILENT,
) -> Cause | None:
    """Return the likeliest cause of a difference; None if no known one explains it.

    A checkpoint (`thing`) is compared with what the golden answers hold of weights and config. For all others, faults
    are tried on the `reference`, the folder of the golden answers, if it holds a model.
    """
    if answered.other_tokens:
        return cause_of_tokens(thing.folder if thing else reference, golden.prompts[answered.other_tokens[0]])
    if thing is not None:
        model = open_exactly(thing, device)
        cause = cause_of_weights(golden.fingerprints, fingerprints(model))
        cause = cause or cause_of_config(golden.config, config_of(model))
        if cause is not None or thing.folder.samefile(reference):
            return cause
    try:
        source = ModelSource(str(reference), None, reference)
        return cause_of_answers(open_exactly(source, device), _observed(golden, answered.top), rounding, progress)
    except CompressionError:  # there is no model, or one whose layers cannot be changed like this
        return None
