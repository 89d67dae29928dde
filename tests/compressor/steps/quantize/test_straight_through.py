"""Training through rounding: the layer computes with what is stored, its gradients are LSQ's, and its error falls."""

import pytest
import torch

from compressor.model.experts import apply_expert, expert_parameters, matrix_of
from compressor.steps.quantize.matrices import Matrix
from compressor.steps.quantize.scheme import ROW, Scheme
from compressor.steps.quantize.straight_through import RoundedLayer, tune_rounded
from tests.cut_cases import CutCase, cut_case

INT2 = Scheme("int2", ROW)


def matrices(found: CutCase) -> list[Matrix]:
    """All matrices of the layer."""
    up = "gate_up_proj" if found.experts.has_gate else "up_proj"
    parts = [(up, "up"), ("down_proj", "down"), *([(up, "gate")] if found.experts.has_gate else [])]
    made = []
    for expert in range(len(found.experts.down_proj)):
        for name, part in parts:
            shape = matrix_of(found.experts, name, getattr(found.experts, name)[expert], part).shape
            key = f"{found.layer.name}.{name}"
            made.append(Matrix(f"{key}.{expert}.{part}", key, found.layer.unit, *shape, found.layer.name, expert, part))
    return made


@torch.no_grad()
def quantised(found: CutCase) -> dict[Matrix, torch.Tensor]:
    """Round all weights of the live layer in place; returns the scales [O, n]."""
    scales = {}
    for matrix in matrices(found):
        live = matrix.of(found.small)
        own = INT2.scales(live.float()[None].contiguous(), torch.float32, clip=True)
        live.copy_(INT2.values(INT2.codes(live.float()[None].contiguous(), own), own)[0])
        scales[matrix] = own.groups[0]
    return scales


def rounded_layer(found: CutCase, scales: dict[Matrix, torch.Tensor]) -> RoundedLayer:
    layer = RoundedLayer.of(found.recording, found.experts, found.cut.router, found.cut.block)
    layer.scheme = INT2
    layer.parameters = [{name: own[name] for name in own if not name.endswith("_bias")} for own in layer.parameters]
    for matrix, scale in scales.items():
        layer.parameters[matrix.expert or 0][f"{matrix.key.rpartition('.')[2]}.{matrix.part}"] = scale.clone()
    return layer


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "nemotron_h", "zaya"])
def test_it_computes_with_the_rounded_weights(name: str) -> None:
    found = cut_case(name)
    layer = rounded_layer(found, quantised(found))
    x = torch.randn(5, found.recording.inputs.shape[1])
    for expert in range(len(found.experts.down_proj)):
        wanted = apply_expert(found.experts, expert_parameters(found.experts, expert), x)
        torch.testing.assert_close(layer.slot_output(expert, x), wanted)


def test_gradients_pass_the_rounding() -> None:
    """Of sum(c * round(w/s) * s) with round as the identity: c for w within range, c * (round(w/s) - w/s) for s."""
    found = cut_case("nemotron_h")
    layer = rounded_layer(found, quantised(found))
    leaves = layer.parameters[0]
    generator = torch.Generator().manual_seed(0)
    scale = 0.1 + torch.rand(leaves["down_proj.down"].shape, generator=generator)
    weight = torch.randn(leaves["down_proj"].shape, generator=generator)
    factors = torch.randn(weight.shape, generator=generator)
    leaves |= {"down_proj": weight.requires_grad_(), "down_proj.down": scale.requires_grad_()}
    value = layer._through_rounding(leaves, "down_proj", "down")
    (value * factors).sum().backward()
    ratio = (weight / scale).detach()
    inside = (ratio > -2) & (ratio < 1)
    torch.testing.assert_close(value.detach(), ratio.round().clamp(-2, 1) * scale.detach())
    torch.testing.assert_close(weight.grad, factors * inside)
    slope = torch.where(inside, ratio.round() - ratio, ratio.clamp(-2, 1))
    torch.testing.assert_close(scale.grad, (factors * slope).sum(1, keepdim=True))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_the_error_falls_and_what_is_kept_computes_it(name: str) -> None:
    found = cut_case(name, sequences=60)
    scales = quantised(found)
    router = {key for key in dict(found.small.named_parameters()) if key.startswith(f"{found.layer.router}.")}
    tuned = tune_rounded(found.small, found.recording, INT2, scales, router, torch.float32, 60, 0)
    assert tuned.error is not None
    before, after = tuned.error
    assert after < before and set(tuned.kept) == set(scales) and set(tuned.router) <= router
    with torch.no_grad():
        for matrix, (codes, own) in tuned.kept.items():
            assert set(codes.unique().tolist()) <= {-2.0, -1.0, 0.0, 1.0}
            matrix.of(found.small).copy_(INT2.values(codes, own)[0])
    again = type(found.cut).of(found.recording, found.experts, found.cut.router, found.cut.block)
    assert again.error(found.heldout) == pytest.approx(after, rel=1e-3)


def test_nothing_is_kept_that_is_no_gain() -> None:
    found = cut_case("mixtral")
    scales = quantised(found)
    before = {key: value.clone() for key, value in found.small.state_dict().items()}
    with torch.no_grad():  # the quantised layer is what is wanted already
        found.recording.outputs.copy_(found.recording.inputs * 0)
        layer = rounded_layer(found, scales)
        for chunk in torch.arange(len(found.recording.inputs)).split(4096):
            found.recording.outputs[chunk] = -layer.gap(chunk, found.recording.outputs[chunk].float())
    tuned = tune_rounded(found.small, found.recording, INT2, scales, set(), torch.float32, 5, 0)
    assert not tuned.kept and not tuned.router
    assert all(torch.equal(value, before[key]) for key, value in found.small.state_dict().items())
