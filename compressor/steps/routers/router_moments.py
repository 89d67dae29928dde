"""What the gradient of a loss says of every router: sums over all tokens, from one pass forward and back.

T tokens, E rows of the router's weight, H width.
"""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from compressor.distributed.ranks import here
from compressor.model.architecture import MoeLayer
from compressor.model.streaming import ReverseVisitor
from compressor.pathways.router_logits import Product, router_weight, watched


@dataclass(slots=True)
class Moments:
    """X'X [H, H], X'G [H, E] and G'G [E, E] of what enters a router, X [T, H], and its logits' gradients, G [T, E]."""

    inputs: Tensor
    both: Tensor
    gradients: Tensor
    tokens: int = 0

    @classmethod
    def empty(cls, width: int, rows: int) -> "Moments":
        """Of no token yet, in float64."""
        sizes = ((width, width), (width, rows), (rows, rows))
        inputs, both, gradients = (torch.zeros(size, dtype=torch.float64) for size in sizes)
        return cls(inputs, both, gradients)

    def add(self, x: Tensor, g: Tensor) -> None:
        """Take in some tokens' inputs [T, H] and gradients [T, E]."""
        self.inputs += (x.T @ x).cpu()
        self.both += (x.T @ g).cpu()
        self.gradients += (g.T @ g).cpu()
        self.tokens += len(x)

    @property
    def flat(self) -> Tensor:
        """All sums one after another, with the tokens."""
        tokens = torch.tensor([self.tokens], dtype=torch.float64)
        return torch.cat([*(part.flatten() for part in (self.inputs, self.both, self.gradients)), tokens])

    def filled(self, flat: Tensor) -> "Moments":
        """Moments of this shape with the sums of `flat`."""
        own = (self.inputs, self.both, self.gradients)
        *parts, tokens = flat.split([*(part.numel() for part in own), 1])
        inputs, both, gradients = (part.view_as(like) for part, like in zip(parts, own, strict=True))
        return Moments(inputs, both, gradients, int(tokens))

    def direction(self, ridge: float) -> Tensor:
        """[E, H]: -(G'G + b)^-1 G'X (X'X + a)^-1, the way down in the metric of inputs and gradients.

        It is the ridge solution for logits that follow the negative gradient, preconditioned on the right (Kronecker-
        factored curvature). a and b are `ridge` times the mean of each diagonal.
        """
        inner = torch.linalg.solve(_ridged(self.inputs, ridge), self.both)
        change: Tensor = torch.linalg.solve(_ridged(self.gradients, ridge), inner.T)
        return -change

    def mean_square(self, change: Tensor) -> float:
        """Of what a change [E, H] of the weight adds to a logit."""
        return float(((change @ self.inputs) * change).sum()) / (self.tokens * len(change))


def _ridged(square: Tensor, ridge: float) -> Tensor:
    added = ridge * square.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    return square + added * torch.eye(len(square), dtype=square.dtype)


class RouterGradients(ReverseVisitor):
    """Gathers the moments of every router that gradients reach, by its weight's state-dict key.

    Each rank runs its own batches; their moments are added up when all have passed a layer.
    """

    def __init__(self) -> None:
        self.found: dict[str, Moments] = {}
        self._own: dict[str, Moments] = {}  # of a layer's routers, on this rank's batches
        self._watching, self._seen = ExitStack(), list[tuple[str, Product]]()

    def replaying(self, unit: str, batch: int) -> None:
        self._seen = []
        for layer in self.at.moe_layers:
            self._watching.enter_context(watched(self.at.model, layer, self._noting(layer)))

    def _noting(self, layer: MoeLayer) -> "_Noting":
        return _Noting(router_weight(layer), self._seen)

    def returned(self, unit: str, batch: int) -> None:
        self._watching.close()
        for key, product in self._seen:
            if (gradient := product.logits.grad) is None:
                continue  # nothing hangs on the scores of the experts that were chosen
            x = product.inputs.detach().double()
            g = gradient.reshape(len(x), -1).double()
            self._own.setdefault(key, Moments.empty(x.shape[1], g.shape[1])).add(x, g)

    def done(self, unit: str) -> None:
        """Add up the moments of the layer's routers over all ranks."""
        for layer in self.at.moe_layers:
            key = router_weight(layer)
            rows, width = self.at.model.get_parameter(key).shape
            own = self._own.pop(key, Moments.empty(width, rows))
            if (moments := own.filled(here().all_reduce(own.flat))).tokens:
                self.found[key] = moments


@dataclass(frozen=True, slots=True)
class _Noting:
    key: str
    seen: list[tuple[str, Product]]

    def __call__(self, product: Product) -> Tensor:
        logits = product.logits
        if not logits.requires_grad:  # in the first layer nothing before it asks for gradients
            logits = logits.detach().requires_grad_()
        logits.retain_grad()
        self.seen.append((self.key, Product(product.inputs, logits, product.weight)))
        return logits
