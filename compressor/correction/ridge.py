"""Ridge correction: down projections refitted in closed form, so that the cut layer's output comes back.

With phi the gate-weighted intermediate activations of the kept experts, laid side by side, and r = y - y' what the cut
layer misses, the change D of the down projections minimises ||r - phi D^T||^2 + penalty ||D||^2: regularised to the
weights as they are. Where experts x intermediate size is large, blocks of neurons are solved in turn, each on what the
others leave. The penalty is the one of least error on held-out tokens for the first block; a later block stays as it is
where that penalty does not help it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from compressor.correction.cut_layer import CHUNK, CutLayer
from compressor.model.experts import intermediate, routed
from compressor.ranks.present import here

LEAST_BLOCK, MOST_BLOCK = 1024, 4096  # neurons solved jointly
MATRICES = 6  # of 8 bytes an element that solving a block takes, as wide and high as the block
TOKENS = 32_768  # fitted on at most
SWEEPS = 2  # over the blocks, where there are several
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)  # times the normal matrix's mean diagonal


@dataclass(frozen=True, slots=True)
class Span:
    """Neurons [begin, end) of one expert, at columns from `place` on of a block."""

    expert: int
    begin: int
    end: int
    place: int

    @property
    def columns(self) -> slice:
        """Its columns of the block's features."""
        return slice(self.place, self.place + self.end - self.begin)


