"""A planned layer's output on the sampled tokens, and its error against the base layer's.

The error is ||y - y'||^2 / ||y||^2 with gate weights on both sides, y' routed by the smaller
layer's own router: its rows picked for kept experts, or mixed for merged ones. For plans that only
drop experts the error is a quadratic form in gate weights, since y' = sum_k w_k o_k with unchanged
outputs o. S sampled tokens, K top-k, E experts, H hidden, N slots of the smaller layer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from compressor.devices import as_float64, float64_device
from compressor.frozen import frozen
from compressor.model.experts import apply_expert, routed
from compressor.model.moe_layer import ExpertTensor
from compressor.model.streaming import as_arguments, as_call
from compressor.recipe.plan import LayerPlan
from compressor.statistics.statistics import LayerStatistics
from compressor.steps.cutting import merged_parameters
from compressor.steps.tensors import distinct_rows, equal_rows_before, remap_table

CHUNK = 32  # tokens whose outputs are laid side by side at once
ROUNDED_PRODUCTS = 2.0**-22  # of a layer's energy: float32's error where products cancel

Routing = tuple[Tensor, Tensor]  # gate weights [S, K] and slots [S, K]
_Select = Callable[[ExpertTensor, Tensor], Tensor]  # a tensor's rows for the smaller layer


class SmallerRouter:
    """Routes the sampled tokens as the smaller layer would; the layer's weights are read once,
    never changed.

    Both ways of asking give (gate weights [S, K] float32, slots [S, K] int64) of the tokens at
    `rows`, or of all; a choice of no expert, such as zaya's skip expert, has the weight 0."""

    def __init__(self, stats: LayerStatistics) -> None:
        layer = stats.layer
        weights = stats.weights
        self.layer = layer
        self.tokens = len(stats.inputs)
        self.device = stats.inputs.device
        self._build = weights.smaller_router
        # by name; how they count experts, if they do
        self._tensors = dict[str, tuple[Tensor, ExpertTensor | None]]()
        self._tables = dict[str, Tensor]()
        self._has_equal_rows = False
        by_key = {tensor.key: tensor for tensor in layer.tensors}
        router = weights.router
        for name, value in {**dict(router.named_buffers()), **router.state_dict()}.items():
            key = f"{layer.router}.{name}"
            tensor = by_key.get(key)
            if key in layer.tables:
                self._tables[name] = value
                continue
            self._tensors[name] = _float(value), tensor
            if tensor is not None:
                self._has_equal_rows |= bool(
                    equal_rows_before(value, tensor.dim, layer.experts).any()
                )
        # tensors that the block passes to its router, such as a bias: identified by their address
        passed_tensors = {}
        for name, value in weights.block.state_dict(keep_vars=True).items():
            key = f"{layer.block}.{name}"
            if key in by_key and not key.startswith((f"{layer.router}.", f"{layer.name}.")):
                passed_tensors[value.data_ptr()] = by_key[key]
        called = stats.router_arguments
        arguments = as_arguments(called.positional, called.by_keyword)
        self._arguments = list[tuple[str | None, Any, int | None, ExpertTensor | None]]()
        for (keyword, value), dim in zip(arguments, called.dims.values(), strict=True):
            tensor = passed_tensors.get(value.data_ptr()) if isinstance(value, Tensor) else None
            self._arguments.append((keyword, _float(value), dim, tensor))

    def kept(self, experts: Sequence[int], rows: Tensor | None = None) -> Routing:
        """Routing among these experts alone, in ascending order; slot n is the n-th of them."""

        def pick(tensor: ExpertTensor, value: Tensor) -> Tensor:
            extra = range(self.layer.experts, self.layer.experts + tensor.extra)
            return value.index_select(
                tensor.dim, torch.tensor([*experts, *extra], device=value.device)
            )

        remap = [-1] * self.layer.experts
        for slot, expert in enumerate(experts):
            remap[expert] = slot
        return self._run(len(experts), pick, remap, rows)

    def planned(self, plan: LayerPlan, shares: Sequence[Tensor] | None = None) -> Routing:
        """Routing of a plan's smaller layer; `shares` stand in for the groups' router coefficients,
        with gradients."""
        if shares is None:
            shares = [
                torch.tensor(group.router_coefficients, device=self.device) for group in plan.groups
            ]

        def mix(tensor: ExpertTensor, value: Tensor) -> Tensor:
            mixed = []
            for coefficients, group in zip(shares, plan.groups, strict=True):
                row = torch.zeros((), device=value.device)
                for coefficient, expert in zip(coefficients, group.members, strict=True):
                    row = row + coefficient * value.select(tensor.dim, expert)
                mixed.append(row)
            mixed += value.unbind(tensor.dim)[self.layer.experts :]
            return torch.stack(mixed, tensor.dim)

        return self._run(len(plan.groups), mix, plan.remap(), None)

    def _run(
        self, count: int, select: _Select, remap: Sequence[int], rows: Tensor | None
    ) -> Routing:
        tokens = self.tokens if rows is None else len(rows)
        if tokens == 0:  # of a layer that no token reached, not even the arguments are known
            nothing = torch.zeros(0, self.layer.top_k, device=self.device)
            return nothing, nothing.long()
        arguments = []
        for name, value, dim, tensor in self._arguments:
            if tensor is not None:
                value = select(tensor, value)
            elif dim is not None and rows is not None:
                value = value.index_select(dim, rows)
            arguments.append((name, value))
        tensors = {}
        for name, (value, tensor) in self._tensors.items():
            if tensor is not None:
                value = select(tensor, value)
                if self._has_equal_rows:  # as cutting the layer makes equal rows distinct
                    value = distinct_rows(value, tensor.dim, count)
            tensors[name] = value
        for name, table in self._tables.items():
            # only the rows that integers among the arguments may name are remapped, as tables may
            # be long; all where none are whole numbers
            named = torch.arange(len(table), device=table.device)
            numbers = [
                value.flatten()
                for _, value in arguments
                if isinstance(value, Tensor) and value.dtype == torch.long
            ]
            if numbers:
                unique = torch.cat(numbers).unique()
                named = unique[unique < len(table)]
            remapped = remap_table(table[named].cpu(), tuple(remap)).to(table.device)
            tensors[name] = torch.zeros_like(table).index_copy(0, named, remapped)
        output = functional_call(
            self._build(count), tensors, *as_call(arguments), tie_weights=False
        )
        return output[1].reshape(tokens, -1).float(), output[2].reshape(tokens, -1).long()


