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
    known, stored = model.partial.plain_keys, dict[str, str]()
    for key in map(router_weight, model.architecture.layers) if keys is None else keys:
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
    smaller, progress, reference = state.model, state.progress, None
    routers = _read(smaller)
    if options.reference is not None:
        reference = checked_reference(options.reference, smaller)
    batches, answers, evaluator = state.base_answers()
    assert state.text is not None
    require_enough(evaluator.sequences, "routers")

    def text(numbers: range) -> Text:
        own = ranks().own([batches[number] for number in numbers])
        return [(batches[n], answers[n]) for place, n in enumerate(numbers) if place in own]

    methods, tried = ("router", "bias") if options.method == "auto" else (options.method,), dict[str, Calibrated]()
    for method in methods:
        try:
            if method == "router":
                rounds = [text(part) for n in range(options.rounds) if (part := range(n, len(batches), options.rounds))]
                tried[method] = calibrate_weights(smaller, routers, rounds, evaluator, progress, state.text.emphasis)
            else:
                tried[method] = _biased(state, options, text(range(min(PLACED, len(batches)))), evaluator, reference)
        except CompressionError as error:  # the other method may fit the model
            if len(methods) == 1:
                raise
            logger.warning("%s; it is left out", error)
    if not tried:
        raise CompressionError("no way to calibrate routers fits this model; leave the step routers out")
    kl = {method: each.after.means["kl"] for method, each in tried.items()}
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
    smaller, progress = state.model, state.progress
    try:
        reference = reference or text_reference(smaller, text, progress)
        average = average_pathway(smaller, reference, options.optimizer, progress)
    finally:
        smaller.partial.release("")
    places = bias_places(smaller, smaller.architecture.layers[-len(average.logits) :], [tokens for tokens, _ in text])
    own = _read(smaller, [place.key for place in places])
    layers = [
        {"layer": place.layer, "place": place.kind, "mean": place.mean, "deviation": place.deviation}
        for place in places
    ]
    details = {"items": average.items, "agreement": average.agreement, "layers": layers}
    return replace(calibrate_bias(smaller, own, places, average, evaluator, progress), details=details)