def block_width(layer_bytes: int) -> int:
    """Neurons to solve jointly, so that the matrices of it take no more than a quarter of the layer."""
    return min(MOST_BLOCK, max(LEAST_BLOCK, math.isqrt(layer_bytes // (4 * 8 * MATRICES))))


def neuron_blocks(experts: int, neurons: int, width: int) -> list[list[Span]]:
    """All neurons of all experts, in order, in blocks of at most `width`."""
    found: list[list[Span]] = []
    for start in range(0, experts * neurons, width):
        stop, block = min(start + width, experts * neurons), list[Span]()
        for expert in range(start // neurons, -(-stop // neurons)):
            first = expert * neurons
            begin, end = max(start - first, 0), min(stop - first, neurons)
            block.append(Span(expert, begin, end, first + begin - start))
        found.append(block)
    return found


@dataclass(slots=True)
class _Tokens:
    """Tokens to fit on or to judge by: positions [T], routing by chunk, and what the layer still misses [T, H]."""

    rows: torch.Tensor
    routes: list[tuple[torch.Tensor, torch.Tensor]]
    residual: torch.Tensor
    scales: torch.Tensor  # [T] square roots of the tokens' weights; residual and features are multiplied by them
    starts: list[int]  # of each chunk among the tokens
    chunks: list[list[int]]  # of each piece of the layer

    @classmethod
    def of(cls, layer: CutLayer, rows: torch.Tensor) -> "_Tokens":
        chunks, numbers = list[torch.Tensor](), list[list[int]]()
        for part in layer.pieces.split(rows):
            own = [chunk for chunk in part.split(CHUNK) if len(chunk)]
            numbers.append(list(range(len(chunks), len(chunks) + len(own))))
            chunks += own
        starts = [sum(map(len, chunks[:number])) for number in range(len(chunks))]
        if not chunks:  # of another rank all of them
            none = layer.recording.outputs.new_zeros(0, 1, dtype=torch.float32)
            return cls(rows, [], none, none[:, 0], starts, numbers)
        scales = torch.cat([layer.token_weights(layer.targets(chunk)).sqrt() for chunk in chunks])
        routes = [layer.route(chunk) for chunk in chunks]
        return cls(torch.cat(chunks), routes, layer.residual(chunks) * scales[:, None], scales, starts, numbers)


def _features(layer: CutLayer, tokens: _Tokens, chunk: int, block: list[Span]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a chunk's tokens that reach the block: their positions in `tokens` [m], and features [m, D]."""
    weights, index = tokens.routes[chunk]
    wanted = {span.expert for span in block}
    inside = torch.isin(index, torch.tensor(sorted(wanted), device=index.device))
    reached = (inside & (weights != 0)).any(-1).nonzero().flatten()
    places = tokens.starts[chunk] + reached.cpu()
    x, weights = layer.inputs(tokens.rows[places]), weights[reached]
    phi = x.new_zeros(len(reached), block[-1].columns.stop)
    for expert, rows, slots in routed(weights, index[reached], wanted):
        shares = weights[rows, slots] * tokens.scales[places][rows]
        active = intermediate(layer.experts, layer.parameters[expert], x[rows]) * shares[:, None]
        for span in block:
            if span.expert == expert:
                phi[:, span.columns].index_add_(0, rows, active[:, span.begin : span.end])
    return places, phi


def _normal(layer: CutLayer, fit: _Tokens, block: list[Span]) -> tuple[torch.Tensor, torch.Tensor]:
    """phi^T phi [D, D] and phi^T r [D, H] in float64, over the fitted tokens of all ranks."""
    width, down = block[-1].columns.stop, layer.parameters[0]["down_proj"]
    hidden = down.shape[1 if layer.experts.is_transposed else 0]  # a rank may have recorded nothing
    like = torch.zeros(width, width + hidden, dtype=torch.float64, device=fit.residual.device)

    def products(piece: int) -> torch.Tensor:
        found = torch.zeros_like(like)
        for chunk in fit.chunks[piece]:
            places, phi = _features(layer, fit, chunk, block)
            found[:, :width] += phi.T @ phi
            found[:, width:] += phi.T @ fit.residual[places]
        return found

    both = layer.pieces.sum(like, products)
    return both[:, :width].contiguous(), both[:, width:].contiguous()


def _change(
    layer: CutLayer, fit: _Tokens, judge: _Tokens, block: list[Span], penalties: Sequence[float]
) -> tuple[torch.Tensor, float] | None:
    """The block's change of the down projections [D, H], and its penalty; None if none lowers the held-out error."""
    normal, right = _normal(layer, fit, block)
    scale = float(normal.diagonal().mean())
    if scale == 0:
        return None
    shown = {chunk: _features(layer, judge, chunk, block) for chunk in range(len(judge.routes))}

    def missed(change: torch.Tensor | None) -> float:
        """The squares of what the judged tokens miss, in all."""

        def off(piece: int) -> torch.Tensor:
            found = torch.zeros(1, dtype=torch.float64)
            for places, phi in (shown[chunk] for chunk in judge.chunks[piece]):
                left = judge.residual[places]
                found += float((left if change is None else left - phi @ change).square().sum())
            return found

        return float(layer.pieces.sum(torch.zeros(1, dtype=torch.float64), off))

    def solved(number: int) -> torch.Tensor:
        """The change [D, H] with a penalty; not a number where rounding, or float32's range, leaves none."""
        regular = normal.clone()
        regular.diagonal().add_(penalties[number] * scale)
        factor, failed = torch.linalg.cholesky_ex(regular)
        change = torch.cholesky_solve(right, factor).float()
        return change.fill_(math.nan) if failed else change

    best: tuple[torch.Tensor, float] | None = None
    least = missed(None)
    like = torch.empty_like(right, dtype=torch.float32)
    turns = [number % here().size for number in range(len(penalties))]  # factoring is most of the work
    for penalty, change in zip(penalties, here().pieces(like, turns, solved), strict=True):
        off = missed(change)
        if off < least:
            best, least = (change, penalty), off
    return best


def _take(layer: CutLayer, tokens: _Tokens, block: list[Span], change: torch.Tensor) -> None:
    """Subtract what the change brings back from the tokens' residual."""
    for chunk in range(len(tokens.routes)):
        places, phi = _features(layer, tokens, chunk, block)
        tokens.residual[places] -= phi @ change


@torch.no_grad()
def refit_down(layer: CutLayer, fit_rows: torch.Tensor, judge_rows: torch.Tensor) -> None:
    """Refit the down projections of `layer.parameters` on the tokens at `fit_rows`, judged by those at `judge_rows`.

    Nothing changes where the experts' output is normalised after the down projection: it is not linear in it then.
    """
    count = int(layer.pieces.counts(fit_rows).sum())
    if getattr(layer.experts, "has_post_expert_norm", False) or not count:
        return
    step = -(-count // TOKENS)  # every step-th token
    fit, judge = _Tokens.of(layer, layer.pieces.every(fit_rows, step)), _Tokens.of(layer, judge_rows)
    first = layer.parameters[0]["down_proj"]
    neurons = first.shape[0] if layer.experts.is_transposed else first.shape[1]
    nbytes = sum(value.nbytes for parameters in layer.parameters for value in parameters.values())
    spans = neuron_blocks(len(layer.parameters), neurons, block_width(nbytes))
    penalties: Sequence[float] = PENALTIES
    for _ in range(SWEEPS if len(spans) > 1 else 1):
        for block in spans:
            found = _change(layer, fit, judge, block, penalties)
            if found is None:
                continue
            change, penalties = found[0], found[1:]
            for tokens in (fit, judge):
                _take(layer, tokens, block, change)
            for span in block:
                down, part = layer.parameters[span.expert]["down_proj"], change[span.columns]
                if layer.experts.is_transposed:
                    down[span.begin : span.end] += part
                else:
                    down[:, span.begin : span.end] += part.T
