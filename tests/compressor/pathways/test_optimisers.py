from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.answers.items import TokenRow, likelihoods
from compressor.errors import CompressionError
from compressor.pathways.engine import PathwayModel
from compressor.pathways.optimisers import Neighbour, core, neighbours_gradient, neighbours_loss, optimised
from compressor.pathways.options import PathwayOptions
from tests.compressor.pathways.test_engine import engine, rows
from tests.support import zoo

WEIGHTS = torch.tensor([0.7, 0.3])


def neighbours(model: PathwayModel) -> list[Neighbour]:
    found = []
    for seed in (11, 12):
        tokens = zoo.tokens(model.model, 1, 8 + seed % 2, seed)[0].tolist()
        plain = model.run([TokenRow(tuple(tokens), 7)])
        found.append(Neighbour(plain.pathway[-model.late :], plain))
    return found


def own_pathway(model: PathwayModel) -> Tensor:
    return model.run(rows(model)).pathway[-model.late :]


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
        ({"optimizer": "adam"}, "optimizer is adam; input should be 'mode', 'kernel' or 'ngd'"),
        ({"neighbours": 0}, "neighbours is 0; input should be greater than 0"),
        ({"radius": 0.0}, r"radius is 0\.0; input should be greater than 0"),
        ({"rate": float("inf")}, "rate is inf"),
        ({"share": 1.5}, r"share is 1\.5; input should be less than or equal to 1"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CompressionError, match=message):
        PathwayOptions(**options)
