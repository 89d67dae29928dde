"""CKA against its definition with an explicit centring matrix, distances against differences."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compressor.errors import CompressionError
from compressor.steps.prune import similarity
from compressor.steps.prune.similarity import linear_cka, mean_output_distances, pairwise_distances, rbf_cka


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive_cka(outputs: Tensor, sigma: float | None = None) -> Tensor:
    """HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)), HSIC = tr(K H L H); linear without sigma, else RBF."""
    experts, tokens, _ = outputs.shape
    kernels = []
    for output in outputs.double():
        if sigma is None:
            kernels.append(output @ output.T)
            continue
        distance = (output[:, None] - output).norm(dim=-1)
        pairs = torch.triu_indices(tokens, tokens, 1)
        bandwidth = sigma * distance[pairs[0], pairs[1]].median()
        kernels.append(torch.exp(-distance.square() / (2 * bandwidth.square())))
    centring = torch.eye(tokens, dtype=torch.float64) - 1 / tokens

    def hsic(i: int, j: int) -> float:
        return float((kernels[i] @ centring @ kernels[j] @ centring).trace())

    table = torch.zeros(experts, experts, dtype=torch.float64)
    for i, j in itertools.product(range(experts), repeat=2):
        table[i, j] = hsic(i, j) / (hsic(i, i) * hsic(j, j)) ** 0.5
    return table


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


CKAS: list[Callable[[Tensor], Tensor]] = [linear_cka, rbf_cka]


@given(st.integers(1, 5), st.integers(3, 12), st.integers(1, 9), st.integers(0, 10**6))
def test_cka_matches_its_definition(experts: int, tokens: int, width: int, seed: int) -> None:
    outputs = normal(experts, tokens, width, seed=seed) + 3
    close(linear_cka(outputs), naive_cka(outputs), 1e-7)
    close(rbf_cka(outputs, sigma=0.5), naive_cka(outputs, sigma=0.5), 1e-7)


@pytest.mark.parametrize(("tokens", "width"), [(200, 3), (20, 40)])
def test_linear_cka_in_either_space_and_in_tiles(monkeypatch: pytest.MonkeyPatch, tokens: int, width: int) -> None:
    outputs = normal(4, tokens, width)
    expected, expected_rbf = naive_cka(outputs), naive_cka(outputs, sigma=0.8)
    monkeypatch.setattr(similarity, "BUDGET", 4 * 7**2)  # tiles of 7 x 7 tokens, the last ones smaller
    close(linear_cka(outputs), expected)
    close(rbf_cka(outputs), expected_rbf)


@pytest.mark.parametrize("cka", CKAS)
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 10))
def test_cka_is_symmetric_bounded_and_one_on_the_diagonal(
    cka: Callable[[Tensor], Tensor], seed: int, tokens: int
) -> None:
    found = cka(normal(4, tokens, 3, seed=seed).float())
    assert found.dtype == torch.float64 and torch.equal(found, found.T)
    assert torch.equal(found.diagonal(), torch.ones(4, dtype=torch.float64))
    assert found.min() >= 0 and found.max() <= 1


@pytest.mark.parametrize("cka", CKAS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("constant", [0.0, 0.1, 1e30])
def test_constant_outputs_are_like_nothing_else(
    cka: Callable[[Tensor], Tensor], dtype: torch.dtype, constant: float
) -> None:
    outputs = normal(3, 37, 5).to(dtype)
    outputs[1] = constant
    found = cka(outputs)
    assert found[1].tolist() == [0, 1, 0] and found[:, 1].tolist() == [0, 1, 0]
    assert found[0, 2] == pytest.approx(float(cka(outputs[[0, 2]])[0, 1]))


def test_extreme_magnitudes_neither_overflow_nor_vanish() -> None:
    outputs = normal(3, 12, 4)
    scaled = outputs * torch.tensor([1e-150, 1e150, 1.0], dtype=torch.float64)[:, None, None]
    for cka in CKAS:
        close(cka(scaled), cka(outputs), 1e-7)


def test_rbf_with_median_zero_compares_which_tokens_coincide() -> None:
    outputs = torch.zeros(2, 10, 2)
    outputs[0, 0] = torch.tensor([1.0, 2.0])
    outputs[1, 0] = torch.tensor([-7.0, 3.0])
    close(rbf_cka(outputs), torch.ones(2, 2, dtype=torch.float64))


def test_values_that_are_not_finite_are_refused() -> None:
    broken = normal(3, 4, 2)
    broken[2, 1, 0] = torch.nan
    for function in (*CKAS, mean_output_distances):
        with pytest.raises(CompressionError, match="outputs of expert 2 hold a value that is not finite"):
            function(broken)
    with pytest.raises(CompressionError, match="features of expert 1 hold a value that is not finite"):
        pairwise_distances(torch.tensor([[0.0, 1], [torch.inf, 1]]))


@given(st.integers(1, 9), st.integers(0, 40), st.integers(0, 10**6), st.floats(0, 1e5))
def test_distances_match_differences(experts: int, width: int, seed: int, offset: float) -> None:
    features = normal(experts, width, seed=seed) + offset
    expected = (features[:, None] - features).square().sum(dim=-1).sqrt()
    found = pairwise_distances(features)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
    assert torch.equal(found, found.T) and found.diagonal().eq(0).all()


def test_close_and_equal_rows_keep_their_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(similarity, "BUDGET", 6 * 11)  # chunks of 11 values
    features = 1e3 * normal(6, 100)
    features[4] = features[1]
    features[5] = features[2]
    features[5, 17] += 1e-6
    found = pairwise_distances(features)
    assert found[1, 4] == 0 == found[4, 1]
    assert found[2, 5] == pytest.approx(float(features[5, 17] - features[2, 17]), rel=1e-12)
    expected = (features[:, None] - features).square().sum(dim=-1).sqrt()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
