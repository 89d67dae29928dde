"""Output-space correction of one cut layer: the remaining experts refitted toward the base layer's
output.

`ridge` refits the down projections in closed form; `tune` continues from there with optimiser steps
on router, gate, up and down. A guard keeps only what lowers the reconstruction error on held-out
calibration tokens.

Ridge: with phi the gate-weighted intermediate activations of the kept experts, laid side by side,
and r = y - y' the error of the cut layer, the change D of the down projections minimises ||r - phi
D^T||^2 + penalty ||D||^2: regularised to the weights as they are. Where experts x intermediate size
is large, blocks of neurons are solved in turn, each on the residual of the others. The penalty is
the one of least error on held-out tokens for the first block; a later block that it does not help
stays as it is. Constants that stand for experts: the same with their gate weights as phi.

Tune: the loss is the weighted mean of ||y - y'||^2 over a step's tokens. The optimiser is Adafactor
(Shazeer and Stern 2018, arXiv:1804.04235): its steps are relative to a tensor's own size, and its
state is a row and a column of a matrix, so that one layer in float32 is about all the memory it
takes. All experts of a group take a step at once; on a processor each group's gradients are used
and freed before the next one's. A step asks the device for no number. Of several ranks each
computes with its own tokens of a step, and gradients are added up.

n tokens of a step, K top-k, H hidden, N experts.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from compressor.devices import as_float64, float64_device
from compressor.distributed import ranks
from compressor.memory import give_back
from compressor.model.experts import CHUNK, Choices, Parameters, intermediate, width_of
from compressor.model.loading import set_tensor
from compressor.model.moe_layer import MoeLayer
from compressor.progress import SILENT, Progress
from compressor.steps.correct.cut_layer import CutLayer, Recording, RefittedConstants
from compressor.steps.correct.options import NONE, Correct

LEAST_BLOCK = 1024
MOST_BLOCK = 4096  # neurons solved jointly
MATRICES = 6  # of 8 bytes an element that solving a block takes, as wide and high as the block
TOKENS = 32_768  # fitted on at most
SWEEPS = 2  # over the blocks, where there are several
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0)  # times the normal matrix's mean diagonal
CONSTANT_PENALTIES = (1e-6, *PENALTIES)
DECAY = -0.8  # of the running averages, as a power of the step
EPSILON = torch.finfo(torch.float32).eps  # the least mean of a squared gradient
BALANCED = 8  # times that the weights of sources change
LEAST_SIZE = 1e-3  # of a tensor, where steps are relative to it
MOST_RATE = 0.03
ROUNDS = 3  # of ridge with weights of sources, after the one without
STEPS_OF: Mapping[str, tuple[str, ...]] = {  # of each method; a step that lowers no error is undone
    NONE: (),
    "ridge": ("ridge",),
    "tune": ("ridge", "tune"),
}


@dataclass
class _Chunk:
    """Tokens to fit on or to evaluate on: positions [m], routing, and the layer's residual [m,
    H], None where targets are fitted."""

    rows: Tensor
    weights: Tensor
    index: Tensor
    # [m]: square roots of the tokens' weights; residual and features are multiplied by them
    scale: Tensor
    residual: Tensor | None


def _chunks(layer: CutLayer, rows: Tensor, of_targets: bool = False) -> list[_Chunk]:
    """Split the tokens at `rows` into chunks."""
    chunks = []
    for part in layer.recording.chunks(rows):
        scale = layer.token_weights(part).sqrt()
        residual = None
        if not of_targets:
            residual = layer.gap(part, layer.targets(part)) * scale[:, None]
        chunks.append(_Chunk(part, *layer.route(part), scale, residual))
    return chunks


@dataclass
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
        """Yield each chunk's residual or target [m, H], which of its tokens reach the block, [n],
        and their features [n, D]."""
        for number, chunk in enumerate(self.chunks):
            if number in self.kept:
                reached, phi = self.kept[number]
            else:
                reached, phi = self._computed(chunk)
                if phi.nbytes <= self.budget:
                    self.budget -= phi.nbytes
                    self.kept[number] = reached, phi
            residual = chunk.residual
            if residual is None:
                residual = self.layer.targets(chunk.rows) * chunk.scale[:, None]
            yield residual, reached, phi

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
    # one block alone outputs all, so its part of the targets is a product of what is there anyway
    is_alone = len(blocks) == 1 and layer.constants is None and not layer.experts.has_bias
    if len(blocks) > 1:  # one alone has nothing to see of others
        blocks = blocks * SWEEPS
    step = math.ceil(count / TOKENS)
    fit = _chunks(layer, fit_rows[places % step == 0], of_targets=is_alone)
    heldout = _chunks(layer, heldout_rows)
    penalties: Sequence[float] = PENALTIES
    for number, (experts, part) in enumerate(blocks, start=1):
        fitted = _Block(layer, fit, experts, part, nbytes / 8)
        held = _Block(layer, heldout, experts, part)
        normal, right = fitted.normal()
        if is_alone:
            right -= normal @ as_float64(fitted.down.flatten(0, 1)).to(normal)
        solution = _best(normal, right, penalties, held.missed)
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


class Adafactor:
    """Adafactor for tensors that hold the values of N members: torch's numbers for each one
    alone."""

    def __init__(self, values: Iterable[Tensor]) -> None:
        """Take tensors [N, O, I], or [N, O] of vectors."""
        self.steps: Tensor | float = 0.0  # of each member
        self.values = []
        # running averages of the squared gradient's sums over the columns and rows of a matrix, or
        # of all of a vector
        self.averages = []
        for value in values:
            wide = value.detach().view(len(value), -1, value.shape[-1])
            self.values.append(wide)
            rows = torch.zeros_like(wide[..., :1]) if value.dim() == 3 else None
            self.averages.append((rows, torch.zeros_like(wide[:, :1])))

    @torch.no_grad()
    def step(self, rate: float, reached: Tensor, gradients: Sequence[Tensor]) -> None:
        """Take a step for the members that are `reached` [N, 1, 1], 1 or 0; others keep values and
        state.

        `rate` is the most relative to a tensor's root mean square.
        """
        self.steps = self.steps + reached
        steps = self.steps.clamp(min=1)
        decay = steps.pow(DECAY) * reached
        rates = steps.pow(-0.5).clamp_(max=rate) * reached
        for value, (rows, columns), gradient in zip(
            self.values, self.averages, gradients, strict=True
        ):
            gradient = gradient.view_as(value)
            size = math.prod(value.shape[1:])
            root = math.sqrt(size)
            # the averages are updated, and the gradient divided by their roots; a product adds up
            # columns several times as fast as a sum over rows
            squares = gradient.square()
            ones = squares.new_ones(1, 1, squares.shape[1]).expand(len(squares), -1, -1)
            roots = columns.lerp_(ones @ squares, decay).rsqrt()
            if rows is not None:
                rows.lerp_(squares.sum(-1, keepdim=True), decay)
                total = rows.sum(1, keepdim=True).clamp_(min=EPSILON * size)
                roots = torch.mul(rows.div(total).rsqrt_(), roots, out=squares)
            update = roots.clamp_(max=1 / EPSILON).mul_(gradient)
            length = vector_norm(value, dim=(1, 2), keepdim=True).clamp_(min=LEAST_SIZE * root)
            norm = vector_norm(update, dim=(1, 2), keepdim=True).clamp_(min=root)
            value.addcmul_(update, length.mul_(rates).div_(norm), value=-1)


# of a group by number; which of the layer's experts are reached [N, 1, 1]
Step = Callable[[int, Tensor], None]


def descend(
    layer: CutLayer,
    rows: Tensor,
    tokens: int,
    groups: Sequence[Parameters],
    step: Step,
    dtype: torch.dtype,
) -> None:
    """Take the gradients of the weighted mean of ||y - y'||^2 over a step's `tokens`; each group's
    `step` follows.

    The last one comes when the router's gradient is there, too. This rank has those tokens at
    `rows` [n]. The `groups` are the layer's parameters, as leaves; products are in `dtype`, and
    sums of them in float32."""
    weights = torch.zeros(0, 1, device=rows.device)
    index = torch.zeros(0, 1, dtype=torch.int64, device=rows.device)
    if len(rows):
        weights, index = layer.route(rows)
    gates = weights if len(groups) == 1 else weights.detach().requires_grad_(weights.requires_grad)
    reached = layer.reached(weights, index).clamp(max=1).view(-1, 1, 1)
    total = layer.targets(rows).neg_()
    outputs = []
    for positions, output in (
        layer.gated_outputs(rows, gates, index, groups, dtype) if len(rows) else ()
    ):
        total.index_add_(0, positions, output.detach())
        outputs.append((positions, output))
    gradient = total.mul_((layer.token_weights(rows) * (2 / tokens)).unsqueeze(1))
    for number in range(len(groups)):
        is_last = number == len(groups) - 1
        # the last ones are a group's and the constants'
        parts = outputs if is_last else outputs[:1]
        if parts:
            gradients = [gradient.index_select(0, positions) for positions, _ in parts]
            torch.autograd.backward([output for _, output in parts], gradients)
        del outputs[:1]
        if is_last and gates is not weights and weights.requires_grad:
            weights.backward(gates.grad)
        step(number, reached)


def _gradients(leaves: Iterable[Tensor]) -> list[Tensor]:
    """Take the gradients off leaves, summed over all ranks; zeros where there are none."""
    gradients = []
    for leaf in leaves:
        gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        leaf.grad = None
        gradients.append(ranks().all_reduce(gradient))
    return gradients


@torch.enable_grad()
def tune(
    layer: CutLayer,
    rows: Tensor,
    router: Sequence[Tensor],
    steps: int,
    tokens: int,
    rate: float,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    progress: Progress = SILENT,
) -> None:
    """Tune `layer.parameters` and `router`, leaves of the live router, in place, on `tokens` tokens
    a step.

    The `rate` is relative to each tensor's root mean square, and falls to 0. Each rank gives its
    own tokens at `rows`, and all end with the same values. Products are in `dtype`. Weights of
    several sources are updated now and then."""
    every = math.ceil(steps / BALANCED)
    places, count = layer.recording.places(rows)
    row_at = torch.full((count,), -1)
    row_at[places] = rows
    groups = []
    for group in layer.groups:
        leaves = {name: value.data.requires_grad_() for name, value in layer.slices(group).items()}
        groups.append(leaves)
    optimizers = [Adafactor(leaves.values()) for leaves in groups]
    router_optimizer = Adafactor(value.requires_grad_().data[None] for value in router)
    # the places of each step's tokens: passes over shuffled ones, without a remainder's short step
    generator = torch.Generator().manual_seed(seed)
    size = min(tokens, count)
    passes = list[Tensor]()
    while len(passes) < steps:
        order = torch.randperm(count, generator=generator)
        passes += order[: count - count % size].split(size)
    chosen = torch.stack(passes[:steps])
    table = row_at[chosen]
    is_own = table >= 0
    own_rows = table[is_own].to(layer.recording.inputs.device).split(is_own.sum(1).tolist())
    for number, rows_now in enumerate(own_rows):
        now = rate * 0.5 * (1 + math.cos(math.pi * number / steps))

        def step(group: int, reached: Tensor, now: float = now) -> None:
            mine = reached[layer.groups[group]]
            optimizers[group].step(now, mine, _gradients(groups[group].values()))
            if group == len(groups) - 1:
                any_reached = reached.amax(0, keepdim=True)
                router_optimizer.step(now, any_reached, _gradients(router))

        if number % every == 0:
            layer.rebalance()
        descend(layer, rows_now, chosen.shape[1], groups, step, dtype)
        progress.advance("step")
    for value in router:
        value.requires_grad_(False)


@contextmanager
def float_router(model: Any, layer: MoeLayer, recording: Recording) -> Iterator[dict[str, Tensor]]:
    """The smaller router in float32 while the block runs; yields its expert-sized tensors that may
    be tuned, by key.

    Afterwards these are back in their own dtype with their new values, the others as they were.
    """
    block_keys = [
        f"{layer.block}.{argument.key}"
        for argument in recording.arguments
        if argument.key is not None
    ]
    state = model.get_submodule(layer.router).state_dict(prefix=f"{layer.router}.", keep_vars=True)
    state |= {key: attrgetter(key)(model) for key in block_keys}
    before = {key: value for key, value in state.items() if value.is_floating_point()}
    for key, value in before.items():
        set_tensor(model, key, value.detach().to(torch.float32, copy=True))
    sized = {tensor.key for tensor in layer.tensors}
    tuned = {
        key: attrgetter(key)(model)
        for key, value in before.items()
        if key in sized and isinstance(value, torch.nn.Parameter)
    }
    try:
        yield tuned
    finally:
        for key, value in before.items():
            set_tensor(model, key, tuned[key].detach().to(value.dtype) if key in tuned else value)


class _Guard:
    """Keeps the best state by the error on held-out tokens, as it will be stored: in the smaller
    model itself."""

    def __init__(
        self,
        cut: CutLayer,
        heldout: Tensor,
        router: Mapping[str, Tensor],
        dtypes: Mapping[str, torch.dtype],
        writing: torch.dtype | None,
    ) -> None:
        self.cut = cut
        self.heldout = heldout
        self.computing: torch.dtype = next(cut.experts.parameters()).dtype
        self.writing = writing or self.computing
        # every refitted tensor and where its best values are: the experts' in the smaller model,
        # the router's here
        self.best_values = list[tuple[Tensor, Tensor]]()
        for group in cut.groups:  # so that rounding takes little memory
            for name, value in cut.parameters.items():
                self.best_values.append((value[group], getattr(cut.experts, name)[group].detach()))
        if cut.constants is not None:
            self.best_values.append((cut.constants.values, cut.constants.best))
        for key, value in router.items():
            self.best_values.append((value, self._stored(value.detach(), dtypes[key]).clone()))
        self.kept = NONE
        self.best = self._error()

    def _stored(self, value: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a value rounded as writing will: what is computed in one dtype may be stored in
        another."""
        return value.to(self.writing if dtype == self.computing else dtype).to(dtype)

    @torch.no_grad()
    def _error(self) -> float:
        """Return the error with all values rounded as they will be stored; they stay so."""
        for value, best in self.best_values:
            value.copy_(self._stored(value, best.dtype))
        return self.cut.error(self.heldout)

    @torch.no_grad()
    def evaluate(self, name: str) -> float:
        """Keep the present state if it is better than the best so far, and go back to the best;
        returns its error."""
        error = self._error()
        is_better = error < self.best
        if is_better:
            self.kept = name
            self.best = error
        for value, best in self.best_values:
            if is_better:
                best.copy_(value)
            else:
                value.copy_(best)
        return error


