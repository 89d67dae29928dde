"""Routing hubs: experts that steer later routers far more than the other experts of their layer do.

Beside them the super experts, whose outputs are massive: Su et al. 2025, "Unveiling Super Experts
in Mixture-of-Experts Large Language Models", arXiv:2507.23279. An expert can be either without the
other."""

from collections.abc import Sequence
from statistics import fmean, median
from typing import TypeVar

import numpy as np

from compressor.attribution.figures import Attribution, Output, Sender, equal_where_tied
from compressor.recipe.hubs import Hub, RoutedExpert
from compressor.tolerance import exceeds

THRESHOLD = 3.5  # Iglewicz and Hoaglin 1993: a modified z-score above it is an outlier
LEAST_SHARE = 1e-3  # of the variance of the later routers' logits, that a hub has
_TO_DEVIATION = 0.6745  # a normal distribution's median absolute deviation, in standard deviations
_MEAN_TO_DEVIATION = 0.7979  # its mean absolute deviation
_LEAST_SPREAD = 0.05  # of the median: a layer of nearly equal experts has no outliers
SUPER_QUANTILE = 0.995
SUPER_SHARE = 0.1


def outlier_scores(values: Sequence[float]) -> list[float]:
    """Modified z-scores by the median absolute deviation (MAD): 0.6745 (x - median) / MAD.

    A twentieth of the median stands in for a smaller deviation. Where both are zero, for most
    values are, the mean absolute deviation serves instead, with its own factor; where that is zero
    too, all values are equal and score 0."""
    centre = median(values)
    distances = [abs(value - centre) for value in values]
    factor = _TO_DEVIATION
    spread = max(median(distances), _LEAST_SPREAD * abs(centre))
    if spread == 0:
        factor = _MEAN_TO_DEVIATION
        spread = fmean(distances)
    return [factor * ((value - centre) / spread) if spread else 0.0 for value in values]


def find_hubs(attribution: Attribution, threshold: float = THRESHOLD) -> tuple[Hub, ...]:
    """Experts whose influence is an outlier of their layer, and whose AARV confirms it; the
    strongest first.

    Whatever stands out among noise is no hub: influence must reach a thousandth of the variance of
    the logits."""
    layers: dict[str, list[Sender]] = {}
    for sender in attribution.of_kind("expert"):
        layers.setdefault(sender.module, []).append(sender)
    hubs = []
    for experts in layers.values():
        influence_scores = outlier_scores([sender.total_influence for sender in experts])
        aarv_scores = outlier_scores([sender.total_rank_change for sender in experts])
        for sender, influence_score, aarv_score in zip(
            experts, influence_scores, aarv_scores, strict=True
        ):
            assert sender.layer is not None and sender.number is not None
            reached = zip(attribution.receivers, sender.influence, strict=True)
            variance = sum(receiver.variance for receiver, value in reached if value is not None)
            is_noise = exceeds(LEAST_SHARE * variance, sender.total_influence)
            if exceeds(min(influence_score, aarv_score), threshold) and not is_noise:
                hub = Hub(
                    sender.module,
                    sender.layer,
                    sender.number,
                    sender.total_influence,
                    sender.total_rank_change,
                    influence_score,
                    aarv_score,
                    sender.share,
                )
                hubs.append(hub)
    return _strongest_first(hubs, [hub.influence for hub in hubs])


Expert = TypeVar("Expert", bound=RoutedExpert)


def _strongest_first(experts: Sequence[Expert], strengths: Sequence[float]) -> tuple[Expert, ...]:
    """Sort experts by strength; those that differ by rounding alone come in model order."""
    keys = zip(equal_where_tied(strengths), experts, strict=True)
    return tuple(expert for _, expert in sorted(keys, key=lambda key: (-key[0], *key[1].sort_key)))


def super_experts(attribution: Attribution) -> tuple[Output, ...]:
    """Experts of the model with massive activations before their gate weights; the strongest first.

    The rule of the paper: the largest absolute entry is beyond the 99.5th percentile of all
    experts, and above a tenth of the largest one. Some expert always meets that, so here the entry
    must be an outlier of the model's experts too. Up to 200 experts the percentile leaves room for
    one alone. Experts that no token reached do not count."""
    reached = [output for output in attribution.outputs if output.tokens > 0]
    if not reached:
        return ()
    entries = equal_where_tied(output.max_entry for output in reached)
    # the next entry above the percentile, so that equal ones stand or fall together
    least = float(np.quantile(entries, SUPER_QUANTILE, method="higher"))
    massive = []
    strengths = []
    for output, entry, score in zip(reached, entries, outlier_scores(entries), strict=True):
        is_large = entry >= least and exceeds(entry, SUPER_SHARE * max(entries))
        if is_large and exceeds(score, THRESHOLD):
            massive.append(output)
            strengths.append(entry)
    return _strongest_first(massive, strengths)
