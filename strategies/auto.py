"""Auto: keep the experts of most energy, and refit what is left by `tune`."""

from dataclasses import replace

from compressor.plugins import LayerPlan, LayerStatistics
from strategies.ranked import energy

CORRECTION = "tune"  # unless another is asked for

NEEDS = energy.NEEDS
score = energy.score


def plan(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    """Keep the `keep` experts of most energy, in the name of `energy`."""
    chosen = energy.plan(stats, keep, protected)
    return replace(chosen, figures={**chosen.figures, "won": "energy"})
