"""One MoE layer as it was recorded and as it was cut: the target output, and the float32 tensors to
refit.

T tokens, n of them at a time, K top-k, N experts, H hidden, I intermediate. Recordings stay in the
computing dtype, and past a budget in unlinked mapped files. Each of several ranks records its own
batches' tokens."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from compressor.data.batches import Calibration
from compressor.data.emphasis import rebalanced
from compressor.devices import as_float64
from compressor.distributed import ranks
from compressor.model.experts import (
    CHUNK,
    Choices,
    Parameters,
    apply_gated,
    expert_parameters,
    moe_hooks,
)
from compressor.model.moe_layer import MoeLayer
from compressor.model.streaming import (
    allocate,
    as_arguments,
    as_call,
    picked,
    stream_weights,
    token_dim,
)

SMALL = 2**20  # bytes of experts that go together on a processor, whose caches hold their tokens


@dataclass
class Rows:
    """Rows appended batch by batch to one buffer of an expected final length."""

    expected: int
    buffer: Tensor | None = None
    used: int = 0

    def append(self, rows: Tensor) -> None:
        need = self.used + len(rows)
        if self.buffer is None or need > len(self.buffer):
            grown = allocate((max(self.expected, need), *rows.shape[1:]), rows.dtype, rows.device)
            if self.buffer is not None:
                grown[: self.used] = self.buffer[: self.used]
            self.buffer = grown
        self.buffer[self.used : need] = rows
        self.used = need

    @property
    def value(self) -> Tensor:
        return torch.zeros(0, 1) if self.buffer is None else self.buffer[: self.used]


@dataclass
class _Argument:
    """One argument of the router: rows by token (`dim` counts them), a tensor of the block, or a
    plain value."""

    keyword: str | None
    dim: int | None = None
    rows: Rows | None = None  # None with a `dim`: the experts' own input
    key: str | None = None  # a parameter or buffer of the block, by name
    plain: Any = None


class Recording:
    """Inputs [T, H] and outputs [T, H] of a layer's experts module, and the router's arguments, on
    the same tokens."""

    def __init__(
        self,
        model: Any,
        layer: MoeLayer,
        calibration: Calibration,
        balances: bool = False,
    ) -> None:
        """Record what the layer of the `model` computes from now on; sources of text are told apart
        if it `balances` them."""
        self.layer = layer
        self.calibration = calibration
        self.sources = torch.tensor(calibration.sources if balances else ())
        self.arguments = list[_Argument]()
        self.expected = calibration.tokens
        # the number of each token's batch, and so on
        self.numbers, self._inputs, self._outputs, self._weights = (
            Rows(self.expected) for _ in range(4)
        )
        self._call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
        self._batch = 0
        self._taken = 0  # tokens of this batch
        self._hooks = ExitStack()
        self._rows_out = 0  # rows whose batch has left the decoder layer
        block = model.get_submodule(layer.block)
        named = chain(block.named_parameters(), block.named_buffers())
        self._block_tensors = {id(value): name for name, value in named}
        hooks = moe_hooks(model, layer, on_router=self._router_ran, on_output=self._experts_ran)
        self._hooks.enter_context(hooks)

    def detach(self) -> None:
        self._hooks.close()

    def enter(self, batch: int) -> None:
        self._batch = batch
        self._taken = 0

    def _router_ran(self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        self._call = (args, kwargs)

    def _experts_ran(self, hidden: Tensor, output: Tensor) -> None:
        if self._call is None or hidden.numel() == 0:
            return
        call = as_arguments(*self._call)
        self._call = None
        if not self.arguments:
            for keyword, value in call:
                argument = _Argument(keyword, key=self._block_tensors.get(id(value)))
                if argument.key is None:
                    argument.dim = token_dim(value, len(hidden))
                    if argument.dim is None:
                        argument.plain = value
                    # one that is the experts' own input is not recorded once more
                    elif value.data_ptr() != hidden.data_ptr() or value.numel() != hidden.numel():
                        argument.rows = Rows(self.expected)
                self.arguments.append(argument)
        for argument, (_, value) in zip(self.arguments, call, strict=True):
            if argument.rows is not None:
                argument.rows.append(value if argument.dim == 0 else value.flatten(0, 1))
        weights = torch.ones(len(hidden), device=output.device)
        if self.calibration.emphasis:
            begin = self._taken
            self._taken += len(hidden)
            emphasis = self.calibration.emphasis[self._batch].flatten()
            weights = emphasis[begin : self._taken].to(output.device)
        self._inputs.append(hidden)
        self._outputs.append(output)
        self._weights.append(weights)
        self.numbers.append(torch.full((len(hidden),), self._batch))

    def on_layer_output(self, hidden: Tensor, shift: Tensor | None = None) -> None:
        """Take the hidden states [B, L, H] behind the decoder layer, and a `shift`, alike, to add
        to the outputs.

        An error counts by the inverse square of the hidden state.
        """
        rows = slice(self._rows_out, self._outputs.used)
        self._rows_out = rows.stop
        if rows.start == rows.stop:
            return
        weights = self._weights.value[rows]
        weights *= stream_weights(hidden, len(weights)).to(weights)
        if shift is not None:
            outputs = self.outputs[rows]
            outputs += shift.flatten(0, -2).to(outputs)

    @property
    def inputs(self) -> Tensor:
        """Input of the experts module: [T, H]."""
        return self._inputs.value

    @property
    def outputs(self) -> Tensor:
        """Output of the base's experts module: [T, H]."""
        return self._outputs.value

    @property
    def weights(self) -> Tensor:
        """The weight of each token's error: [T]."""
        return self._weights.value.flatten()

    @property
    def batches(self) -> Tensor:
        """The number of each token's batch: [T]."""
        return self.numbers.value.flatten().long()

    def sources_of(self, rows: Tensor) -> Tensor:
        """Return the source [n] of the tokens at `rows` [n]."""
        if not len(self.sources):
            return torch.zeros(len(rows), dtype=torch.long)
        return self.sources[self.batches[rows.cpu()]]

    def positions(self, heldout: bool) -> Tensor:
        """Return the positions [n] of the tokens that are held out, or of the others."""
        numbers = torch.tensor([*self.calibration.heldout], dtype=torch.int64)
        is_heldout = torch.isin(self.batches, numbers)
        return (is_heldout == heldout).nonzero().flatten()

    def places(self, rows: Tensor) -> tuple[Tensor, int]:
        """Return the places [n] of `rows` among those of all ranks, in the order of the batches,
        and their number."""
        by_rank = ranks().all_gather(self.batches[rows])
        places = torch.cat(by_rank).argsort(stable=True).argsort()
        begin = sum(map(len, by_rank[: ranks().rank]))
        return places[begin : begin + len(rows)], len(places)

    def chunks(self, rows: Tensor) -> Iterator[Tensor]:
        """Split the positions `rows` [n], ascending, by the batches that they lie in, and into
        chunks."""
        _, counts = torch.unique_consecutive(self.batches[rows], return_counts=True)
        for part in rows.split(counts.tolist()):
            yield from part.split(CHUNK)

    def router_arguments(self, rows: Tensor, block: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the router's arguments for the tokens at `rows` [n], in float32, with tensors of
        `block` itself."""

        def value(argument: _Argument) -> Any:
            if argument.key is not None:
                return attrgetter(argument.key)(block)
            if argument.dim is None:
                return argument.plain
            values = picked(self.inputs if argument.rows is None else argument.rows.value, rows)
            values = values.float() if values.is_floating_point() else values
            return values[None] if argument.dim == 1 else values

        return as_call((argument.keyword, value(argument)) for argument in self.arguments)


@dataclass
class RefittedConstants:
    """Constants [D, H] in float32 that stand for experts of a layer, in slots behind those of the
    experts it keeps."""

    values: Tensor
    best: Tensor  # as they will be stored
    slots: Tensor  # [E] of each expert that the router knows


class CutLayer:
    """A smaller layer's experts in float32, its live router, and the recording."""

    def __init__(
        self,
        recording: Recording,
        experts: Any,
        router: Any,
        block: Any,
        constants: RefittedConstants | None = None,
    ) -> None:
        """Take float32 copies of the parameters of the smaller `experts`; the router's own are used
        as they are."""
        self.recording = recording
        self.experts = experts
        self.router = router
        self.block = block
        self.constants = constants
        self.parameters: Parameters = {  # [N, ...]
            name: value.detach().to(torch.float32, copy=True)
            for name, value in expert_parameters(experts).items()
        }
        self.count = len(self.parameters["down_proj"])
        # the median over all ranks' tokens of weighted ||y||^2; the mean where most are 0
        chunks = recording.outputs.split(CHUNK)
        energies = torch.cat([chunk.float().square().sum(-1).cpu() for chunk in chunks])
        all_energies = torch.cat(ranks().all_gather(energies * recording.weights.cpu()))
        typical = 1.0
        if len(all_energies):
            typical = float(all_energies.median()) or float(all_energies.mean()) or 1.0
        # of the tokens' weights
        self.weight_scale = float(1.0 / torch.tensor(typical))
        sources = 1 + int(recording.sources.max()) if len(recording.sources) else 1
        self.source_weights = torch.ones(sources, dtype=torch.float64)  # of mean 1

    @cached_property
    def groups(self) -> list[slice]:
        """The experts to compute at once: all, but on a processor few enough for its caches."""
        size = self.count
        if self.parameters["down_proj"].device.type == "cpu":
            nbytes = sum(value.nbytes for value in self.parameters.values())
            size = max(1, self.count * SMALL // nbytes)
        return [slice(begin, min(begin + size, self.count)) for begin in range(0, self.count, size)]

    def slices(self, group: slice) -> Parameters:
        """Return the parameters of a group of experts: views."""
        return {name: value[group] for name, value in self.parameters.items()}

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return gate weights [n, K] and slots [n, K] that the smaller router gives the tokens at
        `rows` [n]."""
        positional, by_keyword = self.recording.router_arguments(rows, self.block)
        output = self.router(*positional, **by_keyword)
        weights, index = (part.reshape(len(rows), -1) for part in output[1:3])
        return weights.float(), (
            index if self.constants is None else self.constants.slots[index]
        ).long()

    def inputs(self, rows: Tensor) -> Tensor:
        """Return the inputs of the experts there, in float32: [n, H]."""
        return picked(self.recording.inputs, rows).float()

    def targets(self, rows: Tensor) -> Tensor:
        """Return the outputs of the base's experts there, in float32: [n, H]."""
        return picked(self.recording.outputs, rows).float()

    def token_weights(self, rows: Tensor) -> Tensor:
        """Return how much the error of each token at `rows` [n] counts: [n].

        1 / ||h||^2, h the hidden state behind the layer, over the median of that times ||y||^2;
        times what tokens are emphasised by, and the weights of their sources."""
        weights = picked(self.recording.weights, rows).float() * self.weight_scale
        if len(self.source_weights) > 1:
            weights = weights * self.source_weights[self.recording.sources_of(rows)].to(weights)
        return weights

    def gap(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Return the targets there minus the smaller layer's output, computed at once and with
        gradients: [n, H]."""
        total = torch.zeros_like(targets)
        parameters = [self.slices(group) for group in self.groups]
        for tokens, output in self.gated_outputs(rows, *self.route(rows), parameters):
            total.index_add_(0, tokens, output)
        return targets - total

    def gated_outputs(
        self,
        rows: Tensor,
        weights: Tensor,
        index: Tensor,
        parameters: Sequence[Parameters],
        dtype: torch.dtype = torch.float32,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield tokens [m] and the outputs [m, H] times their gate weights of each group of
        experts, then of constants.

        The routing [n, K] is that of the tokens at `rows` [n], the `parameters` are those of
        `groups`, and products are in `dtype`. A single group without constants asks the device for
        no number."""
        x = self.inputs(rows).to(dtype)
        choices = Choices.of(weights, index, self.count)  # those of constants come last
        groups = self.groups
        parts = [choices]
        if len(groups) > 1 or self.constants is not None:
            bounds = [0, *choices.ends[[group.stop - 1 for group in groups]].tolist()]
            parts = [
                choices.between(*span, weights)
                for span in zip(groups, bounds, bounds[1:], strict=False)
            ]
        for values, part in zip(parameters, parts, strict=True):
            computing = {name: value.to(dtype) for name, value in values.items()}
            selected = x.index_select(0, part.tokens)
            yield part.tokens, apply_gated(self.experts, computing, selected, part)
        if self.constants is not None:
            gates = self.constant_weights(weights, index)
            yield torch.arange(len(x), device=x.device), gates @ self.constants.values

    def constant_weights(self, weights: Tensor, index: Tensor) -> Tensor:
        """Return the gate weights [n, D] of the layer's constants in a routing [n, K]."""
        assert self.constants is not None
        gates = weights.new_zeros(len(weights), len(self.constants.values))
        slots = index - self.count
        return gates.scatter_add(1, slots.clamp(min=0), weights * (slots >= 0))

    def reached(self, weights: Tensor, index: Tensor) -> Tensor:
        """Return how many tokens of all ranks reach each expert or constant in a routing [n, K]."""
        slots = self.count + (0 if self.constants is None else len(self.constants.values))
        counts = torch.zeros(slots, device=self.parameters["down_proj"].device)
        counts.index_add_(0, index.flatten(), (weights.detach() != 0).flatten().to(counts.dtype))
        return ranks().all_reduce(counts)

    @torch.no_grad()
    def errors(self, rows: Tensor) -> Tensor:
        """Return of each source the weighted sum of ||y - y'||^2 over that of ||y||^2 at all ranks'
        `rows`: [S].

        0 if all y are 0; that of all sources for one without tokens.
        """
        sums = torch.zeros(len(self.source_weights), 2, dtype=torch.float64)
        for chunk in self.recording.chunks(rows):  # of a batch, which has one source
            targets = self.targets(chunk)
            weights = as_float64(picked(self.recording.weights, chunk).float() * self.weight_scale)
            sums = sums.to(weights.device)
            energies = [
                as_float64(value).square().sum(-1) for value in (self.gap(chunk, targets), targets)
            ]
            sums[int(self.recording.sources_of(chunk[:1]))] += torch.stack(energies) @ weights
        sums = ranks().all_reduce(sums)
        missed, size = torch.where(sums[:, 1:] > 0, sums, sums.sum(0)).cpu().T
        return torch.where(size > 0, missed / size, 0.0)

    def error(self, rows: Tensor) -> float:
        """Return the largest error of a source."""
        return float(self.errors(rows).max())

    def rebalance(self) -> None:
        """Let the weights of several sources grow with their errors on held-out tokens."""
        if len(self.source_weights) > 1:
            errors = self.errors(self.recording.positions(heldout=True))
            self.source_weights = rebalanced(self.source_weights, errors)
