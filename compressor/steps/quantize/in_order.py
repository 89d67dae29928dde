"""Layers in order, each quantised by GPTQ on what the quantised earlier layers make of the calibration text.

Of a layer, dense matrices come first, all on the inputs that they have now; then the experts, one after the other, on
the tokens that are routed to them: gate and up, and then down on what the rounded gate and up give it. Tokens wait as
they are, so that one expert's Hessians exist at a time.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.data.batches import Calibration
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.model.experts import Watch, expert_parameters, intermediate
from compressor.model.loading import parent_and_name, set_tensor
from compressor.model.moe_layer import MoeLayer
from compressor.model.streaming import Pass, Replay
from compressor.progress import Progress
from compressor.steps.correct.cut_layer import Recording, Rows
from compressor.steps.correct.in_order import RecordingVisitor
from compressor.steps.job import stored_partial
from compressor.steps.quantize.gptq import gptq, inverse_factor
from compressor.steps.quantize.matrices import Matrices, Matrix
from compressor.steps.quantize.scheme import Scheme
from compressor.steps.quantize.straight_through import tune_rounded
from compressor.steps.quantize.writing import Kept, Packed, Writer, largest_weights

HESSIANS = 2**25  # bytes of Hessians that exist at a time, but for a single one
CHUNK = 4096  # tokens whose outer products are added up at once


@dataclass(slots=True)
class Routed:
    """Hidden states [T, H] that came to a layer's experts, and which [T, K] each went to; -1 for a choice unused."""

    layer: MoeLayer
    expected: int
    hidden: Rows = field(init=False)
    index: Rows = field(init=False)

    def __post_init__(self) -> None:
        self.hidden, self.index = Rows(self.expected), Rows(self.expected)

    def watch(self, model: Any, computing: bool) -> Watch:
        return Watch(model, self.layer, on_experts=self._came, computing=computing)

    def _came(self, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        self.hidden.append(hidden)
        self.index.append(index.masked_fill(weights == 0, -1))

    def to(self, expert: int) -> Tensor:
        """Hidden states [n, H] of an expert's tokens, in float32."""
        if not self.hidden.used:
            return torch.zeros(0, 1)
        rows = (self.index.value == expert).any(1).nonzero().flatten()
        return self.hidden.value.index_select(0, rows).float()


def hessian_of(inputs: Iterable[Tensor], matrix: Matrix, device: torch.device) -> Tensor:
    """X^T X [I, I] in float32 of a matrix's inputs [n, I] of all processes."""
    total = torch.zeros(matrix.columns, matrix.columns, device=device)
    for value in inputs:
        for chunk in value.float().split(CHUNK) if len(value) else ():
            total.addmm_(chunk.T, chunk)
    return summed(total, matrix)


def summed(hessian: Tensor, matrix: Matrix) -> Tensor:
    """The sum of all processes' Hessians of a matrix; raises `CompressionError` for one that is not finite."""
    total = ranks().all_reduce(hessian)
    if not bool(total.isfinite().all()):
        fault = "its inputs are not finite on the calibration text"
        raise CompressionError(f"{matrix.module}: {fault}; try --dtype float32")
    return total


@dataclass(slots=True)
class Quantizing(RecordingVisitor):
    """Quantises each layer before the batches pass it."""

    scheme: Scheme
    matrices: Matrices
    kept: Kept
    dtype: torch.dtype  # that is written
    steps: int  # of training
    seed: int
    tensors: dict[str, Tensor] = field(default_factory=dict)  # of the layer that is being quantised
    sums: dict[str, int] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)  # of matrices that share a scale, where a scheme has one
    scales: dict[Matrix, Tensor] = field(default_factory=dict)  # of the layer's matrices: [O, n]

    def before_layer(self, unit: str, replay: Replay) -> None:
        own = self.matrices.of(unit)
        if not own:
            return
        live = self.model.partial.model
        for key in dict.fromkeys(matrix.key for matrix in own):  # loaded tensors may be the files' own
            set_tensor(live, key, live.get_parameter(key).detach().clone())
        if self.kept.sums(unit) is not None:
            tensors = self.kept.tensors(unit)
            for matrix in own:
                prefix = f"{matrix.module}."
                stored = {name.removeprefix(prefix): tensors[name] for name in self._names(matrix)}
                matrix.of(live).copy_(self.scheme.unpack(stored))
            for key, name in self.matrices.names.items():
                if name in tensors:  # of a router
                    set_tensor(live, key, tensors[name].to(self.model.partial.device))
            return
        self.tensors, self.sums, self.scales = {}, {}, {}
        self.largest = largest_weights(own, lambda matrix: matrix.of(live)) if self.scheme.name == "nvfp4" else {}
        assert self.calibration is not None
        numbers = range(len(self.calibration.batches))
        if dense := [matrix for matrix in own if matrix.expert is None]:
            self._quantize_dense(live, dense, lambda: replay(numbers))
        layers = [layer for layer in self.at.moe_layers if any(matrix.owner == layer.name for matrix in own)]
        recorded = [Routed(layer, self.calibration.tokens) for layer in layers]
        watches = [each.watch(live, self.steps > 0 or len(layers) > 1).attach() for each in recorded]
        recordings = self.record(layers, replay) if self.steps else []
        if not self.steps:
            replay(numbers)
        for watch in watches:
            watch.detach()
        for each in recorded:
            self._quantize_experts(live, each, [matrix for matrix in own if matrix.owner == each.layer.name])
        for recording in recordings:
            self._tune(live, recording)
        if ranks().is_first:
            self.kept.save(unit, self.sums, self.tensors)
        ranks().barrier()
        self.tensors = {}

    def _names(self, matrix: Matrix) -> list[str]:
        return [f"{matrix.module}.{name}" for name in self.scheme.stored(matrix.rows, matrix.columns, self.dtype)]

    def _quantize_dense(self, live: Any, dense: Sequence[Matrix], run: Callable[[], None]) -> None:
        inputs: dict[str, Tensor] = {
            matrix.owner: torch.zeros(matrix.columns, matrix.columns, device=self.model.partial.device)
            for matrix in dense
        }

        def seen(name: str, module: Any, args: tuple[Any, ...]) -> None:
            for chunk in args[0].detach().flatten(0, -2).float().split(CHUNK):
                inputs[name].addmm_(chunk.T, chunk)

        handles = [live.get_submodule(name).register_forward_pre_hook(partial(seen, name)) for name in inputs]
        run()
        for handle in handles:
            handle.remove()
        for matrix in dense:
            self._round(live, [matrix], inverse_factor(summed(inputs[matrix.owner], matrix)[None]))

    def _quantize_experts(self, live: Any, routed: Routed, matrices: Sequence[Matrix]) -> None:
        experts, device = live.get_submodule(routed.layer.name), self.model.partial.device
        own = {(matrix.expert, matrix.part): matrix for matrix in matrices}
        hidden, width = (own[0, part].columns for part in ("up", "down"))
        at_once = max(1, HESSIANS // (4 * max(hidden, width) ** 2))
        for numbers in torch.arange(routed.layer.experts).split(at_once):
            some = numbers.tolist()  # whose inputs are taken one expert's at a time
            hessians = [hessian_of([routed.to(expert)], own[expert, "up"], device) for expert in some]
            upper = inverse_factor(torch.stack(hessians))
            for part in ("gate", "up") if experts.has_gate else ("up",):
                self._round(live, [own[expert, part] for expert in some], upper)
            inner = ((expert, _inner(experts, expert, routed.to(expert))) for expert in some)
            hessians = [hessian_of(inputs, own[expert, "down"], device) for expert, inputs in inner]
            self._round(live, [own[expert, "down"] for expert in some], inverse_factor(torch.stack(hessians)))

    def _round(self, live: Any, batch: Sequence[Matrix], upper: Tensor) -> None:
        """Round matrices, put their values into the live model, and keep them as they are stored."""
        weight = torch.stack([matrix.of(live).float() for matrix in batch])
        shared = torch.cat([self.largest[matrix.together] for matrix in batch]) if self.largest else None
        scales = self.scheme.scales(weight, self.dtype, clip=True, largest=shared)
        made = Packed.of(self.scheme, batch, gptq(self.scheme, weight, scales, upper), scales, self.dtype)
        self._put(live, batch, made)
        self.scales |= {matrix: scales.groups[number] for number, matrix in enumerate(batch)}

    def _put(self, live: Any, batch: Sequence[Matrix], made: Packed) -> None:
        for matrix, value in zip(batch, made.values, strict=True):
            matrix.of(live).copy_(value)
        self.tensors |= made.tensors
        self.sums |= made.sums

    def _tune(self, live: Any, recording: Recording) -> None:
        """Train a layer through its rounding, and keep what that has changed."""
        layer, names = recording.layer, self.matrices.names
        scales = {matrix: scale for matrix, scale in self.scales.items() if matrix.owner == layer.name}
        router = {tensor.key for tensor in layer.tensors if tensor.key in names} - {matrix.key for matrix in scales}
        tuned = tune_rounded(live, recording, self.scheme, scales, router, self.dtype, self.steps, self.seed)
        for matrix, (codes, found) in tuned.kept.items():
            self._put(live, [matrix], Packed.of(self.scheme, [matrix], codes, found, self.dtype))
        self.tensors |= {names[key]: getattr(*parent_and_name(live, key)).detach().clone() for key in tuned.router}


def _inner(experts: Any, expert: int, inputs: Tensor) -> Iterator[Tensor]:
    """What an expert's down projection is given for its tokens [n, H], in chunks [m, I]."""
    parameters = expert_parameters(experts, expert)
    for chunk in inputs.split(CHUNK) if len(inputs) else ():
        yield intermediate(experts, parameters, chunk.to(experts.down_proj.dtype))


def quantize_in_order(writer: Writer, calibration: Calibration, progress: Progress, steps: int, seed: int) -> None:
    """Quantise all layers by GPTQ, with so many steps of training, in one pass over calibration text.

    Those that are kept already are not made again.
    """
    model, dtype = writer.model, stored_partial(writer.model).dtype
    how = (writer.scheme, writer.matrices, writer.kept, dtype, steps, seed)
    visitor = Quantizing(model, calibration, *how)
    units = {matrix.unit for matrix in writer.matrices.every}
    one = Pass(model, calibration.batches, progress, "quantize", seed, wanted=units, shared=True)
    with torch.no_grad():
        one.run(visitor)
    ranks().barrier()
