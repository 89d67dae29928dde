"""What is asked of a bake into the routers, its text, and the stored tensors that it may change."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from compressor.checkpoint.headers import TORCH_DTYPES
from compressor.data.batches import Calibration, calibrate, load_tokenizer, recalibrate
from compressor.data.sources import WeightedSource
from compressor.errors import CompressionError
from compressor.evaluation.heldout import rows_at_once
from compressor.evaluation.teacher import check_teacher
from compressor.model.opened import OpenModel
from compressor.pathways.options import OPTIMIZERS
from compressor.pathways.router_logits import router_weight

OWN_ANSWER = "own"  # items of known answers, each moved down the gradient of its own loss, need no neighbours
METHODS = ("router", "bias", "auto")
HELDOUT = 48  # sequences that judge and make nothing
BATCH = 8


@dataclass(frozen=True, slots=True)
class Bake:
    """What to bake into the routers, and by how much text: `rounds` share `sequences` of `length` tokens.

    `optimizer` is what finds the pathways that a bias is the average of; `reference` the digest of the set of items
    that are optimised, or nothing where they are taken from the text.
    """

    method: str = "router"
    rounds: int = 4
    sequences: int = 400
    length: int = 256
    optimizer: str = OWN_ANSWER
    reference: str = ""

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
        said = asdict(self)
        for name in ("optimizer", "reference"):
            if self.method == "router" or not said[name]:
                del said[name]
        return {**said, "dtype": original.dtype_name, "calibration": text.identity}

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise CompressionError(f"there is no bake {self.method!r}; known are {', '.join(METHODS)}")
        if self.optimizer not in (known := (OWN_ANSWER, *(name for name in OPTIMIZERS if name != "oracle"))):
            raise CompressionError(f"a bake has no optimizer {self.optimizer!r}; known are {', '.join(known)}")
        for name, least, most in (("rounds", 1, 1000), ("sequences", self.rounds, 10**6), ("length", 2, 10**6)):
            if not least <= (value := getattr(self, name)) <= most:
                option = "sequence-length" if name == "length" else name
                raise CompressionError(f"--{option} {value} is out of range for a bake; give {least} to {most:,}")


def bake_text(
    bake: Bake, sources: Sequence[WeightedSource], model: OpenModel, seed: int, passed: int = 0
) -> Calibration:
    """The text to bake with; its last sequences, behind `passed` tokens that others have used, are held out."""
    count = max(bake.sequences, math.ceil(passed / bake.length)) + HELDOUT
    return calibrate(
        sources,
        load_tokenizer(model.source.folder),
        samples=count,
        length=bake.length,
        seed=seed,
        vocab=model.vocabulary,
        batch_size=_rows(bake, model),
        heldout=HELDOUT / count,
    )


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
    return stored_names(model, [router_weight(layer) for layer in model.architecture.layers])


def stored_names(model: OpenModel, wanted: Iterable[str]) -> dict[str, str]:
    """The names of the stored tensors by state-dict key; raises `CompressionError` unless each is one, and plain."""
    keys, found = model.partial.keys, {}
    for key in wanted:
        names = [name for name, target in keys.targets.items() if target == key and keys.patterns[name] is None]
        dtypes = [TORCH_DTYPES.get(model.checkpoint.tensors[name].dtype, torch.int8) for name in names]
        if len(names) != 1 or not dtypes[0].is_floating_point or dtypes[0].itemsize < 2:
            raise CompressionError(
                f"{key} is not stored as one tensor of plain numbers, so nothing can be baked into it; leave out --bake"
            )
        found[key] = names[0]
    return found
