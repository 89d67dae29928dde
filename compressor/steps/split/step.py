"""The step `split`: each routed expert becomes several narrower sub-experts that compute the same
function."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from compressor.document.blocks import Block, Text
from compressor.model.opened import OpenModel
from compressor.recipe.plan import describe_split
from compressor.recipe.step import WEIGHTS, Requirements, Step, StepOptions
from compressor.steps.split.options import Split
from compressor.steps.split.view import as_decided, chosen_parts, partitioned, seen_as, shapes
from compressor.steps.state import State


@dataclass(frozen=True)
class SplitStep(Step[Split]):
    """Split each routed expert into narrower sub-experts that compute the same."""

    why: str = ""  # the reason for the number of parts, where that was left open

    @property
    def parts(self) -> int:
        """The number of sub-experts that each expert becomes."""
        return int(self.options.parts)

    def resolve(self, model: OpenModel, stage: Sequence[StepOptions]) -> Self | None:
        """Return the step with the number of parts that `auto` comes to; None if nothing is
        split."""
        if self.options.parts != "auto":
            return None if self.parts == 1 else self
        parts, why = chosen_parts(model, stage)
        return replace(self.with_options(parts=parts), why=why) if why else None

    def model_view(self, model: OpenModel) -> OpenModel:
        return seen_as(model, self.parts)

    def requirements(
        self, model: OpenModel, steps: Sequence[StepOptions], planned: bool
    ) -> Requirements:
        """Return the need of text of its own; else neurons are measured on what others read, or on
        their weights."""
        own_text = self.options.calibration is not None
        notes = () if planned else (f"{sentence(self._shapes(model))}.",)
        reads = own_text and not planned
        passes = int(self.parts != 1)
        return Requirements(text=reads, passes=passes, notes=notes, notes_are_described=True)

    def decide(self, state: State) -> Mapping[str, Any]:
        shapes_now = self._shapes(state.model)
        if self.parts == 1:
            return shapes_now
        changed = any(WEIGHTS in step.options.changes for step in state.steps)
        split = partitioned(state.model, state.fit, state.progress, state.seed, changed).split or {}
        return {**split, **shapes_now}

    def apply_decision(self, decided: Mapping[str, Any], state: State) -> None:
        if decided.get("parts") != 1:
            state.model = as_decided(state.model, decided, state.model.top_k)
            state.parts *= int(decided["parts"])

    def describe(self, entry: Mapping[str, Any]) -> Sequence[Block]:
        """Describe the split of the experts, with the config's numbers before and after, and the
        reason."""
        plan = entry.get("plan")
        return (Text(f"{sentence(plan)}."),) if plan else ()

    def _shapes(self, model: OpenModel) -> dict[str, Any]:
        reason = {"why": self.why} if self.why else {}
        return shapes(model.whole or model, self.parts) | reason


def sentence(split: Mapping[str, Any]) -> str:
    """Return a sentence on the split, with the reason if it was chosen automatically; `split` is
    the plan's entry."""
    parts = split["parts"]
    why = split.get("why")
    if parts == 1:
        return f"Experts stay whole: {why}"
    numbers = {
        "num_experts": (split["experts"], split["experts"] * parts),
        "num_experts_per_tok": (split["top_k"], split["top_k"] * parts),
        "width": (split["width"], split["width"] // parts),
    }
    changes = ", ".join(f"{name} {before} to {after}" for name, (before, after) in numbers.items())
    return f"Split {describe_split(split)}: {changes}" + (f" ({why})" if why else "")
