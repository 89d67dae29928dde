"""The verification itself: what it asks, and that it notices every way in which a graph can be wrong."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.opened import open_model
from compressor.progress import Silent
from exporters.onnx import reference as exporter_reference
from exporters.onnx import verify
from exporters.onnx.reference import CONTINUED, SHAPES, Case, Reference
from exporters.onnx.verify import EXACT, HALF, Tolerance
from tests.support import zoo
from tests.support.onnx_answers import answer, answers, observe


@pytest.fixture(scope="module")
def reference() -> Reference:
    """What a tiny Mixtral says."""
    return observe(zoo.build("mixtral", max_position_embeddings=512), past=True, tokens=12)


def compared(reference: Reference, wrong: Any, tolerance: Tolerance = EXACT) -> verify.Verification:
    """Compare with the reference's own answers, changed by `wrong`."""
    return verify.compare(answers(reference, wrong), reference, tolerance)


def test_every_required_case_is_asked(reference: Reference) -> None:
    names = {case.name: case for case in reference.cases}
    shapes = {tuple(case.tokens.shape) for name, case in names.items() if name.startswith("prefill")}
    assert shapes == set(SHAPES) and len(shapes) >= 5
    assert 1 in names["chunked prefill"].chunks and len(names["chunked prefill"].chunks) > 2
    assert names["left padding"].mask.sum(-1).tolist() == [12, 9, 6]
    assert names["left padding, cached decode"].chunks == (8, 1, 1, 1, 1)
    assert names[CONTINUED].chunks == (8, *[1] * 11)
    for case in reference.cases:
        assert sum(case.chunks) == case.tokens.shape[1] == case.logits.shape[1]


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    message = "DiffusionGemmaForBlockDiffusion cannot be exported: it does not give one row of logits"
    with pytest.raises(CompressionError, match=message):
        streamed(zoo.build("diffusion_gemma"), tmp_path)


def test_a_faithful_graph_passes(reference: Reference) -> None:
    found = compared(reference, lambda case, logits: logits)
    assert found.largest_difference == 0 and found.tolerance == 1e-4
    assert found.tokens_equal == found.tokens_compared == 12
    assert [name for name, _ in found.cases] == [case.name for case in reference.cases]


def test_every_single_wrong_logit_is_noticed(reference: Reference) -> None:
    for wanted in reference.cases:

        def wrong(case: Case, logits: Tensor, wanted: Case = wanted) -> Tensor:
            if case is wanted:
                logits[-1, -1, 5] += 2e-4
            return logits

        with pytest.raises(CompressionError, match=f"case {wanted.name!r}.*by 0.0002"):
            compared(reference, wrong)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_is_noticed(value: float, reference: Reference) -> None:
    def wrong(case: Case, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([3]), value)

    with pytest.raises(CompressionError, match=r"case 'prefill 2 x 3': its logits differ .* by inf"):
        compared(reference, wrong)


def test_another_likeliest_token_is_counted(reference: Reference) -> None:
    """Where two tokens are all but equally likely either may come first; beyond the tolerance that is a fault."""
    *_, case = reference.cases
    logits = case.logits.clone()
    first, second = logits[0, 9].topk(2).indices.tolist()
    logits[0, 9, second] = logits[0, 9, first] - 1e-5
    close = replace(reference, cases=(*reference.cases[:-1], replace(case, logits=logits)))

    def nudged(by: float) -> verify.Verification:
        def wrong(case: Case, logits: Tensor) -> Tensor:
            if case.name == CONTINUED:
                logits[0, 9, second] += by
            return logits

        return compared(close, wrong)

    found = nudged(5e-5)
    assert (found.tokens_compared, found.tokens_equal) == (12, 11)
    with pytest.raises(CompressionError, match=r"wrong in the case 'token by token': its logits differ .* by 0.0002"):
        nudged(2e-4)


