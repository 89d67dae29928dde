"""Public API for authors of plugins: everything imported here, and nothing else need be.

A step of a recipe is a class that derives from `Step`, a strategy a module with `NEEDS` and
`plan(stats, keep, protected[, options])`, an exporter one with `export(checkpoint, output, options, progress)`; entry
points announce them. docs/plugins.md has the contract, and `compressor.plugins.testing` a fake layer to try a strategy
on. The built-in strategies are written with this.
"""

from compressor.entry_points import option
from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer, check_count
from compressor.model.experts import Projections, apply_expert, expert_parameters, projections
from compressor.progress import Progress
from compressor.recipe.plan import Group, LayerPlan
from compressor.recipe.registry import Exporter, Strategy, load_strategy
from compressor.recipe.step import LayerAt, Needs, Result, Step, Tensors, TextPart
from compressor.statistics.statistics import HELDOUT, RECONSTRUCTION, LayerStatistics, LayerWeights, RouterArguments
from compressor.steps.prune.choose import (
    METHODS,
    Block,
    blocks_of,
    competing,
    keep_best,
    kept_share,
    merge_groups,
    merge_needs,
)
from compressor.steps.prune.partition import Grouping, group_experts
from compressor.steps.prune.reconstruction import (
    KeptErrors,
    Routed,
    original,
    reconstruct,
    relative_error,
    rescaled_error,
)
from compressor.steps.prune.similarity import (
    CLOSENESS,
    closeness,
    fast_squared_distances,
    linear_cka,
    mean_output_distances,
    noise,
    pairwise_distances,
    rbf_cka,
)
from compressor.tolerance import FLOAT32, SQUARED, exceeds, rounded, stable_argmin

__all__ = [name for name in dir() if not name.startswith("_")]
