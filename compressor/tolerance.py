"""Numeric tolerance: scores, distances and errors that differ by rounding alone count as equal in
every decision.

The last bits of a matrix product hang on the processor, so a plan must not. A fixed grid of rounded
values will not do by itself: wherever its borders are, some equal values fall on both sides of one.
Here the values themselves say where they may be parted: from the least one upwards, each stands for
all that exceed it by rounding alone."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from compressor.devices import float64_device

# of a value: more than float32 sums and products lose, less than any quality hangs on
ROUNDING = 2.0**-18
MANTISSA = 24  # bits of a rounded value: float64 sums of many such are exact, in whatever order
COUNTED = 2.0**24  # whole numbers up to here are counts, which are exact
# of the size of float32 features: how far apart those of equal experts may come out
FLOAT32 = 2.0**-20
SQUARED = 2.0**-40  # the same for a squared difference as a share of the whole, such as 1 - CKA


def rounded(values: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    """Values with those made equal that differ by rounding alone, in float64 and in the same order:
    [...] -> [...].

    Values that differ by more than `ROUNDING` of the smaller stay apart, however large others are.
    `noise` is how large what should be 0 may come out, for each value or for all: what is not above
    it is 0, and differences not above the least noise do not count. Whole numbers stay exact,
    infinite values and NaN what they are."""
    exact = values.detach().cpu().double()
    counts = (exact == exact.round()) & (exact.abs() <= COUNTED)
    if not values.is_floating_point() or bool(counts.all()):
        return exact.to(float64_device(values.device), copy=True)
    limits = torch.as_tensor(noise, dtype=torch.float64).cpu().expand_as(exact)
    known = exact.isfinite()
    numbers = exact[known].masked_fill(exact[known].abs() <= limits[known], 0)
    ordered, order = numbers.sort()
    reach = (ROUNDING * ordered.abs()).clamp(min=float(limits.min()))
    ends = torch.searchsorted(ordered, ordered + reach, right=True).tolist()
    starts = list[int]()
    start = 0  # of those from which rounding alone parts the ones that follow
    while start < len(ends):
        starts.append(start)
        start = ends[start]
    of = torch.searchsorted(torch.tensor(starts), torch.arange(len(ends)), right=True) - 1
    result = exact.clone()
    least = ordered[starts].numpy()
    mantissa, exponent = np.frexp(least)
    with np.errstate(over="ignore"):
        coarse = np.ldexp(np.rint(mantissa * 2.0**MANTISSA), exponent - MANTISSA)
    grid = torch.from_numpy(np.where(np.isfinite(coarse), coarse, least))
    result[known] = numbers.index_copy(0, order, grid[of])
    return result.to(float64_device(values.device))


def stable_argmin(values: Iterable[float], noise: float = 0.0) -> int:
    """Position of the least value, the first of equal ones; NaN is never less."""
    numbers = torch.tensor([*values], dtype=torch.float64).nan_to_num(
        torch.inf, torch.inf, -torch.inf
    )
    return int(rounded(numbers, noise).argmin())


def exceeds(value: float, bound: float) -> bool:
    """Return True if a value is above a bound by more than rounding."""
    return value > bound + ROUNDING * abs(bound)
