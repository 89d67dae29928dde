"""Ridge correction: refit in closed form the tensors that a layer's output is linear in, toward the
base's output.

Down projections: with phi the gate-weighted intermediate activations of the kept experts, laid side
by side, and r = y - y' the error of the cut layer, their change D minimises ||r - phi D^T||^2 +
penalty ||D||^2: regularised to the weights as they are. Where experts x intermediate size is large,
blocks of neurons are solved in turn, each on the residual of the others. The penalty is the one of
least error on held-out tokens for the first block; a later block that it does not help stays as it
is. Constants that stand for experts: the same with their gate weights as phi."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch
from torch import Tensor

from compressor.devices import as_float64, float64_device
from compressor.distributed import ranks
from compressor.model.experts import CHUNK, Choices, intermediate, width_of
from compressor.steps.correct.cut_layer import CutLayer

LEAST_BLOCK = 1024
MOST_BLOCK = 4096  # neurons solved jointly
MATRICES = 6  # of 8 bytes an element that solving a block takes, as wide and high as the block
TOKENS = 32_768  # fitted on at most
SWEEPS = 2  # over the blocks, where there are several
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)  # times the normal matrix's mean diagonal
CONSTANT_PENALTIES = (1e-6, *PENALTIES)


@dataclass(slots=True)
class _Chunk:
    """Tokens to fit on or to evaluate on: positions [m], routing, and the layer's residual [m,
    H]."""

    rows: Tensor
    weights: Tensor
    index: Tensor
    # [m]: square roots of the tokens' weights; residual and features are multiplied by them
    scale: Tensor
    residual: Tensor


def _chunks(layer: CutLayer, rows: Tensor) -> list[_Chunk]:
    """Split the tokens at `rows` into chunks."""
    chunks = []
    for part in layer.recording.chunks(rows):
        scale = layer.token_weights(part).sqrt()
        residual = layer.gap(part, layer.targets(part)) * scale[:, None]
        chunks.append(_Chunk(part, *layer.route(part), scale, residual))
    return chunks


@dataclass(slots=True)
class _Block:
    """Features of some tokens: the gate-weighted activations of the same neurons of some experts,
    side by side.

    Those of a chunk of tokens are kept within a memory budget, and computed anew beyond.
    """

    layer: CutLayer
    chunks: Sequence[_Chunk]
    experts: range
    neurons: slice
    budget: float = math.inf  # bytes
    kept: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    @property
    def down(self) -> Tensor:
        """The neurons' rows of the experts' down projections: a view [experts, neurons, H]."""
        down = self.layer.parameters["down_proj"][self.experts.start : self.experts.stop]
        return (down if self.layer.experts.is_transposed else down.mT)[:, self.neurons]

    def features(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield each chunk's residual [m, H], which of its tokens reach the block, [n], and their
        features [n, D]."""
        for number, chunk in enumerate(self.chunks):
            if number in self.kept:
                reached, phi = self.kept[number]
            else:
                reached, phi = self._computed(chunk)
                if phi.nbytes <= self.budget:
                    self.budget -= phi.nbytes
                    self.kept[number] = reached, phi
            yield chunk.residual, reached, phi

    def _computed(self, chunk: _Chunk) -> tuple[Tensor, Tensor]:
        layer = self.layer
        first, last = self.experts.start, self.experts.stop
        inside = (chunk.index >= first) & (chunk.index < last) & (chunk.weights != 0)
        tokens, places = inside.nonzero(as_tuple=True)
        shares = chunk.weights[tokens, places] * chunk.scale[tokens]
        choices = Choices.of(
            shares[:, None], chunk.index[tokens, places][:, None] - first, last - first
        )
        x = layer.inputs(chunk.rows.to(tokens.device)[tokens[choices.tokens]])
        neurons = intermediate(layer.experts, layer.slices(slice(first, last)), x, choices)
        active = neurons[:, self.neurons] * choices.weights[:, None]
        reached, positions = tokens.unique(return_inverse=True)
        phi = x.new_zeros(len(reached), last - first, active.shape[1])
        phi.index_put_((positions[choices.tokens], choices.experts), active, accumulate=True)
        return reached, phi.flatten(1)

    def normal(self) -> tuple[Tensor, Tensor]:
        """Return phi^T phi [D, D] and phi^T r [D, H] in float64, over the tokens of all ranks."""
        # of the features: the neurons of the first expert, then those of the next
        width = len(self.experts) * (self.neurons.stop - self.neurons.start)
        hidden = self.down.shape[-1]  # a rank may have recorded nothing
        sums = torch.zeros(
            width, width + hidden, dtype=torch.float64, device=float64_device(self.down.device)
        )
        for residual, reached, phi in self.features():
            sums[:, :width] += as_float64(phi.T @ phi)
            sums[:, width:] += as_float64(phi.T @ residual[reached])
        sums = ranks().all_reduce(sums)
        return sums[:, :width].contiguous(), sums[:, width:].contiguous()

    def missed(self, change: Tensor | None) -> float:
        """Return the squared residual, with a change, summed over all ranks' tokens that reach the
        block."""
        total = torch.zeros((), dtype=torch.float64, device=float64_device(self.down.device))
        for residual, reached, phi in self.features():
            remaining = residual[reached]
            if change is not None:
                remaining = remaining - phi @ change.to(phi.device)
            total += as_float64(remaining.square().sum())
        return float(ranks().all_reduce(total))


