import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from compressor.answers.items import TokenRow, likelihoods
from compressor.errors import CompressionError
from compressor.pathways.engine import PathwayModel
from compressor.pathways.optimisers import (
    Neighbour,
    core,
    core_coverage,
    descend,
    kernel_weights,
    mean_shift,
    neighbours_gradient,
    neighbours_loss,
    optimised,
    towards,
)
from compressor.pathways.options import Kernel, PathwayOptions, selected
from tests.compressor.pathways.test_engine import engine, rows
from tests.support import zoo

WEIGHTS = torch.tensor([0.7, 0.3])


def neighbours(model: PathwayModel) -> list[Neighbour]:
    found = []
    for seed in (11, 12):
        tokens = zoo.tokens(model.model, 1, 8 + seed % 2, seed)[0].tolist()
        plain = model.run([TokenRow(tuple(tokens), 7)])
        found.append(Neighbour(plain.pathway[[*model.layer_numbers]], plain))
    return found


def own_pathway(model: PathwayModel) -> Tensor:
    return model.run(rows(model)).pathway[[*model.layer_numbers]]


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3-n_group1", "deepseek_v4", "gpt_oss"])
@pytest.mark.parametrize("moves", ["last", "scored"])
def test_the_gradient_of_the_neighbours_loss_is_that_of_finite_differences(name: str, moves: Any) -> None:
    model = engine(name, 2, moves)
    own, near = own_pathway(model), neighbours(model)
    place = 0.05 * torch.randn(own.shape, generator=torch.Generator().manual_seed(1))
    gradient = neighbours_gradient(model, own, place, near, WEIGHTS)
    step = 1e-2
    for seed in range(3):
        direction = torch.randn(own.shape, generator=torch.Generator().manual_seed(seed)).sign()
        up, down = (neighbours_loss(model, own, place + sign * step * direction, near, WEIGHTS) for sign in (1, -1))
        assert float((gradient * direction).sum()) == pytest.approx((up - down) / (2 * step), rel=0.03, abs=2e-4)
    assert gradient.abs().max() > 1e-3


def test_the_neighbours_loss_is_of_neighbours_on_the_items_pathway() -> None:
    """Written out: a neighbour's routers, wherever its own logits were, score its last token as the item's do."""
    model = engine("mixtral", 2)
    own, near = own_pathway(model), neighbours(model)
    losses = []
    for neighbour in near:
        assert neighbour.plain is not None
        target = own.log()  # of a softmax router; a constant changes nothing
        added = torch.stack([target[n] - neighbour.plain.router_logits[n][0] for n in range(2)])
        losses.append(-float(likelihoods(model.again(neighbour.plain, added), neighbour.plain.rows)[0]))
    expected = 0.7 * losses[0] + 0.3 * losses[1]
    assert neighbours_loss(model, own, torch.zeros_like(own), near, WEIGHTS) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "options", [{"optimizer": "mode"}, {"optimizer": "kernel"}, {"optimizer": "kernel", "share": 0.75}], ids=str
)
@pytest.mark.parametrize("name", ["olmoe", "deepseek_v3", "deepseek_v4"])
def test_neighbours_of_the_same_pathway_change_nothing(name: str, options: dict[str, Any]) -> None:
    model = engine(name, 2)
    plain = model.run(rows(model))
    own = plain.pathway[-2:]
    near = [Neighbour(own.clone(), each.plain) for each in neighbours(model)]
    found = optimised(model, own, near, WEIGHTS, PathwayOptions(**options))
    assert not found.any()
    assert torch.equal(model.again(plain, found), plain.logits)


def test_kernel_regression_goes_to_the_neighbours_mean() -> None:
    model = engine("mixtral", 2)
    plain, near = model.run(rows(model)), neighbours(model)
    own = plain.pathway[-2:]
    found = optimised(model, own, near, WEIGHTS, PathwayOptions("kernel", share=0.75))
    target = 0.25 * own + 0.75 * sum(w * each.pathway for w, each in zip(WEIGHTS, near, strict=True))
    torch.testing.assert_close((own.log() + found).softmax(-1), target, rtol=1e-4, atol=1e-6)
    kept = optimised(model, own, near, WEIGHTS, PathwayOptions("kernel", share=0.75, experts=3))
    movable = core(own, 3)
    assert torch.equal(kept[movable], found[movable]) and not kept[~movable].any()
    assert not torch.equal(model.again(plain, kept), plain.logits)


