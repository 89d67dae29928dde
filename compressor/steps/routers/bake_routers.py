"""Baking into the routers of a checkpoint: from two models and some text to new router tensors and a record of them."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import Tensor

from compressor.data.batches import Calibration
from compressor.distributed.present import here
from compressor.errors import CompressionError
from compressor.evaluation.teacher import distributions
from compressor.model.opened import OpenModel, open_alike
from compressor.pathways.reference import ReferenceSet
from compressor.progress import Progress
from compressor.steps.routers.average import average_pathway, text_reference
from compressor.steps.routers.bake import Bake, stored_names, stored_routers
from compressor.steps.routers.bake_bias import bake_bias
from compressor.steps.routers.bake_weights import bake_weights
from compressor.steps.routers.bias_places import bias_places
from compressor.steps.routers.judging import Baked, Text, Weights

logger = logging.getLogger(__name__)

PLACED = 16  # batches by which the place of a bias is found, and from which its items are taken


@dataclass(frozen=True, slots=True)
class RoutersBaked:
    """Stored router tensors by name, as they are to be written, and what a plan says of them."""

    tensors: Mapping[str, Tensor]
    result: Mapping[str, Any]


def bake_routers(
    smaller: OpenModel,
    original: OpenModel,
    bake: Bake,
    text: Calibration,
    progress: Progress,
    reference: ReferenceSet | None = None,
) -> RoutersBaked:
    """Bake into the routers of `smaller` what brings it closer to `original` on the text.

    See `bake_weights` and `bake_bias`, whose pathways are those of the `reference` set, or of the text. `auto` takes
    the one that held-out text likes better. Several ranks share each round's text and what is held out.
    """
    heldout = sorted(text.heldout)
    fit = _first(text.fit, text, bake.sequences)
    if bake.method == "bias":  # which needs no more text than its places and items are taken from
        fit = fit[:PLACED]
    parts = [part for begin in range(bake.rounds) if (part := fit[begin :: bake.rounds])]
    numbers = [number for part in (*parts, heldout) for number in _own(part, text)]
    asked = distributions(original, [text.batches[number] for number in numbers], progress)
    known = dict(zip(numbers, asked, strict=True))

    def of(numbers: Sequence[int]) -> Text:
        return Text(tuple(text.batches[n] for n in numbers), tuple(known.get(n) for n in numbers))

    def weights() -> _Made:
        rounds = [of(part) for part in parts]
        names = stored_routers(smaller)
        return _Made("router", bake_weights(smaller, _read(smaller, names), rounds, of(heldout), progress), names)

    def bias() -> _Made:
        return _biased(smaller, bake, of(fit[:PLACED]), of(heldout), reference, progress)

    ways = {"router": (weights,), "bias": (bias,), "auto": (weights, bias)}[bake.method]
    return _chosen([made for way in ways if (made := _tried(way, len(ways) > 1)) is not None], ways)


def _own(numbers: Sequence[int], text: Calibration) -> list[int]:
    """Those of these batches that fall to this rank."""
    own = here().own([text.batches[number] for number in numbers])
    return [number for place, number in enumerate(numbers) if own is None or place in own]


@dataclass(frozen=True, slots=True)
class _Made:
    """One way to bake: what it has made, the stored names of its tensors by key, and what is told of it."""

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


def _chosen(made: Sequence[_Made], ways: Sequence[Any]) -> RoutersBaked:
    """The way that leaves the least divergence, and what a plan tells of it, in nats per token of held-out text."""
    if not made:
        raise CompressionError("no way to bake fits this model; leave out --bake")
    best = min(made, key=lambda each: each.baked.after)
    told: dict[str, Any] = {"before": best.baked.before, "after": best.baked.after}
    told |= {"steps": [asdict(step) for step in best.baked.steps], **best.told}
    if len(ways) > 1:
        told["taken"] = best.method if best.baked.after < best.baked.before else "none"
        told["tried"] = {each.method: each.baked.after for each in made}
    return RoutersBaked({best.names[key]: weight for key, weight in best.baked.weights.items()}, told)


def _biased(
    smaller: OpenModel,
    bake: Bake,
    fit: Text,
    heldout: Text,
    reference: ReferenceSet | None,
    progress: Progress,
) -> _Made:
    """The bake of a bias; it loads the smaller model whole."""
    whole = open_alike(smaller.source, smaller)
    expected = [each for each in fit.original if each is not None]  # one process has all
    found = reference or text_reference(whole, fit.batches, expected, progress)
    average = average_pathway(whole, found, bake.optimizer, progress)
    whole.partial.release("")
    places = bias_places(smaller, smaller.architecture.layers[-len(average.logits) :], fit.batches)
    names = stored_names(smaller, [place.key for place in places])
    baked = bake_bias(smaller, _read(smaller, names), places, average, heldout, progress)
    layers = [
        {"layer": place.layer, "place": place.kind, "mean": place.mean, "deviation": place.deviation}
        for place in places
    ]
    return _Made("bias", baked, names, {"items": average.items, "agreement": average.agreement, "layers": layers})


def _first(numbers: Sequence[int], text: Calibration, sequences: int) -> list[int]:
    """The first batches that hold so many sequences together."""
    found, count = list[int](), 0
    for number in numbers:
        if count >= sequences:
            break
        found.append(number)
        count += len(text.batches[number])
    return found


def _read(model: OpenModel, names: Mapping[str, str]) -> Weights:
    found = {key: model.checkpoint.read(name) for key, name in names.items()}
    for key, weight in found.items():
        if weight.shape != model.partial.empty[key].shape:
            raise CompressionError(f"{key} is stored in another shape than the model has it; leave out --bake")
    return found
