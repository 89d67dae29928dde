"""How alike a layer's experts are, by what its strategy grouped them by, and who visits them: a report's matrices.

Figure 2 of Zhang et al. 2024, arXiv:2407.09590, shows such matrices. Linear CKA (Kornblith et al. 2019,
arXiv:1905.00414) stands in where a strategy compares no experts. E experts, S sampled tokens, H hidden.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from compressor.errors import CompressionError, reason_of
from compressor.grouping.similarity import linear_cka
from compressor.model.architecture import MoeLayer
from compressor.recipe.plan import CompressionPlan, LayerPlan
from compressor.recipe.registry import Strategy, load_strategy
from compressor.report.data import Matrix, rounded
from compressor.statistics.statistics import DENSE, SAMPLED, WEIGHTS, LayerStatistics

logger = logging.getLogger(__name__)

ROUTER_LABEL = "cosine of the centred router rows, negative ones as 0"


def sample_size(experts: int) -> int:
    """Tokens S that experts are compared on; CKA by Gram matrices takes S^2 H multiplications for each expert."""
    return 256 if experts <= 64 else 128  # 256 experts of width 7168 take 4 seconds a layer on one core with 128


def shares(counts: Tensor) -> tuple[float, ...]:
    """Each expert's share of the visits: [E] -> E numbers that sum to 1; zeros where there are none."""
    return tuple(round(share, 6) for share in (counts / counts.sum().clamp(min=1)).tolist())


@dataclass(frozen=True, slots=True)
class Likeness:
    """A way to compare a layer's experts: what it needs measured, and a label with the matrix [E, E], 0 to 1."""

    needs: frozenset[str]
    measure: Callable[[LayerStatistics], tuple[str, Tensor]]

    def tell(self, stats: LayerStatistics) -> tuple[Matrix, str] | None:
        """The matrix and its label, as a strategy tells them, which may raise anything; None without any tokens."""
        sampled = self.needs & (SAMPLED | DENSE) - {"router_arguments"}
        sizes = (getattr(stats, name).shape[1 if name in DENSE else 0] for name in sampled)
        if self.needs - WEIGHTS and not (stats.tokens and all(sizes)):
            return None
        (label, table), experts = self.measure(stats), stats.layer.experts
        if table.shape != (experts, experts) or not bool(table.isfinite().all()):
            raise CompressionError(f"its likeness is no matrix of {experts} x {experts} finite numbers")
        return _matrix(table), str(label)


def own_likeness(strategy: Strategy) -> Likeness | None:
    """How a strategy itself compares experts; None if it does not say."""
    measure = strategy.likeness
    return measure and Likeness(strategy.likeness_needs, lambda stats: measure(stats, strategy.options))


def likeness_of(plan: CompressionPlan, layer: LayerPlan) -> Likeness:
    """How the layer's strategy compared its experts, or linear CKA of their outputs where it does not say."""
    won = layer.figures.get("won")  # by a strategy that tries several, each with its default options
    name, options = (str(won), {}) if won is not None else (plan.strategy, plan.options)
    try:
        own = own_likeness(load_strategy(name, options))
    except CompressionError:  # it need not be installed where a report is made
        own = None
    return own or Likeness(frozenset({"expert_outputs"}), _by_outputs)


def _by_outputs(stats: LayerStatistics) -> tuple[str, Tensor]:
    outputs = stats.expert_outputs
    return f"linear CKA of expert outputs, {outputs.shape[1]} tokens", linear_cka(outputs)


@torch.no_grad()
def compared(likeness: Likeness, stats: LayerStatistics, model: Any) -> tuple[Matrix | None, str]:
    """The matrix and its label; of the router's rows, which must be loaded, where no token reached the layer."""
    try:
        told = likeness.tell(stats)
    except Exception as error:  # of a plugin: a report can do without
        told = None
        logger.warning(
            "%s: its strategy cannot tell how alike its experts are (%s), so its router rows are compared",
            stats.layer.name,
            reason_of(error),
        )
    return told or _by_rows(stats.layer, model)


def _by_rows(layer: MoeLayer, model: Any) -> tuple[Matrix | None, str]:
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
