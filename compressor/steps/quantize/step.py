"""The step `quantize`: weights in fewer bits, stored as compressed-tensors store them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from compressor.checkpoint.quantized import dequantizer
from compressor.checkpoint.reader import DTYPE_NAMES, Size, tensor_bytes
from compressor.errors import CompressionError
from compressor.formatting import counted, joined
from compressor.model.opened import OpenModel
from compressor.recipe.step import StepOptions
from compressor.recipe.steps_plan import Decision, PlannedStep
from compressor.records import value_as
from compressor.steps.job import OutputSize, output_size, stored_dtype, stored_partial
from compressor.steps.quantize.matrices import DENSE, EXPERTS, Matrices, find_matrices
from compressor.steps.quantize.options import ROW, SERVERS, Quantize, loaders
from compressor.steps.quantize.scheme import (
    LINEAR,
    Scheme,
    labels,
    quantization_config,
    scheme_for,
    scheme_labelled,
    storage_of,
)
from compressor.steps.quantize.sequential import quantize_sequentially
from compressor.steps.quantize.writing import Writer
from compressor.steps.section import Section
from compressor.steps.step import Requirements, State, Step
from compressor.steps.tensors import OutputJob

UNITS = {EXPERTS: "experts", DENSE: "attention and dense layers"}


@dataclass(frozen=True)
class QuantizeStep(Step[Quantize]):
    """Store weights in fewer bits, as a compressed-tensors checkpoint."""

    def requirements(
        self, model: OpenModel, earlier: Sequence[StepOptions], planned: bool
    ) -> Requirements:
        """Return the need of calibration text for GPTQ; refuse groups that do not divide the
        model's matrices, and a family whose quantised checkpoints transformers cannot read."""
        config = deepcopy(model.architecture.config)
        matrices = find_matrices(model, self.options.targets)
        schemes = self._schemes(model, matrices, None)
        scheme = next(iter(schemes.values()))[matrices.every[0].unit]
        config.quantization_config = quantization_config({scheme: LINEAR}, [])
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

    def _schemes(
        self, model: OpenModel, matrices: Matrices, decision: Decision | None
    ) -> dict[str, dict[str, Scheme]]:
        """Return the schemes by decoder layer and unit: those of a decision that chose them by
        layer, or that of the options for all.

        Raises `CompressionError` for a layer or unit without one, and for groups that don't fit."""
        columns = dict[tuple[str, str], set[int]]()
        for matrix in matrices.every:
            columns.setdefault((matrix.decoder_layer, matrix.unit), set()).add(matrix.columns)
        options = self.options
        chosen = decision.get("layers") if isinstance(decision, Mapping) else None
        if chosen is None:
            scheme = scheme_for(options.scheme, options.group_size, set().union(*columns.values()))
        else:
            chosen = value_as(chosen, dict[str, dict[str, str]], "quantize.layers")
        schemes = dict[str, dict[str, Scheme]]()
        for (layer, unit), widths in columns.items():
            if chosen is not None:
                label = chosen.get(layer, {}).get(unit)
                if label is None:
                    raise CompressionError(
                        f"quantize: the plan's layers name no number format for {unit} of {layer}; "
                        "add one, or plan again"
                    )
                scheme = scheme_labelled(label, widths)
            schemes.setdefault(layer, {})[unit] = scheme
        return schemes

    def output_size(self, model: OpenModel, experts: int, changed: bool = False) -> OutputSize:
        """Return the model's size once quantised, from headers alone; matrices that GPTQ has packed
        wait beside the output.

        Other tensors stay as `output_size` has them.
        """
        matrices = find_matrices(model, self.options.targets)
        schemes = self._schemes(model, matrices, None)
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
                scheme = schemes[matrix.decoder_layer][matrix.unit]
                packed += scheme.nbytes(matrix.rows, matrix.columns, partial.dtype)
        size = Size(size.parameters, size.bytes - plain + packed)
        return OutputSize(size, packed if self.options.method == "gptq" else 0)

    def plan(self, state: State) -> Mapping[str, Any]:
        """Return the format and its effective bits, and the schemes by layer if they differ; of a
        source that was quantised, that it's dequantised first."""
        found = find_matrices(state.model, self.options.targets)
        schemes = self._schemes(state.model, found, None)
        return self._facts(state.model, found, schemes)

    def _facts(
        self, model: OpenModel, matrices: Matrices, schemes: Mapping[str, Mapping[str, Scheme]]
    ) -> dict[str, Any]:
        dtype = stored_dtype(model)
        weights = nbytes = 0
        distinct = dict[Scheme, None]()
        for matrix in matrices.every:
            scheme = schemes[matrix.decoder_layer][matrix.unit]
            distinct[scheme] = None
            weights += matrix.rows * matrix.columns
            nbytes += scheme.nbytes(matrix.rows, matrix.columns, dtype)
        sizes = {scheme.group_size for scheme in distinct}
        facts: dict[str, Any] = {
            "format": storage_of(distinct),
            "group_size": sizes.pop() if len(sizes) == 1 else None,
            "matrices": len(matrices.every),
            "weights": weights,
            "bits": round(8 * nbytes / weights, 4),
            "dequantized": model.layout.quantized,
        }
        if len(distinct) > 1:
            facts["layers"] = {layer: labels(units) for layer, units in schemes.items()}
        return facts

    def write(self, state: State) -> OutputJob:
        matrices = find_matrices(state.model, self.options.targets)
        schemes = self._schemes(state.model, matrices, state.decision)
        assert isinstance(state.decision, Mapping)
        by_layer = "layers" in state.decision
        writer = Writer(state.model, schemes, matrices, state.kept("quantized"), clip=by_layer)
        if self.options.method == "gptq" and not state.is_written:
            assert state.text is not None
            with state.run.clock.phase(self.name):
                rounded = quantize_sequentially(writer, state.text.fit, state.progress, state.seed)
            if rounded:
                state.run.record(state.number, result={"rounded": rounded})
        return writer.job(state.expert_plan)

    def describe(self, planned: PlannedStep) -> Section:
        """Describe schemes, groups, effective bits, and which servers read the format."""
        plan = planned.decision
        assert isinstance(plan, Mapping)
        options = self.options
        what = "experts, attention and dense layers"
        if options.targets == "experts":
            what = "routed experts"
        before = ", which were dequantised first," if plan.get("dequantized") else ""
        by_layer = plan.get("layers") or {}
        how = "rounding to nearest with clip search" if by_layer else "rounding to nearest"
        if options.method == "gptq":
            how = "GPTQ with clip search"
        to = options.scheme
        formats = [f"{options.scheme}/{plan['group_size']}"]
        groups = f"groups of {plan['group_size']}"
        if plan["group_size"] == ROW:
            groups = "one scale a row"
        if by_layer:
            to = "number formats chosen by layer"
            formats = []
            chosen = []
            for unit, name in UNITS.items():
                counts = Counter(units[unit] for units in by_layer.values() if unit in units)
                formats += counts
                for label, count in counts.most_common():
                    chosen.append(f"{name} in {label} in {counted(count, 'layer')}")
            groups = joined(chosen)
        servers = [*SERVERS.values()]
        for label in formats:
            scheme, _, size = label.partition("/")
            readers = loaders(scheme, size == str(ROW))
            servers = [server for server in servers if server in readers]
        limits = []
        if any(label.startswith("fp8") for label in formats):
            limits = ["Servers round activations to FP8, too; what that costs was not measured."]
        summary = (
            f"Quantised {what}{before} to {to} by {how}: {groups}, "
            f"{plan['bits']:.3g} bits a weight, stored as {plan['format']}, a format that "
            f"{joined(servers) or 'no server is known to'} read (not tried here)"
        )
        rounded = ((planned.result or {}).get("rounded") or {}).values()
        if rounded:
            experts = counted(sum(map(len, rounded)), "expert")
            summary += f"; {experts} saw too little text: their down was rounded to nearest"
        return Section(self.name, summary, ways=[f"quantisation to {to}"], limits=limits)
