"""Count-guided: drop the experts that the fewest tokens visit (He et al. 2024, arXiv:2406.02500)."""

from dataclasses import replace

from compressor.plugins import LayerPlan, LayerStatistics, keep_best, kept_share

NEEDS = frozenset({"routed_count"})


def plan(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    """Keep the `keep` experts with most routed tokens; ties go to the lower expert."""
    counts = stats.routed_count
    kept = keep_best(stats, counts, keep, protected, decided_by="routed_count")
    return replace(kept, figures={"kept_share_of_visits": kept_share(kept, counts)})
