"""Tuning a cut layer on its own reconstruction loss: router rows, gate, up and down; one layer, no
other.

The loss is the weighted mean of ||y - y'||^2 over a step's tokens. The optimiser is Adafactor
(Shazeer and Stern 2018, arXiv:1804.04235): its steps are relative to a tensor's own size, and its
state is a row and a column of a matrix, so that one layer in float32 is about all the memory it
takes. All experts of a group take a step at once; on a processor each group's gradients are used
and freed before the next one's. A step asks the device for no number.

Of several ranks each computes with its own tokens of a step, and gradients are added up.
n tokens of a step, K top-k, H hidden, N experts.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm

from compressor.distributed import ranks
from compressor.model.experts import Parameters
from compressor.progress import SILENT, Progress
from compressor.steps.correct.cut_layer import CutLayer

DECAY = -0.8  # of the running averages, as a power of the step
EPSILON = torch.finfo(torch.float32).eps  # the least mean of a squared gradient
BALANCED = 8  # times that the weights of sources change
LEAST_SIZE = 1e-3  # of a tensor, where steps are relative to it


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
            # the averages are updated, and the gradient divided by their roots
            columns.lerp_(vector_norm(gradient, dim=-2, keepdim=True).square_(), decay)
            update = columns.clone()
            if rows is not None:
                rows.lerp_(vector_norm(gradient, dim=-1, keepdim=True).square_(), decay)
                total = rows.sum(1, keepdim=True).clamp_(min=EPSILON * size)
                update = (rows * columns).div_(total)
            update.clamp_(min=EPSILON**2).rsqrt_().mul_(gradient)
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
