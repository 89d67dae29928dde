"""MoNE: constants for what is dropped, as vLLM serves them (arXiv:2507.00390): refitted by `correct`, and written.

Every tensor that stays is a copy of the stored bytes, quantised ones included, unless it was refitted. Experts keep
their numbers. A constant is `<experts prefix>.<id>.approx_value` [H], and config.json lists them by decoder layer.
Stock transformers computes with none, so a written checkpoint is compared with the source by a forward of our own.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.reader import Checkpoint
from compressor.checkpoint.source import ModelSource
from compressor.data.batches import Calibration
from compressor.errors import CompressionError
from compressor.evaluation.evaluator import Riding
from compressor.kept import keep_tensors, kept_tensors, told_of
from compressor.memory import give_back
from compressor.model.architecture import MoeLayer
from compressor.model.constant_experts import (
    FIELD,
    SUFFIX,
    SubstitutedCheckpoint,
    Substitutes,
    is_replaced,
    substitute,
)
from compressor.model.experts import parameter_names
from compressor.model.layout import expert_prefixes
from compressor.model.loading import parent_and_name, set_tensor
from compressor.model.opened import OpenModel, open_substituted, pick_dtype
from compressor.model.streaming import LayerVisitor, Pass, Replay
from compressor.model.verification import check_carried
from compressor.progress import Progress, Silent
from compressor.recipe.steps_plan import layer_to_dict
from compressor.steps.configuration import config_with
from compressor.steps.constants.planning import Substituting, Variant, measured_constants, substitutes_of
from compressor.steps.correct.cut_layer import Constants, Recording
from compressor.steps.correct.in_order import RecordingVisitor
from compressor.steps.correct.refit import correct_layer
from compressor.steps.correct.step import CONSTANTS, Correct
from compressor.steps.cutting import Conversion
from compressor.steps.job import files_with, stored_partial
from compressor.steps.state import State
from compressor.steps.tensors import (
    OutputJob,
    OutputTensor,
    Piece,
    in_order_of,
    refuse_overflow,
    stored_unit,
    tensor_bytes_view,
    tensor_output,
)

TOKENS = 32  # that a written checkpoint is checked on
TOLERANCE = 1e-3  # of the largest logit; the same sums in the same order differ by nothing
VALUES = "constants"  # the name under which a layer's refitted ones are kept


def kept_at(folder: Path, layer: MoeLayer) -> Path:
    """The file of a corrected layer."""
    return folder / f"{layer.name}.safetensors"


@dataclass(slots=True)
class InOrder(RecordingVisitor):
    """Refits the constants of each layer on what the corrected earlier layers output; keeps the layers in `folder`."""

    calibration: Calibration
    substitutes: Mapping[str, Substitutes]  # by experts module, as planned
    correction: Correct
    folder: Path
    progress: Progress
    seed: int = 0
    figures: dict[str, Any] = field(default_factory=dict)  # of the corrected layers, by experts module

    def run(self, riding: Riding | None = None) -> dict[str, Any]:
        """Carry the pass out; returns each corrected layer's figures. An evaluator's batches run to the model's end."""
        batches, evaluation = self.calibration.batches, [] if riding is None else riding.batches
        if riding is not None:
            riding.first = len(batches)
        one = Pass(self.model, batches, self.progress, "correct", self.seed, evaluation=evaluation)
        one.run(*(visitor for visitor in (self, riding) if visitor is not None))
        return self.figures

    def _kept(self, layer: MoeLayer) -> list[int]:
        return [expert for expert in range(layer.experts) if expert not in self.substitutes[layer.name].dropped]

    def before(self, unit: str, replay: Replay) -> None:
        """Record the loaded layer, refit it with its constants, and let the batches pass that."""
        layers = [layer for layer in self.at.moe_layers if layer.name in self.substitutes]
        fresh = [layer for layer in layers if told_of(kept_at(self.folder, layer)) is None]
        for layer, recording in zip(fresh, self.record(fresh, replay), strict=True):
            self._refit(layer, recording)
        partial = self.model.partial
        for layer in layers:  # which are computed with as they are kept
            path, experts = kept_at(self.folder, layer), partial.model.get_submodule(layer.name)
            tensors, kept = kept_tensors(path), self._kept(layer)
            values = tensors.pop(VALUES).to(partial.device, partial.dtype)
            for key, value in tensors.items():
                set_tensor(partial.model, key, value.to(partial.device))
            sliced = len(experts.down_proj) == len(kept)
            rows = {expert: row for row, expert in enumerate(kept)} if sliced else None
            substitute(experts, Substitutes(self.substitutes[layer.name].dropped, values, rows))
            self.figures[layer.name] = told_of(path)
        give_back()

    def passed(self, unit: str) -> None:
        for layer in self.at.moe_layers:
            substitute(self.model.partial.model.get_submodule(layer.name), None)

    def _refit(self, layer: MoeLayer, recording: Recording) -> None:
        model, planned, kept = self.model.partial.model, self.substitutes[layer.name], self._kept(layer)
        experts = model.get_submodule(layer.name)
        for name in parameter_names(experts):
            set_tensor(model, f"{layer.name}.{name}", getattr(experts, name)[kept])
        writing = pick_dtype("auto", self.model.config, self.model.checkpoint)
        wide = planned.values.to(experts.down_proj.device, torch.float32, copy=True)
        slots = torch.tensor([*kept, *planned.dropped], device=wide.device).argsort()
        constants = Constants(wide, wide.to(writing, copy=True), slots)
        figures = correct_layer(model, layer, recording, self.correction, self.seed, writing, constants)
        tensors = {VALUES: constants.best}
        if self.correction.method != CONSTANTS:
            keys = [tensor.key for tensor in layer.tensors]
            tensors |= {key: getattr(*parent_and_name(model, key)) for key in keys}
        keep_tensors(kept_at(self.folder, layer), tensors, figures)


