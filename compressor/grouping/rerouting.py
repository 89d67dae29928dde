"""The smaller model's own router on the sampled tokens: its rows picked for kept experts, or mixed for merged ones.

S sampled tokens, K top-k, E experts, N slots of the smaller layer.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.func import functional_call

from compressor.model.architecture import ExpertTensor
from compressor.model.streaming import as_call
from compressor.recipe.plan import LayerPlan
from compressor.statistics.statistics import LayerStatistics
from compressor.surgery.tensors import has_equal, remap_table, told_apart

_Select = Callable[[ExpertTensor, torch.Tensor], torch.Tensor]  # a tensor's rows for the smaller layer


class SmallerRouter:
    """Routes the sampled tokens as the smaller layer would; the layer's weights are read once, never changed.

    Both ways of asking give (gate weights [S, K] float32, slots [S, K] int64) of the tokens at `rows`, or of all; a
    choice of no expert, such as zaya's skip expert, has the weight 0.
    """

    def __init__(self, stats: LayerStatistics) -> None:
        layer, weights = stats.layer, stats.weights
        self.layer, self.tokens, self._build = layer, len(stats.inputs), weights.smaller_router
        self.device = stats.inputs.device
        self._built: dict[int, Any] = {}
        sized = {tensor.key: tensor for tensor in layer.tensors if not tensor.key.startswith(f"{layer.name}.")}
        own = {f"{layer.router}.{key}": (key, value.detach()) for key, value in weights.router.state_dict().items()}
        self._sized = {name: (sized[key], value.float()) for key, (name, value) in own.items() if key in sized}
        self._equal = any(has_equal(value, tensor.dim, layer.experts) for tensor, value in self._sized.values())
        self._tables = {name: value for key, (name, value) in own.items() if key in layer.tables}
        buffers = dict(weights.router.named_buffers())
        self._whole = {name: value for name, value in buffers.items() if f"{layer.router}.{name}" not in own}
        moved = self._sized.keys() | self._tables.keys()
        self._whole |= {name: _float(value) for name, value in own.values() if name not in moved}
        # tensors that the block holds and hands to its router, such as a bias: known by their place in memory
        held = {f"{layer.block}.{key}": value for key, value in weights.block.state_dict(keep_vars=True).items()}
        outer = {held[key].data_ptr(): tensor for key, tensor in sized.items() if key not in own}
        positional, by_keyword = stats.router_arguments
        self._arguments: dict[int | str, tuple[Any, int | None, ExpertTensor | None]] = {
            name: (
                _float(value),
                stats.router_arguments.dims[name],
                outer.get(value.data_ptr()) if isinstance(value, torch.Tensor) else None,
            )
            for name, value in (*enumerate(positional), *by_keyword.items())
        }

    def kept(self, experts: Sequence[int], rows: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Routing among these experts alone, in ascending order; slot n is the n-th of them."""
        slots = dict(zip(experts, range(len(experts)), strict=True))
        picked: dict[int, torch.Tensor] = {}

        def pick(tensor: ExpertTensor, value: torch.Tensor) -> torch.Tensor:
            if tensor.extra not in picked:
                beyond = range(self.layer.experts, self.layer.experts + tensor.extra)
                picked[tensor.extra] = torch.tensor([*experts, *beyond], device=value.device)
            return value.index_select(tensor.dim, picked[tensor.extra])

        return self._run(len(experts), pick, slots, rows)

    def planned(
        self, plan: LayerPlan, shares: Sequence[torch.Tensor] | None = None, rows: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Routing of a plan's smaller layer; `shares` stand in for the groups' router coefficients, with gradients."""
        if shares is None:
            shares = [torch.tensor(group.router_coefficients, device=self.device) for group in plan.groups]

        def mix(tensor: ExpertTensor, value: torch.Tensor) -> torch.Tensor:
            nothing = torch.zeros((), device=value.device)
            mixed = [
                sum((a * value.select(tensor.dim, e) for a, e in zip(share, group.members, strict=True)), nothing)
                for share, group in zip(shares, plan.groups, strict=True)
            ]
            mixed += [value.select(tensor.dim, self.layer.experts + place) for place in range(tensor.extra)]
            return torch.stack(mixed, tensor.dim)

        return self._run(len(plan.groups), mix, plan.slots(), rows)

    def _run(
        self, count: int, select: _Select, slots: Mapping[int, int], rows: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = self.tokens if rows is None else len(rows)
        if tokens == 0:  # of a layer that no token reached, not even the arguments are known
            nothing = torch.zeros(0, self.layer.top_k, device=self.device)
            return nothing, nothing.long()
        if count not in self._built:
            self._built[count] = self._build(count)
        arguments = {name: _argument(*entry, select, rows) for name, entry in self._arguments.items()}
        tensors = {name: select(tensor, value) for name, (tensor, value) in self._sized.items()}
        if self._equal:  # as rows that stay are told apart when the layer is cut
            tensors = {name: told_apart(value, self._sized[name][0].dim, count) for name, value in tensors.items()}
        tensors |= self._whole
        for name, table in self._tables.items():
            tensors[name] = _table(table, slots, self.layer.experts, list(arguments.values()))
        call = as_call((name if isinstance(name, str) else None, value) for name, value in arguments.items())
        output = functional_call(self._built[count], tensors, *call, tie_weights=False)
        return output[1].reshape(tokens, -1).float(), output[2].reshape(tokens, -1).long()


def _float(value: Any) -> Any:
    """A tensor of numbers in float32; anything else, also a tensor of ids, as it is."""
    return value.detach().float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _argument(
    value: Any, dim: int | None, tensor: ExpertTensor | None, select: _Select, rows: torch.Tensor | None
) -> Any:
    if tensor is not None:
        return select(tensor, value)
    return value if dim is None or rows is None else value.index_select(dim, rows)


def _table(table: torch.Tensor, slots: Mapping[int, int], experts: int, arguments: Sequence[Any]) -> torch.Tensor:
    """A table of expert ids [V, K] with slots in the rows that integers among the arguments may name, 0 elsewhere."""
    ids = [value.flatten() for value in arguments if isinstance(value, torch.Tensor) and value.dtype == torch.long]
    named = torch.cat(ids).unique() if ids else torch.arange(len(table), device=table.device)
    named = named[named < len(table)]
    remap = tuple(slots.get(expert, -1) for expert in range(experts))
    return torch.zeros_like(table).index_copy(0, named, remap_table(table[named].cpu(), remap).to(table.device))
