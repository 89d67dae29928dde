"""How alike a layer's experts are, by what its strategy grouped them by; the matrices of a report.

Figure 2 of Zhang et al. 2024, arXiv:2407.09590, shows such matrices. Linear CKA (Kornblith et al. 2019,
arXiv:1905.00414) stands in where a strategy compares no experts. E experts, S sampled tokens, H hidden.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.calibration.statistics import DENSE, SAMPLED, WEIGHTS, LayerStatistics, LayerWeights
from compressor.errors import CompressionError, reason_of
from compressor.grouping.similarity import linear_cka
from compressor.model.architecture import MoeLayer
from compressor.planning.registry import load_strategy
from compressor.plans.plan import CompressionPlan, LayerPlan
from compressor.report.data import Matrix, rounded

logger = logging.getLogger(__name__)

SAMPLE, SMALL_SAMPLE, MANY_EXPERTS = 256, 128, 64
ROUTER_LABEL = "cosine of the centred router rows, negative ones as 0"


def sample_size(experts: int) -> int:
    """Tokens that experts are compared on: 256, and 128 beyond 64 experts.

    CKA by Gram matrices takes S^2 H multiplications in float64 for each expert: 256 experts of width 7168 take 12
    seconds a layer on one core with 256 tokens, 4 with 128; 64 of width 2048 take one.
    """
    return SAMPLE if experts <= MANY_EXPERTS else SMALL_SAMPLE


@dataclass(frozen=True, slots=True)
class Likeness:
    """A way to compare a layer's experts: what it needs measured, and a label with the matrix [E, E], 0 to 1."""

    needs: frozenset[str]
    measure: Callable[[LayerStatistics], tuple[str, Tensor]]

    @property
    def by_weights(self) -> bool:
        """Whether no token is needed."""
        return self.needs == WEIGHTS


def likeness_of(plan: CompressionPlan, layer: LayerPlan) -> Likeness:
    """How the layer's strategy compared its experts, or linear CKA of their outputs where it does not say."""
    won = layer.figures.get("won")  # by a strategy that tries several, each with its default options
    name, options = (str(won), {}) if won is not None else (plan.strategy, plan.options)
    try:
        strategy = load_strategy(name, options)
    except CompressionError:  # it need not be installed where a report is made
        return Likeness(frozenset({"expert_outputs"}), _by_outputs)
    measure = strategy.likeness
    if measure is None:
        return Likeness(frozenset({"expert_outputs"}), _by_outputs)
    return Likeness(strategy.likeness_needs, lambda stats: measure(stats, strategy.options))


def _by_outputs(stats: LayerStatistics) -> tuple[str, Tensor]:
    outputs = stats.expert_outputs
    return f"linear CKA of expert outputs, {outputs.shape[1]} tokens", linear_cka(outputs)


def _reached(stats: LayerStatistics, needs: frozenset[str]) -> bool:
    """Whether tokens were sampled for what is to be compared, if it takes any."""
    sampled = needs & (SAMPLED | DENSE) - {"router_arguments"}
    found = [getattr(stats, name).shape[1 if name in DENSE else 0] for name in sampled]
    return needs == WEIGHTS or (stats.tokens > 0 and all(found))


@torch.no_grad()
def compared(likeness: Likeness, stats: LayerStatistics, model: Any) -> tuple[Matrix | None, str]:
    """The matrix and its label; by the router's rows where no token reached the layer, which must be loaded."""
    if _reached(stats, likeness.needs):
        try:
            label, table = likeness.measure(stats)
            return _matrix(_checked(table, stats.layer.experts)), str(label)
        except Exception as error:  # of a plugin: a report can do without
            logger.warning(
                "%s: its strategy cannot tell how alike its experts are (%s), so its router rows are compared",
                stats.layer.name, reason_of(error),
            )  # fmt: skip
    return compared_by_rows(stats.layer, model)


def _checked(table: Tensor, experts: int) -> Tensor:
    if table.shape != (experts, experts) or not bool(table.isfinite().all()):
        raise CompressionError(f"its likeness is no matrix of {experts} x {experts} finite numbers")
    return table


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
