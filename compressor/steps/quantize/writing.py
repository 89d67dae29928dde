"""The output of the step: a compressed-tensors checkpoint, written a decoder layer at a time and read once more.

Before the output is put in place every matrix is loaded as a reader will load it, and compared with what it was rounded
to: by a checksum of its values, which waits in the work folder.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial as bind
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.reader import DTYPE_NAMES, Size, refuse_nan, tensor_bytes
from compressor.checkpoint.source import ModelSource
from compressor.devices import one_thread_each
from compressor.errors import CompressionError
from compressor.kept import facts_of, keep_tensors, kept_tensors
from compressor.model.experts import matrix_of
from compressor.model.opened import OpenModel, open_model
from compressor.recipe.plan import ExpertPlan
from compressor.steps.job import files_with, make_job, output_size, stored_partial
from compressor.steps.quantize.matrices import Matrices, Matrix
from compressor.steps.quantize.scheme import Scales, Scheme
from compressor.steps.tensors import Named, OutputJob, OutputTensor, in_order_of, tensor_bytes_view

AT_ONCE = 2**19  # weights that are rounded at once: few enough to stay in the cache
WHOLE = ("weight_shape", "weight_global_scale")  # stored once for a matrix


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known of finished layers: checksums of the values that each matrix was rounded to, and packed tensors."""

    folder: Path

    def sums(self, unit: str) -> dict[str, int] | None:
        """Checksums of a layer's matrices by module; None if the layer is not finished."""
        found: dict[str, int] | None = facts_of(self._file(unit))
        return found

    def save(self, unit: str, sums: Mapping[str, int], tensors: Mapping[str, Tensor] | None = None) -> None:
        keep_tensors(self._file(unit), tensors or {}, dict(sums))

    def tensors(self, unit: str) -> dict[str, Tensor]:
        """Packed tensors of a layer that was quantised in the pass over text, by name; none otherwise."""
        return kept_tensors(self._file(unit))

    def _file(self, unit: str) -> Path:
        return self.folder / f"{unit}.safetensors"


def checksum(value: Tensor, before: int = 0) -> int:
    """CRC-32 of a matrix's bytes, with both zeros alike, after that of the rows `before`."""
    return zlib.crc32(tensor_bytes_view(value + 0), before)


def largest_weights(matrices: Sequence[Matrix], read: Callable[[Matrix], Tensor]) -> dict[str, Tensor]:
    """Largest absolute weight among those that servers fuse, by `Matrix.together`."""
    found = dict[str, Tensor]()
    for matrix in matrices:
        own = read(matrix).abs().amax().float()[None]
        found[matrix.together] = torch.maximum(found.get(matrix.together, own), own)
    return found


def rounded(
    scheme: Scheme, weight: Tensor, dtype: torch.dtype, largest: Tensor | None = None
) -> Iterator[tuple[Tensor, Scales]]:
    """Codes [1, n, I] of a matrix [O, I] and scales, stored in `dtype`: n rows at a time, rounded to nearest."""
    for rows in weight.split(max(1, AT_ONCE // weight.shape[1])):
        part = rows.float()[None].contiguous()
        scales = scheme.scales(part, dtype, largest=largest)
        yield scheme.codes(part, scales), scales


def round_to_nearest(
    scheme: Scheme, weight: Tensor, dtype: torch.dtype, largest: Tensor | None = None
) -> tuple[dict[str, Tensor], int]:
    """Stored tensors of a matrix [O, I], by the last part of their names, and the checksum of its values."""
    pieces, total = list[dict[str, Tensor]](), 0
    for codes, scales in rounded(scheme, weight, dtype, largest):
        pieces.append({name: value[0] for name, value in scheme.pack(codes, scales, dtype).items()})
        total = checksum(scheme.values(codes, scales).to(dtype), total)
    stored = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0] if name not in WHOLE}
    stored |= {name: pieces[0][name] for name in WHOLE if name in pieces[0]}
    return stored | ({"weight_shape": torch.tensor(weight.shape)} if "weight_shape" in stored else {}), total


def packed_size(
    model: OpenModel, scheme: Scheme, matrices: Matrices, experts: int, changed: bool = False
) -> tuple[Size, int]:
    """Parameters and bytes of a model with so many experts in each layer once quantised, and those of packed matrices.

    Other tensors stay as `output_size` has them. Reads headers alone.
    """
    partial = stored_partial(model)
    size = output_size(model, experts, changed, through=not matrices.stored)
    dtypes = dict[str, str]()
    if matrices.stored and not model.is_split:
        dtypes = {key: model.checkpoint.tensors[name].dtype for name, key in partial.plain_keys.targets.items()}
    own = [matrix for matrix in matrices.every if matrix.expert is None or matrix.expert < experts]
    shapes = [(matrix.rows, matrix.columns) for matrix in own]
    stored = [dtypes.get(matrix.key, DTYPE_NAMES[partial.dtype]) for matrix in own]
    plain = sum(tensor_bytes(dtype, shape) for dtype, shape in zip(stored, shapes, strict=True))
    packed = sum(scheme.nbytes(*shape, partial.dtype) for shape in shapes)
    return Size(size.parameters, size.bytes - plain + packed), packed


