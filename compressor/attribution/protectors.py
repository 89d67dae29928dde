"""Entry points of routing attribution for `prune`: hubs and central experts to protect, and AARV
for strategies.

All are called by all ranks together. The attribution is run once for all plans of a model.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from compressor.distributed import ranks
from compressor.extras import require

if TYPE_CHECKING:  # a recipe names protectors, and is read without torch
    from torch import Tensor

    from compressor.attribution.figures import Attribution
    from compressor.steps.prune.planning import Planner

logger = logging.getLogger(__name__)

GRAPH_PACKAGES = ("networkx",)
Experts = list[tuple[str, int]]  # experts module and number, the strongest first


def hubs(planner: "Planner") -> Experts:
    """Experts module and number of the routing hubs at the default threshold, the strongest first.

    "Understanding Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs" (ICLR 2026).
    """
    from compressor.attribution.hubs import find_hubs

    attribution = _attribution(planner)
    return _on_first_rank(
        lambda: [(hub.module, hub.expert) for hub in find_hubs(attribution)],
        "no expert of this model is a hub on the calibration data, so --protect auto protects none",
    )


def central(planner: "Planner", count: int) -> Experts:
    """The `count` experts of highest centrality in the routing graph, see `graph.centralities`."""
    require(*GRAPH_PACKAGES)
    from compressor.attribution.graph import RELATIVE, centralities, ranking, routing_graph

    attribution = _attribution(planner)

    def find() -> Experts:
        graph = routing_graph(attribution)
        labels = ranking(centralities(graph), RELATIVE)[:count]
        return [(graph.nodes[label]["module"], graph.nodes[label]["number"]) for label in labels]

    warning = f"no expert steers a later router, so --protect graph:{count} protects none"
    return _on_first_rank(find, warning)


# The step that protects refuses a package that is missing before torch is imported.
vars(central)["packages"] = GRAPH_PACKAGES


def _on_first_rank(find: Callable[[], Experts], warning: str) -> Experts:
    """Return what the first rank finds; it warns if that is nothing."""
    experts: Experts = ranks().broadcast(find)
    if not experts and ranks().is_first:
        logger.warning(warning)
    return experts


def rank_change(planner: "Planner") -> dict[str, "Tensor"]:
    """AARV summed over the later routers, [E] float64, by experts module."""
    import torch

    changes = {
        layer.name: torch.zeros(layer.experts, dtype=torch.float64)
        for layer in planner.model.architecture.layers
    }
    for sender in _attribution(planner).of_kind("expert"):
        assert sender.number is not None
        changes[sender.module][sender.number] = sender.total_rank_change
    return changes


def _attribution(planner: "Planner") -> "Attribution":
    from compressor.attribution import measure

    attribution: Attribution = planner.once(
        "attribution",
        lambda fit: measure.attribute(planner.model, fit, planner.progress, planner.seed),
    )
    return attribution
