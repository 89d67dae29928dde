"""Exact tests of the drop between two models whose answers to the same n items are right or wrong.

Only items that flip speak: `lost` of them the compressed model gets wrong and the base right, `gained` the other way
round. Under a true drop d = P(lost) - P(gained) one probability stays unknown, and the maximum of the likelihood under
that constraint, in closed form by Tango (Statistics in Medicine 17, 1998), is put in its place. Tango then takes the
score statistic for normal. That is too liberal where flips are few: 272 items without a flip would pass a margin of
0.01 at confidence 0.95, though a true drop of 0.01 shows none in 6.5 % of such samples. So the tail is summed here
from the trinomial distribution itself, at the same estimate: an estimated p-value in the sense of Lloyd ("Exact
P-values for discrete models obtained by estimation and maximization", Australian & New Zealand Journal of Statistics
50, 2008). Enumerated over 20 to 2,000 items, flips of 0.5 % to 40 %, margins of 0 to 0.1 and confidences of 0.9, 0.95
and 0.99, its rate of false verdicts never exceeds 1 - confidence; without a flip it is the binomial test.
"""

import math

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom, binomtest

TAILS = 9.0  # standard deviations of the number of flips beyond which nothing is summed
SLACK = 20  # flips more at either end, for a number of flips too small to be taken for normal


def constrained_gain(lost: int, gained: int, items: int, drop: float) -> float:
    """The likeliest P(gained) if P(lost) - P(gained) were `drop`, in [max(0, -drop), (1 - drop) / 2] (Tango 1998)."""
    linear = (2 * items - lost + gained) * drop - lost - gained
    constant = -gained * drop * (1 - drop)
    root = math.sqrt(max(linear * linear - 8 * items * constant, 0.0))
    return min(max((root - linear) / (4 * items), 0.0, -drop), (1 - drop) / 2)


def at_most(lost: int, gained: int, items: int, drop: float) -> float:
    """p of a net loss of `lost - gained` or less of `items` items, if the true drop were `drop`.

    Falls as `drop` rises, so that a small one shows a drop under `drop`.
    """
    if abs(drop) > 1:  # no such drop exists, so the true one lies on the near side of it
        return float(drop < 0)
    gain = constrained_gain(lost, gained, items, drop)
    flip = min(2 * gain + drop, 1.0)
    share = min(max((gain + drop) / flip, 0.0), 1.0) if flip > 0 else 0.5  # of flips that are losses
    width = TAILS * math.sqrt(items * flip * (1 - flip)) + SLACK
    flips = np.arange(max(0, math.floor(items * flip - width)), min(items, math.ceil(items * flip + width)) + 1)
    tail = binom.pmf(flips, items, flip) * binom.cdf((flips + lost - gained) // 2, flips, share)
    return min(float(tail.sum()), 1.0)


def at_least(lost: int, gained: int, items: int, drop: float) -> float:
    """p of a net loss of `lost - gained` or more of `items` items, if the true drop were `drop`."""
    return at_most(gained, lost, items, -drop)


def upper_bound(lost: int, gained: int, items: int, alpha: float) -> float:
    """The drop at which `at_most` is `alpha`: the true one is above it in at most that share of samples."""
    if lost == items:
        return 1.0
    return float(brentq(lambda drop: at_most(lost, gained, items, drop) - alpha, -1.0, 1.0, xtol=1e-13))


def lower_bound(lost: int, gained: int, items: int, alpha: float) -> float:
    """The drop at which `at_least` is `alpha`."""
    return -upper_bound(gained, lost, items, alpha)


def mcnemar(lost: int, gained: int) -> float:
    """Exact two-sided p of flips as uneven as these if either direction were as likely; 1 without a flip."""
    return float(binomtest(lost, lost + gained).pvalue) if lost + gained else 1.0
