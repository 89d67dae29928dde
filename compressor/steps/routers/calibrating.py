"""Calibration of the routers of a checkpoint: what is asked for, its text, new router tensors, and their place in it.

From two models and some text come stored router tensors that bring the smaller model nearer to its base, and a record.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.reader import TORCH_DTYPES
from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.evaluation.base_answers import Distributions
from compressor.evaluation.evaluator import Evaluator, require_enough
from compressor.kept import keep_tensors, kept_tensors, told_of
from compressor.model.opened import OpenModel, open_alike
from compressor.pathways.reference import ReferenceSet
from compressor.pathways.router_logits import router_weight
from compressor.progress import Progress
from compressor.steps.routers.average import average_pathway, text_reference
from compressor.steps.routers.bias import bake_bias, bias_places
from compressor.steps.routers.step import Routers
from compressor.steps.routers.weights import Baked, Text, Weights, bake_weights

logger = logging.getLogger(__name__)

PLACED = 16  # batches by which the place of a bias is found, and from which its items are taken


def stored_routers(model: OpenModel) -> dict[str, str]:
    """The name of the stored tensor of every router's weight, by its state-dict key.

    Raises `CompressionError` where a router has no such weight, or it is stored in pieces or quantised.
    """
    return stored_names(model, [router_weight(layer) for layer in model.architecture.layers])


def stored_names(model: OpenModel, wanted: Iterable[str]) -> dict[str, str]:
    """The names of the stored tensors by state-dict key; raises `CompressionError` unless each is one, and plain."""
    keys, found = model.partial.keys, {}
    for key in wanted:
        names = [name for name, target in keys.targets.items() if target == key and keys.patterns[name] is None]
        dtypes = [TORCH_DTYPES.get(model.checkpoint.tensors[name].dtype, torch.int8) for name in names]
        if len(names) != 1 or not dtypes[0].is_floating_point or dtypes[0].itemsize < 2:
            raise CompressionError(
                f"{key} is not stored as one tensor of plain numbers, so it cannot be calibrated; leave out routers"
            )
        found[key] = names[0]
    return found


@dataclass(frozen=True, slots=True)
class CalibratedRouters:
    """Stored router tensors by name, as they are to be written, and what a plan says of them."""

    tensors: Mapping[str, Tensor]
    result: Mapping[str, Any]


def calibrate_tensors(
    smaller: OpenModel,
    asked: Routers,
    batches: Sequence[Tensor],
    answers: Sequence[Distributions],
    evaluator: Evaluator,
    progress: Progress,
    reference: ReferenceSet | None = None,
) -> CalibratedRouters:
    """Calibrate the routers of `smaller`, so that it comes nearer to its base, which the evaluator knows.

    See `weights` and `bias`, whose pathways are those of the `reference` set, or of the text. `auto` takes the one of
    least KL on held-out text. `answers` are the base's on the batches [B, L] of text, which processes share.
    Raises `CompressionError` for fewer than eight held-out sequences.
    """
    require_enough(evaluator.sequences, "routers")
    parts = [part for begin in range(asked.rounds) if (part := range(begin, len(batches), asked.rounds))]

    def of(numbers: Sequence[int]) -> Text:
        chosen = [batches[n] for n in numbers]
        own = here().own(chosen)
        known = (answers[n] if own is None or place in own else None for place, n in enumerate(numbers))
        return Text(tuple(chosen), tuple(known))

    def weights() -> _Made:
        rounds, names = [of(part) for part in parts], stored_routers(smaller)
        return _Made("router", bake_weights(smaller, _read(smaller, names), rounds, evaluator, progress), names)

    def bias() -> _Made:
        return _biased(smaller, asked, of(range(min(PLACED, len(batches)))), evaluator, reference, progress)

    ways = {"router": (weights,), "bias": (bias,), "auto": (weights, bias)}[asked.method]
    return _chosen([made for way in ways if (made := _tried(way, len(ways) > 1)) is not None], ways)


@dataclass(frozen=True, slots=True)
class _Made:
    """One way to calibrate: what it has made, the stored names of its tensors by key, and what is told of it."""

    method: str
    baked: Baked
    names: Mapping[str, str]
    told: Mapping[str, Any] = field(default_factory=dict)


def _tried(way: Callable[[], _Made], others: bool) -> _Made | None:
    """What comes out; with other ways beside it, one that the model does not allow is left out with a warning."""
    try:
        return way()
    except CompressionError as error:
        if not others:
            raise
        logger.warning("%s; it is left out", error)
        return None


def _chosen(made: Sequence[_Made], ways: Sequence[Any]) -> CalibratedRouters:
    """The way of least KL, and what a plan tells of it, in nats per token of held-out text."""
    if not made:
        raise CompressionError("no way to calibrate routers fits this model; leave the step routers out")
    after = {each.method: each.baked.after.means["kl"] for each in made}
    best = min(made, key=lambda each: after[each.method])
    before, means = best.baked.before.means, best.baked.after.means
    told: dict[str, Any] = {"before": before["kl"], "after": means["kl"]}
    for name in ("loss", "flips"):
        told |= {f"{name}_before": before[name], f"{name}_after": means[name]}
    told["sequences"] = best.baked.before.sequences
    told |= {"steps": [asdict(step) for step in best.baked.steps], **best.told}
    if len(ways) > 1:
        told["taken"] = best.method if any(step.step for step in best.baked.steps) else "none"
        told["tried"] = after
    return CalibratedRouters({best.names[key]: weight for key, weight in best.baked.weights.items()}, told)


def _biased(
    smaller: OpenModel,
    asked: Routers,
    fit: Text,
    evaluator: Evaluator,
    reference: ReferenceSet | None,
    progress: Progress,
) -> _Made:
    """The bake of a bias; it loads the smaller model whole."""
    whole = open_alike(smaller.source, smaller)
    expected = [each for each in fit.base if each is not None]  # one process has all
    found = reference or text_reference(whole, fit.batches, expected, progress)
    average = average_pathway(whole, found, asked.optimizer, progress)
    whole.partial.release("")
    places = bias_places(smaller, smaller.architecture.layers[-len(average.logits) :], fit.batches)
    names = stored_names(smaller, [place.key for place in places])
    baked = bake_bias(smaller, _read(smaller, names), places, average, evaluator, progress)
    layers = [
        {"layer": place.layer, "place": place.kind, "mean": place.mean, "deviation": place.deviation}
        for place in places
    ]
    return _Made("bias", baked, names, {"items": average.items, "agreement": average.agreement, "layers": layers})


def _read(model: OpenModel, names: Mapping[str, str]) -> Weights:
    found = {key: model.checkpoint.read(name) for key, name in names.items()}
    for key, weight in found.items():
        if weight.shape != model.partial.empty[key].shape:
            raise CompressionError(f"{key} is stored in another shape than the model has it; leave out routers")
    return found


def keep(path: Path, baked: CalibratedRouters) -> None:
    """Write calibrated routers whole, or not at all."""
    keep_tensors(path, baked.tensors, dict(baked.result))


def kept(path: Path) -> CalibratedRouters | None:
    """What `keep` has written; None if there is nothing, or nothing that can be read."""
    result = told_of(path)
    return None if result is None else CalibratedRouters(kept_tensors(path), result)
