"""Refitted down projections against least squares on an augmented system, and against cases with a known answer."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from compressor.steps.correct import refit
from compressor.steps.correct.refit import refit_down
from tests.support import zoo
from tests.support.cut_layers import CutCase, cut_again, cut_case, plain_error, put_in, stock_output, token_weights
from tests.support.stock_models import activations

NAMES = ["mixtral", "gpt_oss", "deepseek_v4", "minimax_m2", "zaya", "nemotron_h", "gemma4"]


@torch.no_grad()
def features(found: CutCase, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Gate-weighted activations side by side [n, N * I], choice by choice, and what the output lacks [n, H]."""
    weights, index, output = stock_output(found, rows)
    x, count = found.recording.inputs[rows], len(found.plan.groups)
    parts = []
    for expert in range(count):
        gates = torch.stack([weights[:, k] * (index[:, k] == expert) for k in range(index.shape[1])]).sum(0)
        parts.append(gates[:, None] * activations(found.experts, expert, x))
    return torch.cat(parts, dim=1).double(), (found.recording.outputs[rows] - output).double()


def weighted(found: CutCase, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The same, each token multiplied by the square root of its weight."""
    phi, missing = features(found, rows)
    scales = token_weights(found, rows).sqrt()[:, None]
    return phi * scales, missing * scales


def down(parameters: dict[str, Tensor], transposed: bool) -> Tensor:
    """All experts' down projections as [N * I, H]."""
    return torch.cat([value if transposed else value.T for value in parameters["down_proj"]])


def augmented(phi: Tensor, missing: Tensor, penalty: float) -> Tensor:
    """Ridge as plain least squares with a row for each neuron: [N * I, H]."""
    weight = (penalty * phi.square().sum(0).mean()).sqrt()
    left = torch.cat([phi, weight * torch.eye(phi.shape[1], dtype=phi.dtype)])
    right = torch.cat([missing, missing.new_zeros(phi.shape[1], missing.shape[1])])
    return torch.linalg.lstsq(left, right).solution


def twice_named(found: CutCase) -> None:
    """Have the id table name one slot twice for every second token id."""
    table = found.small.get_submodule(found.layer.router).tid2eid
    table[::2, 1] = table[::2, 0]


@pytest.mark.parametrize("name", zoo.sweep(NAMES))
def test_one_block_is_least_squares_on_the_augmented_system(name: str) -> None:
    found = cut_case(name, sequences=40)
    if name == "deepseek_v4":
        twice_named(found)
        _, index, _ = stock_output(found, found.fit)
        assert bool((index[:, 0] == index[:, 1]).any())
    phi, missing = weighted(found, found.fit)
    shown, lacking = weighted(found, found.heldout)
    changes = [augmented(phi, missing, penalty) for penalty in refit.PENALTIES]
    left = [float((lacking - shown @ change).square().sum()) for change in [0 * changes[0], *changes]]
    best = min(range(len(left)), key=lambda number: left[number])
    assert best > 0
    before = down(found.cut.parameters, found.experts.is_transposed).clone()
    refit_down(found.cut, found.fit, found.heldout)
    after = down(found.cut.parameters, found.experts.is_transposed)
    torch.testing.assert_close((after - before).double(), changes[best - 1], rtol=1e-3, atol=1e-4)
    put_in(found, found.cut)
    size = token_weights(found, found.heldout) @ found.recording.outputs[found.heldout].double().square().sum(-1)
    assert plain_error(found, found.heldout) == pytest.approx(left[best] / float(size), rel=1e-3)


def planted(name: str) -> CutCase:
    """A layer whose original puts out what other down projections of the survivors would."""
    found = cut_case(name, sequences=80)
    rows = torch.cat([found.fit, found.heldout])
    phi, _ = features(found, rows)
    other = torch.randn(phi.shape[1], found.recording.outputs.shape[1], generator=torch.Generator().manual_seed(4))
    found.recording.outputs[rows] = stock_output(found, rows)[2] + (phi @ other.double()).float()
    return replace(found, cut=cut_again(found))


def test_blocks_in_turn_converge_to_what_one_block_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = planted("mixtral")
    joint, before = cut_again(found), found.cut.error(found.heldout)
    refit_down(joint, found.fit, found.heldout)
    monkeypatch.setattr(refit, "LEAST_BLOCK", 40)  # beyond the share of so small a layer
    errors = []
    for sweeps in (1, 3, 60):
        monkeypatch.setattr(refit, "SWEEPS", sweeps)
        blocks = cut_again(found)
        refit_down(blocks, found.fit, found.heldout)
        errors.append(blocks.error(found.heldout))
    assert before > errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-3 * before
    torch.testing.assert_close(down(blocks.parameters, False), down(joint.parameters, False), rtol=0.05, atol=0.05)


def test_what_does_not_help_heldout_tokens_is_not_taken() -> None:
    """Noise on what the fit tokens should give, none on what the held-out ones should."""
    found = cut_case("mixtral")
    rows = torch.cat([found.fit, found.heldout])
    found.recording.outputs[rows] = stock_output(found, rows)[2]
    found.recording.outputs[found.fit] += torch.randn(len(found.fit), found.recording.outputs.shape[1])
    before = down(found.cut.parameters, False).clone()
    refit_down(found.cut, found.fit, found.heldout)
    assert torch.equal(down(found.cut.parameters, False), before)


def test_without_activations_nothing_changes() -> None:
    found = cut_case("mixtral")
    before = down(found.cut.parameters, False).clone()
    found.recording.inputs.zero_()  # every intermediate activation is 0, and so is the normal matrix
    refit_down(found.cut, found.fit, found.heldout)
    assert torch.equal(down(found.cut.parameters, False), before)


def test_experts_whose_output_is_normalised_afterwards_stay() -> None:
    found = cut_case("muse_spark")
    before = down(found.cut.parameters, found.experts.is_transposed).clone()
    refit_down(found.cut, found.fit, found.fit)
    assert torch.equal(down(found.cut.parameters, found.experts.is_transposed), before)
