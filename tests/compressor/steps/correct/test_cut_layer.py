"""Recordings of a pass in order against the calls of a plain forward, and their buffers by themselves."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from compressor.steps.correct import cut_layer
from compressor.steps.correct.cut_layer import Rows
from tests.support import zoo
from tests.support.opened_models import Calls, plain_calls
from tests.support.sequential_runs import SHARED, Corrected, keeps, opened_wide, run, watch_corrections, with_heldout
from tests.support.stock_models import by_slot

EVERY = pytest.mark.parametrize("name", zoo.sweep(zoo.FAMILIES, but={*SHARED, *zoo.LOOPED}))
EXACT = 5e-6


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


def test_rows_in_files_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_layer.allocate, "__defaults__", (0,))
    rows, whole = Rows(5), torch.randn(23, 4)
    for part in whole.split(4):
        rows.append(part)
    assert torch.equal(rows.value, whole)
