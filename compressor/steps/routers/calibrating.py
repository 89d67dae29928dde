"""Carry out `routers` on the checkpoint that earlier steps have made: new router tensors nearer to the base."""

import logging
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.evaluation.evaluator import Evaluator, require_enough
from compressor.kept import facts_of, keep_tensors, kept_tensors
from compressor.model.opened import OpenModel
from compressor.model.router_logits import router_weight
from compressor.pathways.answering import average_pathway, checked_reference, text_reference
from compressor.pathways.reference import ReferenceSet
from compressor.recipe.step import Result
from compressor.steps.routers.options import Routers
from compressor.steps.routers.weights import Calibrated, Text, Weights, bias_places, calibrate_bias, calibrate_weights
from compressor.steps.state import State

logger = logging.getLogger(__name__)

PLACED = 16  # batches by which the place of a bias is found, and from which its items are taken


def calibrate_routers(options: Routers, state: State) -> Result:
    """Move the routers as far as held-out text is nearer to the base; the new ones are kept until they are in place.

    The pathways of a bias are those of the `reference` set, or of the text. `auto` takes the method of least KL on
    held-out text. Raises `CompressionError` for fewer than eight held-out sequences.
    """
    place = state.kept("routers.safetensors")
    assert place is not None
    if ranks().broadcast(lambda: facts_of(place)) is None:
        calibrated = _calibrate(options, state)
        if ranks().is_first:
            keep_tensors(place, *calibrated)
    figures = ranks().broadcast(lambda: facts_of(place))
    return Result(figures, iter([kept_tensors(place)] if ranks().is_first else ()))


def stored_names(model: OpenModel, keys: Iterable[str] | None = None) -> dict[str, str]:
    """Stored tensors by state-dict key, by default of all router weights; refuses one that is not stored plain."""
    known = model.partial.plain_keys
    if keys is None:
        keys = [router_weight(layer) for layer in model.architecture.layers]
    stored = dict[str, str]()
    for key in keys:
        names = [name for name, target in known.targets.items() if target == key and known.patterns[name] is None]
        infos = [model.checkpoint.tensors[name] for name in names]
        if len(infos) != 1 or not infos[0].is_plain or infos[0].shape != tuple(model.partial.empty[key].shape):
            raise CompressionError(
                f"{key} is not stored as one tensor of plain numbers, so it cannot be calibrated; leave out routers"
            )
        stored[key] = names[0]
    return stored


def _read(model: OpenModel, keys: Iterable[str] | None = None) -> Weights:
    return {key: model.checkpoint.read(name) for key, name in stored_names(model, keys).items()}


def _calibrate(options: Routers, state: State) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Stored router tensors by name, as they are to be written, and what a plan says of them, in nats per token."""
    smaller = state.model
    weights = _read(smaller)
    reference = None if options.reference is None else checked_reference(options.reference, smaller)
    batches, answers, evaluator = state.teacher_outputs()
    assert state.text is not None
    emphasis = state.text.emphasis
    require_enough(evaluator.sequences, "routers")

    def text(numbers: range) -> Text:
        own = ranks().share([batches[number] for number in numbers])
        return [(batches[number], answers[number]) for place, number in enumerate(numbers) if place in own]

    def by_weights() -> Calibrated:
        parts = [range(first, len(batches), options.rounds) for first in range(options.rounds)]
        rounds = [text(numbers) for numbers in parts if numbers]
        return calibrate_weights(smaller, weights, rounds, evaluator, state.progress, emphasis)

    def by_bias() -> Calibrated:
        return _biased(state, options, text(range(min(PLACED, len(batches)))), evaluator, reference)

    ways = {"router": by_weights, "bias": by_bias}
    methods = [*ways] if options.method == "auto" else [options.method]
    tried = dict[str, Calibrated]()
    for method in methods:
        try:
            tried[method] = ways[method]()
        except CompressionError as error:
            if method == methods[-1] and not tried:
                raise
            logger.warning("%s; it is left out", error)  # the other method may fit the model
    kl = {method: calibrated.after.means["kl"] for method, calibrated in tried.items()}
    method = min(kl, key=lambda name: kl[name])
    best = tried[method]
    before, after = best.before.means, best.after.means
    figures: dict[str, Any] = {"before": before["kl"], "after": after["kl"]}
    for name in ("loss", "flips"):
        figures |= {f"{name}_before": before[name], f"{name}_after": after[name]}
    figures |= {"sequences": best.before.sequences, "steps": [asdict(step) for step in best.steps], **best.details}
    if len(methods) > 1:
        figures |= {"taken": method if any(step.step for step in best.steps) else "none", "tried": kl}
    names = stored_names(smaller, best.weights)
    return {names[key]: weight for key, weight in best.weights.items()}, figures


def _biased(
    state: State, options: Routers, text: Text, evaluator: Evaluator, reference: ReferenceSet | None
) -> Calibrated:
    """Routers with the average optimised pathway as a bias; this loads the smaller model whole."""
    smaller = state.model
    try:
        reference = reference or text_reference(smaller, text, state.progress)
        average = average_pathway(smaller, reference, options.optimizer, state.progress)
    finally:
        smaller.partial.release("")
    late = smaller.architecture.layers[-len(average.logits) :]
    places = bias_places(smaller, late, [tokens for tokens, _ in text])
    stored = _read(smaller, [place.key for place in places])
    layers = [
        {"layer": place.layer, "place": place.kind, "mean": place.mean, "deviation": place.deviation}
        for place in places
    ]
    details = {"items": average.items, "agreement": average.agreement, "layers": layers}
    return replace(calibrate_bias(smaller, stored, places, average, evaluator, state.progress), details=details)
