"""The output of the step: a compressed-tensors checkpoint, written a decoder layer at a time.

Before it is put in place, one layer of each kind is loaded as a reader will load it.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from functools import partial as bind
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.reader import CONFIG, refuse_nan
from compressor.checkpoint.source import ModelSource
from compressor.devices import one_thread_each
from compressor.errors import CompressionError
from compressor.model.experts import matrix_of
from compressor.model.loading import PartialModel
from compressor.model.opened import OpenModel, open_model
from compressor.model.remote_code import json_bytes
from compressor.recipe.plan import ExpertPlan
from compressor.steps.cutting import Tensors
from compressor.steps.job import make_job, stored_partial
from compressor.steps.quantize.matrices import DENSE, Matrices, Matrix, target_patterns
from compressor.steps.quantize.scheme import (
    LINEAR,
    Scales,
    Scheme,
    labels,
    quantization_config,
    row_chunks,
)
from compressor.steps.tensors import Named, OutputJob, OutputTensor, in_order_of, tensor_bytes_view
from compressor.tensor_cache import load_tensors, read_metadata

# weights that a thread rounds at once on an accelerator, where they are in float32
ON_DEVICE = 2**25
ROWS = 8  # of a matrix, that are compared as a reader loads them
WHOLE = ("weight_shape", "weight_global_scale")  # stored once for a matrix


def largest_weights(
    schemes: Mapping[str, Scheme], matrices: Sequence[Matrix], read: Callable[[Matrix], Tensor]
) -> Tensors:
    """Largest absolute weight among those that servers fuse, by `Matrix.together`; none but for
    NVFP4. `schemes` are those of a layer's units."""
    largest = dict[str, Tensor]()
    shared = [matrix for matrix in matrices if schemes[matrix.unit].name == "nvfp4"]
    if shared:
        with one_thread_each() as pool:
            ranges = pool.map(
                lambda matrix: schemes[matrix.unit].ranges(read(matrix)[None]), shared
            )
            for matrix, values in zip(shared, ranges, strict=True):
                weight = values.amax()[None]
                earlier = largest.get(matrix.together, weight)
                largest[matrix.together] = torch.maximum(earlier, weight)
    return largest


def rounded(
    scheme: Scheme,
    weight: Tensor,
    most: Tensor,
    dtype: torch.dtype,
    largest: Tensor | None = None,
    clip: bool = False,
) -> Iterator[tuple[Tensor, Scales]]:
    """Codes [B, n, I] and scales, stored in `dtype`, of matrices [B, O, I] with these ranges: n
    rows at a time. With `clip`, the range of each group is searched for."""
    chunks = row_chunks(weight)
    scales = scheme.scales_of(most, dtype, largest)
    for rows, groups in zip(chunks, scales.groups.split(chunks[0].shape[1], dim=1), strict=True):
        values = rows.float().contiguous()
        own = Scales(groups, scales.overall)
        if clip:
            own = scheme.scales(values, dtype, clip, largest)
        yield scheme.codes(values, own), own


