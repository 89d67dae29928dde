"""Auto: plan each layer by several strategies, keep what brings its output back best on held-out tokens, correct it."""

from dataclasses import dataclass, replace

from compressor.plugins import (
    HELDOUT,
    SQUARED,
    CompressionError,
    LayerPlan,
    LayerStatistics,
    load_strategy,
    option,
    rescaled_error,
    stable_argmin,
)

CANDIDATES = "enumerate,energy"
CORRECTION = "tune"  # unless another is asked for

NEEDS = HELDOUT


@dataclass(frozen=True, slots=True)
class Options:
    """Names of the strategies to choose from, each with its default options, separated by commas."""

    candidates: str = option(CANDIDATES, help="the strategies to choose from, separated by commas")

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.names) or {"", "auto"} & set(self.names):
            raise CompressionError(
                f"candidates {self.candidates!r} should be different strategies other than auto, separated by commas"
            )

    @property
    def names(self) -> list[str]:
        return [name.strip() for name in self.candidates.split(",")]


def needs(options: Options) -> frozenset[str]:
    """What the candidates need, and tokens that none of them sees."""
    return HELDOUT.union(*(load_strategy(name).needs for name in options.names))


def plan(
    stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset(), options: Options = Options()
) -> LayerPlan:
    """The candidates' plan of least error on held-out tokens after rescaling; ties go to the earlier.

    The error is `rescaled_error`. A layer that no held-out token reached is planned by the first candidate.
    """
    plans, errors, refusals = dict[str, LayerPlan](), dict[str, float](), list[CompressionError]()
    for name in options.names:
        try:
            plans[name] = load_strategy(name).plan_layer(stats, keep, protected)
        except CompressionError as refusal:  # others may fit the protected experts
            refusals.append(refusal)
            continue
        errors[name] = rescaled_error(stats.heldout, plans[name])
    if not plans:
        raise refusals[0]
    won = [*errors][stable_argmin(errors.values(), SQUARED)]
    others = [error for name, error in errors.items() if plans[name].groups != plans[won].groups]
    margin = {"ahead_by": round(max(min(others) - errors[won], 0.0), 6)} if others else {}
    rounded = {name: round(error, 6) for name, error in errors.items()}
    figures = {**plans[won].figures, "won": won, **margin, "heldout_errors": rounded}
    return replace(plans[won], decided_by="held-out reconstruction error", figures=figures)