def refit_constants(state: State) -> Mapping[int, Mapping[str, Any]]:
    """Refit constants, and with `ridge` experts that stay, into the work folder; returns the plan with figures."""
    if state.step_of("correct") is None:
        return {}
    number, figures = state.stage[0], _in_order(state, _planned(state), state.progress).run()
    layers = [
        replace(layer, figures={**layer.figures, "correction": figures[layer.module]}) if layer.constants else layer
        for layer in state.stage_plan().layers
    ]
    return {number: {**(state.plan.steps[number].plan or {}), "layers": [layer_to_dict(layer) for layer in layers]}}


def _planned(state: State) -> Variant:
    dropped = {layer.module: layer.constants for layer in state.stage_plan().layers}
    return substitutes_of(dropped, measured_constants(state))


def _in_order(state: State, planned: Variant, progress: Progress) -> InOrder:
    assert state.text is not None
    correct, folder = state.step_of("correct"), state.cut().folder
    return InOrder(state.model, state.text.fit, planned, correct, folder, progress, state.seed)


def constants_job(state: State) -> OutputJob:
    """The job of writing the stage. What is measured and refitted waits in the work folder."""
    model, plan, correct, planned = state.model, state.stage_plan(), state.step_of("correct"), _planned(state)
    layers = [layer for layer in model.architecture.layers if layer.name in planned]
    roles = model.layout.roles
    if correct is None:
        stored = pick_dtype("auto", model.config, model.checkpoint)
        rounded = {name: replace(own, values=own.values.to(stored)) for name, own in planned.items()}
        values = {name: own.values for name, own in rounded.items()}
        expected: LayerVisitor = Substituting(model, [rounded])
    else:
        values = {layer.name: kept_tensors(kept_at(state.cut().folder, layer))[VALUES] for layer in layers}
        expected = _in_order(state, planned, Silent())
    copies = [
        OutputTensor.copy(model.checkpoint, name, role.unit)
        for name, role in roles.items()
        if not is_replaced(role, planned)
    ]
    added = list[OutputTensor]()
    for layer in layers:
        prefixes = expert_prefixes(model.layout, layer)
        for expert, value in zip(planned[layer.name].dropped, values[layer.name], strict=True):
            name = f"{prefixes[expert]}{SUFFIX}"
            content = partial(_bytes_of, refuse_overflow(name, value))
            added.append(replace(tensor_output(name, value, layer.unit), content=content))
    outputs = in_order_of(model.architecture.units, [*copies, *added])
    config, zeroed = config_with(model.checkpoint.raw_config, model.architecture, model.layout, {})
    config[FIELD] = {str(entry.layer): list(entry.constants) for entry in plan.layers if entry.constants}

    def produce(unit: str) -> Iterator[tuple[str, Iterator[Piece]]]:
        own = [output for output in copies if output.unit == unit]
        if correct is not None and correct.method != CONSTANTS:
            changed = {output.name for output in own if roles[output.name].layer in planned}
            yield from _refitted(model, planned, state.cut().folder, unit, changed) if changed else ()
            own = [output for output in own if output.name not in changed]
        yield from stored_unit([*own, *added], unit)

    def verify(folder: Path) -> None:
        written = {name: (info.dtype, info.shape) for name, info in Checkpoint(folder).tensors.items()}
        wanted = {output.name: (output.dtype, output.shape) for output in outputs}
        for name in sorted({*written, *wanted}):
            if written.get(name) != wanted.get(name):
                raise CompressionError(f"the written tensor {name!r} is not as planned; please report this model")
        check_carried(folder, model.source.folder)
        check_forward(folder, model, expected)

    units = ("", *model.architecture.units)
    return OutputJob(tuple(outputs), units, produce, files_with(model, config), verify, tuple(zeroed))


