"""Strategies that rank experts by one score each and keep the highest: published ones, and those of
our own.

g_e(x) is the gate weight and f_e(x) the output of expert e, X_e are the tokens x routed to it. Ties
go to the lower expert, and an expert that no token reached counts 0. Scores are [E] in float64."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from compressor.plugins import (
    CompressionError,
    LayerPlan,
    LayerStatistics,
    LayerWeights,
    NamedOptions,
    as_float64,
    keep_best,
    kept_share,
    projections,
    rounded,
)

SHARE = "kept_share_of_saliency"
# what hub-guided weighs, and its statistic
MASSES = {"gated-mass": "gated_norm_sum", "visits": "routed_count"}


def mean_over_routed(sums: Tensor, counts: Tensor) -> Tensor:
    """Sums over their routed tokens by the numbers of those: [E], [E] -> [E]; 0 for an expert no
    token reached."""
    reached = counts > 0  # counts of weighted calibration sources may lie between 0 and 1
    return torch.where(reached, sums / counts.where(reached, 1), 0)


def keep_salient(
    stats: LayerStatistics,
    saliency: Tensor,
    keep: int,
    protected: frozenset[int],
    decided_by: str,
    share: str = SHARE,
) -> LayerPlan:
    """Keep the experts of highest saliency [E], and note what share of the layer's total they
    hold."""
    overflowed = (~saliency.isfinite()).nonzero().flatten().tolist()
    if overflowed:
        raise CompressionError(
            f"{stats.layer.name}: the outputs of expert {overflowed[0]} are not finite on the "
            "calibration data; try --dtype float32"
        )
    plan = keep_best(stats, saliency, keep, protected, decided_by=decided_by)
    return replace(plan, figures={share: kept_share(plan, saliency), **plan.figures})


@dataclass
class Ranked:
    """A strategy that keeps the experts of highest score, documented as the score is."""

    score: Callable[[LayerStatistics], Tensor]
    NEEDS: frozenset[str]
    decided_by: str
    share: str

    def __post_init__(self) -> None:
        self.__doc__ = self.score.__doc__

    def plan(
        self, stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()
    ) -> LayerPlan:
        """Keep the `keep` experts of highest score."""
        return keep_salient(stats, self.score(stats), keep, protected, self.decided_by, self.share)


def ranked(
    *needs: str, by: str, share: str = SHARE
) -> Callable[[Callable[[LayerStatistics], Tensor]], Ranked]:
    """Make a strategy of a score of these statistics; plans say that they were decided `by` it."""
    return lambda score: Ranked(score, frozenset(needs), by, share)


@ranked("routed_count", by="routed_count", share="kept_share_of_visits")
def count_guided(stats: LayerStatistics) -> Tensor:
    """Count-guided: drop the experts that the fewest tokens are routed to (He et al. 2024,
    arXiv:2406.02500)."""
    return stats.routed_count


@ranked("stream_energy_sum", by="energy")
def energy(stats: LayerStatistics) -> Tensor:
    """Energy: keep the experts whose gated outputs weigh most in the hidden states that leave the
    layer.

    The energy of expert e is sum over its tokens t of ||g_e(t) f_e(t)||^2 / ||h_t||^2, h the hidden
    state behind the decoder layer: squares, as the error of dropping experts is one, and relative,
    as the next norm divides a hidden state by its size."""
    return stats.stream_energy_sum


@ranked("gated_norm_sum", by="gated_norm_sum")
def gated_mass(stats: LayerStatistics) -> Tensor:
    """Gated mass: keep the experts whose gated outputs are largest in sum over all tokens.

    The mass of expert e is the sum over its routed tokens of gate weight times ||output||, a bound
    on how far the layer's outputs move in total if e contributed nothing. REAP (Lasby et al. 2026,
    arXiv:2510.13999) ranks by the mean of the same terms, mass / routed tokens. The mean asks how
    much an expert matters where it is used, so that a rare specialist may stay; the mass multiplies
    that by how often it is used, and weighs every calibration token alike."""
    return stats.gated_norm_sum


@ranked("squared_deletion_sum", by="leave-one-out")
def leave_one_out(stats: LayerStatistics) -> Tensor:
    """Leave-one-out: keep the experts whose deletion, with the router taking its next one, costs
    most over all tokens.

    The cost of an expert is sum of ||y - y'||^2 over its tokens, y' the layer's output without it,
    as in the hooks of NVIDIA's Model Optimizer. `razor` asks for its mean: how much an expert
    matters where it is used."""
    return stats.squared_deletion_sum


@ranked("squared_deletion_sum", "routed_count", by="razor")
def razor(stats: LayerStatistics) -> Tensor:
    """RAZOR: keep the experts whose deletion moves the layer's output most where they are used.

    Song and Zheng 2026, arXiv:2609.30465 (RCS-Refill). With c the mixture of a token's experts, of
    weights w that sum to 1 and a scale s, and r_j = f_j - c expert j's residual to that consensus,
    deleting expert i, in whose place the router takes its next expert n, moves the output by
    exactly s ||w_i r_i - w_n r_n|| / (1 - w_i + w_n); by ||g_i f_i - g_n f_n|| where the router
    does not normalise its weights g over the chosen experts. An expert's score is the root mean
    square of that over its tokens. One more expert is computed for each token, and the router once
    more."""
    return mean_over_routed(stats.squared_deletion_sum, stats.routed_count).sqrt()


@ranked("norm_sum", "routed_count", by="man")
def man(stats: LayerStatistics) -> Tensor:
    """MAN: keep the experts of largest mean activation norm, the mean of ||f_e(x)|| over the tokens
    x routed to e.

    Liu et al. 2026, arXiv:2606.15716: neither gate weights nor how often an expert is asked count.
    """
    return mean_over_routed(stats.norm_sum, stats.routed_count)


@ranked("squared_norm_sum", "routed_count", by="msan")
def msan(stats: LayerStatistics) -> Tensor:
    """MSAN: keep the experts of largest mean squared activation norm, the mean of ||f_e(x)||^2 over
    its tokens x.

    Liu et al. 2026, arXiv:2606.15716, as `man`; a few large outputs count more.
    """
    return mean_over_routed(stats.squared_norm_sum, stats.routed_count)


@ranked("norm_sum", by="ean")
def ean(stats: LayerStatistics) -> Tensor:
    """EAN: keep the experts of largest activation norm, the sum of ||f_e(x)|| over the tokens x
    routed to e.

    Jaiswal et al. 2025, arXiv:2504.05586.
    """
    return stats.norm_sum


@ranked("gated_norm_sum", "routed_count", by="reap")
def reap(stats: LayerStatistics) -> Tensor:
    """REAP: keep the experts with the largest mean gated output (Lasby et al. 2026,
    arXiv:2510.13999).

    The mean of g_e(x) ||f_e(x)|| over the tokens x routed to e.
    """
    return mean_over_routed(stats.gated_norm_sum, stats.routed_count)


class HubGuided:
    """Hub-guided: keep the experts of large output, weighed by their effect on later routers.

    The score of expert e is m_e (a_e / sum of a)^exponent. m_e is its gated mass or its routed
    tokens, and a_e its AARV summed over the later routers: by how many places the ranks of their
    chosen experts change, in the mean over all tokens, when what e wrote is taken out of their
    logits ("Understanding Cross-Layer Contributions to Mixture-of- Experts Routing in LLMs", ICLR
    2026). A factor that a layer's m have in common ranks nothing, so m stays as measured, and
    exponent 0 ranks as gated-mass or count-guided does. So does the last MoE layer, which no router
    reads. a_e is a mean over all tokens, including those not routed to e, and rises with the routed
    tokens as m_e does."""

    NEEDS = frozenset({"gated_norm_sum", "rank_change"})

    class Options(NamedOptions):
        """The mass of an expert, and the weight of its effect on later routers."""

        mass: Literal["gated-mass", "visits"] = "gated-mass"
        """Mass that the effect on later routers weighs. visits are routed tokens."""
        exponent: float = Field(1.0, ge=0, le=10)
        """Power of the effect on later routers, from 0 (it does not count) to 10."""

    @staticmethod
    def needs(options: Options) -> frozenset[str]:
        """The mass, and the effect on later routers where it counts."""
        mass = frozenset({MASSES[options.mass]})
        return mass | {"rank_change"} if options.exponent else mass

    @staticmethod
    def score(stats: LayerStatistics, options: Options) -> Tensor:
        """The mass, times the effect on later routers where it counts: [E]."""
        mass: Tensor = getattr(stats, MASSES[options.mass])
        if not options.exponent:
            return mass
        # shares of the layer's total; where no later router is moved, the mass alone counts
        values = rounded(stats.rank_change)
        total = values.sum()
        return mass * (values / total) ** options.exponent if total > 0 else mass

    @classmethod
    def plan(
        cls,
        stats: LayerStatistics,
        keep: int,
        protected: frozenset[int] = frozenset(),
        options: Options = Options(),
    ) -> LayerPlan:
        """Keep the `keep` experts of highest score."""
        by = MASSES[options.mass]
        is_weighed = options.exponent and bool(stats.rank_change.any())
        by = f"{by} x rank_change" if is_weighed else by
        plan = keep_salient(stats, cls.score(stats, options), keep, protected, by)
        if not is_weighed:
            return plan
        figures = {**plan.figures, "kept_share_of_rank_change": kept_share(plan, stats.rank_change)}
        return replace(plan, figures=figures)


@torch.no_grad()
def size_ratios(weights: LayerWeights, count: int) -> Tensor:
    """Mean |w| over root mean square of each expert's projections: -> [E] in float64, in (0, 1]."""
    ratios = torch.ones(count, dtype=torch.float64)
    for expert in range(count):
        view = projections(weights.experts, expert)
        numbers = 0
        absolute = squared = 0.0
        for matrix in (view.gate, view.up, view.down):
            if matrix is not None:
                wide = as_float64(matrix)
                numbers += wide.numel()
                absolute += float(torch.linalg.vector_norm(wide, 1))
                squared += float(torch.linalg.vector_norm(wide)) ** 2
        if squared != 0:  # NaN goes on, and is refused
            ratios[expert] = absolute / (numbers * squared) ** 0.5
    return ratios


