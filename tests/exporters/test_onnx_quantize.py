"""Integer weights: a plain loop, a library, half a step, zeros, independent blocks, packing, what the node reads."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from exporters.onnx.quantise import RATIOS, SCHEMES, Scheme, best_scales, codes, dequantise, pack, rounded
from tests.support.onnx_answers import run_node

ALL = [pytest.param(scheme, id=name) for name, scheme in SCHEMES.items()]
SMALL_BLOCK = Scheme(4, 4)
FINITE = st.floats(-1e6, 1e6, width=32)


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def weights(draw: st.DrawFn) -> tuple[Tensor, Scheme]:
    """A weight [rows, K] with whatever finite values, zeros and blocks of zeros among them, and a scheme."""
    scheme = draw(st.sampled_from([Scheme(8), Scheme(4), Scheme(8, 4), SMALL_BLOCK]))
    rows, width = draw(st.integers(1, 3)), draw(st.integers(1, 11))
    values = draw(st.lists(st.one_of(st.just(0.0), FINITE), min_size=rows * width, max_size=rows * width))
    return torch.tensor(values).view(rows, width), scheme


def naive_scale(values: list[float], scheme: Scheme) -> tuple[float, float]:
    """The scale of a few values with the smallest squared error, tried one by one in Python's own numbers."""
    full = max(abs(value) for value in values) / scheme.highest
    found = []
    for ratio in RATIOS:
        scale = full * ratio
        nearest = [min(scheme.highest, max(-scheme.highest - 1, round(value / scale))) for value in values]
        found.append((sum((n * scale - v) ** 2 for n, v in zip(nearest, values, strict=True)), scale))
    error, scale = min(found, key=lambda pair: pair[0])
    return scale, error


@pytest.mark.parametrize("scheme", ALL)
def test_every_scale_has_the_smallest_error_of_a_plain_loop(scheme: Scheme) -> None:
    weight = gaussian(3, 70)
    value, scales = rounded(weight, scheme)
    width = scheme.block or 70
    assert scales.shape == (3, -(-70 // width))
    for row in range(3):
        for place, part in enumerate(weight[row].split(width)):
            scale, error = naive_scale(part.tolist(), scheme)
            mine = (value[row].split(width)[place] - part).double().square().sum()
            assert float(mine) == pytest.approx(error, rel=1e-4)
            assert float(scales[row, place]) == pytest.approx(scale, rel=1e-5)


@pytest.mark.parametrize("scheme", ALL)
def test_rounding_is_that_of_torch(scheme: Scheme) -> None:
    weight = gaussian(4, 64)
    value, scales = rounded(weight, scheme)
    flat, steps = weight.view(-1, scheme.block or 64), scales.flatten()
    zeros = torch.zeros(len(steps), dtype=torch.int32)
    wanted = torch.fake_quantize_per_channel_affine(flat, steps, zeros, 0, -scheme.highest - 1, scheme.highest)
    torch.testing.assert_close(value, wanted.view(4, 64))


def test_a_case_by_hand() -> None:
    weight = torch.tensor([[7.0, -3.0, 0.4, 0.0, -70.0, 0.0, 30.0, 50.0]])  # blocks of 4: steps of 1 and of 10
    value, scales = rounded(weight, SMALL_BLOCK)
    assert value.tolist() == [[7, -3, 0, 0, -70, 0, 30, 50]]
    assert scales.tolist() == [[1, 10]]
    assert pack(codes(weight, scales, SMALL_BLOCK), SMALL_BLOCK).tolist() == [[0x5F, 0x88, 0x81, 0xDB]]


@given(weights())
def test_what_is_not_cut_off_is_within_half_a_step(case: tuple[Tensor, Scheme]) -> None:
    weight, scheme = case
    value, scales = rounded(weight, scheme)
    step = scales.repeat_interleave(scheme.block or weight.shape[1], -1)[:, : weight.shape[1]]
    inside = (weight >= step * (-scheme.highest - 1)) & (weight <= step * scheme.highest)
    slack = 1 + 1e-4
    assert bool(((value - weight).abs() <= step / 2 * slack)[inside].all())
    assert bool(((value - weight).abs() <= weight.abs() * (1 - min(RATIOS)) + step * slack).all())
    assert bool((value[weight == 0] == 0).all())


@given(weights())
def test_a_rounded_weight_has_its_own_codes(case: tuple[Tensor, Scheme]) -> None:
    weight, scheme = case
    scales = best_scales(weight, scheme)
    found = codes(weight, scales, scheme)
    assert torch.equal(codes(dequantise(found, scales, scheme), scales, scheme), found)


def test_zeros_and_tiny_weights_have_a_scale() -> None:
    for weight in (torch.zeros(2, 40), torch.full((2, 40), 1e-42)):
        value, scales = rounded(weight, SCHEMES["int4"])
        assert bool((scales > 0).all()) and bool(torch.isfinite(value).all()) and float(value.abs().max()) < 1e-37


@pytest.mark.parametrize("scheme", ALL)
def test_the_node_reads_the_same_weights(scheme: Scheme) -> None:
    weight, identity = gaussian(1, 64, 64), torch.eye(64)[None]
    tensors = {}
    for name, value in (("one", weight), ("two", identity)):
        scales = best_scales(value, scheme)
        tensors[name] = pack(codes(value, scales, scheme), scheme)
        tensors[f"{name}_scales"] = scales if scheme.block else scales[..., 0]
    inputs = ["x", "logits", "one", "one_scales", "", "two", "two_scales"]
    attributes: dict[str, Any] = {"k": 1, "activation_type": "identity", "expert_weight_bits": scheme.bits}
    attributes |= {"block_size": scheme.block} if scheme.block else {}
    feed = {"x": torch.eye(64), "logits": torch.zeros(64, 1)}
    read = run_node("QMoE", inputs, attributes, feed, tensors)  # row i: column i of the weight
    torch.testing.assert_close(read.T, rounded(weight, scheme)[0][0], rtol=1e-5, atol=1e-6)
