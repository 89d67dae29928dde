"""The verification itself: what it asks, and that it notices every way in which a graph can be wrong."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.errors import CompressionError
from exporters import onnx_verify
from exporters.onnx_reference import Case, Reference, model_inputs, observe
from exporters.onnx_verify import EXACT, HALF, Tolerance, runtime_reason
from tests import zoo


@pytest.fixture(scope="module")
def reference() -> Reference:
    """What a tiny Mixtral says."""
    return observe(zoo.build("mixtral", max_position_embeddings=512), past=True, tokens=12)


class Echo:
    """A session that answers from a reference, except where `wrong` changes an answer; its cache is a count."""

    def __init__(self, reference: Reference, wrong: Any = None) -> None:
        self.known = {case.tokens.shape: case.logits for case in reference.cases}
        self.reference, self.wrong, self.past, self.steps = reference, wrong, 0, 0
        self.case: Case | None = None

    def start(self, rows: int) -> None:
        self.past = 0

    def step(self, tokens: Tensor, mask: Tensor) -> Tensor:
        start, self.past, self.steps = self.past, self.past + tokens.shape[1], self.steps + 1
        if self.case is None:
            place = self.past - self.reference.prompt.shape[1]
            logits = torch.zeros(1, tokens.shape[1], self.reference.greedy_logits.shape[1])
            logits[0, -1] = self.reference.greedy_logits[place]
        else:
            logits = self.case.logits[:, start : self.past].clone()
        return logits if self.wrong is None else self.wrong(self.case, logits)


def compared(
    reference: Reference, wrong: Any, monkeypatch: pytest.MonkeyPatch, tolerance: Tolerance = EXACT
) -> onnx_verify.Verification:
    """Compare with a session that is wrong in this way."""
    session = Echo(reference, wrong)
    run_case = onnx_verify.run_case

    def told(_: Any, case: Case) -> Tensor:
        session.case = case
        found = run_case(session, case)  # type: ignore[arg-type]
        session.case = None
        return found

    monkeypatch.setattr(onnx_verify, "Session", lambda path: session)
    monkeypatch.setattr(onnx_verify, "run_case", told)
    return onnx_verify.compare(onnx_verify.WholeGraph(Path()), reference, tolerance)


def test_a_faithful_graph_passes(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    found = compared(reference, None, monkeypatch)
    assert found.largest_difference == 0 and found.tolerance == 1e-4
    assert found.tokens_equal == found.tokens_compared == 12
    assert [name for name, _ in found.cases] == [*(case.name for case in reference.cases), "greedy"]


def test_every_single_wrong_logit_is_noticed(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    for wanted in reference.cases:

        def wrong(case: Case | None, logits: Tensor, wanted: Case = wanted) -> Tensor:
            if case is wanted:
                logits[-1, -1, 5] += 2e-4
            return logits

        with monkeypatch.context() as patch, pytest.raises(CompressionError, match=f"case {wanted.name!r}.*by 0.0002"):
            compared(reference, wrong, patch)


def test_padding_is_not_compared(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(case: Case | None, logits: Tensor) -> Tensor:
        if case is not None and case.name == "left padding":
            logits[2, :6] = 100
        return logits

    assert compared(reference, wrong, monkeypatch).largest_difference == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_no_number_is_noticed(
    value: float, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(case: Case | None, logits: Tensor) -> Tensor:
        return logits.index_fill(-1, torch.tensor([3]), value)

    with pytest.raises(CompressionError, match=r"case 'prefill 2 x 3': its logits differ .* by inf"):
        compared(reference, wrong, monkeypatch)


def test_wrong_greedy_logits_are_noticed(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    for change, message in ((-100.0, "generates token .* at step 0"), (None, "greedy generation: .* differ .* by")):

        def wrong(case: Case | None, logits: Tensor, change: float | None = change) -> Tensor:
            if case is None:
                return logits + 1 if change is None else logits * change
            return logits

        with monkeypatch.context() as patch, pytest.raises(CompressionError, match=message):
            compared(reference, wrong, patch)


def test_a_tie_may_be_broken_either_way(reference: Reference) -> None:
    logits = reference.greedy_logits.clone()
    second = logits[4].topk(2).indices[1]
    close = replace(reference, greedy_logits=logits.clone())
    close.greedy_logits[4, second] = close.greedy_logits[4].max() - 1e-4
    logits[4, second] = logits[4].max() + 1e-5
    assert onnx_verify._equal_tokens(logits, close, 1e-4) == 11
    with pytest.raises(CompressionError, match=f"token {int(second)} instead of {int(reference.greedy[4])} at step 4"):
        onnx_verify._equal_tokens(logits, close, 1e-5)


def test_tolerance_grows_with_the_logits_and_with_what_roundings_do_to_them(reference: Reference) -> None:
    def bound(largest: float, sensitivity: float) -> float:
        case = replace(reference.cases[0], logits=torch.full_like(reference.cases[0].logits, largest))
        none = {"greedy": torch.zeros(0), "greedy_logits": torch.zeros(0, 1)}
        return EXACT.of(replace(reference, cases=(case,), sensitivity=sensitivity, **none))

    assert bound(3.0, 0) == bound(3.0, 1e-5) == 1e-4
    assert bound(40.0, 0) == pytest.approx(4e-4)
    assert bound(3.0, 1e-4) == pytest.approx(8e-4)
    assert bound(3.0, 1.0) == pytest.approx(3e-3)  # however much a model blows them up


class Given:
    """Answers that were worked out before."""

    how = onnx_verify.WHOLE

    def __init__(self, model: Any) -> None:
        self.model = model

    def case(self, case: Case) -> Tensor:
        inputs = model_inputs(self.model, case.tokens, 0, case.mask)
        return self.model(**inputs, use_cache=False).logits.float().detach()

    def greedy(self, reference: Reference) -> Tensor:
        return reference.greedy_logits


def test_a_model_that_blows_up_roundings_passes_in_float64_and_without_a_bias_fails() -> None:
    """Double precision is a right answer of other roundings; which the fixed bound refused."""
    model = zoo.build("gpt_oss", hidden_size=256, intermediate_size=128)
    units = [f"model.layers.{number}" for number in range(2)]
    reference = observe(model, past=False, tokens=0, units=units)
    model.set_experts_implementation("eager")
    exact = onnx_verify.compare(Given(copy.deepcopy(model).double()), reference, EXACT)
    assert 1e-4 < exact.largest_difference < exact.tolerance == 8 * exact.sensitivity < 1e-2
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj_bias[3] = 0
    with pytest.raises(CompressionError, match=r"is wrong in the case .*; nothing was written"):
        onnx_verify.compare(Given(model), reference, EXACT)
    assert observe(zoo.build("mixtral"), past=False, tokens=0, units=units).sensitivity < 1e-5


def test_lengths_that_a_trace_has_fixed_are_told_as_such(reference: Reference, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(case: Case | None, logits: Tensor) -> Tensor:
        return logits + 1 if case is not None and case.tokens.shape[1] > 16 else logits

    right = r"\(it is right for 2 x 3, 1 x 1, 1 x 7, 3 x 5"
    with monkeypatch.context() as patch, pytest.raises(CompressionError, match=rf"'prefill 2 x 33': .* {right}\); no"):
        compared(reference, wrong, patch)

    def failing(case: Case | None, logits: Tensor) -> Tensor:
        if case is not None and case.tokens.shape[1] > 16:
            raise CompressionError("ONNX Runtime fails") from RuntimeError("Expand")
        return logits

    with pytest.raises(CompressionError, match=rf"fails {right}; the stock code's loop over tokens .*\); nothing"):
        compared(reference, failing, monkeypatch)


def test_what_onnx_runtime_says_is_told_without_its_source_files() -> None:
    begin = (
        "[ONNXRuntimeError] : 1 : FAIL : Non-zero status code returned while running Reshape node. Name:'node_view_1'"
    )
    where = "Status Message: /source/reshape_helper.h:91 onnxruntime::Helper::Helper(const Shape&, bool)"
    error = RuntimeError(f"{begin} {where} size was false. The tensor {{2,3}} cannot be reshaped\n")
    assert runtime_reason(error) == "Reshape: size was false. The tensor {2,3} cannot be reshaped"
    inner = "[ONNXRuntimeError] : 1 : FAIL : Shape mismatch. {1} != {3}. Validate dim_value (above 0) and dim_param"
    error = RuntimeError(f"{begin} Status Message: /source/kernel.cc:87 Value* Context::Out(int, const S&) {inner}")
    assert runtime_reason(error) == f"Reshape: {inner.rpartition(' : ')[2]}"
    plain = RuntimeError("[ONNXRuntimeError] : 2 : INVALID_ARGUMENT : Got invalid dimensions for input: x")
    assert runtime_reason(plain) == "Got invalid dimensions for input: x"


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
    name: str, tokens: int, value: float, passes: bool, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(case: Case | None, logits: Tensor) -> Tensor:
        if case is not None and case.name == name:
            logits[-1, -tokens:] += value
        return logits

    if passes:
        found = compared(reference, wrong, monkeypatch, HALF)
        assert (found.ties, found.largest_difference) == (tokens, 0)
        assert found.tokens == sum(int(case.mask.sum()) for case in reference.cases) + len(reference.greedy)
    else:
        with pytest.raises(CompressionError, match=f"case {name!r}"):
            compared(reference, wrong, monkeypatch, HALF)
