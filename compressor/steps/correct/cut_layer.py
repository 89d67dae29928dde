"""One MoE layer as it was recorded, and as it was cut: what is to come back, and the float32 tensors to refit for it.

T tokens, n of them at a time, K top-k, N experts, H hidden, I intermediate. What is recorded stays in the computing
dtype; past a budget it lies in unlinked mapped files.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Self

import torch

from compressor.devices import as_float64
from compressor.distributed import ranks
from compressor.model.experts import ExpertsView, Parameters, Watch, apply_expert, expert_parameters, routed
from compressor.model.loading import parent_and_name
from compressor.model.moe_layer import MoeLayer
from compressor.model.streaming import allocate, as_arguments, as_call, picked, stream_weights, token_dim

CHUNK = 4096  # tokens computed at once
GROUPS = 8  # of batches, whose sums over tokens are added up first


@dataclass(slots=True)
class Rows:
    """Rows appended batch by batch to one buffer whose final length is foreseen."""

    expected: int
    buffer: torch.Tensor | None = None
    used: int = 0

    def append(self, rows: torch.Tensor) -> None:
        need = self.used + len(rows)
        if self.buffer is None or need > len(self.buffer):
            grown = allocate((max(self.expected, need), *rows.shape[1:]), rows.dtype, rows.device)
            if self.buffer is not None:
                grown[: self.used] = self.buffer[: self.used]
            self.buffer = grown
        self.buffer[self.used : need] = rows
        self.used = need

    @property
    def value(self) -> torch.Tensor:
        return torch.zeros(0, 1) if self.buffer is None else self.buffer[: self.used]


@dataclass(slots=True)
class _Argument:
    """One argument of the router: rows by token (`dim` counts them), a tensor of the block, or a plain value."""

    keyword: str | None
    dim: int | None = None
    rows: Rows | None = None  # None with a `dim`: the experts' own input
    key: str | None = None  # a parameter or buffer of the block, by name
    plain: Any = None


@dataclass(slots=True)
class Recording:
    """Inputs [T, H] and outputs [T, H] of a layer's experts module, and the router's arguments, on the same tokens."""

    layer: MoeLayer
    expected: int  # tokens foreseen
    heldout: Collection[int] = ()  # numbers of the batches that are
    emphasis: Sequence[torch.Tensor] = ()  # weights [B, L] of the batches' tokens; none if all count alike
    calls: list[tuple[int, int]] = field(default_factory=list)  # of each call: number of the batch, tokens
    arguments: list[_Argument] = field(default_factory=list)
    _inputs: Rows = field(init=False)
    _outputs: Rows = field(init=False)
    _weights: Rows = field(init=False)
    _call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    _watch: Watch | None = None
    _own: dict[int, str] = field(default_factory=dict)
    _batch: int = 0
    _come_out: int = 0  # rows whose batch has left the decoder layer

    def __post_init__(self) -> None:
        self._inputs, self._outputs, self._weights = (Rows(self.expected) for _ in range(3))

    def attach(self, model: Any) -> None:
        block = model.get_submodule(self.layer.block)
        self._own = {id(value): name for name, value in (*block.named_parameters(), *block.named_buffers())}
        self._watch = Watch(model, self.layer, on_router=self._router_ran, on_output=self._experts_ran).attach()

    def detach(self) -> None:
        if self._watch is not None:
            self._watch.detach()
        self._watch, self._call = None, None

    def enter(self, batch: int) -> None:
        self._batch = batch

    def _router_ran(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._call = (args, kwargs)

    def _experts_ran(self, hidden: torch.Tensor, output: torch.Tensor) -> None:
        if self._call is None or hidden.numel() == 0:
            return
        named = as_arguments(*self._call)
        for keyword, value in () if self.arguments else named:
            dim = token_dim(value, len(hidden))
            if id(value) in self._own:
                self.arguments.append(_Argument(keyword, key=self._own[id(value)]))
            elif dim is None:
                self.arguments.append(_Argument(keyword, plain=value))
            else:
                same = value.data_ptr() == hidden.data_ptr() and value.numel() == hidden.numel()
                self.arguments.append(_Argument(keyword, dim, None if same else Rows(self.expected)))
        for argument, (_, value) in zip(self.arguments, named, strict=True):
            if argument.rows is not None:
                argument.rows.append(value if argument.dim == 0 else value.flatten(0, 1))
        self._inputs.append(hidden)
        self._outputs.append(output)
        weights = torch.ones(len(hidden), device=output.device)
        if self.emphasis:
            seen = sum(size for batch, size in self.calls if batch == self._batch)
            weights = self.emphasis[self._batch].flatten()[seen : seen + len(hidden)].to(output.device)
        self._weights.append(weights)
        self.calls.append((self._batch, len(hidden)))
        self._call = None

    def came_out(self, hidden: torch.Tensor, shift: torch.Tensor | None = None) -> None:
        """The decoder layer has put out a batch's hidden states [B, L, H]; `shift`, alike, is added to the outputs.

        An error counts by the inverse square of the hidden state.
        """
        rows = slice(self._come_out, self._outputs.used)
        self._come_out = rows.stop
        if rows.start == rows.stop:
            return
        weights = self._weights.value[rows]
        weights *= stream_weights(hidden, len(weights)).to(weights)
        if shift is not None:
            outputs = self.outputs[rows]
            outputs += shift.flatten(0, -2).to(outputs)

    @property
    def inputs(self) -> torch.Tensor:
        """Input of the experts module: [T, H]."""
        return self._inputs.value

    @property
    def outputs(self) -> torch.Tensor:
        """Output of the base's experts module: [T, H]."""
        return self._outputs.value

    @property
    def weights(self) -> torch.Tensor:
        """How much each token's error counts: [T]."""
        return self._weights.value if self._weights.used else torch.zeros(0)

    def positions(self, heldout: bool) -> torch.Tensor:
        """Positions [n] of the tokens that are held out, or of the others."""
        kept = [torch.full((size,), (batch in self.heldout) is heldout) for batch, size in self.calls]
        return torch.cat(kept).nonzero().flatten() if kept else torch.arange(0)

    def gathered(self, rows: torch.Tensor) -> "Recording":
        """Gather what all ranks have recorded at their `rows`, rank by rank."""

        def gather(value: torch.Tensor) -> Rows:
            every = gathered(value, rows)
            return Rows(len(every), every, len(every))

        whole = Recording(self.layer, 0)
        whole._inputs, whole._outputs, whole._weights = map(gather, (self.inputs, self.outputs, self.weights))
        described = ranks().broadcast(
            lambda: [(own.keyword, own.dim, own.key, own.rows is not None) for own in self.arguments]
        )
        arguments = self.arguments or [  # of a rank that has recorded nothing
            _Argument(keyword, dim, Rows(0) if by_rows else None, key) for keyword, dim, key, by_rows in described
        ]
        whole.arguments = [own if own.rows is None else replace(own, rows=gather(own.rows.value)) for own in arguments]
        return whole

    def router_arguments(self, rows: torch.Tensor, block: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The router's arguments for the tokens at `rows` [n], in float32; tensors of its parent are `block`'s own."""

        def value(argument: _Argument) -> Any:
            if argument.key is not None:
                return getattr(*parent_and_name(block, argument.key))
            if argument.dim is None:
                return argument.plain
            taken = picked(self.inputs if argument.rows is None else argument.rows.value, rows)
            taken = taken.float() if taken.is_floating_point() else taken
            return taken[None] if argument.dim == 1 else taken

        return as_call((argument.keyword, value(argument)) for argument in self.arguments)


@dataclass(slots=True)
class RefittedConstants:
    """Constants [D, H] in float32 that stand for experts of a layer, in slots behind those of the experts it keeps."""

    values: torch.Tensor
    best: torch.Tensor  # as they will be stored
    slots: torch.Tensor  # [E] of each expert that the router knows


@dataclass(slots=True)
class CutLayer:
    """A smaller layer's experts, one set of float32 parameters each, and its live router, beside what was recorded."""

    recording: Recording
    experts: Any  # the smaller model's experts module, for its flags and activation
    router: Any
    block: Any
    parameters: list[Parameters]
    typical: float = 1.0  # median of the tokens' weighted ||y||^2
    constants: RefittedConstants | None = None

    @classmethod
    def of(
        cls, recording: Recording, experts: Any, router: Any, block: Any, constants: RefittedConstants | None = None
    ) -> Self:
        """Take float32 copies of the experts' parameters; the router's own are used as they are."""
        wide = ExpertsView(experts, lambda name, expert, value: value.detach().to(torch.float32, copy=True))
        copies = [expert_parameters(wide, expert) for expert in range(len(experts.down_proj))]
        typical = _typical_energy(recording.outputs, recording.weights)
        return cls(recording, experts, router, block, copies, typical, constants)

    def split(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Split the positions `rows` [n], ascending, by the recorded calls that they lie in."""
        sizes = torch.tensor([0, *(size for _, size in self.recording.calls)])
        edges = torch.searchsorted(rows, sizes.cumsum(0)).tolist()
        return [rows[begin:end] for begin, end in pairwise(edges)]

    def summed(self, like: torch.Tensor, make: Callable[[int], torch.Tensor]) -> torch.Tensor:
        """Add up over all ranks what `make` computes for each recorded call; `like` has its shape, dtype and device.

        This rank's calls are added up in `GROUPS`, every eighth call in one.
        """
        total = torch.zeros_like(like)
        for first in range(min(GROUPS, len(self.recording.calls))):
            group = torch.zeros_like(like)
            for call in range(first, len(self.recording.calls), GROUPS):
                group += make(call)
            total += group
        return ranks().all_reduce(total)

    def _ordered(self, rows: torch.Tensor) -> tuple[torch.Tensor, int]:
        """The order by batches [n] of all ranks' tokens at their `rows`, rank by rank, and where this rank's begin."""
        calls = zip(self.recording.calls, self.split(rows), strict=True)
        own = torch.cat([torch.full((len(part),), batch) for (batch, _), part in calls] or [rows[:0]])
        every = ranks().all_gather(own)
        return torch.cat(every).argsort(stable=True), sum(map(len, every[: ranks().rank]))

    def every(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        """This rank's part of every step-th of all ranks' tokens at `rows`, counted in the order of the batches."""
        order, begin = self._ordered(rows)
        return rows[order.argsort()[begin : begin + len(rows)] % step == 0]

    def gathered(self, rows: torch.Tensor) -> tuple["CutLayer", torch.Tensor]:
        """Gather what all ranks have recorded at their `rows`; also its positions in the order of the batches.

        The parameters are those of this layer.
        """
        layer = copy.copy(self)
        layer.recording = self.recording.gathered(rows)
        return layer, self._ordered(rows)[0]

    def route(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate weights [n, K] and slots [n, K] that the smaller router gives the tokens at `rows` [n]."""
        positional, by_keyword = self.recording.router_arguments(rows, self.block)
        output = self.router(*positional, **by_keyword)
        weights, index = (part.reshape(len(rows), -1) for part in output[1:3])
        return weights.float(), index if self.constants is None else self.constants.slots[index.long()]

    def inputs(self, rows: torch.Tensor) -> torch.Tensor:
        """Inputs of the experts there, in float32: [n, H]."""
        return picked(self.recording.inputs, rows).float()

    def targets(self, rows: torch.Tensor) -> torch.Tensor:
        """Outputs of the base's experts there, in float32: [n, H]."""
        return picked(self.recording.outputs, rows).float()

    def token_weights(self, rows: torch.Tensor) -> torch.Tensor:
        """How much the error of each token at `rows` [n] counts: -> [n].

        1 / ||h||^2, h the hidden state behind the layer, over the median of that times ||y||^2; times what tokens are
        emphasised by.
        """
        return picked(self.recording.weights, rows).float() * (1.0 / torch.tensor(self.typical)).item()

    def gap(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The targets there minus the smaller layer's output, computed at once and with gradients: [n, H]."""
        x, (weights, index) = self.inputs(rows), self.route(rows)
        total = torch.zeros_like(x)
        for slot, at, places in routed(weights, index):
            total.index_add_(0, at, self.slot_output(slot, x.index_select(0, at)) * weights[at, places, None])
        return targets - total

    @property
    def choices(self) -> int:
        return len(self.parameters) + (0 if self.constants is None else len(self.constants.values))

    def slot_output(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        """Output of a slot's expert, before its gate weight, or its constant: [m, H] -> [m, H]."""
        if self.constants is not None and slot >= len(self.parameters):
            return self.constants.values[slot - len(self.parameters)].expand(*x.shape[:-1], -1)
        return apply_expert(self.experts, self.parameters[slot], x)

    @torch.no_grad()
    def error(self, rows: torch.Tensor) -> float:
        """Weighted sum of ||y - y'||^2 over that of ||y||^2 at `rows`; 0 where there is nothing to bring back.

        Of several ranks it is that of all their tokens at `rows`, and all must ask at once.
        """
        parts = self.split(rows)

        def sums(call: int) -> torch.Tensor:
            totals = torch.zeros(2, dtype=torch.float64)
            for chunk in parts[call].split(CHUNK) if len(parts[call]) else ():
                target = self.targets(chunk)
                share = as_float64(self.token_weights(chunk))
                totals[0] += float(share @ as_float64(self.gap(chunk, target)).square().sum(-1))
                totals[1] += float(share @ as_float64(target).square().sum(-1))
            return totals

        off, size = self.summed(torch.zeros(2, dtype=torch.float64), sums).tolist()
        return off / size if size else 0.0


def _typical_energy(outputs: torch.Tensor, weights: torch.Tensor) -> float:
    """Median over the tokens of all ranks of weighted ||y||^2; the mean where most are 0, and 1 where all are."""
    energies = torch.cat([chunk.float().square().sum(-1) for chunk in outputs.split(CHUNK)] or [outputs.new_zeros(0)])
    every = torch.cat(ranks().all_gather((energies * weights).cpu()))
    every = every if len(every) else torch.zeros(1)
    return float(every.median()) or float(every.mean()) or 1.0


def gathered(values: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Gather every rank's `values` [T, ...] at its `rows` [n], rank by rank, at all ranks.

    A rank without tokens has values of any shape; they become those of rank 0.
    """
    counts, begin = ranks().all_gather(len(rows)), 0
    dtype, *shape = ranks().broadcast(lambda: [values.dtype, *values.shape[1:]])
    every = allocate((sum(counts), *shape), dtype, values.device)
    for owner, count in enumerate(counts):
        part = every[begin : begin + count]
        if owner == ranks().rank and count:
            part.copy_(values[rows])
        ranks().copy_from(owner, [part])
        begin += count
    return every
