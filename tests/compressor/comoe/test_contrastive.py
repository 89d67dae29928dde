import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from compressor.comoe.contrastive import contrastive_loss


def vectors(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def example(tokens: int = 5, positives: int = 2, negatives: int = 3, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    return (
        vectors(tokens, 7, seed=seed),
        vectors(tokens, positives, 7, seed=seed + 1),
        vectors(tokens, negatives, 7, seed=seed + 2),
    )


def algorithm_1(query: list[float], positives: list[list[float]], negatives: list[list[float]], tau: float) -> float:
    """The pseudocode of one sample, line by line, with epsilon = 1e-3."""

    def normalize(vector: list[float]) -> list[float]:
        length = math.sqrt(sum(value * value for value in vector))
        return [value / length for value in vector]

    def score(key: list[float]) -> float:
        return sum(a * b for a, b in zip(normalize(query), normalize(key), strict=True)) / tau

    s_pos = [score(key) for key in positives]
    s_neg = [score(key) for key in negatives]
    logits = s_pos + s_neg
    return -math.log(sum(map(math.exp, s_pos)) / (sum(map(math.exp, logits)) + 1e-3))


@given(some.integers(0, 10_000), some.integers(1, 4), some.integers(1, 5), some.floats(0.05, 5))
@settings(max_examples=30)
def test_equals_algorithm_1_averaged_over_tokens(seed: int, positives: int, negatives: int, tau: float) -> None:
    anchor, near, far = example(4, positives, negatives, seed)
    losses = [algorithm_1(*(part[token].tolist() for part in (anchor, near, far)), tau) for token in range(4)]
    assert contrastive_loss(anchor, near, far, tau).item() == pytest.approx(sum(losses) / 4, rel=1e-9)


def test_the_gradient_is_that_of_finite_differences() -> None:
    parts = tuple(part.requires_grad_() for part in example())
    assert torch.autograd.gradcheck(lambda *given: contrastive_loss(*given, 0.5), parts)


def test_experts_that_answer_zeros_get_no_gradient_and_do_not_spoil_the_others() -> None:
    anchor, near, far = (part.requires_grad_() for part in example())
    silent = torch.zeros(5, 1, 7, dtype=torch.float64, requires_grad=True)
    contrastive_loss(anchor, near, torch.cat((far, silent), dim=1), 0.07).backward()
    assert silent.grad is not None and not silent.grad.any()
    assert anchor.grad is not None and 0 < anchor.grad.abs().max() < 100
