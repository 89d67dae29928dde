"""The step `split`: each routed expert becomes several narrower sub-experts that compute the same function."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr

from compressor.document.blocks import Block, Text
from compressor.errors import CompressionError
from compressor.recipe.plan import MOST_PARTS, describe_split
from compressor.recipe.step import Needs, Step

if TYPE_CHECKING:
    from compressor.model.opened import OpenModel
    from compressor.steps.state import State


class Split(Step):
    """Split each routed expert into narrower sub-experts that compute the same; `prune` can then drop them singly."""

    name: ClassVar[str] = "split"
    order: ClassVar[int | None] = 0
    not_after: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("split", "prune", "constants", "correct", "quantize"), "experts are split before anything else is done to them"
    )

    parts: int | Literal["auto"] = Field(
        2, description="Sub-experts that each expert becomes; auto: 2, 3 or 4 where nothing speaks against it, or 1."
    )

    _why: str = PrivateAttr("")  # there are so many parts, where that was left open

    def resolved(self, model: "OpenModel", steps: Sequence[Step]) -> Self | None:
        """With the number of parts that `auto` comes to; None where nobody thinks of a split."""
        from compressor.steps.split.opening import chosen_parts

        if self.parts != "auto":
            if not 1 <= self.parts <= MOST_PARTS:
                raise CompressionError(f"--split {self.parts} is not 1 to {MOST_PARTS}; give another number of parts")
            return None if self.parts == 1 else self
        parts, why = chosen_parts(model, steps)
        step = self.model_copy(update={"parts": parts})
        step._why = why
        return step if why else None

    def view(self, model: "OpenModel") -> "OpenModel":
        from compressor.steps.split.opening import seen_as

        return seen_as(model, int(self.parts))

    def needs(self, model: "OpenModel", steps: Sequence[Step], planned: bool) -> Needs:
        """Text of its own where it is named: else neurons are measured on what others read, or on their weights."""
        notes = () if planned else (f"{sentence(self._shapes(model))}.",)
        return Needs(text=self.calibration is not None and not planned, passes=int(self.parts != 1), notes=notes)

    def plan(self, state: "State") -> Mapping[str, Any]:
        from compressor.steps.split.opening import partitioned

        if self.parts == 1:
            return self._shapes(state.model)
        changed = any(step.name in ("correct", "distill") for step in state.steps)
        text = None if state.text is None else state.text.fit
        split = partitioned(state.model, text, state.progress, state.seed, changed).split or {}
        return {**split, **self._shapes(state.model)}

    def take(self, decided: Mapping[str, Any], state: "State") -> None:
        from compressor.steps.split.opening import as_decided

        if decided.get("parts") != 1:
            state.model = as_decided(state.model, decided, state.model.top_k)
            state.parts *= int(decided["parts"])

    def describe(self, entry: Mapping[str, Any]) -> Sequence[Block]:
        """What became of every expert, with the config's numbers before and after, and why."""
        return (Text(f"{sentence(plan)}."),) if (plan := entry.get("plan")) else ()

    def _shapes(self, model: "OpenModel") -> dict[str, Any]:
        from compressor.steps.split.opening import shapes

        return shapes(model.whole or model, int(self.parts)) | ({"why": self._why} if self._why else {})


def sentence(split: Mapping[str, Any]) -> str:
    """What becomes of every expert, and why if that was not asked for; `split` is the entry in the plan."""
    parts, why = split["parts"], split.get("why")
    if parts == 1:
        return f"Experts stay whole: {why}"
    numbers = {
        "num_experts": (split["experts"], split["experts"] * parts),
        "num_experts_per_tok": (split["top_k"], split["top_k"] * parts),
        "width": (split["width"], split["width"] // parts),
    }
    changes = ", ".join(f"{name} {before} to {after}" for name, (before, after) in numbers.items())
    return f"Split {describe_split(split)}: {changes}" + (f" ({why})" if why else "")
