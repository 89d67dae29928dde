"""The step `distill`: train the smaller model end to end toward its base's next-token distribution
on text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from torch import Tensor

from compressor.data.sources import TextPart
from compressor.document.blocks import Block, Table, Text
from compressor.errors import CompressionError
from compressor.formatting import short
from compressor.model.opened import OpenModel
from compressor.recipe.step import StepOptions
from compressor.recipe.steps_plan import PlannedStep
from compressor.steps.distill.engines import stored_dtypes, trained_layers
from compressor.steps.distill.options import Distill
from compressor.steps.distill.training import distill
from compressor.steps.section import Section, divergence, flips, is_changed
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

    def describe(self, planned: PlannedStep) -> Section:
        """Describe what was trained for how long, KL before and after, and each evaluation with
        training losses."""
        options = self.options
        result = planned.result or {}
        trained = is_changed(planned)
        outcome = f"{divergence(result, True)}, after {result.get('best')} steps"
        if not trained:
            outcome = f"nothing was changed; {divergence(result, False)}"
        blocks: list[Block] = []
        if result.get("ended"):
            blocks.append(Text(f"Training ended: {result['ended']}."))
        rows = []
        for evaluation in result.get("curve", ()):
            losses = [
                f"{name} {short(value)}".replace("_", " ")
                for name, value in evaluation["training"].items()
            ]
            figures = [short(evaluation[name], 5) for name in ("kl", "loss")]
            figures.append(flips(evaluation["flips"]) if "flips" in evaluation else "-")
            rows.append((f"{evaluation['step']:,}", *figures, ", ".join(losses) or "-"))
        if rows:
            title = "Held-out text during the distillation"
            blocks.append(Table(title, COLUMNS, rows, COLUMNS[4:]))
        limit = (
            "Distillation trained the model end to end toward the base on text that its maker "
            "chose; what the base gets wrong, and what that text does not show, did not come "
            "closer to right."
        )
        return Section(
            self.name,
            f"Distillation ({options.train}, at most {options.steps} steps of "
            f"{options.tokens_per_step} tokens): {outcome}",
            ways=["distillation"] if trained else [],
            tuned="model" if trained else "",
            blocks=blocks,
            limits=[limit] if trained else [],
        )
