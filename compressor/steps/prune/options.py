"""Options of the step `prune`: a strategy decides which experts stay, merge or go."""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, JsonValue

from compressor import entry_points
from compressor.data.sources import SAMPLE_TOKENS
from compressor.errors import CompressionError
from compressor.model.moe_layer import MoeLayer, resolve_count
from compressor.recipe.step import StepOptions
from compressor.steps.correct.options import Correct, Correcting

WHOLE = re.compile(r"0*[1-9][0-9]{0,8}")  # a number above 0
# of a planner: experts module and number, the strongest first
Protector = Callable[[Any], Sequence[tuple[str, int]]]


def protector_of(protect: Any) -> Protector | None:
    """Return the protector of a NAME or NAME:N, which finds experts on calibration data; None for a
    list.

    Raises `CompressionError` for NAME:N without a whole number N above 0, or where the protector
    takes none."""
    name, colon, count = protect.partition(":") if isinstance(protect, str) else ("", "", "")
    if name not in entry_points.names(entry_points.PROTECTORS):
        return None
    find: Callable[..., Sequence[tuple[str, int]]] = entry_points.load(
        entry_points.PROTECTORS, name
    )
    if not colon and entry_points.takes(find, 1):
        return find
    if not entry_points.takes(find, 2):
        raise CompressionError(f"--protect {protect} should be {name}, without a number")
    if not WHOLE.fullmatch(count):
        raise CompressionError(
            f"--protect {protect} should be {name}:N with a whole number N above 0"
        )

    @functools.wraps(find)
    def of_count(planner: Any) -> Sequence[tuple[str, int]]:
        return find(planner, int(count))

    return of_count


def protecting_packages(protect: Any) -> tuple[str, ...]:
    """Return the optional packages that a protector says it imports, as its `packages`."""
    packages: tuple[str, ...] = getattr(protector_of(protect), "packages", ())
    return packages


def _check_protect(protect: Any) -> Any:
    protector_of(protect)
    return protect


Protect = Annotated[str | tuple[dict[str, JsonValue], ...] | None, AfterValidator(_check_protect)]

SampleTokens = Annotated[int, Field(ge=1)] | Literal["all"]


class Prune(StepOptions):
    """Drop or merge experts, with their rows of the routers."""

    name: ClassVar[str] = "prune"
    implementation: ClassVar[str] = "compressor.steps.prune.step:PruneStep"

    strategy: str = "auto"
    """Pruning strategy. See `moe-compress list strategies`."""
    experts: int | None = None
    """Experts to keep in each MoE layer. They are those of the source, also after `split`."""
    ratio: float | None = Field(None, ge=0, lt=1)
    """Share of the experts to remove. No more than this goes."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Options of the strategy."""
    protect: Protect = None
    """Experts that are neither merged nor dropped: auto (the hub experts), graph:N (the N of
    highest centrality in the routing graph), or a JSON list of experts to keep (hubs.json of
    `moe-compress attribute`)."""
    sample_tokens: SampleTokens = SAMPLE_TOKENS
    """Tokens of the text on which each layer's experts are compared, by strategies that compare
    outputs or router logits; or all. Sums, such as those of reap, are over the whole text."""
    sequential: bool = False
    """Plan each layer on what the compressed earlier layers output."""
    top_k: int | None = Field(None, ge=1)
    """num_experts_per_tok of the output, at most as many as now (default: as many)."""
    mtp: Literal["keep", "with", "whole", "drop"] | Annotated[int, Field(ge=1)] | None = None
    """Multi-token-prediction heads: keep or with (with as many experts as the other layers), whole
    (with all of theirs), so many experts, or drop (default: keep where the layout is known)."""
    balance: Literal["sum", "worst"] | None = None
    """How experts are kept for several sources of text: by the sum of their scores (the default),
    or worst: the source that keeps the least share of its score gets its best expert, until the
    layer is full."""

    split: int | Literal["auto"] = 1
    """Sub-experts that each expert becomes before, narrower and together the same, so that they can
    go one by one; auto: 2, 3 or 4, the first that suits the experts' width, or 1."""
    correct: Correcting = Correct("none")
    """Refit kept experts: none, ridge, tune or auto; or a mapping of method and more. ridge solves
    for the down projections in closed form. tune then trains router, gate, up and down projections
    by gradient steps. auto is the strategy's own method."""

    @property
    def rewrites(self) -> bool:
        return self.correct.wanted

    def fault_after(self, earlier: StepOptions) -> str | None:
        if self.split != 1 and (earlier.name == self.name or earlier.format):
            return "experts are split before anything else is done to them"
        if self.correct.wanted and earlier.format:
            return "it would write the experts that it refits unquantised"
        return None

    @property
    def keeps_all(self) -> bool:
        """Return True if every expert stays, so that no strategy decides."""
        return self.ratio == 0 and self.experts is None and self.mtp is None

    @property
    def is_sized(self) -> bool:
        """Return True if it says how many experts stay."""
        return self.experts is not None or self.ratio is not None

    def count(self, layers: Sequence[MoeLayer], parts: int = 1) -> int:
        """Return how many experts each layer keeps; `experts` count `parts` each.

        Raises `CompressionError` where both or none of `experts` and `ratio` are given, and for a
        number that a layer cannot have."""
        experts = None if self.experts is None else self.experts * parts
        return resolve_count(layers, experts, self.ratio)

    @property
    def sample_count(self) -> int | None:
        """Return the number of tokens that are sampled; None for all."""
        return None if self.sample_tokens == "all" else self.sample_tokens

    @property
    def packages(self) -> tuple[str, ...]:
        return protecting_packages(self.protect)

    def check_installed(self) -> None:
        super().check_installed()
        entry_points.find(entry_points.STRATEGIES, self.strategy)
        if self.options:  # which its module knows
            from compressor.recipe.registry import load_strategy

            load_strategy(self.strategy, self.options)
