"""The step `quantize`: weights in fewer bits, stored as compressed-tensors store them."""

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

from compressor.checkpoint.quantized import dequantizer
from compressor.checkpoint.reader import DTYPE_NAMES, Size, tensor_bytes
from compressor.divergence.evaluator import FEWEST
from compressor.errors import CompressionError
from compressor.formatting import counted, joined
from compressor.model.opened import OpenModel
from compressor.model.serving import LLAMA_CPP
from compressor.recipe.step import StepOptions
from compressor.recipe.steps_plan import PlannedStep
from compressor.records import value_as
from compressor.steps.job import OutputSize, output_size, stored_dtype, stored_partial
from compressor.steps.quantize.choosing import (
    CHOOSING,
    Tried,
    Unit,
    candidates,
    choose,
    chosen_layers,
    sensitivities,
    unit_bytes,
    units_of,
)
from compressor.steps.quantize.llama_cpp import NAME, quantize_command
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

logger = logging.getLogger(__name__)

UNITS = {EXPERTS: "experts", DENSE: "attention and dense layers"}


@dataclass(frozen=True)
class QuantizeStep(Step[Quantize]):
    """Store weights in fewer bits, as a compressed-tensors checkpoint."""

    def requirements(
        self, model: OpenModel, earlier: Sequence[StepOptions], planned: bool
    ) -> Requirements:
        """Return the need of calibration text for GPTQ, and to choose formats by layer; refuse
        groups that do not divide the model's matrices, a choice that cannot fit, and a family whose
        quantised checkpoints transformers cannot read."""
        config = deepcopy(model.architecture.config)
        chooses = self._chooses and not planned
        if chooses:
            units, schemes = self._candidates(model)
            scheme = schemes[0][0]
            smallest = zip(units, schemes, strict=True)
            least = sum(unit_bytes(unit, own[0], model.partial.dtype) for unit, own in smallest)
            weights = sum(unit.weights for unit in units)
            if self.options.bits is not None and 8 * least > self.options.bits * weights:
                raise CompressionError(
                    f"quantize: {self.options.bits:g} bits are below the smallest possible, "
                    f"{math.ceil(800 * least / weights) / 100:g}; ask for at least that"
                )
        else:
            matrices, by_layer = self._chosen(model, self.options.layers)
            scheme = by_layer[matrices.every[0].decoder_layer][matrices.every[0].unit]
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
        passes = int(self.options.method == "gptq") + (CHOOSING if chooses else 0)
        return Requirements(passes > 0, heldout=FEWEST if chooses else 0, passes=passes)

    @property
    def _chooses(self) -> bool:
        """True if formats by layer are still to be chosen."""
        return self.options.by_layer and self.options.layers is None

    def _chosen(
        self, model: OpenModel, layers: Mapping[str, Mapping[str, str]] | None
    ) -> tuple[Matrices, dict[str, dict[str, Scheme]]]:
        """Return what is quantised, and the schemes by decoder layer and unit: those of `layers`,
        or that of the options for all.

        Raises `CompressionError` for a layer that is not there, and for groups that don't fit."""
        options = self.options
        matrices = find_matrices(model, options.targets, layers)
        columns = defaultdict[tuple[str, str], set[int]](set)
        for matrix in matrices.every:
            columns[matrix.decoder_layer, matrix.unit].add(matrix.columns)
        named = {(layer, unit) for layer, units in (layers or {}).items() for unit in units}
        for layer, unit in sorted(named - columns.keys()):
            raise CompressionError(
                f"quantize: the layers name {unit} of {layer}, which the model lacks; leave it out"
            )
        schemes = dict[str, dict[str, Scheme]]()
        if layers is None:
            scheme = scheme_for(options.scheme, options.group_size, set().union(*columns.values()))
        for (layer, unit), widths in columns.items():
            if layers is not None:
                scheme = scheme_labelled(layers[layer][unit], widths)
            schemes.setdefault(layer, {})[unit] = scheme
        return matrices, schemes

    def _candidates(self, model: OpenModel) -> tuple[list[Unit], list[list[Scheme]]]:
        """Return the units to choose formats for, and those of each.

        Raises `CompressionError` where the servers load none."""
        units = units_of(find_matrices(model, self.options.targets).every)
        servers = [SERVERS[name] for name in self.options.servers]
        schemes = [candidates(unit, servers) for unit in units]
        if not all(schemes):
            raise CompressionError(
                f"quantize: there is no number format for these weights that {joined(servers)} "
                "load; name fewer servers"
            )
        return units, schemes

    def output_size(self, model: OpenModel, experts: int, changed: bool = False) -> OutputSize:
        """Return the model's size once quantised, from headers alone; matrices that GPTQ has packed
        wait beside the output.

        Other tensors stay as `output_size` has them.
        """
        schemes = dict[str, dict[str, Scheme]]()
        if self._chooses:  # by plan, in the bits or bytes that were asked for
            matrices = find_matrices(model, self.options.targets)
        else:
            matrices, schemes = self._chosen(model, self.options.layers)
        partial = stored_partial(model)
        size = output_size(model, experts, changed, through=not matrices.stored)
        dtypes = {}
        if matrices.stored and not model.is_split:
            dtypes = {
                key: model.checkpoint.tensors[name].dtype
                for name, key in partial.plain_keys.targets.items()
            }
        plain, packed = 0, 0.0
        for matrix in matrices.every:
            if matrix.expert is None or matrix.expert < experts:
                dtype = dtypes.get(matrix.key, DTYPE_NAMES[partial.dtype])
                plain += tensor_bytes(dtype, (matrix.rows, matrix.columns))
                if schemes:
                    scheme = schemes[matrix.decoder_layer][matrix.unit]
                    packed += scheme.nbytes(matrix.rows, matrix.columns, partial.dtype)
                else:
                    packed += matrix.rows * matrix.columns * (self.options.bits or 0) / 8
        nbytes = self.options.bytes or size.bytes - plain + int(packed)
        waiting = int(packed) if self.options.method == "gptq" else 0
        return OutputSize(Size(size.parameters, nbytes), waiting)

    def plan(self, state: State) -> Mapping[str, Any]:
        """Return the format and its effective bits, and the schemes by layer if they differ, with
        the choices that were measured; of a source that was quantised, that it's dequantised
        first."""
        if not self._chooses:
            return self._facts(state.model, *self._chosen(state.model, self.options.layers))
        tried = self._choices(state)
        layers = chosen_layers(tried[0].formats)
        if not layers:
            raise CompressionError("quantize: the model fits as it is stored; leave quantize out")
        facts = self._facts(state.model, *self._chosen(state.model, layers))
        choices = []
        for one in tried:
            rates = {"predicted_kl": one.predicted, "kl": one.kl}
            rates["standard_error"] = one.figures.kl_error
            figures = {name: round(value, 6) for name, value in rates.items()}
            choices.append({"name": one.name, "bytes": one.nbytes, **figures})
        return {**facts, "choices": choices}

    def _choices(self, state: State) -> list[Tried]:
        """Return the choices of formats that were measured, the best first."""
        model, calibration = state.model, state.fit
        assert calibration is not None
        dtype = stored_dtype(model)
        units, schemes = self._candidates(model)
        batches = calibration.without_heldout().batches
        together = not self.options.servers  # which read each layer by itself
        given = batches, dtype, state.progress, together
        table = sensitivities(model, units, schemes, *given)
        if self.options.bits is not None:
            weights = sum(unit.weights for unit in units)
            limit = int(self.options.bits * weights / 8)
        else:
            assert self.options.bytes is not None
            finest = Quantize(
                layers=chosen_layers(table.formats(table.finest)), targets=self.options.targets
            )
            size = QuantizeStep(finest).output_size(model, model.architecture.experts)
            limit = self.options.bytes - size.size.bytes + table.total(table.finest)
            table = table.of(units, schemes, dtype)  # what may stay as it is stored
        return choose(model, table, limit, calibration.heldout_batches, dtype, state.progress)

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
        if self.options.by_layer:
            facts["formats"] = {layer: labels(units) for layer, units in schemes.items()}
        return facts

    def write(self, state: State) -> OutputJob:
        assert isinstance(state.decision, Mapping)
        layers = state.decision.get("formats")
        if layers is not None:
            layers = value_as(layers, dict[str, dict[str, str]], "quantize.formats")
        matrices, schemes = self._chosen(state.model, layers)
        writer = Writer(
            state.model, schemes, matrices, state.kept("quantized"), clip=layers is not None
        )
        if self.options.method == "gptq" and not state.is_written:
            assert state.text is not None
            with state.run.clock.phase(self.name):
                rounded = quantize_sequentially(writer, state.text.fit, state.progress, state.seed)
            if rounded:
                state.run.record(state.number, result={"rounded": rounded})
        job = writer.job(state.expert_plan)
        if layers is None or LLAMA_CPP not in self.options.servers:
            return job
        command = quantize_command(layers, state.model)
        for line in command.splitlines():
            logger.info("%s", line)
        return replace(job, files={**job.files, NAME: command.encode()})

    def describe(self, planned: PlannedStep) -> Section:
        """Describe schemes, groups, effective bits, and which servers read the format."""
        plan = planned.decision
        assert isinstance(plan, Mapping)
        options = self.options
        what = "experts, attention and dense layers"
        if options.targets == "experts":
            what = "routed experts"
        before = ", which were dequantised first," if plan.get("dequantized") else ""
        by_layer = plan.get("formats") or {}
        how = "rounding to nearest with clip search" if by_layer else "rounding to nearest"
        if options.method == "gptq":
            how = "GPTQ with clip search"
        to: str = options.scheme
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
                of_unit = [
                    f"{label} in {counted(count, 'layer')}" for label, count in counts.most_common()
                ]
                if of_unit:  # a unit may stay as it is stored
                    chosen.append(f"{name} in {joined(of_unit)}")
            groups = "; ".join(chosen)
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
            f"{joined(servers) or 'no server is known to'} read{'s' * (len(servers) == 1)} "
            "(not tried here)"
        )
        rounded = ((planned.result or {}).get("rounded") or {}).values()
        if rounded:
            experts = counted(sum(map(len, rounded)), "expert")
            summary += f"; {experts} saw too little text: their down was rounded to nearest"
        return Section(self.name, summary, ways=[f"quantisation to {to}"], limits=limits)
