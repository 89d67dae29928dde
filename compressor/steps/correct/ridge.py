"""Ridge correction: tensors that a layer's output is linear in, refitted in closed form so that the output comes back.

Down projections: with phi the gate-weighted intermediate activations of the kept experts, laid side by side, and
r = y - y' what the cut layer misses, their change D minimises ||r - phi D^T||^2 + penalty ||D||^2: regularised to the
weights as they are. Where experts x intermediate size is large, blocks of neurons are solved in turn, each on what the
others leave. The penalty is the one of least error on held-out tokens for the first block; a later block stays as it is
where that penalty does not help it. Constants that stand for experts: the same with their gate weights as phi.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from compressor.devices import as_float64, float64_device
from compressor.distributed import ranks
from compressor.model.experts import intermediate, routed
from compressor.steps.correct.cut_layer import CHUNK, CutLayer

LEAST_BLOCK, MOST_BLOCK = 1024, 4096  # neurons solved jointly
MATRICES = 6  # of 8 bytes an element that solving a block takes, as wide and high as the block
TOKENS = 32_768  # fitted on at most
SWEEPS = 2  # over the blocks, where there are several
PARTS = 8  # of the columns that a block is solved for, however many ranks take turns in solving them
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)  # times the normal matrix's mean diagonal
CONSTANT_PENALTIES = (1e-6, *PENALTIES)


def block_width(layer_bytes: int) -> int:
    """Neurons to solve jointly, so that the matrices of it take no more than a quarter of the layer."""
    return min(MOST_BLOCK, max(LEAST_BLOCK, math.isqrt(layer_bytes // (4 * 8 * MATRICES))))


def neuron_blocks(experts: int, neurons: int, width: int) -> list[tuple[range, slice]]:
    """Experts and their neurons in blocks of at most `width` neurons, in order.

    A block is of whole experts, or a part of one that is wider: activations are computed anew for each block.
    """
    if neurons > width:
        parts = [slice(begin, min(begin + width, neurons)) for begin in range(0, neurons, width)]
        return [(range(expert, expert + 1), part) for expert in range(experts) for part in parts]
    count = width // neurons
    return [(range(first, min(first + count, experts)), slice(0, neurons)) for first in range(0, experts, count)]


@dataclass(slots=True)
class _Tokens:
    """Tokens to fit on or to evaluate on: positions [T], routing by chunk, and what the layer still misses [T, H]."""

    rows: torch.Tensor
    routes: list[tuple[torch.Tensor, torch.Tensor]]
    residual: torch.Tensor
    scales: torch.Tensor  # [T] square roots of the tokens' weights; residual and features are multiplied by them
    starts: list[int]  # of each chunk among the tokens
    chunks: list[list[int]]  # of each recorded call

    @classmethod
    def of(cls, layer: CutLayer, rows: torch.Tensor) -> "_Tokens":
        chunks, numbers = list[torch.Tensor](), list[list[int]]()
        for part in layer.split(rows):
            own = [chunk for chunk in part.split(CHUNK) if len(chunk)]
            numbers.append(list(range(len(chunks), len(chunks) + len(own))))
            chunks += own
        starts = [sum(map(len, chunks[:number])) for number in range(len(chunks))]
        if not chunks:  # of another rank all of them
            none = layer.recording.outputs.new_zeros(0, 1, dtype=torch.float32)
            return cls(rows, [], none, none[:, 0], starts, numbers)
        scales = torch.cat([layer.token_weights(chunk).sqrt() for chunk in chunks])
        routes = [layer.route(chunk) for chunk in chunks]
        residual = torch.cat([layer.gap(chunk, layer.targets(chunk)) for chunk in chunks])
        return cls(torch.cat(chunks), routes, residual * scales[:, None], scales, starts, numbers)


@dataclass(slots=True)
class _Block:
    """Features of some tokens: the gate-weighted activations of the same neurons of some experts, side by side.

    Those of a chunk of tokens are kept within a memory budget, and computed anew beyond.
    """

    layer: CutLayer
    tokens: _Tokens
    experts: range
    neurons: slice
    budget: float = math.inf  # bytes
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def columns(self, expert: int) -> slice:
        """Columns of the features that are an expert's neurons."""
        width = self.neurons.stop - self.neurons.start
        return slice((expert - self.experts.start) * width, (expert + 1 - self.experts.start) * width)

    @property
    def width(self) -> int:
        return int(self.columns(self.experts[-1]).stop)

    def features(self, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the chunk's tokens that reach the block: their positions in `tokens` [m], and features [m, D]."""
        if chunk in self.kept:
            return self.kept[chunk]
        layer, tokens = self.layer, self.tokens
        weights, index = tokens.routes[chunk]
        inside = torch.isin(index, torch.tensor([*self.experts], device=index.device))
        reached = (inside & (weights != 0)).any(-1).nonzero().flatten()
        places = tokens.starts[chunk] + reached.cpu()
        x, weights = layer.inputs(tokens.rows[places]), weights[reached]
        phi = x.new_zeros(len(reached), self.width)
        for expert, rows, slots in routed(weights, index[reached], self.experts):
            shares = weights[rows, slots] * tokens.scales[places][rows]
            active = intermediate(layer.experts, layer.parameters[expert], x.index_select(0, rows)) * shares[:, None]
            phi[:, self.columns(expert)].index_add_(0, rows, active[:, self.neurons])
        if phi.nbytes <= self.budget:
            self.budget -= phi.nbytes
            self.kept[chunk] = places, phi
        return places, phi

    def take(self, change: torch.Tensor) -> None:
        """Subtract what the change brings back from the tokens' residual."""
        for chunk in range(len(self.tokens.routes)):
            places, phi = self.features(chunk)
            self.tokens.residual[places] -= phi @ change.to(phi.device)


def _normal(block: _Block) -> tuple[torch.Tensor, torch.Tensor]:
    """phi^T phi [D, D] and phi^T r [D, H] in float64, over the fitted tokens of all ranks."""
    layer, fit = block.layer, block.tokens
    width, down = block.width, layer.parameters[0]["down_proj"]
    hidden = down.shape[1 if layer.experts.is_transposed else 0]  # a rank may have recorded nothing
    like = torch.zeros(width, width + hidden, dtype=torch.float64, device=float64_device(down.device))

    def products(call: int) -> torch.Tensor:
        sums = torch.zeros_like(like)
        for chunk in fit.chunks[call]:
            places, phi = block.features(chunk)
            sums[:, :width] += as_float64(phi.T @ phi)
            sums[:, width:] += as_float64(phi.T @ fit.residual[places])
        return sums

    both = layer.summed(like, products)
    return both[:, :width].contiguous(), both[:, width:].contiguous()


def _best(
    normal: torch.Tensor,
    right: torch.Tensor,
    penalties: Sequence[float],
    missed: Callable[[torch.Tensor | None], float],
    parts: int = 1,
) -> tuple[torch.Tensor, float] | None:
    """The ridge solution [D, H] that misses least of held-out tokens, and its penalty; None if none does better.

    Of phi^T phi [D, D] and phi^T r [D, H]. Each rank solves some of the columns, in so many `parts`. Where rounding, or
    float32's range, leaves no Cholesky factor, a solution is not a number.
    """
    best, least, scale = None, missed(None), float(normal.diagonal().mean())
    for penalty in penalties if scale else ():
        regular = normal.clone()
        regular.diagonal().add_(penalty * scale)
        factor, failed = torch.linalg.cholesky_ex(regular)
        change = torch.zeros_like(right, dtype=torch.float32)
        columns = zip(right.chunk(parts, dim=1), change.chunk(parts, dim=1), strict=True)
        for part, (wanted, into) in enumerate(columns):
            if ranks().takes_turn(part):
                into.copy_(torch.full_like(wanted, math.nan) if failed else torch.cholesky_solve(wanted, factor))
        change = ranks().all_reduce(change)
        if (off := missed(change)) < least:
            best, least = (change, penalty), off
    return best


def _change(fit: _Block, heldout: _Block, penalties: Sequence[float]) -> tuple[torch.Tensor, float] | None:
    normal, right = _normal(fit)

    def missed(change: torch.Tensor | None) -> float:
        """The squares of what the held-out tokens miss, in all."""

        def off(call: int) -> torch.Tensor:
            total = torch.zeros(1, dtype=torch.float64)
            for places, phi in (heldout.features(chunk) for chunk in heldout.tokens.chunks[call]):
                left = heldout.tokens.residual[places]
                total += float((left if change is None else left - phi @ change.to(phi.device)).square().sum())
            return total

        return float(heldout.layer.summed(torch.zeros(1, dtype=torch.float64), off))

    return _best(normal, right, penalties, missed, math.gcd(right.shape[1], PARTS))


@torch.no_grad()
def refit_down(layer: CutLayer, fit_rows: torch.Tensor, heldout_rows: torch.Tensor) -> None:
    """Refit the down projections of `layer.parameters` on the tokens at `fit_rows`, and evaluate on `heldout_rows`.

    Nothing changes where the experts' output is normalised after the down projection: it is not linear in it then.
    """
    count = int(ranks().all_reduce(torch.tensor(len(fit_rows))))
    if getattr(layer.experts, "has_post_expert_norm", False) or not count:
        return
    step = -(-count // TOKENS)  # every step-th token
    fit, heldout = _Tokens.of(layer, layer.every(fit_rows, step)), _Tokens.of(layer, heldout_rows)
    first = layer.parameters[0]["down_proj"]
    neurons = first.shape[0] if layer.experts.is_transposed else first.shape[1]
    nbytes = sum(value.nbytes for parameters in layer.parameters for value in parameters.values())
    blocks = neuron_blocks(len(layer.parameters), neurons, block_width(nbytes))
    turns = blocks * (SWEEPS if len(blocks) > 1 else 1)  # one alone has nothing to see of others
    penalties: Sequence[float] = PENALTIES
    for number, (experts, part) in enumerate(turns, start=1):
        fitted, held = _Block(layer, fit, experts, part, nbytes / 8), _Block(layer, heldout, experts, part)
        solution = _change(fitted, held, penalties)
        if solution is None:
            continue
        change, penalties = solution[0], solution[1:]
        if number < len(turns):  # no other block asks what is left after the last
            fitted.take(change)
            held.take(change)
        for expert in experts:
            down, own = layer.parameters[expert]["down_proj"], change[fitted.columns(expert)].to(first.device)
            if layer.experts.is_transposed:
                down[part] += own
            else:
                down[:, part] += own.T


@torch.no_grad()
def refit_constants(cut: CutLayer, fit_rows: torch.Tensor, heldout_rows: torch.Tensor) -> None:
    """Change the layer's constants in place by the weighted least squares of what it misses at `fit_rows`.

    The penalty, or no change at all, is chosen at `heldout_rows`.
    """
    assert cut.constants is not None
    held_normal, held_right = _constants_normal(cut, heldout_rows)

    def missed(change: torch.Tensor | None) -> float:
        """The squares of what the held-out tokens miss, less ||r||^2."""
        wide = torch.zeros_like(held_right) if change is None else as_float64(change)
        return float((wide * (held_normal @ wide)).sum() - 2 * (wide * held_right).sum())

    best = _best(*_constants_normal(cut, fit_rows), CONSTANT_PENALTIES, missed)
    if best is not None:
        cut.constants.values += best[0].to(cut.constants.values)


def _constants_normal(cut: CutLayer, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """G^T W G [D, D] and G^T W r [D, H] in float64: G the gate weights of the D replaced experts, W the tokens'."""
    assert cut.constants is not None
    count, width = cut.constants.values.shape
    device = float64_device(cut.constants.values.device)
    normal = torch.zeros(count, count, dtype=torch.float64, device=device)
    right = torch.zeros(count, width, dtype=torch.float64, device=device)
    for chunk in rows.split(CHUNK):
        target = cut.targets(chunk)
        share = as_float64(cut.token_weights(chunk))[:, None]
        weights, index = cut.route(chunk)
        gates = weights.new_zeros(len(chunk), cut.choices).scatter_add_(1, index, weights)
        gates = as_float64(gates[:, len(cut.parameters) :])
        normal += gates.T @ (gates * share)
        right += gates.T @ (as_float64(cut.gap(chunk, target)) * share)
    return normal, right
