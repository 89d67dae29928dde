"""Hub-guided: keep the experts that do much, all the more where later routers listen to them.

The score of expert e is m_e (a_e / sum of a)^exponent. m_e is its gated mass or its visits, and a_e its AARV summed
over the later routers: by how many places the ranks of their chosen experts change, in the mean over all tokens, when
what e wrote is taken out of their logits ("Understanding Cross-Layer Contributions to Mixture-of-Experts Routing in
LLMs", ICLR 2026). A factor that a layer's m have in common ranks nothing, so m stays as measured, and exponent 0 ranks
as gated-mass or count-guided does. So does the last MoE layer, which no router listens to. a_e is a mean over all
tokens, those that do not visit e included, and rises with visits as m_e does.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from compressor.plugins import CompressionError, LayerPlan, LayerStatistics, kept_share, option, rounded
from strategies.reap import keep_salient

NEEDS = frozenset({"gated_norm_sum", "rank_change"})
MASSES: Mapping[str, str] = {"gated-mass": "gated_norm_sum", "visits": "routed_count"}
MOST = 10.0


@dataclass(frozen=True, slots=True)
class Options:
    """What an expert does, and how much it counts what that does to later routers."""

    mass: str = option(
        "gated-mass", help="what is weighed by the effect on later routers: gated-mass or visits", choices=MASSES
    )
    exponent: float = option(1.0, help="the power of the effect on later routers, from 0 (it does not count) to 10")

    def __post_init__(self) -> None:
        if not 0 <= self.exponent <= MOST:
            raise CompressionError(f"exponent is {self.exponent}; give a number from 0 to {MOST:g}")


def needs(options: Options) -> frozenset[str]:
    """The mass, and the effect on later routers where it counts."""
    return frozenset({MASSES[options.mass]} | ({"rank_change"} if options.exponent else set()))


def factors(rank_change: torch.Tensor, exponent: float) -> torch.Tensor:
    """Shares of the layer's total to that power, equal ones equally: [E] -> [E]; 1 where no later router is moved."""
    values = rounded(rank_change)
    total = values.sum()
    return (values / total) ** exponent if total > 0 else torch.ones_like(values)


def plan(
    stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset(), options: Options = Options()
) -> LayerPlan:
    """Keep the `keep` experts of highest score; ties go to the lower expert, one that no token reached counts 0."""
    statistic = MASSES[options.mass]
    mass = getattr(stats, statistic)
    if not options.exponent or not bool(stats.rank_change.any()):
        return keep_salient(stats, mass, keep, protected, statistic)
    scores = mass * factors(stats.rank_change, options.exponent)
    kept = keep_salient(stats, scores, keep, protected, f"{statistic} x rank_change")
    figures = {**kept.figures, "kept_share_of_rank_change": kept_share(kept, stats.rank_change)}
    return replace(kept, figures=figures)
