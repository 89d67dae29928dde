"""How alike a layer's experts are, by what its strategy grouped them by; the matrices of a report.

Figure 2 of Zhang et al. 2024, arXiv:2407.09590, shows such matrices. Linear CKA (Kornblith et al. 2019,
arXiv:1905.00414) stands in where a strategy compares no experts. E experts, S sampled tokens, H hidden.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.calibration.statistics import LayerStatistics, LayerWeights
from compressor.grouping.similarity import linear_cka
from compressor.model.architecture import MoeLayer
from compressor.plans.plan import CompressionPlan, LayerPlan
from compressor.report.data import Matrix, rounded

SAMPLE, SMALL_SAMPLE, MANY_EXPERTS = 256, 128, 64
CLOSENESS = "1 - distance / largest distance"
ROUTER_LABEL = "cosine of the centred router rows, negative ones as 0"


def sample_size(experts: int) -> int:
    """Tokens that experts are compared on: 256, and 128 beyond 64 experts.

    CKA by Gram matrices takes S^2 H multiplications in float64 for each expert: 256 experts of width 7168 take 12
    seconds a layer on one core with 256 tokens, 4 with 128; 64 of width 2048 take one.
    """
    return SAMPLE if experts <= MANY_EXPERTS else SMALL_SAMPLE


@dataclass(frozen=True, slots=True)
class Likeness:
    """A way to compare a layer's experts: what it needs measured, its name, and the matrix [E, E], 0 to 1."""

    needs: frozenset[str]
    label: str  # with {tokens} where it is measured on tokens
    matrix: Callable[[LayerStatistics], Tensor]

    @property
    def by_weights(self) -> bool:
        """Whether no token is needed."""
        return self.needs == frozenset({"weights"})


def closeness(distances: Tensor) -> Tensor:
    """1 - d / largest d: [E, E] -> [E, E] in [0, 1]; all 1 where all are equal."""
    largest = float(distances.max())
    return (1 - distances / largest if largest > 0 else torch.ones_like(distances)).clamp(0, 1)


def likeness_of(plan: CompressionPlan, layer: LayerPlan) -> Likeness:
    """How the layer's strategy compared its experts, or linear CKA of their outputs where it did not."""
    won = layer.figures.get("won")  # by a strategy that tries several, each with its default options
    name, options = (str(won), {}) if won is not None else (plan.strategy, plan.options)
    if name == "data-centric":
        return _data_centric(options)
    if name == "model-centric":
        return _model_centric(options)
    return Likeness(
        frozenset({"expert_outputs"}),
        "linear CKA of expert outputs, {tokens} tokens",
        lambda stats: linear_cka(stats.expert_outputs),
    )


def _data_centric(options: Mapping[str, Any]) -> Likeness:
    from strategies.data_centric import Options, distances

    wanted = Options(**options)
    name = "mixed_outputs" if wanted.mix_tokens else "expert_outputs"
    on = "{tokens} random mixtures of tokens" if wanted.mix_tokens else "{tokens} tokens"

    def matrix(stats: LayerStatistics) -> Tensor:
        found = distances(getattr(stats, name), wanted.similarity)
        return closeness(found) if wanted.similarity == "mean-output" else 1 - found

    kinds = {
        "linear-cka": "linear CKA of expert outputs",
        "rbf-cka": "CKA of expert outputs with a Gaussian kernel",
        "mean-output": f"closeness of mean expert outputs ({CLOSENESS})",
    }
    return Likeness(frozenset({name}), f"{kinds[wanted.similarity]}, {on}", matrix)


def _model_centric(options: Mapping[str, Any]) -> Likeness:
    from strategies.model_centric import Options, surrogate_distances, vectorized_distances

    representation = Options(**options).representation
    distances = surrogate_distances if representation == "surrogate" else vectorized_distances
    return Likeness(
        frozenset({"weights"}),
        f"closeness of {representation} weights ({CLOSENESS})",
        lambda stats: closeness(distances(stats.weights, stats.layer.experts)),
    )


@torch.no_grad()
def compared(likeness: Likeness, stats: LayerStatistics, model: Any) -> tuple[Matrix | None, str]:
    """The matrix and its label; by the router's rows where no token reached the layer, which must be loaded."""
    tokens = 0
    for name in likeness.needs & {"expert_outputs", "mixed_outputs"}:
        tokens = getattr(stats, name).shape[1]
    if tokens or likeness.by_weights:
        return _matrix(likeness.matrix(stats)), likeness.label.format(tokens=tokens)
    return compared_by_rows(stats.layer, model)


def compared_by_weights(likeness: Likeness, layer: MoeLayer, model: Any) -> tuple[Matrix | None, str]:
    """The same without any tokens, for a layer whose `wanted_keys` are loaded."""
    if not likeness.by_weights:
        return compared_by_rows(layer, model)
    experts, router, block = (model.get_submodule(name) for name in (layer.name, layer.router, layer.block))
    values = {"weights": LayerWeights(experts, router, block, _no_router)}
    return compared(likeness, LayerStatistics(layer, values=values), model)


def _no_router(count: int) -> Any:
    raise NotImplementedError("comparing experts builds no smaller router")


def wanted_keys(likeness: Likeness, layer: MoeLayer) -> list[str]:
    """The tensors that comparing without tokens reads."""
    experts = f"{layer.name}."
    return [tensor.key for tensor in layer.tensors if likeness.by_weights or not tensor.key.startswith(experts)]


@torch.no_grad()
def compared_by_rows(layer: MoeLayer, model: Any) -> tuple[Matrix | None, str]:
    """Cosine of what the router's matrices hold for each expert, less its mean over experts; None without a matrix."""
    rows = []
    for tensor in layer.tensors:
        owner, _, name = tensor.key.rpartition(".")
        value = None if tensor.key.startswith(f"{layer.name}.") else getattr(model.get_submodule(owner), name)
        if value is not None and value.dim() > 1:
            rows.append(value.detach().movedim(tensor.dim, 0)[: layer.experts].flatten(1).double())
    if not rows:
        return None, ""
    centred = torch.cat(rows, dim=1)
    centred = torch.nn.functional.normalize(centred - centred.mean(dim=0), dim=1)
    return _matrix((centred @ centred.T).clamp(0, 1).fill_diagonal_(1)), ROUTER_LABEL


def _matrix(table: Tensor) -> Matrix:
    return tuple(tuple(rounded(value) for value in row) for row in table.cpu().clamp(0, 1).tolist())
