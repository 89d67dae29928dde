"""Similarity of experts: CKA of their outputs, Euclidean distance of their features.

E experts, T tokens, D output width, F features; all results are float64, on the device of the input
if it has that. CKA is HSIC(K, L) / sqrt(HSIC(K, K) HSIC(L, L)) with HSIC(K, L) = tr(K H L H) and H
= I - 1/T (Kornblith et al., ICML 2019, arXiv:1905.00414). An expert whose output never varies is
like itself (1) and like no other (0)."""

from collections.abc import Callable
from math import isqrt

import torch
from torch import Tensor

from compressor.devices import as_float64, float64_device
from compressor.errors import CompressionError
from compressor.tolerance import FLOAT32

BUDGET = 2**23  # float64 elements of one temporary: 64 MiB
CHUNK = 2**20  # float32 elements of one chunk of fast distances: 4 MiB, which a cache holds
CLOSENESS = "1 - distance / largest distance"  # what `closeness` is, for a label
CLOSE = 1e-2  # fast squared distances below this share of the squared norms are subtracted instead
SAME = 1e-12  # tokens whose squared distance is below this share of the largest count as equal

# (expert, rows, columns) -> that part of its centred Gram matrix
Tile = Callable[[int, slice, slice], Tensor]


def linear_cka(outputs: Tensor) -> Tensor:
    """CKA with K = X X^T: [E, T, D] -> [E, E] in [0, 1]."""
    centred = _centred(outputs)

    def tile(expert: int, rows: slice, columns: slice) -> Tensor:
        return centred(expert, rows) @ centred(expert, columns).T

    return _cka(tile, *outputs.shape[:2])