def _best(
    normal: Tensor,
    right: Tensor,
    penalties: Sequence[float],
    missed: Callable[[Tensor | None], float],
) -> tuple[Tensor, float] | None:
    """Return the ridge solution [D, H] of least held-out error, and its penalty; None if none
    lowers the error.

    `normal` is phi^T phi [D, D], `right` phi^T r [D, H]. A penalty has no solution where rounding,
    or float32's range, leaves no Cholesky factor."""
    best = None
    least = missed(None)
    scale = float(normal.diagonal().mean())
    for penalty in penalties if scale else ():
        regular = normal.clone()
        regular.diagonal().add_(penalty * scale)
        factor, failed = torch.linalg.cholesky_ex(regular)
        if failed:
            continue
        change = torch.cholesky_solve(right, factor).float()
        error = missed(change)
        if error < least:
            best = (change, penalty)
            least = error
    return best


@torch.no_grad()
def refit_down(layer: CutLayer, fit_rows: Tensor, heldout_rows: Tensor) -> None:
    """Refit the down projections of `layer.parameters` on the tokens at `fit_rows`, and evaluate on
    `heldout_rows`.

    Nothing changes where the experts' output is normalised after the down projection: it is not
    linear in it then."""
    places, count = layer.recording.places(fit_rows)
    if getattr(layer.experts, "has_post_expert_norm", False) or not count:
        return
    step = math.ceil(count / TOKENS)
    fit = _chunks(layer, fit_rows[places % step == 0])
    heldout = _chunks(layer, heldout_rows)
    nbytes = sum(value.nbytes for value in layer.parameters.values())
    # so many neurons that the matrices of a block take no more than a quarter of the layer
    width = min(MOST_BLOCK, max(LEAST_BLOCK, math.isqrt(nbytes // (4 * 8 * MATRICES))))
    # a block is of whole experts, or a part of one that is wider: activations are computed anew for
    # each block
    neurons = width_of(layer.experts)
    together = max(1, width // neurons)
    blocks = []
    for first in range(0, layer.count, together):
        experts = range(first, min(first + together, layer.count))
        for begin in range(0, neurons, width):
            blocks.append((experts, slice(begin, min(begin + width, neurons))))
    if len(blocks) > 1:  # one alone has nothing to see of others
        blocks = blocks * SWEEPS
    penalties: Sequence[float] = PENALTIES
    for number, (experts, part) in enumerate(blocks, start=1):
        fitted = _Block(layer, fit, experts, part, nbytes / 8)
        held = _Block(layer, heldout, experts, part)
        solution = _best(*fitted.normal(), penalties, held.missed)
        if solution is None:
            continue
        change = solution[0]
        penalties = solution[1:]
        if number < len(blocks):  # no other block asks what is left after the last
            for residual, reached, phi in chain(fitted.features(), held.features()):
                residual[reached] -= phi @ change.to(phi.device)
        fitted.down.add_(change.to(fitted.down.device).view_as(fitted.down))


@torch.no_grad()
def refit_constants(cut: CutLayer, fit_rows: Tensor, heldout_rows: Tensor) -> None:
    """Change the layer's constants in place by the weighted least squares of what it misses at
    `fit_rows`.

    The penalty, or no change at all, is chosen at `heldout_rows`.
    """
    assert cut.constants is not None
    heldout_normal, heldout_right = _constants_normal(cut, heldout_rows)

    def missed(change: Tensor | None) -> float:
        """Return the squares of what the held-out tokens miss, less ||r||^2."""
        wide = torch.zeros_like(heldout_right) if change is None else as_float64(change)
        return float((wide * (heldout_normal @ wide)).sum() - 2 * (wide * heldout_right).sum())

    best = _best(*_constants_normal(cut, fit_rows), CONSTANT_PENALTIES, missed)
    if best is not None:
        cut.constants.values += best[0].to(cut.constants.values)


def _constants_normal(cut: CutLayer, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return G^T W G [D, D] and G^T W r [D, H] in float64.

    G are the gate weights of the D replaced experts, W the tokens' weights.
    """
    assert cut.constants is not None
    count, width = cut.constants.values.shape
    device = float64_device(cut.constants.values.device)
    normal = torch.zeros(count, count, dtype=torch.float64, device=device)
    right = torch.zeros(count, width, dtype=torch.float64, device=device)
    for chunk in rows.split(CHUNK):
        token_weights = as_float64(cut.token_weights(chunk))[:, None]
        gates = as_float64(cut.constant_weights(*cut.route(chunk)))
        normal += gates.T @ (gates * token_weights)
        right += gates.T @ (as_float64(cut.gap(chunk, cut.targets(chunk))) * token_weights)
    return normal, right
