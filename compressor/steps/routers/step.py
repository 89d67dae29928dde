"""The step `routers`: router calibration, which moves router weights or biases toward the base, after C3PO."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from compressor.document.blocks import Block, Table, Text
from compressor.errors import CompressionError
from compressor.formatting import short
from compressor.recipe.document import changed, divergence
from compressor.recipe.step import DEFAULT_LENGTH, Needs, Result, Step, TextPart

if TYPE_CHECKING:
    from torch import Tensor

    from compressor.model.opened import OpenModel
    from compressor.steps.state import State


PLACED = 16  # batches by which the place of a bias is found, and from which its items are taken
ROUNDS = ("round", "ridge", "step", "gain", "± standard error")
FIGURES = ("ridge", "step", "gain", "standard_error")
PLACES = ("layer", "place", "mean", "deviation")


class Routers(Step):
    """Move the routers toward the base on text, as far as held-out text is nearer to it."""

    name: ClassVar[str] = "routers"
    not_after: ClassVar[Mapping[str, str]] = {"constants": "stock transformers cannot load constants"}

    method: Literal["router", "bias", "auto", "none"] = Field(
        "router",
        description="Calibrate router weights (router), a bias per expert (bias) or the better one (auto).",
    )
    rounds: int = Field(4, ge=1, le=1000, description="Gradient rounds, each on its share of the text.")
    sequences: int = Field(200, ge=1, le=10**6, description="Calibration sequences.")
    sequence_length: int = Field(DEFAULT_LENGTH, ge=2, le=10**6, description="Tokens in each sequence.")
    optimizer: Literal["own", "mode", "kernel", "ngd"] = Field(
        "own",
        description="How to optimise the pathways that a bias averages: own (each answer), mode, kernel or ngd.",
    )
    reference: str | None = Field(
        None, description="Reference set of the checkpoint, whose optimised pathways a bias averages."
    )

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.sequences < self.rounds:
            raise ValueError(f"{self.sequences} sequences are fewer than {self.rounds} rounds; give at least as many")
        return self

    def resolved(self, model: "OpenModel", steps: Sequence[Step]) -> Self | None:
        """None where nothing is moved."""
        return None if self.method == "none" else self

    def needs(self, model: "OpenModel", steps: Sequence[Step], planned: bool) -> Needs:
        """Text of its own, and held-out text; refuses routers whose logits cannot be moved as they are stored."""
        from compressor.distributed import refuse_several
        from compressor.steps.routers.calibrating import stored_names

        if self.method != "router":
            refuse_several(f"routers: method {self.method}", "choose the method router, or start one process")
        elif self.reference is not None:
            raise CompressionError(
                "routers: reference is for the methods bias and auto; name one of them, or leave it out"
            )
        stored_names(model)
        part = TextPart(self.sequences, self.sequence_length, min(8, self.sequences // self.rounds))
        return Needs(part=part, passes=2)  # the base's, and forward and back for the gradients

    def asks_base(self, batches: "Sequence[Tensor]") -> "Sequence[Tensor]":
        """The batches that gradients are taken on; a bias needs few, by which its places are found."""
        return batches[:PLACED] if self.method == "bias" else batches

    def whole(self, state: "State") -> Result | None:
        """Calibrate the routers of the checkpoint as it is now."""
        from compressor.steps.routers.calibrating import calibrate_routers

        return calibrate_routers(self, state)

    def describe(self, entry: Mapping[str, Any]) -> Sequence[Block]:
        """The method, KL before and after, a row for each round, and a bias's places; gains are in nats per token."""
        result, moved = entry.get("result") or {}, changed(entry)
        took = f", took {result['taken']}" if "taken" in result else ""
        outcome = f"{'' if moved else 'the routers stay as they are; '}{divergence(result, moved)}"
        rounds = tuple(
            (str(number), *(short(step.get(name)) if step.get("step") else "-" for name in FIGURES))
            for number, step in enumerate(result.get("steps", ()), 1)
        )
        layers = result.get("layers", ())
        places = tuple(
            (*(str(layer.get(name, "-")) for name in PLACES[:2]), *(short(layer.get(name)) for name in PLACES[2:]))
            for layer in layers
        )
        selection = any(layer.get("place") == "selection bias" for layer in layers)
        return (
            Text(f"Router calibration ({self.method}{took}): {outcome}."),
            *([Table("Rounds of the router calibration", ROUNDS, rounds)] if rounds else []),
            *([Table("Places of the bias", PLACES, places, frozenset(PLACES[:2]))] if places else []),
            *([Text("A selection bias moves which experts are chosen, not their weights.")] if selection else []),
        )
