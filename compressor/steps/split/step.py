"""The step `split`: each routed expert becomes several narrower sub-experts that compute the same function."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import Field

from compressor.errors import CompressionError
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
        2, description="Sub-experts that each expert becomes; auto: 2 where nothing speaks against it, otherwise 1."
    )
    by: Literal["energy", "clusters"] = Field(
        "energy", description="How neurons are partitioned: by energy, or in clusters that fire together (needs text)."
    )

    def resolved(self, model: "OpenModel", steps: Sequence[Step]) -> Self | None:
        """With the number of parts that `auto` comes to; None where experts stay whole."""
        from compressor.steps.split.opening import resolved_parts

        parts = resolved_parts(self, model, steps)
        return None if parts == 1 else self.model_copy(update={"parts": parts})

    def view(self, model: "OpenModel") -> "OpenModel":
        from compressor.steps.split.opening import seen_as

        return seen_as(model, int(self.parts))

    def needs(self, model: "OpenModel", steps: Sequence[Step], planned: bool) -> Needs:
        """Text of its own where it is named: else neurons are measured on what others read, or on their weights."""
        from compressor.model.opened import served_model, warn_of_servers

        if self.by == "clusters" and self.calibration is None and all(step.name == self.name for step in steps):
            raise CompressionError("--split-by clusters needs text on which neurons fire; pass --calibration")
        if not any(step.name == "prune" for step in steps):  # which warns of what it leaves
            warn_of_servers(served_model(model.whole or model), served_model(model), model.architecture.layers)
        return Needs(text=self.calibration is not None and not planned)

    def plan(self, state: "State") -> Mapping[str, Any]:
        from compressor.steps.split.opening import dealt

        changed = any(step.name in ("correct", "distill") for step in state.steps)
        text = None if state.text is None else state.text.fit
        return dict(dealt(state.model, text, self.by, state.progress, state.seed, changed).split or {})

    def take(self, decided: Mapping[str, Any], state: "State") -> None:
        from compressor.steps.split.opening import as_decided

        state.model = as_decided(state.model, decided, state.model.top_k)
        state.parts *= int(decided["parts"])