def rbf_cka(outputs: Tensor, sigma: float = 0.8) -> Tensor:
    """CKA with K = exp(-d^2 / (2 (sigma m)^2)), m the median distance of two tokens: [E, T, D] ->
    [E, E].

    If more than half of the pairs coincide, m is 0 and K is its limit: 1 where d = 0, else 0.
    """
    centred = _centred(outputs)
    experts, tokens = outputs.shape[:2]
    floors = list[Tensor]()
    bandwidths = list[Tensor]()
    means = list[Tensor]()

    def squared_distances(expert: int, rows: slice, columns: slice) -> Tensor:
        left = centred(expert, rows)
        right = centred(expert, columns)
        left_norms = left.square().sum(dim=1)
        right_norms = right.square().sum(dim=1)
        norms = left_norms[:, None] + right_norms
        return norms.addmm_(left, right.T, alpha=-2).clamp_(min=0)

    def kernel(squared: Tensor, expert: int) -> Tensor:
        same = squared <= floors[expert]
        return (squared / -bandwidths[expert].clamp(min=1e-300)).exp_().masked_fill_(same, 1)

    def tile(expert: int, rows: slice, columns: slice) -> Tensor:
        part = kernel(squared_distances(expert, rows, columns), expert)
        mean = means[expert]
        return part - mean[rows, None] - mean[columns] + mean.mean()

    # of the pairs: the lower median; a single token has none
    middle = (tokens * (tokens - 1) // 2 + 1) // 2
    for expert in range(experts):
        squared = squared_distances(expert, slice(tokens), slice(tokens)).fill_diagonal_(0)
        floors.append(SAME * squared.max())
        squared.masked_fill_(squared <= floors[-1], 0)
        # the diagonal comes first, then pairs twice
        median = squared.flatten().kthvalue(tokens + 2 * middle).values
        bandwidths.append(2 * sigma**2 * median)
        means.append(kernel(squared, expert).mean(dim=1))
    return _cka(tile, experts, tokens)


def pairwise_distances(features: Tensor) -> Tensor:
    """Euclidean distance of every two rows, exactly 0 between equal ones: [E, F] -> [E, E] in
    float64."""
    _refuse_not_finite("features", features)
    points = as_float64(features)
    return torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")


def fast_squared_distances(features: Tensor) -> Tensor:
    """Squared Euclidean distance of every two rows, exactly 0 between equal ones: [E, F] -> [E, E]
    in float64.

    For rows of very many values: products in float32, about the speed of the matrix product, and
    sums in float64."""
    experts = features.shape[0]
    squared = torch.zeros(
        experts, experts, dtype=torch.float64, device=float64_device(features.device)
    )
    for columns in _slices(features.shape[1], max(1, CHUNK // experts)):
        part = features[:, columns].float()
        distances, close = _from_products(part)
        if bool(close.any()):  # what all rows share cancels badly: take it away first
            distances, close = _from_products(part - part.mean(dim=0))
        first, second = close.triu_(1).nonzero(as_tuple=True)
        for pairs in _slices(len(first), experts):
            left = first[pairs]
            right = second[pairs]
            exact = as_float64((part[left] - part[right]).square_()).sum(dim=1)
            distances[left, right] = distances[right, left] = exact
        squared += distances
    if not squared.isfinite().all():
        raise CompressionError("features are not finite, or too large for float32 distances")
    return squared


def _from_products(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Squared distances by |a|^2 + |b|^2 - 2ab, and which pairs are too close for that: [E, F] ->
    two [E, E]."""
    gram = as_float64(rows @ rows.T)
    norms = gram.diagonal()[:, None] + gram.diagonal()
    distances = (norms - (gram + gram.T)).clamp_(min=0).fill_diagonal_(0)
    return distances, (distances < CLOSE * norms).fill_diagonal_(False)


def mean_output_distances(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Euclidean distance of the experts' outputs averaged over tokens, and its `noise`: [E, T, D]
    -> two [E, E]."""
    _refuse_not_finite("outputs", outputs)
    means = torch.stack([as_float64(output).mean(dim=0) for output in outputs])
    return pairwise_distances(means), noise(means.norm(dim=1))


def noise(norms: Tensor) -> Tensor:
    """Return the distance that rounding alone can put between float32 features of these norms: [E]
    -> [E, E]."""
    return FLOAT32 * (norms[:, None] + norms)


def closeness(distances: Tensor) -> Tensor:
    """1 - d / largest d: [E, E] -> [E, E] in [0, 1]; all 1 where all are equal."""
    largest = float(distances.max()) or 1.0
    return (1 - distances / largest).clamp(0, 1)


def _refuse_not_finite(what: str, values: Tensor) -> None:
    is_finite = values.isfinite().flatten(1).all(dim=1)
    if not is_finite.all():
        raise CompressionError(
            f"{what} of expert {int(is_finite.int().argmin())} hold a value that is not finite"
        )


def _centred(outputs: Tensor) -> Callable[[int, slice], Tensor]:
    """Return a reader of an expert's centred outputs, over their Frobenius norm, as CKA ignores
    scale."""
    _refuse_not_finite("outputs", outputs)
    spread = list[tuple[Tensor, Tensor, Tensor]]()
    for output in outputs:
        # Offsets from the first token are exactly 0 when the output never varies; a plain mean
        # would round.
        first = as_float64(output[0])
        offset = (as_float64(output) - first).mean(dim=0)
        centred = as_float64(output) - first - offset
        peak = centred.abs().max()
        norm = peak * (centred / peak.where(peak > 0, 1)).norm()
        spread.append((first, offset, norm.where(norm > 0, 1)))

    def read(expert: int, rows: slice) -> Tensor:
        first, offset, norm = spread[expert]
        return (as_float64(outputs[expert, rows]) - first - offset) / norm

    return read


def _cka(tile: Tile, experts: int, tokens: int) -> Tensor:
    """CKA from tiles of every expert's Gram matrix, each made once: 0 beside a constant expert, 1
    on the diagonal."""
    parts = _slices(tokens, max(1, isqrt(BUDGET // experts)))
    products = torch.zeros(())
    for index, rows in enumerate(parts):
        for columns in parts[index:]:
            tiles = torch.stack(
                [tile(expert, rows, columns).flatten() for expert in range(experts)]
            )
            # the mirrored tile has the same products
            product = tiles @ tiles.T * (1 if rows == columns else 2)
            products = product + products.to(product)
    norms = products.diagonal().sqrt()
    scale = norms[:, None] * norms
    similarity = torch.where(scale > 0, products / scale.where(scale > 0, 1), 0)
    return ((similarity + similarity.T) / 2).clamp_(0, 1).fill_diagonal_(1)


def _slices(total: int, width: int) -> list[slice]:
    return [slice(start, min(start + width, total)) for start in range(0, total, width)]