def test_tolerance_grows_with_the_logits_and_with_what_roundings_do_to_them(reference: Reference) -> None:
    def bound(largest: float, sensitivity: float) -> float:
        case = replace(reference.cases[0], logits=torch.full_like(reference.cases[0].logits, largest))
        changed = replace(reference, cases=(case,), sensitivity=sensitivity)
        return verify.compare(iter([case.logits]), changed, EXACT).tolerance

    assert bound(3.0, 0) == bound(3.0, 1e-5) == 1e-4
    assert bound(40.0, 0) == pytest.approx(4e-4)
    assert bound(3.0, 1e-4) == pytest.approx(8e-4)
    assert bound(3.0, 1.0) == pytest.approx(3e-3)  # however much a model blows them up


def test_a_model_that_blows_up_roundings_passes_in_float64_and_without_a_bias_fails(tmp_path: Path) -> None:
    """Double precision is a right answer of other roundings; which the fixed bound refused."""
    model = zoo.build("gpt_oss", hidden_size=256, intermediate_size=128)
    reference = streamed(model, tmp_path / "gpt_oss")
    model.set_experts_implementation("eager")

    def said(by: Any) -> Iterator[Tensor]:
        return (answer(by, case) for case in reference.cases)

    exact = verify.compare(said(copy.deepcopy(model).double()), reference, EXACT)
    assert 1e-4 < exact.largest_difference < exact.tolerance == 8 * exact.sensitivity < 1e-2
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj_bias[3] = 0
    with pytest.raises(CompressionError, match=r"is wrong in the case .*; nothing was written"):
        verify.compare(said(model), reference, EXACT)
    assert streamed(zoo.build("mixtral"), tmp_path / "mixtral").sensitivity < 1e-5


def streamed(model: Any, folder: Path) -> Reference:
    """What the exporter has of a model's checkpoint."""
    model.save_pretrained(folder)
    return exporter_reference.observe(open_model(locate(str(folder)), "float32", "cpu"), False, 0, Silent())


@pytest.mark.parametrize(
    ("name", "tokens", "value", "passes"),
    [
        ("prefill 2 x 33", 1, 5.0, True),
        ("prefill 2 x 33", 2, 5.0, False),
        ("prefill 2 x 33", 1, float("nan"), False),
        ("prefill 1 x 1", 1, 5.0, False),
        ("left padding", 2, 5.0, False),
    ],
)
def test_in_half_precision_a_router_may_break_a_near_tie_of_few_tokens(
    name: str, tokens: int, value: float, passes: bool, reference: Reference
) -> None:
    def wrong(case: Case, logits: Tensor) -> Tensor:
        if case.name == name:
            logits[-1, -tokens:] += value
        return logits

    if passes:
        found = compared(reference, wrong, HALF)
        assert (found.ties, found.largest_difference) == (tokens, 0)
        assert found.tokens == sum(int(case.mask.sum()) for case in reference.cases)
    else:
        with pytest.raises(CompressionError, match=f"case {name!r}"):
            compared(reference, wrong, HALF)


def test_tokens_may_be_as_far_off_as_nudges_move_them(reference: Reference) -> None:
    """A near tie that another order of adding breaks in another way, and the tokens that attend to it."""
    case = reference.cases[4]
    moved = torch.zeros(len(case.real))
    moved[5:9] = 0.2
    tied = replace(reference, cases=(*reference.cases[:4], replace(case, moved=moved), *reference.cases[5:]))

    def off(first: int, last: int, by: float) -> verify.Verification:
        def wrong(of: Case, logits: Tensor) -> Tensor:
            if of.name == case.name:
                logits.view(-1, logits.shape[-1])[first:last, 3] += by
            return logits

        return compared(tied, wrong)

    assert off(5, 9, 0.3).ties == 4
    for wrong in ((4, 9, 0.3), (5, 9, 0.5)):
        with pytest.raises(CompressionError, match=f"case {case.name!r}"):
            off(*wrong)