@dataclass(frozen=True, slots=True)
class Writer:
    """Writes a model with these matrices quantised."""

    model: OpenModel
    scheme: Scheme
    matrices: Matrices
    kept: Kept

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that is written."""
        return stored_partial(self.model).dtype

    def job(self, plan: ExpertPlan) -> OutputJob:
        model, units = self.model, self.model.architecture.units
        partial = stored_partial(model)
        inner = make_job(model, plan, through=None if self.matrices.stored else partial)
        own = list[OutputTensor]()
        for matrix in self.matrices.every:
            weights = matrix.rows * matrix.columns  # counted with the first of its tensors
            for name, (dtype, shape) in self.scheme.stored(matrix.rows, matrix.columns, partial.dtype).items():
                each = Fraction(weights, math.prod(shape))
                own.append(OutputTensor(f"{matrix.module}.{name}", dtype, shape, matrix.unit, each=each))
                weights = 0
        outputs = [each for each in inner.outputs if each.name not in self.matrices.replaced]
        others = [unit for unit in inner.units if unit and unit not in units]  # of multi-token-prediction heads
        config = json.loads(bytes(inner.files["config.json"]))
        config["quantization_config"] = self.scheme.config([*self.matrices.ignored, *self._of_heads(inner, units)])
        files = {**inner.files, "config.json": files_with(model, config)["config.json"]}
        return replace(
            inner,
            outputs=tuple(in_order_of([*units, *others], [*outputs, *own])),
            produce=bind(self._produce, inner, partial),
            files=files,
            verify=bind(self._verify, inner, partial),
        )

    def _of_heads(self, inner: OutputJob, units: Sequence[str]) -> list[str]:
        """Modules of multi-token-prediction heads, which stay as they are."""
        heads = [each for each in inner.outputs if each.unit and each.unit not in units and len(each.shape) == 2]
        return sorted(each.name.removesuffix(".weight") for each in heads if each.name.endswith(".weight"))

    def _produce(self, inner: OutputJob, partial: Any, unit: str) -> Named:
        kept = self.kept.tensors(unit) if self.kept.sums(unit) is not None else {}
        for name, value in kept.items():
            yield name, iter([tensor_bytes_view(value)])
        if not kept and self.matrices.of(unit):
            sums = dict[str, int]()
            for matrix, tensors, total in self._rounded(partial, unit):
                sums[matrix.module] = total
                for name, value in tensors.items():
                    yield f"{matrix.module}.{name}", iter([tensor_bytes_view(value)])
            self.kept.save(unit, sums)
        for name, pieces in inner.produce(unit):
            if name not in self.matrices.replaced:
                yield name, pieces

    def _rounded(self, partial: Any, unit: str) -> Iterator[tuple[Matrix, dict[str, Tensor], int]]:
        """A layer's matrices rounded to nearest: what is stored of each, and the checksum of its values."""
        if not self.matrices.stored:
            partial.load(partial.keys_under(unit))
        own, read, scheme = self.matrices.of(unit), bind(self._read, partial), self.scheme
        largest = largest_weights(own, read) if scheme.name == "nvfp4" else {}

        def packed(matrix: Matrix) -> tuple[dict[str, Tensor], int]:
            return round_to_nearest(scheme, read(matrix), partial.dtype, largest.get(matrix.together))

        with one_thread_each() as pool:
            for matrix, (tensors, total) in zip(own, pool.map(packed, own), strict=True):
                yield matrix, tensors, total

    def _read(self, partial: Any, matrix: Matrix) -> Tensor:
        """A matrix of the stage before: of its stored tensor, or of the loaded layer."""
        if not self.matrices.stored:
            return matrix.of(partial.model)
        keys, checkpoint = partial.plain_keys, self.model.checkpoint
        if keys.targets.get(f"{matrix.module}.weight") == matrix.key:
            return checkpoint.read_checked(f"{matrix.module}.weight")
        name, tensor = self.matrices.names[matrix.key], matrix.key.rpartition(".")[2]
        experts, fused = partial.model.get_submodule(matrix.owner), checkpoint.read(name)
        refuse_nan(name, checkpoint.tensors[name].file, fused[matrix.expert])  # this expert's alone
        return matrix_of(experts, tensor, fused[matrix.expert], matrix.part)

    def _verify(self, inner: OutputJob, partial: Any, folder: Path) -> None:
        """Load the written folder layer by layer; raises `CompressionError` for a matrix that is not what was made."""
        inner.verify(folder)
        written = open_model(ModelSource(str(folder), None, folder), str(partial.dtype).removeprefix("torch."), "cpu")
        for unit in self.model.architecture.units:
            own, sums = self.matrices.of(unit), self.kept.sums(unit)
            if sums is None:  # lost with power, before it was on disk like the layer
                sums = {matrix.module: total for matrix, _, total in self._rounded(partial, unit)}
            written.partial.load({matrix.key for matrix in own})
            with one_thread_each() as pool:
                found = pool.map(lambda matrix: checksum(matrix.of(written.partial.model).detach()), own)
                for matrix, total in zip(own, found, strict=True):
                    if total != sums.get(matrix.module):
                        raise CompressionError(
                            f"{matrix.module} is not loaded as it was quantised to {self.scheme.name}; please report "
                            "this"
                        )
            written.partial.release(unit)
