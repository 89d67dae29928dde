"""Auto: plan each layer by the strategy that loses least, or by the best of several for it, and correct it."""

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

CANDIDATES = "energy"
CORRECTION = "tune"  # unless another is asked for

NEEDS = frozenset[str]()


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
    """What the candidates need, and of several tokens that none of them sees."""
    own = frozenset[str]().union(*(load_strategy(name).needs for name in options.names))
    return own | HELDOUT if len(options.names) > 1 else own


def plan(
    stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset(), options: Options = Options()
) -> LayerPlan:
    """The only candidate's plan, or of several the one of least error on held-out tokens after rescaling.

    The error is `rescaled_error`; ties go to the earlier. A layer that no held-out token reached is planned by the
    first candidate.
    """
    if len(options.names) == 1:
        (name,) = options.names
        only = load_strategy(name).plan_layer(stats, keep, protected)
        return replace(only, figures={**only.figures, "won": name})
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