def _bytes_of(value: Tensor) -> Iterator[Piece]:
    yield tensor_bytes_view(value)


def _refitted(
    model: OpenModel, planned: Variant, folder: Path, unit: str, wanted: set[str]
) -> Iterator[tuple[str, Iterator[Piece]]]:
    """The refitted tensors of a unit by their stored names: experts are put back at their own numbers first."""
    partial = stored_partial(model)

    def change(layer: MoeLayer) -> dict[str, Tensor]:
        tensors = kept_tensors(kept_at(folder, layer)) if layer.name in planned else {}
        for key, value in tensors.items():
            if key.startswith(f"{layer.name}."):
                kept = [expert for expert in range(layer.experts) if expert not in planned[layer.name].dropped]
                tensors[key] = value.new_zeros(layer.experts, *value.shape[1:])
                tensors[key][kept] = value
            refuse_overflow(key, value.to(partial.dtype))
        return {key: value for key, value in tensors.items() if key != VALUES}

    for name, content in Conversion(partial, model.architecture, partial.model).produce(change, None, unit):
        if name in wanted:
            yield name, content


@dataclass(slots=True)
class _Outputs(LayerVisitor):
    logits: list[Tensor] = field(default_factory=list)

    def finished(self, batch: int, output: Any) -> None:
        self.logits.append(output[0].detach().float().cpu())


def logits_with(model: OpenModel, visitor: LayerVisitor, batches: Sequence[Tensor]) -> list[Tensor]:
    """Logits [B, L, V] of each batch of token ids [B, L]; `visitor` puts the constants in, a layer at a time."""
    outputs = _Outputs()
    Pass(model, batches, to_end=True).run(visitor, outputs)
    return outputs.logits


def read_constants(folder: Path, dtype: str = "auto", device: str = "auto") -> tuple[OpenModel, Variant]:
    """A written checkpoint with constants, and these by experts module; an unfit one is a `CompressionError`."""
    model = open_substituted(ModelSource(str(folder), None, folder), dtype, device)
    assert isinstance(model.checkpoint, SubstitutedCheckpoint)
    partial = model.partial
    return model, model.checkpoint.substitutes(model.architecture.layers, partial.dtype, partial.device)


def check_forward(folder: Path, source: OpenModel, visitor: LayerVisitor) -> None:
    """Refuse a written checkpoint that does not compute what the source does with what `visitor` puts into it."""
    tokens = torch.arange(TOKENS)[None] * 7919 % source.vocabulary
    written, constants = read_constants(folder, source.dtype_name, str(source.partial.device))
    [wanted] = logits_with(source, visitor, [tokens])
    [logits] = logits_with(written, Substituting(written, [constants]), [tokens])
    off, size = float((logits - wanted).abs().max()), float(wanted.abs().max())
    if not off <= TOLERANCE * max(size, 1e-6):
        raise CompressionError(
            f"the written checkpoint's logits differ by {off:.3g} from the source's with constants; please report this "
            "model"
        )
