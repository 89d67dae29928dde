"""Options of the step `split`: each routed expert becomes several narrower sub-experts that compute
the same."""

from collections.abc import Mapping
from typing import ClassVar, Literal

from compressor.recipe.step import CONSTANTS, EXPERTS, FORMAT, SUB_EXPERTS, StepOptions


class Split(StepOptions):
    """Split each routed expert into narrower sub-experts that compute the same; `prune` can then
    drop them singly."""

    name: ClassVar[str] = "split"
    implementation: ClassVar[str] = "compressor.steps.split.step:SplitStep"
    changes: ClassVar[frozenset[str]] = frozenset({SUB_EXPERTS})
    order: ClassVar[int | None] = 0
    cannot_follow: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (SUB_EXPERTS, EXPERTS, CONSTANTS, FORMAT),
        "experts are split before anything else is done to them",
    )

    parts: int | Literal["auto"] = 2
    """Sub-experts that each expert becomes; auto: 2, 3 or 4, the first that the model's layout
    allows, or 1."""
