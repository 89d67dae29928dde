"""The guard around a correction: what is judged is what will be stored, and nothing worse than the plan is kept."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.steps.correct.cut_layer import Rows
from compressor.steps.correct.options import Correct
from compressor.steps.correct.refit import correct_layer
from tests.support import zoo
from tests.support.cut_layers import CutCase, cut_case, in_float, plain_error, stock_output

TUNE = Correct("tune", steps=12, tokens=96)
RIDGE = Correct("ridge")


def corrected(found: CutCase, how: Correct, seed: int = 0) -> dict[str, Any]:
    return correct_layer(found.small, found.layer, found.recording, how, seed)


def state(found: CutCase) -> dict[str, Tensor]:
    """The layer's tensors; those of other layers are any."""
    inside = f"{found.layer.block}."
    return {key: value.clone() for key, value in found.small.state_dict().items() if key.startswith(inside)}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("harm", ["noise", "infinity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_worse_than_the_plan_is_not_kept(harm: str, dtype: torch.dtype) -> None:
    """All text asks for noise, text to fit on for a lot of it, or for infinity."""
    found = cut_case("mixtral", dtype=dtype)
    recorded, generator = found.recording.outputs, torch.Generator().manual_seed(0)
    for rows, size in ((found.heldout, 0.3), (found.fit, 10)):
        output = stock_output(in_float(found), rows)[2]
        noise = torch.randn(output.shape, generator=generator)
        recorded[rows] = (output * (1 + size * noise)).to(dtype)
    if harm == "infinity":
        recorded[found.fit[:3]] = torch.inf
    before = state(found)
    figures = corrected(found, Correct("tune", steps=40, tokens=96))
    assert figures["kept"] == "none"
    assert figures["heldout_error"] == figures["heldout_error_before"] > 0
    assert not figures["heldout_error_tune"] <= figures["heldout_error"]
    assert same(state(found), before)


@pytest.mark.parametrize("how", [Correct("none"), RIDGE, TUNE], ids=lambda how: how.method)
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "deepseek_v4", *map(zoo.full, ("minimax_m2", "gemma4"))])
def test_the_error_told_is_that_of_the_stored_tensors(name: str, how: Correct) -> None:
    """In bfloat16: the stock modules, with the stored tensors, on what was recorded; tokens count up to nine times."""
    found = cut_case(name, sequences=24, dtype=torch.bfloat16, heaviest=9)
    before, dtypes = state(found), {key: value.dtype for key, value in state(found).items()}
    start = plain_error(in_float(found), found.heldout)
    assert start > 0
    figures = corrected(found, how)
    after = state(found)
    assert {key: value.dtype for key, value in after.items()} == dtypes
    assert figures["heldout_error_before"] == pytest.approx(start, rel=2e-3)
    assert figures["heldout_error"] == pytest.approx(plain_error(in_float(found), found.heldout), rel=2e-3)
    changed = {key for key in after if not torch.equal(after[key], before[key])}
    assert changed <= {tensor.key for tensor in found.layer.tensors}
    assert how is not RIDGE or all("down_proj" in key for key in changed)
    assert bool(changed) is (figures["kept"] != "none")
    assert how.wanted is ("heldout_error_ridge" in figures)


@pytest.mark.parametrize("missing", ["heldout", "fit", "both"])
def test_layers_that_too_few_tokens_reached_stay(missing: str) -> None:
    found = cut_case("mixtral")
    before = state(found)
    heldout = frozenset({0, 1} if missing == "fit" else ())
    found.recording.calibration = replace(found.recording.calibration, heldout=heldout)
    found.recording.numbers = Rows(0) if missing == "both" else found.recording.numbers
    figures = corrected(found, TUNE)
    assert figures["kept"] == "none" and same(state(found), before)
    assert ("heldout_error" in figures) is (missing == "fit")


@pytest.mark.parametrize("how", [RIDGE, TUNE], ids=lambda how: how.method)
def test_the_worst_of_two_sources_counts_more(how: Correct) -> None:
    """The second source's outputs are the first one's upside down, so that fitting both alike does justice to none."""

    def of_two_sources() -> tuple[CutCase, list[Tensor]]:
        found = cut_case("mixtral", sequences=48)
        by_source = list[Tensor]()
        for rows, batch in ((found.fit, 0), (found.heldout, 2)):
            first, second = rows.tensor_split([3 * len(rows) // 4])
            found.recording.numbers.buffer[first] = batch
            found.recording.numbers.buffer[second] = batch + 1
            found.recording.outputs[second] *= -1
            by_source += [first, second]
        found.recording.calibration = replace(found.recording.calibration, heldout=frozenset({2, 3}))
        return found, by_source[2:]

    plain, heldout = of_two_sources()
    corrected(plain, how)
    balanced, _ = of_two_sources()
    balanced.recording.sources = torch.tensor([0, 1, 0, 1])
    before = [plain_error(balanced, rows) for rows in heldout]
    figures = corrected(balanced, how)
    errors = [plain_error(balanced, rows) for rows in heldout]
    assert figures["heldout_error_before"] == pytest.approx(max(before), rel=1e-4)
    assert figures["heldout_error"] == pytest.approx(max(errors), rel=1e-3)
    assert max(errors) < max(plain_error(plain, rows) for rows in heldout)


def test_rows_grow_past_what_was_expected() -> None:
    rows, whole = Rows(5), torch.randn(23, 4)
    for part in whole.split(4):
        rows.append(part)
    assert torch.equal(rows.value, whole)