@dataclass(frozen=True)
class Writer:
    """Writes a model with these matrices quantised; a layer that a pass over text has quantised
    lies in `kept`, in a file with its name."""

    model: OpenModel
    schemes: Mapping[str, Mapping[str, Scheme]]  # by decoder layer, then by unit
    matrices: Matrices
    kept: Path
    clip: bool = False  # search for ranges also where weights are rounded to nearest

    @cached_property
    def partial(self) -> PartialModel:
        """The model in the dtype that is written."""
        return stored_partial(self.model)

    @property
    def dtype(self) -> torch.dtype:
        return self.partial.dtype

    def scheme(self, matrix: Matrix) -> Scheme:
        return self.schemes[matrix.decoder_layer][matrix.unit]

    def stored(self, matrix: Matrix) -> Mapping[str, tuple[str, tuple[int, ...]]]:
        """Return safetensors dtype and shape of a matrix's tensors, by the last part of a name."""
        return self.scheme(matrix).stored(matrix.rows, matrix.columns, self.dtype)

    def kept_file(self, decoder_layer: str) -> tuple[Path, dict[str, Any] | None]:
        """Return the file of a layer that a pass over text has quantised, and the facts in it; None
        if it is not there, or in other schemes."""
        file = self.kept / f"{decoder_layer}.safetensors"
        facts = read_metadata(file)
        same = facts is not None and facts["schemes"] == labels(self.schemes[decoder_layer])
        return file, facts if same else None

    def job(self, plan: ExpertPlan) -> OutputJob:
        inner = make_job(self.model, plan, through=None if self.matrices.stored else self.partial)
        decoder_layers = ("", *self.model.architecture.decoder_layers)
        outputs = []
        ignored = []  # of multi-token-prediction heads
        for output in inner.outputs:
            if output.name in self.matrices.replaced:
                continue
            name = self.matrices.published.get(output.name, output.name)
            outputs.append(replace(output, name=name))
            is_matrix = name.endswith(".weight") and len(output.shape) == 2
            if is_matrix and output.decoder_layer not in decoder_layers:
                ignored.append(name.removesuffix(".weight"))
        for matrix in self.matrices.every:
            weights = matrix.rows * matrix.columns  # counted with the first of its tensors
            for name, (dtype, shape) in self.stored(matrix).items():
                density = Fraction(weights, math.prod(shape))
                stored_name = f"{matrix.module}.{name}"
                outputs.append(
                    OutputTensor(stored_name, dtype, shape, matrix.decoder_layer, density=density)
                )
                weights = 0
        config = json.loads(bytes(inner.files[CONFIG]))
        ignored = [*self.matrices.ignored, *sorted(ignored)]
        config["quantization_config"] = quantization_config(self._targets(), ignored)
        return replace(
            inner,
            outputs=tuple(in_order_of(inner.decoder_layers, outputs)),
            produce=bind(self._produce, inner),
            files={**inner.files, CONFIG: json_bytes(config)},
            verify=bind(self._verify, inner),
        )

    def _targets(self) -> Mapping[Scheme, Sequence[str]]:
        """Return what the config says is stored in each scheme; the first is one of experts."""
        matrices = dict[Scheme, list[Matrix]]()
        for matrix in sorted(self.matrices.every, key=lambda matrix: matrix.unit == DENSE):
            matrices.setdefault(self.scheme(matrix), []).append(matrix)
        if len(matrices) == 1:
            return dict.fromkeys(matrices, LINEAR)
        return {scheme: target_patterns(members) for scheme, members in matrices.items()}

    def _produce(self, inner: OutputJob, decoder_layer: str) -> Named:
        for tensors in self._quantized(decoder_layer):
            for name, value in tensors.items():
                yield name, iter([tensor_bytes_view(value)])
        for name, pieces in inner.produce(decoder_layer):
            if name not in self.matrices.replaced:
                yield self.matrices.published.get(name, name), pieces
        if decoder_layer and not self.matrices.stored:  # it was loaded to be rounded
            self.partial.release(decoder_layer)

    def _quantized(self, decoder_layer: str) -> Iterator[Tensors]:
        """Yield the stored tensors of a layer's matrices by name: those that are kept, or rounded
        to nearest, on an accelerator several of one shape together, on a CPU each alone."""
        matrices = self.matrices.of(decoder_layer)
        if not matrices:
            return
        file, facts = self.kept_file(decoder_layer)
        if facts is not None:
            yield load_tensors(file)
            return
        if not self.matrices.stored:
            self.partial.load(self.partial.keys_under(decoder_layer))
        largest = largest_weights(self.schemes[decoder_layer], matrices, self._read)
        most = 0 if self.model.partial.device.type == "cpu" else ON_DEVICE
        batches = list[list[Matrix]]()
        kind = None
        for matrix in matrices:
            last = batches[-1] if batches else []
            fits = (len(last) + 1) * matrix.rows * matrix.columns <= most
            if fits and kind == (matrix.unit, matrix.rows, matrix.columns):
                last.append(matrix)
            else:
                batches.append([matrix])
            kind = matrix.unit, matrix.rows, matrix.columns
        with one_thread_each() as pool:
            yield from pool.map(bind(self._packed, largest), batches)

    def _packed(self, largest: Tensors, batch: Sequence[Matrix]) -> Tensors:
        """Round a unit's matrices of one shape to nearest, by stored names; raises
        `CompressionError` for one that holds NaN."""
        scheme = self.scheme(batch[0])
        device = self.model.partial.device
        weights = [self._read(matrix).to(device, non_blocking=True) for matrix in batch]
        weight = torch.stack(weights) if len(weights) > 1 else weights[0][None]
        most = scheme.ranges(weight)
        for number in most.isnan().flatten(1).any(1).nonzero().flatten().tolist():
            name = self._stored_name(batch[number])
            refuse_nan(name, self.model.checkpoint.tensors[name].file, most[number])
        shared = None
        if scheme.name == "nvfp4":
            shared = torch.cat([largest[matrix.together] for matrix in batch]).to(device)
        pieces = dict[str, list[Tensor]]()
        for codes, scales in rounded(scheme, weight, most, self.dtype, shared, self.clip):
            for name, value in scheme.pack(codes, scales, self.dtype).items():
                pieces.setdefault(name, []).append(value)
        stored = dict[str, Tensor]()
        for name, values in pieces.items():
            value = values[0] if name in WHOLE else torch.cat(values, dim=1)
            if name == "weight_shape":  # those of the pieces have fewer rows
                value = torch.tensor([weight.shape[1:]] * len(weight))
            stored[name] = value.cpu()
        packed = dict[str, Tensor]()
        for number, matrix in enumerate(batch):
            packed |= {f"{matrix.module}.{name}": value[number] for name, value in stored.items()}
        return packed

    def _stored_name(self, matrix: Matrix) -> str:
        """Return the stored tensor that is a matrix, or that it is a part of."""
        name = f"{matrix.module}.weight"
        if self.partial.plain_keys.targets.get(name) == matrix.key:
            return name
        return self.matrices.names[matrix.key]

    def _read(self, matrix: Matrix) -> Tensor:
        """Return a matrix of the stage before: of its stored tensor, or of the loaded layer."""
        if not self.matrices.stored:
            return matrix.of(self.partial.model)
        name = self._stored_name(matrix)
        value = self.model.checkpoint.read(name)
        if matrix.expert is None or name == f"{matrix.module}.weight":
            return value
        experts = self.partial.model.get_submodule(matrix.owner)
        return matrix_of(experts, matrix.key.rpartition(".")[2], value[matrix.expert], matrix.part)

    def _verify(self, inner: OutputJob, folder: Path) -> None:
        """Compare of each kind of layer in a written folder, and in each of its schemes, how it is
        loaded with what is stored, by the first rows of each matrix.

        Raises `CompressionError` for a matrix that differs.
        """
        inner.verify(folder)
        source = ModelSource(str(folder), None, folder)
        written = open_model(source, str(self.dtype).removeprefix("torch."), "cpu")
        kinds = set()
        for decoder_layer in self.model.architecture.decoder_layers:
            matrices = self.matrices.of(decoder_layer)
            shapes = []
            for matrix in matrices:
                key = matrix.key.removeprefix(decoder_layer)
                shapes.append((key, matrix.rows, matrix.columns, self.scheme(matrix)))
            kind = frozenset(shapes)
            if not kind or kind in kinds:
                continue
            kinds.add(kind)
            written.partial.load({matrix.key for matrix in matrices})
            for matrix in matrices:
                first = {}
                for name in self.stored(matrix):
                    stored = written.checkpoint.read(f"{matrix.module}.{name}")
                    first[name] = stored if name in WHOLE else stored[:ROWS]
                if "weight_shape" in first:
                    first["weight_shape"] = torch.tensor([min(ROWS, matrix.rows), matrix.columns])
                loaded = matrix.of(written.partial.model)[:ROWS]
                if not torch.equal(loaded, self.scheme(matrix).unpack(first).to(loaded.dtype)):
                    raise CompressionError(
                        f"{matrix.module} is not loaded as it was quantised to "
                        f"{self.scheme(matrix).label}; please report this"
                    )
            written.partial.release(decoder_layer)
