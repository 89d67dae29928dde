"""How many experts each layer gives up: evenly, or where it costs the least.

A layer's cost is a curve: what replacing its 1, 2, 3 ... most replaceable experts costs the whole model. It is measured
at a few numbers, and between two of them it grows with what the constants miss, sum g^2 ||o - c||^2.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

Curve = NDArray[np.float64]  # [most + 1]: the cost of 0, 1, 2 ... experts less


def probed_numbers(most: int, experts: int) -> tuple[int, ...]:
    """At which numbers of replaced experts a layer's curve is measured: quarters of its experts, and all it can spare.

    `most` of its `experts` can go.
    """
    quarters = {max(1, round(experts * share)) for share in (0.25, 0.5, 0.75)}
    return tuple(sorted(number for number in quarters | {most} if 0 < number <= most))


def curve(missed: Sequence[float], measured: Mapping[int, float]) -> Curve:
    """Costs of 0, 1 ... experts less, from what the constants miss of each, ascending [most], and measured costs.

    No further expert makes it cheaper: what says so is noise.
    """
    summed = np.concatenate([[0.0], np.cumsum(np.asarray(missed, dtype=np.float64))])
    costs = np.zeros(len(summed))
    places = [0, *sorted(measured)]
    known = np.maximum.accumulate([0.0, *(measured[place] for place in places[1:])])
    for number, (begin, end) in enumerate(pairwise(places)):
        inside = np.arange(begin + 1, end + 1)
        width = summed[end] - summed[begin]
        share = (summed[inside] - summed[begin]) / width if width > 0 else (inside - begin) / (end - begin)
        costs[inside] = known[number] + share * (known[number + 1] - known[number])
    return costs


def even_numbers(removed: int, most: Sequence[int]) -> list[int]:
    """As many from every layer, as far as `removed` divides and each can spare them; the last layers give the rest."""
    numbers = [0] * len(most)
    left = removed
    while left > 0:
        open_layers = [place for place, number in enumerate(numbers) if number < most[place]]
        for place in open_layers[max(0, len(open_layers) - left) :] if left < len(open_layers) else open_layers:
            numbers[place] += 1
            left -= 1
    return numbers


def cheapest_numbers(curves: Sequence[Curve], removed: int) -> list[int]:
    """How many of each layer, `removed` in all, at the least sum of costs: exact, by dynamic programming.

    Ties break towards fewer from the earlier layers.
    """
    best = np.full(removed + 1, np.inf)
    best[0] = 0.0
    chosen = np.zeros((len(curves), removed + 1), dtype=np.int64)
    for layer, costs in enumerate(curves):
        fresh = np.full(removed + 1, np.inf)
        for number in range(min(len(costs) - 1, removed) + 1):
            tried = best[: removed + 1 - number] + costs[number]
            better = tried < fresh[number:]
            fresh[number:][better] = tried[better]
            chosen[layer, number:][better] = number
        best = fresh
    numbers, left = [0] * len(curves), removed
    for layer in reversed(range(len(curves))):
        numbers[layer] = int(chosen[layer, left])
        left -= numbers[layer]
    return numbers


def halfway(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Numbers between two divisions of the same sum, with that sum."""
    doubled = [a + b for a, b in zip(one, other, strict=True)]
    found = [value // 2 for value in doubled]
    odd = [place for place, value in enumerate(doubled) if value % 2]
    for place in odd[len(odd) // 2 :]:
        found[place] += 1
    return found
