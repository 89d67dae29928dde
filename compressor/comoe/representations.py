"""What experts answer to the same tokens, as points in two dimensions (CoMoE, figures 5 to 7).

Letters: T tokens, E experts, D features of an expert's output.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from compressor.comoe.options import Projection

TOKENS = 128  # of each task
PERPLEXITY = 30.0  # of t-SNE, where there are enough points


@dataclass(frozen=True, slots=True)
class Representations:
    """Points of each expert, [E, T, 2], and the silhouette of all unprojected outputs grouped by
    expert, -1 to 1."""

    points: tuple[tuple[tuple[float, float], ...], ...]
    silhouette: float


class OutputSample:
    """A random sample of tokens, each as likely as any other, with the outputs of all experts."""

    def __init__(self) -> None:
        self.outputs = torch.zeros(0)
        self._ranks = torch.zeros(0)
        self._generator = torch.Generator().manual_seed(0)

    def add(self, outputs: Tensor) -> None:
        """Add tokens' outputs, [T, E, D], at unit length."""
        ranks = torch.rand(len(outputs), generator=self._generator)
        ranks, chosen = ranks.topk(min(TOKENS, len(ranks)), largest=False)
        together = outputs[chosen.to(outputs.device)].cpu()
        if len(self._ranks):
            together = torch.cat((self.outputs, together))
            ranks = torch.cat((self._ranks, ranks))
        self._ranks, kept = ranks.topk(min(TOKENS, len(ranks)), largest=False)
        self.outputs = together[kept]


def project(outputs: Tensor, projection: Projection) -> Representations | None:
    """Project outputs [T, E, D] by scikit-learn; None for fewer than two tokens or experts, or all
    zeros."""
    from sklearn.decomposition import PCA
    from sklearn.manifold import TSNE
    from sklearn.metrics import silhouette_score

    if min(outputs.shape) < 2 or not outputs.any():
        return None
    tokens, experts, features = outputs.shape
    rows = outputs.transpose(0, 1).reshape(-1, features).double().numpy()
    if projection == "tsne":
        method = TSNE(
            2, perplexity=min(PERPLEXITY, (len(rows) - 1) / 3), init="pca", random_state=0
        )
    else:
        method = PCA(2, svd_solver="full")
    experts_of_rows = np.repeat(np.arange(experts), tokens)
    silhouette = float(silhouette_score(rows, experts_of_rows))
    by_expert = method.fit_transform(rows).reshape(experts, tokens, 2).tolist()
    return Representations(tuple(tuple(map(tuple, pairs)) for pairs in by_expert), silhouette)
