"""The output of the step: a compressed-tensors checkpoint, written a decoder layer at a time and read once more.

Before the output is put in place every matrix is loaded as a reader will load it, and compared with what it was rounded
to: by a checksum of its values, which waits in the work folder.
"""

import json
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from functools import partial as bind
from pathlib import Path

import torch
from torch import Tensor

from compressor.checkpoint.reader import DTYPE_NAMES, Size, refuse_nan, tensor_bytes
from compressor.checkpoint.source import ModelSource
from compressor.devices import one_thread_each
from compressor.errors import CompressionError
from compressor.model.experts import matrix_of
from compressor.model.loading import PartialModel
from compressor.model.opened import OpenModel, open_model
from compressor.recipe.plan import ExpertPlan
from compressor.steps.cutting import Tensors
from compressor.steps.job import files_with, make_job, output_size, stored_partial
from compressor.steps.quantize.matrices import Matrices, Matrix
from compressor.steps.quantize.scheme import Scales, Scheme
from compressor.steps.tensors import Named, OutputJob, OutputTensor, in_order_of, tensor_bytes_view
from compressor.tensor_cache import load_tensors, read_metadata, save_tensors

AT_ONCE = 2**19  # weights that are rounded at once: few enough to stay in the cache
WHOLE = ("weight_shape", "weight_global_scale")  # stored once for a matrix


def checksum(value: Tensor, before: int = 0) -> int:
    """CRC-32 of a matrix's bytes, with both zeros alike, after that of the rows `before`."""
    return zlib.crc32(tensor_bytes_view(value + 0), before)


def largest_weights(scheme: Scheme, matrices: Sequence[Matrix], read: Callable[[Matrix], Tensor]) -> Tensors:
    """Largest absolute weight among those that servers fuse, by `Matrix.together`; none but for NVFP4."""
    largest = dict[str, Tensor]()
    for matrix in matrices if scheme.name == "nvfp4" else ():
        weight = read(matrix).abs().amax().float()[None]
        largest[matrix.together] = torch.maximum(largest.get(matrix.together, weight), weight)
    return largest


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
) -> tuple[Tensors, int]:
    """Stored tensors of a matrix [O, I], by the last part of their names, and the checksum of its values."""
    pieces = dict[str, list[Tensor]]()
    total = 0
    for codes, scales in rounded(scheme, weight, dtype, largest):
        for name, value in scheme.pack(codes, scales, dtype).items():
            pieces.setdefault(name, []).append(value[0])
        total = checksum(scheme.values(codes, scales).to(dtype), total)
    stored = {name: values[0] if name in WHOLE else torch.cat(values) for name, values in pieces.items()}
    if "weight_shape" in stored:
        stored["weight_shape"] = torch.tensor(weight.shape)
    return stored, total


def packed_size(model: OpenModel, scheme: Scheme, matrices: Matrices, experts: int, changed: bool) -> tuple[Size, int]:
    """Return the size of a quantised model with this number of experts in each layer, and the bytes of packed matrices.

    Other tensors stay as `output_size` has them. Reads headers alone.
    """
    partial = stored_partial(model)
    size = output_size(model, experts, changed, through=not matrices.stored)
    dtypes = dict[str, str]()
    if matrices.stored and not model.is_split:
        dtypes = {key: model.checkpoint.tensors[name].dtype for name, key in partial.plain_keys.targets.items()}
    plain = packed = 0
    for matrix in matrices.every:
        if matrix.expert is None or matrix.expert < experts:
            dtype = dtypes.get(matrix.key, DTYPE_NAMES[partial.dtype])
            plain += tensor_bytes(dtype, (matrix.rows, matrix.columns))
            packed += scheme.nbytes(matrix.rows, matrix.columns, partial.dtype)
    return Size(size.parameters, size.bytes - plain + packed), packed


