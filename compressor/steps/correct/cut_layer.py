"""One MoE layer as it was recorded, and as it was cut: what is to come back, and the float32 tensors to refit for it.

T tokens, n of them at a time, K top-k, N experts, H hidden, I intermediate. What is recorded stays in the computing
dtype; past a budget it lies in unlinked mapped files.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from compressor.distributed.present import here
from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer
from compressor.model.buffers import allocate, as_arguments, as_call, picked, token_dim
from compressor.model.experts import ExpertsView, Parameters, apply_expert, expert_parameters, routed
from compressor.model.loading import parent_and_name
from compressor.steps.correct.pieces import Pieces

CHUNK = 4096  # tokens computed at once


class _Rows:
    """Rows appended batch by batch to one tensor whose final length is foreseen."""

    def __init__(self, expected: int) -> None:
        self.expected, self.used = expected, 0
        self._buffer: torch.Tensor | None = None

    def append(self, rows: torch.Tensor) -> None:
        need = self.used + len(rows)
        if self._buffer is None or need > len(self._buffer):
            grown = allocate((max(self.expected, need), *rows.shape[1:]), rows.dtype, rows.device)
            if self._buffer is not None:
                grown[: self.used] = self._buffer[: self.used]
            self._buffer = grown
        self._buffer[self.used : need] = rows
        self.used = need

    @classmethod
    def of(cls, value: torch.Tensor) -> "_Rows":
        found = cls(len(value))
        found._buffer, found.used = value, len(value)
        return found

    @property
    def value(self) -> torch.Tensor:
        return torch.zeros(0, 1) if self._buffer is None else self._buffer[: self.used]


@dataclass(slots=True)
class _Argument:
    """One argument of the router: by tokens (`dim` counts them), the experts' own input, a block's tensor, or plain."""

    keyword: str | None
    dim: int | None = None
    rows: _Rows | None = None  # None with a `dim`: it is what the experts get
    key: str | None = None  # a parameter or buffer of the block, by name
    plain: Any = None

    @property
    def told(self) -> dict[str, Any]:
        """What a rank that has recorded nothing is told."""
        simple = self.plain is None or isinstance(self.plain, bool | int | float | str)
        said = {"keyword": self.keyword, "dim": self.dim, "key": self.key, "plain": self.plain if simple else None}
        return {**said, "rows": self.rows is not None, "simple": simple}

    @classmethod
    def of(cls, said: Mapping[str, Any]) -> "_Argument":
        """The argument that is told of, of no token yet."""
        if not said["simple"]:
            raise CompressionError("a rank has no text of its own here; start fewer ranks, or give more text")
        return cls(said["keyword"], said["dim"], _Rows(0) if said["rows"] else None, said["key"], said["plain"])


@dataclass(slots=True)
class Recording:
    """Inputs [T, H] and outputs [T, H] of a layer's experts module, and the router's arguments, on the same tokens."""

    layer: MoeLayer
    expected: int  # tokens foreseen
    heldout: Collection[int] = ()  # numbers of the batches that are
    seen: list[tuple[int, bool]] = field(default_factory=list)  # of each call: tokens, whether held out
    calls: list[tuple[int, int]] = field(default_factory=list)  # of each call: number of the batch, tokens
    arguments: list[_Argument] = field(default_factory=list)
    _inputs: _Rows = field(init=False)
    _outputs: _Rows = field(init=False)
    _call: tuple[tuple[Any, ...], dict[str, Any]] | None = None
    _handles: list[Any] = field(default_factory=list)
    _own: dict[int, str] = field(default_factory=dict)
    _batch: int = 0

    def __post_init__(self) -> None:
        self._inputs, self._outputs = _Rows(self.expected), _Rows(self.expected)

    def attach(self, model: Any) -> None:
        """Start recording the layer of `model`."""
        block = model.get_submodule(self.layer.block)
        self._own = {id(value): name for name, value in (*block.named_parameters(), *block.named_buffers())}
        self._handles = [
            model.get_submodule(self.layer.router).register_forward_pre_hook(self._before_router, with_kwargs=True),
            model.get_submodule(self.layer.name).register_forward_hook(self._after_experts),
        ]

    def detach(self) -> None:
        """Stop recording."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._call = [], None

    def enter(self, batch: int) -> None:
        """The batch of this number is about to run."""
        self._batch = batch

    def _before_router(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._call = (args, kwargs)

    def _after_experts(self, module: Any, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        hidden = args[0]
        if self._call is None or hidden.numel() == 0:
            return
        named = as_arguments(*self._call)
        if not self.arguments:
            self.arguments = [self._described(keyword, value, hidden) for keyword, value in named]
        for argument, (_, value) in zip(self.arguments, named, strict=True):
            if argument.rows is not None:
                argument.rows.append(value if argument.dim == 0 else value.flatten(0, 1))
        self._inputs.append(hidden)
        self._outputs.append(output)
        self.seen.append((len(hidden), self._batch in self.heldout))
        self.calls.append((self._batch, len(hidden)))
        self._call = None

    def _described(self, keyword: str | None, value: Any, hidden: torch.Tensor) -> _Argument:
        if id(value) in self._own:
            return _Argument(keyword, key=self._own[id(value)])
        dim = token_dim(value, len(hidden))
        if dim is None:
            return _Argument(keyword, plain=value)
        same = value.data_ptr() == hidden.data_ptr() and value.numel() == hidden.numel()
        return _Argument(keyword, dim, None if same else _Rows(self.expected))

    @property
    def inputs(self) -> torch.Tensor:
        """[T, H] what the experts were given."""
        return self._inputs.value

    @property
    def outputs(self) -> torch.Tensor:
        """[T, H] what the original experts module put out."""
        return self._outputs.value

    def positions(self, heldout: bool) -> torch.Tensor:
        """Positions [n] of the tokens that are held out, or of the others."""
        kept = [torch.full((size,), held is heldout) for size, held in self.seen]
        return torch.cat(kept).nonzero().flatten() if kept else torch.arange(0)

    def everywhere(self, pieces: Pieces, rows: torch.Tensor) -> "Recording":
        """What all ranks have recorded at their `rows`, in the order of the pieces, at every rank.

        Raises `CompressionError` at a rank that has recorded nothing, if it cannot be told what the router is given.
        """
        found = Recording(self.layer, 0)
        found._inputs, found._outputs = (
            _Rows.of(pieces.everywhere(value, rows)) for value in (self.inputs, self.outputs)
        )
        told = here().told(lambda: [argument.told for argument in self.arguments])
        for argument in self.arguments or [_Argument.of(said) for said in told]:
            own = argument.rows
            made = None if own is None else _Rows.of(pieces.everywhere(own.value, rows))
            found.arguments.append(replace(argument, rows=made))
        return found

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
class CutLayer:
    """A smaller layer's experts, one set of float32 parameters each, and its live router, beside what was recorded."""

    recording: Recording
    experts: Any  # the smaller model's experts module, for its flags and activation
    router: Any
    block: Any
    parameters: list[Parameters]
    floor: float = 1.0  # added to ||y||^2 in a token's weight
    pieces: Pieces = field(init=False)  # of the tokens of all ranks; those that methods take and give are this rank's

    def __post_init__(self) -> None:
        self.pieces = Pieces.of(self.recording.calls)

    @classmethod
    def of(cls, recording: Recording, experts: Any, router: Any, block: Any) -> "CutLayer":
        """Take float32 copies of the experts' parameters; the router's own are used as they are."""
        wide = ExpertsView(experts, lambda name, expert, value: value.detach().to(torch.float32, copy=True))
        copies = [expert_parameters(wide, expert) for expert in range(len(experts.down_proj))]
        return cls(recording, experts, router, block, copies, _typical_energy(recording.outputs))

    def everywhere(self, rows: torch.Tensor) -> tuple["CutLayer", torch.Tensor]:
        """The layer with what all ranks have recorded at their `rows`, and all places in that.

        Its parameters are those of this layer. It is for computing outputs alone, and judges nothing.
        """
        found = copy.copy(self)
        found.recording = self.recording.everywhere(self.pieces, rows)
        return found, torch.arange(len(found.recording.inputs))

    def more_kept(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What is refitted beside experts and router, each tensor with the place where its best state is kept."""
        return []

    def route(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Gate weights [n, K] and slots [n, K] that the smaller router gives the tokens at `rows` [n]."""
        positional, by_keyword = self.recording.router_arguments(rows, self.block)
        output = self.router(*positional, **by_keyword)
        return output[1].reshape(len(rows), -1).float(), output[2].reshape(len(rows), -1)

    def inputs(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, H] what the experts are given there, in float32."""
        return picked(self.recording.inputs, rows).float()

    def targets(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, H] what the original layer's experts put out there, in float32."""
        return picked(self.recording.outputs, rows).float()

    def token_weights(self, targets: torch.Tensor) -> torch.Tensor:
        """[n]: 1 / (||y||^2 + its median), so that a few tokens of huge output do not drown all others."""
        return 1.0 / (targets.square().sum(-1) + self.floor)

    def gap(self, rows: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """[n, H] the targets there minus what the smaller layer puts out, computed at once and with gradients."""
        return targets - self.output(self.inputs(rows), *self.route(rows))

    @property
    def choices(self) -> int:
        """How many experts the router chooses from, and whatever stands for some."""
        return len(self.parameters)

    def put_out(self, slot: int, x: torch.Tensor) -> torch.Tensor:
        """What the expert in a slot makes of its inputs [m, H], before its gate's weight; [m, H], or [H] for all."""
        return apply_expert(self.experts, self.parameters[slot], x)

    def output(self, x: torch.Tensor, weights: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """[n, H]: the gate-weighted sum of the chosen experts' outputs."""
        total = torch.zeros_like(x)
        for slot, rows, places in routed(weights, index):
            total.index_add_(0, rows, self.put_out(slot, x.index_select(0, rows)) * weights[rows, places, None])
        return total

    @torch.no_grad()
    def residual(self, chunks: Sequence[torch.Tensor]) -> torch.Tensor:
        """[n, H] targets minus outputs at the tokens of all chunks."""
        return torch.cat([self.gap(chunk, self.targets(chunk)) for chunk in chunks])

    @torch.no_grad()
    def error(self, rows: torch.Tensor) -> float:
        """Weighted sum of ||y - y'||^2 over that of ||y||^2 at `rows`; 0 where there is nothing to bring back.

        Of several ranks it is that of all their tokens at `rows`, and all must ask at once.
        """
        parts = self.pieces.split(rows)

        def sums(piece: int) -> torch.Tensor:
            found = torch.zeros(2, dtype=torch.float64)
            for chunk in parts[piece].split(CHUNK) if len(parts[piece]) else ():
                target = self.targets(chunk)
                share = self.token_weights(target).double()
                found[0] += float(share @ self.gap(chunk, target).double().square().sum(-1))
                found[1] += float(share @ target.double().square().sum(-1))
            return found

        off, size = self.pieces.sum(torch.zeros(2, dtype=torch.float64), sums).tolist()
        return off / size if size else 0.0


def _typical_energy(outputs: torch.Tensor) -> float:
    """Median over the tokens of all ranks of ||y||^2; the mean where most are 0, and 1 where all are."""
    energies = torch.cat([chunk.float().square().sum(-1) for chunk in outputs.split(CHUNK)] or [outputs.new_zeros(0)])
    found = here().gathered(energies.cpu().numpy().tobytes())

    def typical() -> float:
        content = b"".join(found)
        every = torch.frombuffer(bytearray(content), dtype=torch.float32) if content else torch.zeros(1)
        return float(every.median()) or float(every.mean()) or 1.0

    return float(here().told(typical))
