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
from collections.abc import Callable, Sequence
from itertools import chain

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
    """Adafactor for tensors that hold N experts' values, or as one the router's: torch's numbers
    for each one alone.

    Lists of tensors share operators, so that a step takes about as many for all as for one.
    """

    def __init__(self, *owners: Sequence[Tensor]) -> None:
        """Take, of each owner, tensors of its members: [N, O, I], or [N, O] of vectors."""
        self.owner_of = [number for number, values in enumerate(owners) for _ in values]
        values = [value for tensors in owners for value in tensors]
        self.values = [value if value.dim() == 3 else value[:, None] for value in values]
        self.is_matrix = [value.dim() == 3 for value in values]
        self.sizes = [math.prod(value.shape[1:]) for value in values]
        device = values[0].device
        self.steps = [
            torch.zeros(len(tensors[0]) if tensors else 1, 1, 1, device=device)
            for tensors in owners
        ]
        # running averages of the squared gradient's sums over the columns and rows of a matrix, or
        # of all of a vector
        self.averages = list[Tensor]()
        for value, is_matrix in zip(self.values, self.is_matrix, strict=True):
            self.averages += [torch.zeros_like(value[:, :, :1])] * is_matrix + [
                torch.zeros_like(value[:, :1])
            ]

    @torch.no_grad()
    def step(self, rate: float, reached: list[Tensor], gradients: Sequence[Tensor]) -> None:
        """Take a step for the members of each owner that are `reached` [N, 1, 1], 1 or 0; others
        keep values and state.

        `rate` is the most relative to a tensor's root mean square.
        """
        torch._foreach_add_(self.steps, reached)
        steps = torch._foreach_clamp_min(self.steps, 1)
        decays = torch._foreach_pow(steps, DECAY)
        torch._foreach_mul_(decays, reached)
        rates = torch._foreach_pow(steps, -0.5)
        torch._foreach_clamp_max_(rates, rate)
        torch._foreach_mul_(rates, reached)
        shaped = [
            gradient.view_as(value) for gradient, value in zip(gradients, self.values, strict=True)
        ]
        # the averages of the squared gradients are updated, and gradients divided by their roots
        sums = []
        weights = []
        for gradient, owner, is_matrix in zip(shaped, self.owner_of, self.is_matrix, strict=True):
            sums += [vector_norm(gradient, dim=-1, keepdim=True)] * is_matrix
            sums.append(vector_norm(gradient, dim=-2, keepdim=True))
            weights += [decays[owner]] * (1 + is_matrix)
        torch._foreach_pow_(sums, 2)
        torch._foreach_lerp_(self.averages, sums, weights)
        averages = iter(self.averages)
        updates = []
        for size, is_matrix in zip(self.sizes, self.is_matrix, strict=True):
            if not is_matrix:
                updates.append(next(averages).clone())
                continue
            rows = next(averages)
            whole = rows.sum(1, keepdim=True).clamp_(min=EPSILON * size)
            updates.append((rows * next(averages)).div_(whole))
        torch._foreach_clamp_min_(updates, EPSILON**2)
        torch._foreach_rsqrt_(updates)
        torch._foreach_mul_(updates, shaped)
        roots = [math.sqrt(size) for size in self.sizes]
        sizes = [vector_norm(value, dim=(1, 2), keepdim=True) for value in self.values]
        torch._foreach_maximum_(sizes, [LEAST_SIZE * root for root in roots])
        torch._foreach_mul_(sizes, [rates[owner] for owner in self.owner_of])
        norms = [vector_norm(update, dim=(1, 2), keepdim=True) for update in updates]
        torch._foreach_maximum_(norms, roots)
        torch._foreach_div_(sizes, norms)
        torch._foreach_addcmul_(self.values, updates, sizes, value=-1)


# of a group by number; which experts are reached [N, 1, 1], if any is
Step = Callable[[int, list[Tensor]], None]


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
    for number, group in enumerate(layer.groups):
        is_last = number == len(groups) - 1
        # the last ones are a group's and the constants'
        parts = outputs if is_last else outputs[:1]
        if parts:
            gradients = [gradient.index_select(0, positions) for positions, _ in parts]
            torch.autograd.backward([output for _, output in parts], gradients)
        del outputs[:1]
        if is_last and gates is not weights and weights.requires_grad:
            weights.backward(gates.grad)
        step(number, [reached[group], reached.amax(0, keepdim=True)])


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
    owned = [[list(leaves.values()), []] for leaves in groups]
    owned[-1][1] = [value.requires_grad_() for value in router]
    optimizers = []
    for own, shared in owned:
        optimizers.append(
            Adafactor([leaf.data for leaf in own], [leaf.data[None] for leaf in shared])
        )
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

        def step(group: int, reached: list[Tensor], now: float = now) -> None:
            gradients = []
            for leaf in chain(*owned[group]):
                gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                leaf.grad = None
                gradients.append(ranks().all_reduce(gradient))
            optimizers[group].step(now, reached, gradients)

        if number % every == 0:
            layer.rebalance()
        descend(layer, rows_now, chosen.shape[1], groups, step, dtype)
        progress.advance("step")
    for value in router:
        value.requires_grad_(False)
