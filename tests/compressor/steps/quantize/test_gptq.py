"""GPTQ against the paper's algorithm as it stands, one column at a time in float64, and what it is for."""

import pytest
import torch
from torch import Tensor

from compressor.steps.quantize.gptq import DAMPING, gptq, inverse_factor
from compressor.steps.quantize.options import ROW
from compressor.steps.quantize.scheme import Scales, Scheme

CASES = [
    ("int4", 128, 256),
    ("int4", 32, 192),
    ("int3", ROW, 160),
    ("int2", 8, 40),
    ("mxfp4", 32, 160),
    ("fp8", ROW, 136),
]


class Wide(Scheme):
    """A scheme that rounds numbers in float64, too."""

    def nearest(self, value: Tensor) -> Tensor:
        return super().nearest(value.float()).to(value.dtype)


def correlated(tokens: int, columns: int, seed: int = 0) -> Tensor:
    """Inputs [T, I] in float64 that lie near a subspace, of columns of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    latent = torch.randn(tokens, columns // 4, generator=generator, dtype=torch.float64)
    mixing = torch.randn(columns // 4, columns, generator=generator, dtype=torch.float64)
    noise = torch.randn(tokens, columns, generator=generator, dtype=torch.float64)
    return (latent @ mixing + 0.3 * noise) * torch.linspace(0.2, 3, columns, dtype=torch.float64)


def weights(count: int, columns: int, seed: int = 1) -> Tensor:
    return 0.1 * torch.randn(count, 12, columns, generator=torch.Generator().manual_seed(seed))


def one_by_one(scheme: Scheme, weight: Tensor, effective: Tensor, hessian: Tensor) -> Tensor:
    """Codes [O, I]: round column j, take its error from the others by H^-1, and remove j from H^-1 by elimination."""
    columns = weight.shape[1]
    inverse = (hessian + DAMPING * hessian.diagonal().mean() * torch.eye(columns).double()).inverse()
    left, codes = weight.clone(), torch.zeros_like(weight)
    for j in range(columns):
        scale = effective[:, j * effective.shape[1] // columns]
        codes[:, j] = scheme.nearest(left[:, j] / scale)
        error = (left[:, j] - codes[:, j] * scale) / inverse[j, j]
        left[:, j + 1 :] -= torch.outer(error, inverse[j, j + 1 :])
        inverse = inverse - torch.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return codes


@pytest.mark.parametrize(("name", "size", "width"), CASES)
def test_codes_are_the_papers(name: str, size: int, width: int) -> None:
    scheme, weight, x = Wide(name, size), weights(1, width), correlated(300, width)
    hessian, scales = x.T @ x, scheme.scales(weight, torch.float32, clip=True)
    exact = Scales(scales.groups.double())
    codes = gptq(scheme, weight.double(), exact, inverse_factor(hessian[None]))
    assert torch.equal(codes[0], one_by_one(scheme, weight[0].double(), exact.effective[0], hessian))
    found = gptq(scheme, weight, scales, inverse_factor(hessian[None].float()))  # ties fall otherwise, as in any dtype
    assert float((found != codes).float().mean()) < 0.2
    assert float(loss(scheme, weight, found, scales, x)) < 1.05 * float(loss(scheme, weight, codes, scales, x))


def loss(scheme: Scheme, weight: Tensor, codes: Tensor, scales: Scales, x: Tensor) -> Tensor:
    """||X (W - Q)^T||^2 of each matrix [B]."""
    missing = weight.double() - scheme.values(codes.float(), scales).double()
    return (x @ missing.mT).square().sum((1, 2))


@pytest.mark.parametrize("used", [0, 1, 100])
def test_columns_without_inputs_are_rounded_to_nearest(used: int) -> None:
    scheme, weight, x = Scheme("int4", 32), weights(1, 160), correlated(400, 160)
    unused = torch.ones(160, dtype=torch.bool)
    unused[torch.randperm(160, generator=torch.Generator().manual_seed(2))[:used]] = False
    x[:, unused] = 0
    scales = scheme.scales(weight, torch.float32)
    codes = gptq(scheme, weight, scales, inverse_factor((x.T @ x)[None].float()))
    assert torch.equal(codes[..., unused], scheme.codes(weight, scales)[..., unused])


def test_matrices_together_are_what_each_is_alone() -> None:
    scheme, weight = Scheme("int4", 32), weights(3, 160)
    hessian = torch.stack([(x.T @ x).float() for x in (correlated(300, 160, seed) for seed in range(3))])
    hessian[2, :, 5:9], hessian[2, 5:9] = 0, 0
    scales, upper = scheme.scales(weight, torch.float32), inverse_factor(hessian)
    together = gptq(scheme, weight, scales, upper)
    for number in range(3):
        own = slice(number, number + 1)
        assert torch.equal(inverse_factor(hessian[own]), upper[own])
        assert torch.equal(gptq(scheme, weight[own], Scales(scales.groups[own]), upper[own]), together[own])


def test_one_that_is_not_positive_is_damped_more() -> None:
    hessian = torch.stack([torch.eye(8), torch.eye(8)])
    hessian[1, 0, 1] = hessian[1, 1, 0] = 1.5
    upper = inverse_factor(hessian)
    assert bool(upper.isfinite().all()) and bool((upper.diagonal(dim1=1, dim2=2) > 0).all())