def correct_layer(
    model: Any,
    layer: MoeLayer,
    recording: Recording,
    correction: Correct,
    seed: int = 0,
    writing: torch.dtype | None = None,
    constants: RefittedConstants | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Refit a layer of the smaller `model`, and its constants, in place toward the recorded
    outputs; returns figures.

    Values are rounded to the dtype of `writing` (by default the experts' own) before they're
    evaluated and kept. Errors are shares of the base output's energy that is missed on held-out
    calibration tokens, each token weighted (`CutLayer.error`). A layer that none reached stays as
    it is."""
    fit = recording.positions(heldout=False)
    heldout = recording.positions(heldout=True)
    fitted, evaluated = ranks().all_reduce(torch.tensor([len(fit), len(heldout)])).tolist()
    if not evaluated:
        return {"kept": NONE, "reason": "no calibration token reached the layer"}
    experts = model.get_submodule(layer.name)
    block = model.get_submodule(layer.block)
    dtypes = {key: value.dtype for key, value in model.state_dict().items()}
    with float_router(model, layer, recording) as router:
        cut = CutLayer(recording, experts, model.get_submodule(layer.router), block, constants)
        guard = _Guard(cut, heldout, router, dtypes, writing)
        errors = {"before": guard.best}
        steps = STEPS_OF[correction.method]
        leaves = list(router.values())
        if constants is not None:
            steps = ("constants", *steps)
            leaves.append(constants.values)
        for name in steps if guard.best > 0 and fitted else ():
            if name == "tune":
                # large steps only disturb a layer that is close
                rate = min(correction.rate * guard.best, MOST_RATE)
                # auto is bfloat16 where tensor cores take it
                is_narrow = correction.precision == "bfloat16"
                if correction.precision == "auto" and recording.inputs.device.type == "cuda":
                    is_narrow = torch.cuda.is_bf16_supported(including_emulation=False)
                dtype = torch.bfloat16 if is_narrow else torch.float32
                give_back()  # what ridge has taken
                progress.start(f"tune {layer.name}", correction.steps)
                tune(
                    cut,
                    fit,
                    leaves,
                    correction.steps,
                    correction.tokens,
                    rate,
                    seed,
                    dtype,
                    progress,
                )
            if name == "ridge":
                refit_down(cut, fit, heldout)
            if name != "tune" and constants is not None:
                refit_constants(cut, fit, heldout)
            errors[name] = guard.evaluate(name)
            for _ in range(ROUNDS if name == "ridge" and len(cut.source_weights) > 1 else 0):
                cut.rebalance()
                refit_down(cut, fit, heldout)
                errors[name] = min(errors[name], guard.evaluate(name))
    tried = {f"heldout_error_{name}": round(error, 6) for name, error in errors.items()}
    return {"kept": guard.kept, "heldout_error": round(guard.best, 6), **tried}
