"""The step `routers`: router calibration, which moves router weights or biases toward the base, after C3PO."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from compressor.distributed import refuse_several
from compressor.document.blocks import Block, Table, Text
from compressor.errors import CompressionError
from compressor.formatting import short
from compressor.model.opened import OpenModel
from compressor.recipe.document import changed, divergence
from compressor.recipe.step import Requirements, Result, Step, StepOptions, TextPart
from compressor.steps.routers.calibrating import PLACED, calibrate_routers, stored_names
from compressor.steps.routers.options import Routers
from compressor.steps.state import State

ROUNDS = ("round", "ridge", "step", "gain", "± standard error")
FIGURES = ("ridge", "step", "gain", "standard_error")
PLACES = ("layer", "place", "mean", "deviation")


@dataclass(frozen=True)
class RoutersStep(Step[Routers]):
    """Move the routers toward the base on text, as far as held-out text is nearer to it."""

    def resolve(self, model: OpenModel, stage: Sequence[StepOptions]) -> Self | None:
        """Return None where nothing is moved."""
        return None if self.options.method == "none" else self

    def requirements(self, model: OpenModel, steps: Sequence[StepOptions], planned: bool) -> Requirements:
        """Return the need of text of its own; refuse routers whose logits cannot be moved as they are stored."""
        options = self.options
        if options.method != "router":
            refuse_several(f"routers: method {options.method}", "choose the method router, or start one process")
        elif options.reference is not None:
            raise CompressionError(
                "routers: reference is for the methods bias and auto; name one of them, or leave it out"
            )
        stored_names(model)
        part = TextPart(options.sequences, options.sequence_length, min(8, options.sequences // options.rounds))
        return Requirements(part=part, passes=2)  # the base's, and forward and back for the gradients

    def teacher_batches(self, batches: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return the batches that gradients are taken on; a bias needs few, by which its places are found."""
        return batches[:PLACED] if self.options.method == "bias" else batches

    def apply_model(self, state: State) -> Result:
        """Calibrate the routers of the checkpoint as it is now."""
        return calibrate_routers(self.options, state)

    def describe(self, entry: Mapping[str, Any]) -> Sequence[Block]:
        """Describe the method, KL before and after, each round and a bias's places; gains are in nats per token."""
        result, moved = entry.get("result") or {}, changed(entry)
        took = f", took {result['taken']}" if "taken" in result else ""
        outcome = f"{'' if moved else 'the routers stay as they are; '}{divergence(result, moved)}"
        blocks: list[Block] = [Text(f"Router calibration ({self.options.method}{took}): {outcome}.")]
        rounds = list[tuple[str, ...]]()
        for number, step in enumerate(result.get("steps", ()), 1):
            figures = [short(step.get(name)) if step.get("step") else "-" for name in FIGURES]
            rounds.append((str(number), *figures))
        if rounds:
            blocks.append(Table("Rounds of the router calibration", ROUNDS, tuple(rounds)))
        places = [
            (str(layer.get("layer", "-")), layer["place"], short(layer.get("mean")), short(layer.get("deviation")))
            for layer in result.get("layers", ())
        ]
        if places:
            blocks.append(Table("Places of the bias", PLACES, tuple(places), frozenset(PLACES[:2])))
        if any(kind == "selection bias" for _, kind, _, _ in places):
            blocks.append(Text("A selection bias moves which experts are chosen, not their weights."))
        return blocks
