"""Baking into the routers of a checkpoint: from two models and some text to new router tensors and a record of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

from compressor.calibration.batches import Calibration, calibrate, load_tokenizer, recalibrate
from compressor.calibration.heldout import rows_at_once
from compressor.calibration.sources import WeightedSource
from compressor.calibration.teacher import check_teacher, distributions
from compressor.checkpoint.headers import TORCH_DTYPES
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel
from compressor.pathways.bake_weights import Baked, Text, Weights, bake_weights
from compressor.pathways.router_logits import router_weight
from compressor.progress import Progress

METHODS = ("router",)
HELDOUT = 48  # sequences that judge and make nothing
BATCH = 8


@dataclass(frozen=True, slots=True)
class Bake:
    """What to bake into the routers, and by how much text: `rounds` share `sequences` of `length` tokens."""

    method: str = "router"
    rounds: int = 4
    sequences: int = 400
    length: int = 256

    @classmethod
    def from_plan(cls, asked: Mapping[str, Any]) -> "Bake":
        """What a plan asks for; raises `CompressionError` for a field of another kind."""
        given = {entry.name: asked.get(entry.name, entry.default) for entry in fields(cls)}
        for entry in fields(cls):
            if type(given[entry.name]) is not type(entry.default):
                raise CompressionError(f"the bake's {entry.name} is {given[entry.name]!r}; restore it or plan again")
        return cls(**given)

    def to_dict(self, original: OpenModel, text: Calibration) -> dict[str, Any]:
        """What a plan says of it: how, in which dtype, and on what text."""
        dtype = str(original.partial.dtype).removeprefix("torch.")
        return {**asdict(self), "dtype": dtype, "calibration": text.identity}

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise CompressionError(f"there is no bake {self.method!r}; known are {', '.join(METHODS)}")
        for name, least, most in (("rounds", 1, 1000), ("sequences", self.rounds, 10**6), ("length", 2, 10**6)):
            if not least <= (value := getattr(self, name)) <= most:
                option = "sequence-length" if name == "length" else name
                raise CompressionError(f"--{option} {value} is out of range for a bake; give {least} to {most:,}")


@dataclass(frozen=True, slots=True)
class RoutersBaked:
    """Stored router tensors by name, as they are to be written, and what a plan says of them."""

    tensors: Mapping[str, Tensor]
    result: Mapping[str, Any]


def bake_text(
    bake: Bake, sources: Sequence[WeightedSource], model: OpenModel, seed: int, passed: int = 0
) -> Calibration:
    """The text to bake with; its last sequences, behind `passed` tokens that others have used, are held out."""
    count = max(bake.sequences, math.ceil(passed / bake.length)) + HELDOUT
    return calibrate(
        sources, load_tokenizer(model.source.folder), samples=count, length=bake.length, seed=seed,
        vocab=model.vocabulary, batch_size=_rows(bake, model), heldout=HELDOUT / count,
    )  # fmt: skip


def repeated_text(bake: Bake, identity: Mapping[str, Any], model: OpenModel) -> Calibration:
    """The text that a plan's bake names; raises `CompressionError` unless the same tokens come out."""
    return recalibrate(identity, load_tokenizer(model.source.folder), model.vocabulary, _rows(bake, model))


def _rows(bake: Bake, model: OpenModel) -> int:
    """Sequences of a batch: few enough for its logits to stay small, and for every round to have one."""
    return min(BATCH, bake.sequences // bake.rounds, rows_at_once(bake.length, model.vocabulary))


def check_pair(smaller: OpenModel, original: OpenModel) -> None:
    """Refuse an original that cannot teach the smaller model, and routers whose logits cannot be moved as stored."""
    check_teacher(smaller, original)
    stored_routers(smaller)


def stored_routers(model: OpenModel) -> dict[str, str]:
    """The name of the stored tensor of every router's weight, by its state-dict key.

    Raises `CompressionError` where a router has no such weight, or it is stored in pieces or quantised.
    """
    keys, found = model.partial.keys, {}
    for layer in model.architecture.layers:
        key = router_weight(layer)
        names = [name for name, target in keys.targets.items() if target == key and keys.patterns[name] is None]
        dtypes = [TORCH_DTYPES.get(model.checkpoint.tensors[name].dtype, torch.int8) for name in names]
        if len(names) != 1 or not dtypes[0].is_floating_point or dtypes[0].itemsize < 2:
            raise CompressionError(
                f"{key} is not stored as one tensor of plain numbers, so nothing can be baked into it; leave out --bake"
            )
        found[key] = names[0]
    return found


def bake_routers(
    smaller: OpenModel, original: OpenModel, bake: Bake, text: Calibration, progress: Progress
) -> RoutersBaked:
    """Bake into the routers of `smaller` what brings it closer to `original` on the text; see `bake_weights`."""
    names = stored_routers(smaller)
    asked = distributions(original, text.batches, progress)
    fit = [number for number in range(len(text.batches)) if number not in text.heldout]
    fit = _first(fit, text.batches, bake.sequences)
    rounds = [fit[begin :: bake.rounds] for begin in range(bake.rounds)]

    def of(numbers: Sequence[int]) -> Text:
        return Text(tuple(text.batches[n] for n in numbers), tuple(asked[n] for n in numbers))

    made = bake_weights(
        smaller, _weights(smaller, names), [of(numbers) for numbers in rounds if numbers], of(sorted(text.heldout)),
        progress,
    )  # fmt: skip
    tensors = {names[key]: weight for key, weight in made.weights.items()}
    return RoutersBaked(tensors, _result(made))


def _first(numbers: Sequence[int], batches: Sequence[Tensor], sequences: int) -> list[int]:
    """The first batches that hold so many sequences together."""
    found, count = list[int](), 0
    for number in numbers:
        if count >= sequences:
            break
        found.append(number)
        count += len(batches[number])
    return found


def _weights(model: OpenModel, names: Mapping[str, str]) -> Weights:
    found = {key: model.checkpoint.read(name) for key, name in names.items()}
    for key, weight in found.items():
        if weight.shape != model.partial.empty[key].shape:
            raise CompressionError(f"{key} is stored in another shape than the model has it; leave out --bake")
    return found


def _result(made: Baked) -> dict[str, Any]:
    """What a plan tells of a bake: the divergence on held-out text in nats per token, and what each round took."""
    return {"before": made.before, "after": made.after, "steps": [asdict(step) for step in made.steps]}
