import math
from typing import get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from compressor.pathways.optimisers import core, descend, kernel_weights, mean_shift
from compressor.pathways.optimisers import towards as moved
from compressor.pathways.options import Kernel

POINTS, LAYERS, EXPERTS = 4, 2, 5


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed))


def in_numpy(kernel: Kernel, query: Tensor, points: Tensor, bandwidth: float | None) -> np.ndarray:
    found = []
    x = query.numpy().astype(np.float64).ravel()
    rows = [row.numpy().astype(np.float64).ravel() for row in points]
    distances = [math.sqrt(sum((a - b) ** 2 for a, b in zip(row, x, strict=True))) for row in rows]
    width = sum(distances) / len(distances) if bandwidth is None else bandwidth
    for row, distance in zip(rows, distances, strict=True):
        far = math.sqrt(3) * distance / width
        found.append(
            {
                "gaussian": math.exp(-(distance**2) / (2 * width**2)),
                "matern": (1 + far) * math.exp(-far),
                "linear": max(0.0, float(row @ x)),
                "polynomial": (1 + float(row @ x)) ** 2,
            }[kernel]
        )
    return np.array(found) / sum(found)


@pytest.mark.parametrize("kernel", get_args(Kernel))
@pytest.mark.parametrize("bandwidth", [None, 0.7])
def test_kernel_weights_and_the_regression_are_those_of_numpy(kernel: Kernel, bandwidth: float | None) -> None:
    query, points = drawn(7), drawn(POINTS, 7, seed=1)
    weights = kernel_weights(kernel, query, points, bandwidth)
    expected = in_numpy(kernel, query, points, bandwidth)
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-5)
    own, pathways = drawn(LAYERS, EXPERTS, seed=2), drawn(POINTS, LAYERS, EXPERTS, seed=3)
    mean = sum(weight * pathway for weight, pathway in zip(expected, pathways.numpy(), strict=True))
    np.testing.assert_allclose(moved(own, pathways, weights, 0.3).numpy(), 0.7 * own.numpy() + 0.3 * mean, rtol=1e-5)


@pytest.mark.parametrize("kernel", get_args(Kernel))
def test_mode_finding_is_that_of_numpy(kernel: Kernel) -> None:
    own, points = drawn(LAYERS, EXPERTS), drawn(POINTS, LAYERS, EXPERTS, seed=1)
    expected = own.numpy().astype(np.float64)
    for _ in range(6):
        weights = in_numpy(kernel, torch.tensor(expected), points, 0.4)
        mean = sum(weight * point for weight, point in zip(weights, points.numpy(), strict=True))
        expected = 0.5 * expected + 0.5 * mean
    np.testing.assert_allclose(mean_shift(own, points, kernel, 0.4, 0.5, 6).numpy(), expected, rtol=1e-4)


@pytest.mark.parametrize("kernel", get_args(Kernel))
def test_points_at_one_place_or_without_a_weight_share_it_alike(kernel: Kernel) -> None:
    query = torch.tensor([1.0, 0.0])
    torch.testing.assert_close(kernel_weights(kernel, query, query.expand(3, 2)), torch.full((3,), 1 / 3))
    opposite = kernel_weights(kernel, query, -query.expand(3, 2))
    torch.testing.assert_close(opposite, torch.full((3,), 1 / 3))


def test_far_points_keep_a_weight() -> None:
    """exp(-d^2) of all of them is nothing in floating point."""
    weights = kernel_weights("gaussian", torch.zeros(1), torch.tensor([[1e3], [2e3]]), 1.0)
    assert weights.tolist() == [1.0, 0.0]


def test_the_core_is_each_layers_largest() -> None:
    pathway = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.4, 0.1, 0.2, 0.3]])
    assert core(pathway, 2).tolist() == [[False, True, True, False], [True, False, False, True]]
    assert core(pathway, 20).all()


def test_descent_goes_down_at_a_rate_that_falls() -> None:
    steps = descend(torch.ones_like, torch.zeros(1), 4, 2.0)
    torch.testing.assert_close(steps, -torch.tensor([2.0 + 1.707107 + 1.0 + 0.292893]))
    assert descend(lambda place: 2 * (place - 3), torch.zeros(1), 10, 0.4).item() == pytest.approx(3, abs=0.1)
