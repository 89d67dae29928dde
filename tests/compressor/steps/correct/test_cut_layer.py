"""Recordings of a pass in order against the calls of a plain forward, and their buffers by themselves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.model.architecture import MoeLayer
from compressor.model.streaming import allocate, token_dim
from compressor.steps.correct import cut_layer
from compressor.steps.correct.cut_layer import Recording, _Rows
from tests import zoo
from tests.opened import Calls, batches, opened, plain_calls
from tests.ordered import SHARED, Corrected, keeps, opened_wide, run, watch_corrections, with_heldout
from tests.stock import by_slot

EVERY = pytest.mark.parametrize("name", [name for name in zoo.FAMILIES if name not in SHARED])
EXACT = 2e-6


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=EXACT)


def check_recorded(seen: Corrected, calls: Calls, starts: list[int], rows: Tensor) -> None:
    """Compare with what the plain forward called; the router, called again on some rows, must choose as it did."""
    hidden, index, weights = calls.joined()
    close(seen.recording.inputs, hidden)
    close(seen.recording.outputs, torch.cat(calls.experts_outputs))
    heldout = list(range(starts[1], starts[2]))
    assert seen.recording.positions(heldout=True).tolist() == heldout
    fit = [row for row in range(len(hidden)) if row not in heldout]
    assert seen.recording.positions(heldout=False).tolist() == fit
    block = seen.model.get_submodule(seen.layer.block)
    positional, by_keyword = seen.recording.router_arguments(rows, block)
    with torch.no_grad():
        _, gates, chosen, *_ = seen.model.get_submodule(seen.layer.router)(*positional, **by_keyword)
    expected = by_slot(weights[rows], index[rows], seen.layer.experts)
    close(by_slot(gates.reshape(len(rows), -1), chosen.reshape(len(rows), -1), seen.layer.experts), expected)


@EVERY
def test_every_family_is_recorded_as_a_plain_forward_calls_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all experts kept every layer stands behind the original's, and nothing is left to correct."""
    stock, model = opened_wide(name, tmp_path)
    data = with_heldout(stock)
    sizes = [batch.numel() for batch in data.batches]
    starts, rows = [0, sizes[0], sizes[0] + sizes[1]], torch.tensor([61, 0, 30, 17, 30])
    expected = plain_calls(stock, model.architecture, data.batches)

    def check(seen: Corrected) -> None:
        calls = expected[seen.layer.name]
        if calls.experts_outputs:
            check_recorded(seen, calls, starts, rows)
            assert seen.figures["heldout_error"] < 1e-9
        else:
            assert not len(seen.recording.positions(heldout=True)) and "reason" in seen.figures

    seen = watch_corrections(monkeypatch, check)
    run(model, keeps(model.architecture), data, measure=True)
    assert list(seen) == [layer.name for layer in model.architecture.layers]


def recorded(stock: Any, layer: MoeLayer, parts: tuple[Tensor, ...], expected: int) -> Recording:
    """A layer's recording of plain forwards, every second one held out."""
    found = Recording(layer, expected, heldout=range(1, len(parts), 2))
    found.attach(stock)
    for number, tokens in enumerate(parts):
        found.enter(number)
        with torch.no_grad():
            stock(input_ids=tokens, use_cache=False)
    found.detach()
    return found


@pytest.mark.parametrize("expected", [0, 1, 13, 36, 1000])
def test_more_or_fewer_tokens_than_foreseen(expected: int, tmp_path: Path) -> None:
    stock, model = opened("minimax_m2", tmp_path)
    layer, parts = model.architecture.layers[1], batches(stock, (1, 1, 1))
    found = recorded(stock, layer, parts, expected)
    calls = plain_calls(stock, model.architecture, parts)[layer.name]
    hidden, _, _ = calls.joined()
    close(found.inputs, hidden)
    close(found.outputs, torch.cat(calls.experts_outputs))
    assert found.positions(heldout=True).tolist() == list(range(12, 24))
    assert found.positions(heldout=False).tolist() == [*range(12), *range(24, 36)]


def test_nothing_is_recorded_after_detaching_nor_before_any_batch(tmp_path: Path) -> None:
    stock, model = opened("mixtral", tmp_path)
    found = recorded(stock, model.architecture.layers[0], (), 36)
    with torch.no_grad():
        stock(input_ids=batches(stock)[0], use_cache=False)
    assert len(found.inputs) == len(found.outputs) == len(found.positions(heldout=False)) == 0
    assert found.arguments == []


@pytest.mark.parametrize("name", ["mixtral", "minimax_m2", "deepseek_v4", "zaya", "gemma4"])
def test_what_is_stored_once_and_what_is_stored_at_all(name: str, tmp_path: Path) -> None:
    """Of the router's arguments the experts' own input is no second copy, and the parent's tensors are no copy."""
    stock, model = opened(name, tmp_path)
    layer, parts = model.architecture.layers[-1], batches(stock, (2, 1))
    found = recorded(stock, layer, parts, 36)
    calls = plain_calls(stock, model.architecture, parts[:1])[layer.name]
    (args, kwargs), hidden = calls.router_arguments[0], calls.experts_arguments[0][0]
    for argument, value in zip(found.arguments, [*args, *kwargs.values()], strict=True):
        if isinstance(value, torch.nn.Parameter) or (value is not None and value.numel() % len(hidden)):
            assert argument.rows is None and argument.key is not None, argument
        elif value is not None and value.shape[-1] == hidden.shape[-1] and torch.equal(value.view_as(hidden), hidden):
            assert argument.rows is None and argument.dim is not None
        elif value is not None:
            assert argument.rows is not None and len(argument.rows.value) == 36
    copies = {"mixtral": 0, "minimax_m2": 0, "deepseek_v4": 0, "zaya": 1, "gemma4": 1}[name]
    assert sum(argument.rows is not None for argument in found.arguments) == copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.long])
def test_past_the_budget_tensors_lie_in_files(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    mapped: list[int] = []
    original = torch.from_file

    def from_file(*args: Any, **kwargs: Any) -> Tensor:
        mapped.append(kwargs["size"])
        return original(*args, **kwargs)

    monkeypatch.setattr(torch, "from_file", from_file)
    rows = torch.arange(60).reshape(20, 3).to(dtype)
    inside = allocate((20, 3), dtype, torch.device("cpu"), budget=60 * dtype.itemsize)
    assert mapped == [] and inside.shape == (20, 3)
    outside = allocate((20, 3), dtype, torch.device("cpu"), budget=60 * dtype.itemsize - 1)
    assert mapped == [60] and outside.dtype == dtype
    outside.copy_(rows)
    assert torch.equal(outside, rows)


def test_rows_in_files_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_layer.allocate, "__defaults__", (0,))
    rows, whole = _Rows(5), torch.randn(23, 4)
    for part in whole.split(4):
        rows.append(part)
    assert torch.equal(rows.value, whole)


def test_the_dimension_that_counts_tokens() -> None:
    assert token_dim(torch.zeros(6, 3), 6) == 0
    assert token_dim(torch.zeros(2, 3, 5), 6) == 1
    assert token_dim(torch.zeros(6), 6) == 0
    assert token_dim(torch.zeros(3, 2), 5) is None
    assert token_dim(torch.tensor(1.0), 1) is None
    assert token_dim(None, 6) is None and token_dim(6, 6) is None