def _float(value: Any) -> Any:
    return (
        value.detach().float() if isinstance(value, Tensor) and value.is_floating_point() else value
    )


@torch.no_grad()
def original(stats: LayerStatistics) -> Tensor:
    """Output of the layer's experts module on the sampled tokens, float32: -> [S, H]."""
    outputs = stats.expert_outputs
    rows = torch.arange(outputs.shape[1], device=outputs.device)
    result = torch.zeros(outputs.shape[1:], dtype=torch.float32, device=outputs.device)
    for choice, weight in zip(stats.top_k_index.T, stats.top_k_weights.T, strict=True):
        result += weight[:, None] * outputs[choice, rows]
    return result


@torch.no_grad()
def reconstruct(stats: LayerStatistics, plan: LayerPlan) -> Tensor:
    """Output of the smaller layer's experts module on the sampled tokens, float32: -> [S, H].

    Untouched experts' outputs are taken from the statistic; merged experts run on the tokens that
    are routed to them, one at a time."""
    outputs = stats.expert_outputs
    experts = stats.weights.experts
    weights, slots = SmallerRouter(stats).planned(plan)
    result = torch.zeros(outputs.shape[1:], dtype=torch.float32, device=outputs.device)
    for slot, rows, choices in routed(weights, slots):
        group = plan.groups[slot]
        if group.untouched:
            output = outputs[group.members[0], rows]
        else:
            output = apply_expert(experts, merged_parameters(experts, group), stats.inputs[rows])
        result.index_add_(0, rows, weights[rows, choices, None] * output)
    return result


def relative_error(stats: LayerStatistics, plan: LayerPlan) -> float:
    """||y - y'||^2 / ||y||^2 over the sampled tokens; the numerator alone where y is zero, 0
    without tokens."""
    before = as_float64(original(stats))
    gap = float((before - as_float64(reconstruct(stats, plan))).square().sum())
    return gap / (float(before.square().sum()) or 1.0)


@frozen
class Routed:
    """Tokens routed among kept experts: gate weights [n, K], experts of the source [n, K], errors
    [n] in float64."""

    weights: Tensor
    experts: Tensor
    errors: Tensor


class KeptErrors:
    """Each sampled token's ||y - y'||^2 when only some experts are kept, without touching an output
    again.

    With G = <o_e, o_f> of a token's expert outputs, its gate weights w and the smaller router's w',
    all [E], this is w'Gw' - 2 w'Gw + wGw. G is float32, the sums float64, so that what is equal
    cancels."""

    @torch.no_grad()
    def __init__(self, stats: LayerStatistics) -> None:
        outputs = stats.expert_outputs
        self._router = SmallerRouter(stats)
        experts, tokens = outputs.shape[:2]
        weights = torch.zeros(
            tokens, experts, dtype=torch.float64, device=float64_device(outputs.device)
        )
        weights.scatter_add_(
            1, stats.top_k_index.to(weights.device), as_float64(stats.top_k_weights)
        )
        self._products = torch.empty(tokens, experts, experts, device=outputs.device)
        self._mixed = torch.empty_like(weights)  # Gw
        for begin in range(0, tokens, CHUNK):
            rows = slice(begin, begin + CHUNK)
            part = outputs[:, rows].transpose(0, 1).contiguous()
            torch.bmm(part, part.mT, out=self._products[rows])
            self._mixed[rows] = (as_float64(self._products[rows]) @ weights[rows, :, None])[..., 0]
        self._original = (self._mixed * weights).sum(1)  # wGw
        self._rows = torch.arange(tokens, device=outputs.device)
        # errors summed over all tokens tie within it
        self.noise = ROUNDED_PRODUCTS * float(self._original.sum())

    @torch.no_grad()
    def kept(self, experts: Sequence[int], rows: Tensor | None = None) -> Routed:
        """Routing and errors of the tokens at `rows` [n], or of all, when these experts, ascending,
        are kept."""
        weights, slots = self._router.kept(experts, rows)
        rows = self._rows if rows is None else rows
        chosen = torch.tensor(experts, device=rows.device)[slots]
        shares = as_float64(weights)
        products = self._products[rows[:, None, None], chosen[:, :, None], chosen[:, None]]
        squared = (shares[:, None] @ as_float64(products) @ shares[..., None])[:, 0, 0]
        mixed = self._mixed[rows[:, None].to(shares.device), chosen.to(shares.device)]
        errors = squared - 2 * (shares * mixed).sum(1) + self._original[rows.to(shares.device)]
        return Routed(weights, chosen, errors.clamp_(min=0))
