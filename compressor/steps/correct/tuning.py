"""Tuning a cut layer on its own reconstruction loss: router rows, gate, up and down; one layer, no other.

The loss is the weighted mean of ||y - y'||^2 over a step's tokens. The optimiser is Adafactor (Shazeer and Stern 2018,
arXiv:1804.04235): its steps are relative to a tensor's own size, and its state is a row and a column of a matrix, so
that one layer in float32 is about all the memory it takes. All experts of a group take a step at once; on a processor
each group's gradients are used and freed before the next one's. A step asks the device for no number.

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
from compressor.steps.correct.cut_layer import CutLayer

DECAY = -0.8  # of the running averages, as a power of the step
LEAST_SIZE = 1e-3  # of a tensor, where steps are relative to it


class Adafactor:
    """Adafactor for tensors [N, ...] of N experts, each expert with its own scales: torch's for each one's alone."""

    def __init__(self, values: Iterable[Tensor]) -> None:
        self.values = list(values)
        self.steps: Tensor | float = 0.0  # [N] from the first on
        # averages of the squared gradient over the rows and the columns of a matrix, or all of them of a vector
        self.averages = list[list[Tensor]]()
        for value in self.values:
            dims = (-1, -2) if value.dim() > 2 else ()
            means = [torch.zeros_like(value.select(dim, 0).unsqueeze(dim)) for dim in dims]
            self.averages.append(means or [torch.zeros_like(value)])

    @torch.no_grad()
    def step(self, rate: float, reached: Tensor, gradients: Iterable[Tensor]) -> None:
        """Take a step for the experts that are `reached` [N], 1 or 0; others keep their values and state.

        `rate` is the most relative to a tensor's root mean square.
        """
        self.steps = self.steps + reached
        steps = self.steps.clamp(min=1)
        decays = reached * steps**DECAY
        sizes = reached * steps.rsqrt().clamp_(max=rate)
        for value, averages, gradient in zip(self.values, self.averages, gradients, strict=True):
            shape = (-1, *[1] * (value.dim() - 1))
            update = _preconditioned(gradient.view_as(value), averages, decays.view(shape))
            dims = tuple(range(1, value.dim()))
            root = math.sqrt(value[0].numel())
            size = vector_norm(value, dim=dims, keepdim=True).div_(root).clamp_(min=LEAST_SIZE)
            size *= sizes.view(shape)
            size /= vector_norm(update, dim=dims, keepdim=True).div_(root).clamp_(min=1)
            value.addcmul_(update, size, value=-1)


def _preconditioned(gradient: Tensor, averages: Sequence[Tensor], decay: Tensor) -> Tensor:
    """Update the averages of the squared gradient, and return the gradient over their root."""
    least = torch.finfo(gradient.dtype).eps
    if len(averages) == 1:
        variance = averages[0].lerp_(gradient.square(), decay).clamp(min=least**2)
    else:
        for dim, average in zip((-1, -2), averages, strict=True):
            mean = vector_norm(gradient, dim=dim, keepdim=True).square_().div_(gradient.shape[dim])
            average.lerp_(mean, decay)
        rows, columns = averages
        variance = rows * columns
        variance.div_(rows.mean(dim=-2, keepdim=True).clamp_(min=least)).clamp_(min=least**2)
    return variance.rsqrt_().mul_(gradient)


Step = Callable[[int, Tensor], None]  # for a group of experts by its number, or -1 for the router; which are reached


def descend(
    layer: CutLayer, rows: Tensor, tokens: int, groups: Sequence[Parameters], step: Step, dtype: torch.dtype
) -> None:
    """Take the gradients of the weighted mean of ||y - y'||^2 over a step's `tokens`; each group's `step` follows.

    This rank has those tokens at `rows` [n]. The `groups` are the layer's parameters, as leaves; products are in
    `dtype`, and sums of them in float32.
    """
    weights = torch.zeros(0, 1, device=rows.device)
    index = torch.zeros(0, 1, dtype=torch.int64, device=rows.device)
    if len(rows):
        weights, index = layer.route(rows)
    gates = weights.detach().requires_grad_(weights.requires_grad)
    reached = layer.reached(gates, index)
    outputs = list[tuple[Tensor, Tensor]]()
    if len(rows):
        computing = [{name: value.to(dtype) for name, value in group.items()} for group in groups]
        outputs += layer.gated_outputs(layer.inputs(rows), gates, index, computing)
    total = torch.zeros_like(layer.targets(rows))
    for positions, output in outputs:
        total.index_add_(0, positions, output.detach())
    gradient = (total - layer.targets(rows)) * (layer.token_weights(rows) * (2 / tokens))[:, None]
    for number, group in enumerate(layer.groups):
        if outputs:
            positions, output = outputs.pop(0)
            output.backward(gradient.index_select(0, positions))
        step(number, reached[group])
    for positions, output in outputs:  # of constants
        output.backward(gradient.index_select(0, positions))
    if weights.requires_grad:
        weights.backward(gates.grad)
    step(-1, reached.sum()[None])


def computing_dtype(precision: str, device: torch.device) -> torch.dtype:
    """Return the dtype of products for `auto` or a dtype's name: bfloat16 where tensor cores take it, else float32."""
    if precision != "auto":
        return torch.bfloat16 if precision == "bfloat16" else torch.float32
    has_tensor_cores = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_tensor_cores else torch.float32


def _steps(count: int, steps: int, tokens: int, seed: int) -> list[Tensor]:
    """Return the places of each step's tokens: passes over `count` shuffled ones, without a remainder's short step."""
    generator = torch.Generator().manual_seed(seed)
    size = min(tokens, count)
    chosen = list[Tensor]()
    while len(chosen) < steps:
        order = torch.randperm(count, generator=generator)
        chosen += order[: count - count % size].split(size)
    return chosen[:steps]


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
) -> None:
    """Tune `layer.parameters` and `router`, leaves of the live router, in place, on `tokens` tokens a step.

    The `rate` is relative to each tensor's root mean square, and falls to 0. Each rank gives its own tokens at `rows`,
    and all end with the same values. Products are in `dtype`.
    """
    places, count = layer.recording.places(rows)
    row_at = torch.full((count,), -1)
    row_at[places] = rows
    groups = [
        {name: value.data[group].requires_grad_() for name, value in layer.parameters.items()} for group in layer.groups
    ]
    leaves = [*(list(group.values()) for group in groups), [value.requires_grad_() for value in router]]
    optimizers = [Adafactor(values) for values in leaves[:-1]]
    optimizers.append(Adafactor([value.data[None] for value in router]))
    chosen = _steps(count, steps, tokens, seed)
    own = [row_at[places][row_at[places] >= 0] for places in chosen]
    on_device = torch.cat(own).to(layer.recording.inputs.device).split([len(part) for part in own])
    for number, places in enumerate(chosen):
        now = rate * 0.5 * (1 + math.cos(math.pi * number / steps))

        def step(group: int, reached: Tensor, now: float = now) -> None:
            optimizers[group].step(now, (reached > 0).float(), map(_taken, leaves[group]))

        descend(layer, on_device[number], len(places), groups, step, dtype)
    for value in router:
        value.requires_grad_(False)


def _taken(leaf: Tensor) -> Tensor:
    """Take the gradient of a leaf away from it: the sum of all ranks'."""
    gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    leaf.grad = None
    return ranks().all_reduce(gradient)