class Aimer:
    """AIMER: keep the experts whose weights are least alike in size; no data (Liu et al. 2026,
    arXiv:2603.18492).

    An expert's ratio is the mean |w| over the root mean square of its weights, those of the gate,
    up and down projections taken together: ||w||_1 / (sqrt(N) ||w||_2) of the N weights (equations
    4 and 5). It is 1 where all weights are equally large, 0.80 for Gaussian ones, and small where
    few weights hold most of the size. A low ratio means a distinct expert: the highest are removed.
    Two things are our reading: biases do not count, and an expert of zeros has the ratio 1."""

    NEEDS = frozenset({"weights"})

    @staticmethod
    def plan(
        stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()
    ) -> LayerPlan:
        """Keep the `keep` experts of least ratio."""
        ratios = size_ratios(stats.weights, stats.layer.experts)
        figures = {
            "least_ratio": round(float(ratios.min()), 6),
            "largest_ratio": round(float(ratios.max()), 6),
        }
        return keep_best(
            stats,
            -ratios,
            keep,
            protected,
            decided_by="mean |w| over root mean square",
            figures=figures,
        )


class Listed:
    """Listed: keep the experts that a list names, such as one that another tool has left; no
    data."""

    NEEDS = frozenset[str]()

    class Options(NamedOptions):
        """The list."""

        order: dict[str, str] = Field(default_factory=dict)
        """Experts of each decoder layer by its number, the best first."""
        all: bool = False
        """Each layer's list should have all of its experts, as that of scores has."""

    @staticmethod
    def check(layers: Sequence[int], options: Options) -> None:
        """Refuse a list for a decoder layer that has no experts."""
        unknown = [layer for layer in options.order if layer not in map(str, layers)]
        if unknown:
            known = f"layers {min(layers)} to {max(layers)}"
            raise CompressionError(
                f"the list has decoder layer {unknown[0]}, but experts are in {known}; take it out"
            )

    @staticmethod
    def plan(
        stats: LayerStatistics,
        keep: int,
        protected: frozenset[int] = frozenset(),
        options: Options = Options(),
    ) -> LayerPlan:
        """Keep the first `keep` experts of the layer's list."""
        layer = stats.layer
        order = [int(expert) for expert in options.order.get(str(layer.index), "").split()]
        known = [expert for expert in order if expert in range(layer.experts)]
        scores = torch.full((layer.experts,), -torch.inf)
        scores[known] = -torch.arange(len(known), dtype=scores.dtype)
        plan = keep_best(stats, scores, keep, protected, decided_by="list")
        if options.all and len(order) != layer.experts:
            raise CompressionError(
                f"{layer.name} has {layer.experts} experts, and {len(order)} are scored; name a "
                "file of this very model"
            )
        unlisted = {group.members[0] for group in plan.groups} - {*known} - protected
        if unlisted or len(known) < len(order):
            raise CompressionError(
                f"{layer.name}: the list for layer {layer.index} is {order}, and {keep} of "
                f"{layer.experts} experts are to stay, as many of each routing group; mend it, or "
                "pass --mtp drop if it is a head's that is missing"
            )
        return plan
