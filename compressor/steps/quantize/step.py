"""The step `quantize`: weights in fewer bits, stored as compressed-tensors store them."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from compressor.checkpoint.quantized import dequantizer
from compressor.checkpoint.reader import DTYPE_NAMES, Size, tensor_bytes
from compressor.errors import CompressionError
from compressor.formatting import joined
from compressor.model.opened import OpenModel
from compressor.recipe.step import StepOptions
from compressor.recipe.steps_plan import PlannedStep
from compressor.steps.job import OutputSize, output_size, stored_dtype, stored_partial
from compressor.steps.quantize.matrices import Matrices, find_matrices
from compressor.steps.quantize.options import ROW, Quantize, loaders
from compressor.steps.quantize.scheme import Scheme, scheme_for
from compressor.steps.quantize.sequential import quantize_sequentially
from compressor.steps.quantize.writing import Writer
from compressor.steps.section import Section
from compressor.steps.step import Requirements, State, Step
from compressor.steps.tensors import OutputJob


@dataclass(frozen=True)
class QuantizeStep(Step[Quantize]):
    """Store weights in fewer bits, as a compressed-tensors checkpoint."""

    def requirements(
        self, model: OpenModel, earlier: Sequence[StepOptions], planned: bool
    ) -> Requirements:
        """Return the need of calibration text for GPTQ; refuse groups that do not divide the
        model's matrices, and a family whose quantised checkpoints transformers cannot read."""
        config = deepcopy(model.architecture.config)
        config.quantization_config = self._chosen(model)[1].config([])
        try:
            quantizer = dequantizer(config)
            assert quantizer is not None
            partial = model.partial
            quantizer.update_weight_conversions(partial.plain_conversions, partial.model)
        except ValueError as error:
            raise CompressionError(
                "quantize: transformers cannot read quantised checkpoints of "
                f"{model.architecture.family}; leave quantize out"
            ) from error
        reads = self.options.method == "gptq"
        return Requirements(text=reads, passes=int(reads))

    def _chosen(self, model: OpenModel) -> tuple[Matrices, Scheme]:
        """Return a model's matrices, and the scheme with the group size for them."""
        matrices = find_matrices(model, self.options.targets)
        columns = (matrix.columns for matrix in matrices.every)
        return matrices, scheme_for(self.options.scheme, self.options.group_size, columns)

    def output_size(self, model: OpenModel, experts: int, changed: bool = False) -> OutputSize:
        """Return the model's size once quantised, from headers alone; matrices that GPTQ has packed
        wait beside the output.

        Other tensors stay as `output_size` has them.
        """
        matrices, scheme = self._chosen(model)
        partial = stored_partial(model)
        size = output_size(model, experts, changed, through=not matrices.stored)
        dtypes = {}
        if matrices.stored and not model.is_split:
            dtypes = {
                key: model.checkpoint.tensors[name].dtype
                for name, key in partial.plain_keys.targets.items()
            }
        plain = packed = 0
        for matrix in matrices.every:
            if matrix.expert is None or matrix.expert < experts:
                dtype = dtypes.get(matrix.key, DTYPE_NAMES[partial.dtype])
                plain += tensor_bytes(dtype, (matrix.rows, matrix.columns))
                packed += scheme.nbytes(matrix.rows, matrix.columns, partial.dtype)
        size = Size(size.parameters, size.bytes - plain + packed)
        return OutputSize(size, packed if self.options.method == "gptq" else 0)

    def plan(self, state: State) -> Mapping[str, Any]:
        """Return the format and its effective bits; of a source that was quantised, that it's
        dequantised first."""
        found, scheme = self._chosen(state.model)
        matrices = found.every
        dtype = stored_dtype(state.model)
        weights = sum(matrix.rows * matrix.columns for matrix in matrices)
        nbytes = sum(scheme.nbytes(matrix.rows, matrix.columns, dtype) for matrix in matrices)
        return {
            "format": scheme.format,
            "group_size": scheme.group_size,
            "matrices": len(matrices),
            "weights": weights,
            "bits": round(8 * nbytes / weights, 4),
            "dequantized": state.model.layout.quantized,
        }

    def write(self, state: State) -> OutputJob:
        matrices, scheme = self._chosen(state.model)
        writer = Writer(state.model, scheme, matrices, state.kept("quantized"))
        if self.options.method == "gptq" and not state.is_written:
            assert state.text is not None
            with state.run.clock.phase(self.name):
                quantize_sequentially(writer, state.text.fit, state.progress, state.seed)
        return writer.job(state.expert_plan)

    def describe(self, planned: PlannedStep) -> Section:
        """Describe scheme, groups, effective bits, and which servers read the format."""
        plan = planned.decision
        assert isinstance(plan, Mapping)
        options = self.options
        is_by_row = plan["group_size"] == ROW
        groups = "one scale a row" if is_by_row else f"groups of {plan['group_size']}"
        what = "experts, attention and dense layers"
        if options.targets == "experts":
            what = "routed experts"
        before = ", which were dequantised first," if plan.get("dequantized") else ""
        how = "GPTQ with clip search" if options.method == "gptq" else "rounding to nearest"
        servers = joined(loaders(options.scheme, is_by_row)) or "no server is known to"
        limits = []
        if options.scheme == "fp8":
            limits = ["Servers round activations to FP8, too; what that costs was not measured."]
        return Section(
            self.name,
            f"Quantised {what}{before} to {options.scheme} by {how}: {groups}, "
            f"{plan['bits']:.3g} bits a weight, stored as {plan['format']}, a format that "
            f"{servers} read (not tried here)",
            ways=[f"quantisation to {options.scheme}"],
            limits=limits,
        )