def test_the_line_search_takes_the_share_of_least_loss() -> None:
    model = engine("mixtral", 2)
    own, near = own_pathway(model), neighbours(model)
    shifts = {
        share: optimised(model, own, near, WEIGHTS, PathwayOptions("kernel", share=share))
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    }
    losses = {share: neighbours_loss(model, own, each, near, WEIGHTS) for share, each in shifts.items()}
    best = min(losses, key=lambda share: losses[share])
    assert torch.equal(optimised(model, own, near, WEIGHTS, PathwayOptions("kernel")), shifts[best])


def test_descent_lowers_the_neighbours_loss_and_moves_the_core_alone() -> None:
    model = engine("mixtral", 2)
    own, near = own_pathway(model), neighbours(model)
    found = optimised(model, own, near, WEIGHTS, PathwayOptions("ngd", experts=4, rate=5.0))
    before, after = (neighbours_loss(model, own, each, near, WEIGHTS) for each in (torch.zeros_like(own), found))
    assert after < before - 0.01
    movable = core(own, 4)
    assert not found[~movable].any() and found[movable].any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adam"}, "optimizer should be 'mode', 'kernel', 'ngd' or 'oracle', it is 'adam'"),
        ({"neighbours": 0}, "neighbours should be greater than 0, it is 0"),
        ({"radius": 0.0}, r"radius should be greater than 0, it is 0\.0"),
        ({"rate": float("inf")}, "rate should be a number, it is inf"),
        ({"layers": "late:3"}, "'late:3' names no layers or tokens; write 5, last:5, first:5, middle:5 or all"),
        ({"tokens": 0}, "0 names no layers or tokens"),
        ({"share": 1.5}, r"share should be less than or equal to 1, it is 1\.5"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CompressionError, match=message):
        PathwayOptions(**options)


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
    np.testing.assert_allclose(towards(own, pathways, weights, 0.3).numpy(), 0.7 * own.numpy() + 0.3 * mean, rtol=1e-5)


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
    # exp(-d^2) of all of them is nothing in floating point
    assert kernel_weights("gaussian", torch.zeros(1), torch.tensor([[1e3], [2e3]]), 1.0).tolist() == [1.0, 0.0]


def test_the_core_is_each_layers_largest() -> None:
    pathway = torch.tensor([[0.1, 0.4, 0.3, 0.2], [0.4, 0.1, 0.2, 0.3]])
    assert core(pathway, 2).tolist() == [[False, True, True, False], [True, False, False, True]]
    assert core(pathway, 20).all()


def test_descent_goes_down_at_a_rate_that_falls() -> None:
    steps = descend(torch.ones_like, torch.zeros(1), 4, 2.0)
    torch.testing.assert_close(steps, -torch.tensor([2.0 + 1.707107 + 1.0 + 0.292893]))
    assert descend(lambda place: 2 * (place - 3), torch.zeros(1), 10, 0.4).item() == pytest.approx(3, abs=0.1)
    constant = descend(torch.ones_like, torch.zeros(1), 4, 2.0, "constant")
    assert constant.item() == -8


def test_spans_name_things_by_their_place() -> None:
    for span, expected in {
        2: [5, 6], "last:2": [5, 6], "last": [6], "first:2": [0, 1], "middle:3": [2, 3, 4], "middle:2": [2, 3],
        "all": [*range(7)], 9: [*range(7)], "first:1+last:2": [0, 5, 6], "first:5+middle:5": [*range(6)],
    }.items():  # fmt: skip
        assert list(selected(span, 7)) == expected, span


def test_coverage_counts_the_experts_that_were_large_before() -> None:
    before, shift = drawn(LAYERS, EXPERTS), 2 * drawn(LAYERS, EXPERTS, seed=1)
    logits = before.log()
    found = core_coverage(before, shift, logits, [2, 3])
    for number in range(1, EXPERTS + 1):
        shares = []
        for layer, count in enumerate([2, 3]):
            after = np.argsort(-(logits + shift)[layer].numpy())[:count]
            large = np.argsort(-before[layer].numpy())[:number]
            shares.append(len({*after} & {*large}) / count)
        assert found[number - 1].item() == pytest.approx(sum(shares) / 2)
    unmoved = core_coverage(before, torch.zeros_like(shift), logits, [2, 2])
    assert unmoved.tolist() == [0.5, 1, 1, 1, 1]
