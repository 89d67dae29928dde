"""The step `quantize`: weights in fewer bits, stored as compressed-tensors store them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compressor.document.blocks import Block, Text
from compressor.formatting import joined
from compressor.model.opened import OpenModel
from compressor.model.serving import loaders
from compressor.recipe.step import StepOptions
from compressor.steps.job import OutputSize
from compressor.steps.quantize.matrices import Matrices, find_matrices, refuse_unreadable
from compressor.steps.quantize.options import Quantize
from compressor.steps.quantize.scheme import ROW, Scheme, scheme_for
from compressor.steps.quantize.sequential import quantize_sequentially
from compressor.steps.quantize.writing import Writer, packed_size
from compressor.steps.step import Requirements, State, Step
from compressor.steps.tensors import OutputJob


@dataclass(frozen=True)
class QuantizeStep(Step[Quantize]):
    """Store weights in fewer bits, as a compressed-tensors checkpoint."""

    def requirements(
        self, model: OpenModel, earlier: Sequence[StepOptions], planned: bool
    ) -> Requirements:
        """Return the need of calibration text for GPTQ; refuse groups that do not divide the
        model's matrices."""
        refuse_unreadable(model, self._chosen(model)[1])
        reads = self.options.method == "gptq"
        return Requirements(text=reads, passes=int(reads))

    def _chosen(self, model: OpenModel) -> tuple[Matrices, Scheme]:
        """Return a model's matrices, and the scheme with the group size for them."""
        matrices = find_matrices(model, self.options.targets)
        columns = (matrix.columns for matrix in matrices.every)
        return matrices, scheme_for(self.options.scheme, self.options.group_size, columns)

    def output_size(self, model: OpenModel, experts: int, changed: bool = False) -> OutputSize:
        """Return the model's size once quantised; matrices that GPTQ has packed wait beside the
        output."""
        matrices, scheme = self._chosen(model)
        size, packed = packed_size(model, scheme, matrices, experts, changed)
        return OutputSize(size, packed if self.options.method == "gptq" else 0)

    def plan(self, state: State) -> Mapping[str, Any]:
        """Return the format and its effective bits; of a source that was quantised, that it's
        dequantised first."""
        writer = self._writer(state)
        scheme = writer.scheme
        matrices = writer.matrices.every
        weights = sum(matrix.rows * matrix.columns for matrix in matrices)
        nbytes = sum(
            scheme.nbytes(matrix.rows, matrix.columns, writer.dtype) for matrix in matrices
        )
        return {
            "format": scheme.format,
            "group_size": scheme.group_size,
            "matrices": len(matrices),
            "weights": weights,
            "bits": round(8 * nbytes / weights, 4),
            "dequantized": state.model.layout.quantized,
        }

    def write(self, state: State) -> OutputJob:
        writer = self._writer(state)
        if self.options.method == "gptq" and not state.is_written:
            assert state.text is not None
            with state.run.clock.phase(self.name):
                quantize_sequentially(writer, state.text.fit, state.progress, state.seed)
        return writer.job(state.expert_plan)

    def _writer(self, state: State) -> Writer:
        matrices, scheme = self._chosen(state.model)
        return Writer(state.model, scheme, matrices, state.kept("quantized"))

    def describe(self, entry: Mapping[str, Any]) -> Sequence[Block]:
        """Describe scheme, groups, effective bits, and which servers read the format."""
        plan = entry.get("plan")
        options = self.options
        if not plan:
            return ()
        is_by_row = plan["group_size"] == ROW
        groups = "one scale a row" if is_by_row else f"groups of {plan['group_size']}"
        what = (
            "routed experts"
            if options.targets == "experts"
            else "experts, attention and dense layers"
        )
        before = ", which were dequantised first," if plan.get("dequantized") else ""
        how = "GPTQ with clip search" if options.method == "gptq" else "rounding to nearest"
        servers = loaders(options.scheme, is_by_row)
        read = (
            f"a format that {joined(servers)} read"
            if servers
            else "a format that no server is known to read"
        )
        return (
            Text(
                f"Quantised {what}{before} to {options.scheme} by {how}: {groups}, "
                f"{plan['bits']:.3g} bits a weight, "
                f"stored as {plan['format']}, {read} (not tried here)."
            ),
        )