@dataclass(frozen=True)
class Writer:
    """Writes a model with these matrices quantised.

    In the folder `kept` a layer that is finished has checksums of the values that its matrices were rounded to, by
    module, and its packed tensors if it was quantised in the pass over text.
    """

    model: OpenModel
    scheme: Scheme
    matrices: Matrices
    kept: Path

    @cached_property
    def partial(self) -> PartialModel:
        """The model in the dtype that is written."""
        return stored_partial(self.model)

    @property
    def dtype(self) -> torch.dtype:
        return self.partial.dtype

    def kept_file(self, decoder_layer: str) -> Path:
        return self.kept / f"{decoder_layer}.safetensors"

    def job(self, plan: ExpertPlan) -> OutputJob:
        layer_names = self.model.architecture.decoder_layers
        inner = make_job(self.model, plan, through=None if self.matrices.stored else self.partial)
        outputs = [output for output in inner.outputs if output.name not in self.matrices.replaced]
        # of multi-token-prediction heads
        heads = [output for output in outputs if output.decoder_layer not in ("", *layer_names)]
        dense = [output.name for output in heads if output.name.endswith(".weight") and len(output.shape) == 2]
        for matrix in self.matrices.every:
            weights = matrix.rows * matrix.columns  # counted with the first of its tensors
            tensors = self.scheme.stored(matrix.rows, matrix.columns, self.dtype)
            for name, (dtype, shape) in tensors.items():
                density = Fraction(weights, math.prod(shape))
                stored_name = f"{matrix.module}.{name}"
                outputs.append(OutputTensor(stored_name, dtype, shape, matrix.decoder_layer, density=density))
                weights = 0
        config = json.loads(bytes(inner.files["config.json"]))
        ignored = [*self.matrices.ignored, *sorted(name.removesuffix(".weight") for name in dense)]
        config["quantization_config"] = self.scheme.config(ignored)
        all_layers = [*layer_names, *dict.fromkeys(output.decoder_layer for output in heads)]
        return replace(
            inner,
            outputs=tuple(in_order_of(all_layers, outputs)),
            produce=bind(self._produce, inner),
            files={**inner.files, "config.json": files_with(self.model, config)["config.json"]},
            verify=bind(self._verify, inner),
        )

    def _produce(self, inner: OutputJob, decoder_layer: str) -> Named:
        file = self.kept_file(decoder_layer)
        tensors = {} if read_metadata(file) is None else load_tensors(file)
        for name, value in tensors.items():
            yield name, iter([tensor_bytes_view(value)])
        if not tensors and self.matrices.of(decoder_layer):
            sums = dict[str, int]()
            for matrix, stored, total in self._rounded(decoder_layer):
                sums[matrix.module] = total
                for name, value in stored.items():
                    yield f"{matrix.module}.{name}", iter([tensor_bytes_view(value)])
            save_tensors(file, {}, sums)
        for name, pieces in inner.produce(decoder_layer):
            if name not in self.matrices.replaced:
                yield name, pieces

    def _rounded(self, decoder_layer: str) -> Iterator[tuple[Matrix, Tensors, int]]:
        """Yield a layer's matrices rounded to nearest: what is stored of each, and the checksum of its values."""
        if not self.matrices.stored:
            self.partial.load(self.partial.keys_under(decoder_layer))
        matrices = self.matrices.of(decoder_layer)
        largest = largest_weights(self.scheme, matrices, self._read)

        def packed(matrix: Matrix) -> tuple[Tensors, int]:
            return round_to_nearest(self.scheme, self._read(matrix), self.dtype, largest.get(matrix.together))

        with one_thread_each() as pool:
            for matrix, (tensors, total) in zip(matrices, pool.map(packed, matrices), strict=True):
                yield matrix, tensors, total

    def _read(self, matrix: Matrix) -> Tensor:
        """Return a matrix of the stage before: of its stored tensor, or of the loaded layer."""
        if not self.matrices.stored:
            return matrix.of(self.partial.model)
        checkpoint = self.model.checkpoint
        if self.partial.plain_keys.targets.get(f"{matrix.module}.weight") == matrix.key:
            return checkpoint.read_checked(f"{matrix.module}.weight")
        name = self.matrices.names[matrix.key]
        weight = checkpoint.read(name)[matrix.expert]
        refuse_nan(name, checkpoint.tensors[name].file, weight)  # this expert's alone
        experts = self.partial.model.get_submodule(matrix.owner)
        return matrix_of(experts, matrix.key.rpartition(".")[2], weight, matrix.part)

    def _verify(self, inner: OutputJob, folder: Path) -> None:
        """Load the written folder layer by layer; raises `CompressionError` for a matrix that differs."""
        inner.verify(folder)
        source = ModelSource(str(folder), None, folder)
        written = open_model(source, str(self.dtype).removeprefix("torch."), "cpu")
        live = written.partial.model
        for decoder_layer in self.model.architecture.decoder_layers:
            matrices = self.matrices.of(decoder_layer)
            sums = read_metadata(self.kept_file(decoder_layer))
            if sums is None:  # lost with power, before it was on disk like the layer
                sums = {matrix.module: total for matrix, _, total in self._rounded(decoder_layer)}
            written.partial.load({matrix.key for matrix in matrices})
            with one_thread_each() as pool:
                totals = pool.map(lambda matrix: checksum(matrix.of(live).detach()), matrices)
                for matrix, total in zip(matrices, totals, strict=True):
                    if total != sums.get(matrix.module):
                        raise CompressionError(
                            f"{matrix.module} is not loaded as it was quantised to {self.scheme.name}; please report "
                            "this"
                        )
            written.partial.release(decoder_layer)
