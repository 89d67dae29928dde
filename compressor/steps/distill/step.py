"""The step `distill`: train the smaller model end to end toward its base's next-token distribution
on text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from compressor.data.sources import TextPart
from compressor.document.blocks import Block, Table, Text
from compressor.errors import CompressionError
from compressor.formatting import short
from compressor.model.opened import OpenModel
from compressor.recipe.document import changed, divergence, flips
from compressor.recipe.step import StepOptions
from compressor.steps.distill.engines import stored_dtypes, trained_layers
from compressor.steps.distill.options import Distill
from compressor.steps.distill.training import distill
from compressor.steps.step import Requirements, Result, State, Step

COLUMNS = ("step", "KL", "loss", "flips", "training")
OPTIMISER_BYTES = {"adam": 12, "adafactor": 4}  # of memory for each parameter that is trained


@dataclass(frozen=True)
class DistillStep(Step[Distill]):
    """Train toward the base; the loss is the sum of its parts, each times its weight."""

    def resolve(self, model: OpenModel) -> Self | None:
        """Return the step; None if nothing is trained."""
        return None if self.options.train == "none" else self

    def requirements(
        self, model: OpenModel, earlier: Sequence[StepOptions], planned: bool
    ) -> Requirements:
        """Return the need of text of its own; refuse tensors that cannot be trained as they are
        stored."""
        options = self.options
        packed = [step.name for step in earlier if step.format]
        if packed and options.rewrites:
            message = f"train {options.train} changes weights that {packed[0]} has packed"
            raise CompressionError(
                f"distill: {message}; put distill before {packed[0]}, or give train: router"
            )
        layers = trained_layers(model, options)
        if not model.layout.quantized or not earlier:  # merging and correcting dequantise first
            stored_dtypes(model, layers)
        sequences = options.sequences
        part = TextPart(
            options.steps * sequences, options.sequence_length, min(8, sequences), sequences
        )
        state = OPTIMISER_BYTES[options.optimiser] if options.train in ("experts", "all") else 0
        whole = 0 if options.stream else model.partial.dtype.itemsize + state
        # the base's, and forward and back
        return Requirements(part=part, passes=2, parameter_bytes=whole)

    def teacher_batches(self, batches: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return all batches: the base's next-token distributions on them are what is trained
        toward."""
        return batches

    @property
    def needs_teacher_hidden(self) -> bool:
        return self.options.hidden_states > 0

    def write(self, state: State) -> Result:
        """Train, evaluate on held-out text, and take the best state if its KL from the base is
        lower."""
        return distill(self.options, state)

    def describe(self, entry: Mapping[str, Any]) -> Sequence[Block]:
        """Describe what was trained for how long, KL before and after, and each evaluation with
        training losses."""
        options = self.options
        result = entry.get("result") or {}
        training = (
            f"{options.train}, at most {options.steps} steps of {options.tokens_per_step} tokens"
        )
        outcome = f"{divergence(result, True)}, after {result.get('best')} steps"
        if not changed(entry):
            outcome = f"nothing was changed; {divergence(result, False)}"
        blocks: list[Block] = [Text(f"Distillation ({training}): {outcome}.")]
        if result.get("ended"):
            blocks.append(Text(f"Training ended: {result['ended']}."))
        rows = []
        for evaluation in evaluations(entry):
            losses = [
                f"{name} {short(value)}".replace("_", " ")
                for name, value in evaluation["training"].items()
            ]
            rows.append(
                (
                    f"{evaluation['step']:,}",
                    short(evaluation["kl"], 5),
                    short(evaluation["loss"], 5),
                    flips(evaluation["flips"]) if "flips" in evaluation else "-",
                    ", ".join(losses) or "-",
                )
            )
        if rows:
            blocks.append(
                Table(
                    "Held-out text during the distillation",
                    COLUMNS,
                    tuple(rows),
                    frozenset(COLUMNS[4:]),
                )
            )
        return blocks


def evaluations(entry: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the figures on held-out text that a plan's entry has, in the order of their steps."""
    result = entry.get("result") or {}
    return list(result.get("curve", ()))
