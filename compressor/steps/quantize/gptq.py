"""GPTQ: round column by column, each column's error made up for by those that follow (Frantar et
al. 2023, arXiv:2210.17323).

B matrices at once, O output rows, I input columns, T tokens. H = X^T X of a matrix's inputs X [T,
I]."""

import torch
from torch import Tensor

from compressor.steps.quantize.options import ROW
from compressor.steps.quantize.scheme import Scales, Scheme

DAMPING = 0.01  # of the mean diagonal of H
BLOCK = 128  # columns whose errors are passed on to the rest at once


def gptq(scheme: Scheme, weight: Tensor, scales: Scales, upper: Tensor) -> Tensor:
    """Codes [B, O, I] of weights [B, O, I] that lose little of X W^T, all in float32.

    With U = `upper` [B, I, I], the factor of H's inverse, column j's error over U[j, j] times U[j,
    j+1:] is taken from the columns that follow. A column that no token uses is rounded to nearest.
    """
    columns = weight.shape[-1]
    group = columns if scheme.group_size == ROW else scheme.group_size
    effective = scales.effective.mT.contiguous()  # [B, n, O]; columns lie together in all of these
    remaining = weight.mT.contiguous()
    codes = torch.empty_like(remaining)
    for begin in range(0, columns, BLOCK):
        end = min(begin + BLOCK, columns)
        block = upper[:, begin:end, begin:end].mT.contiguous()
        errors = torch.empty_like(remaining[:, begin:end])
        for done, column in enumerate(range(begin, end)):
            propagated = block[:, None, done, :done] @ errors[:, :done]
            current = remaining[:, column] - propagated[:, 0]
            scale = effective[:, column // group]
            code = scheme.nearest(current / scale)
            codes[:, column] = code
            errors[:, done] = (current - code * scale) / block[:, None, done, done]
        remaining[:, end:].baddbmm_(upper[:, begin:end, end:].mT, errors, alpha=-1)
    return codes.mT.contiguous()


def inverse_factor(hessian: Tensor) -> Tensor:
    """Upper Cholesky factors U [B, I, I] of the damped Hessians' inverses: H^-1 = U^T U; more
    damping where needed.

    With rows and columns in reverse H has a lower factor, which in reverse is upper: H = R R^T, so
    that U = R^-1."""
    reverse = hessian.flip(1, 2)
    diagonal = reverse.diagonal(dim1=1, dim2=2)
    unused = diagonal == 0
    mean = diagonal.mean(1, keepdim=True)
    identity = torch.eye(hessian.shape[1], dtype=hessian.dtype, device=hessian.device).expand_as(
        hessian
    )
    damping = DAMPING
    while True:
        damped = reverse.clone()
        damped.diagonal(dim1=1, dim2=2).add_(damping * mean).masked_fill_(unused, 1.0)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed.any()):
            upper: Tensor = torch.linalg.solve_triangular(lower.flip(1, 2), identity, upper=True)
            return upper
        damping *= 10
