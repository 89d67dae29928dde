"""A strategy of another package, and what installing one would leave on the disk; test support."""

import sys
from pathlib import Path

import pytest

from compressor.recipe import registry

REAP = '''
"""REAP: keep the experts with the largest mean gated output (Lasby et al., ICLR 2026, arXiv:2510.13999)."""
import torch
from compressor.plugins import LayerPlan, LayerStatistics
NEEDS = frozenset({"gated_norm_sum", "routed_count"})  # one streamed pass collects the union of all NEEDS
def saliency(gated_norm_sum: torch.Tensor, routed_count: torch.Tensor) -> torch.Tensor:
    """Mean of gate * ||output|| over routed tokens: [E], [E] -> [E]; 0 for an expert no token reached."""
    return gated_norm_sum / routed_count.clamp(min=1)
def plan(stats: LayerStatistics, keep: int, protected: frozenset[int] = frozenset()) -> LayerPlan:
    """Keep `keep` experts of one layer; LayerPlan refuses fewer than top_k, or uneven router groups."""
    scores = saliency(stats.gated_norm_sum, stats.routed_count)
    scores = scores.index_fill(0, torch.tensor(sorted(protected), dtype=torch.long), torch.inf)
    kept = scores.argsort(descending=True, stable=True)[:keep]
    return LayerPlan.keep(stats.layer, sorted(kept.tolist()))
'''


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    source: str,
    package: str = "",
    group: str = registry.STRATEGIES,
    value: str = "",
) -> None:
    """Lay down what `pip install` would: a module, and the metadata that announces its entry point."""
    package = package or f"{name.replace('-', '_')}_plugin"
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{package}.py").write_text(source)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {package}{value}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, package, raising=False)
