"""MoNE: constants for what is dropped, as vLLM serves them (arXiv:2507.00390): refitted if so asked, and written.

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
from compressor.errors import CompressionError
from compressor.kept import kept_tensors
from compressor.model.architecture import MoeLayer
from compressor.model.constant_experts import FIELD, SUFFIX, SubstitutedCheckpoint, is_replaced
from compressor.model.layout import expert_prefixes
from compressor.model.opened import OpenModel, open_substituted, pick_dtype
from compressor.model.streaming import LayerVisitor, Pass
from compressor.model.verification import check_carried
from compressor.progress import Progress, Silent
from compressor.recipe.steps_plan import layer_to_dict
from compressor.steps.constants.measure import Substituting, Variant, substitutes_of
from compressor.steps.constants.planning import measured_constants
from compressor.steps.correct.constants import VALUES, InOrder, correct_constants, kept_at
from compressor.steps.correct.step import CONSTANTS
from compressor.steps.state import State
from compressor.surgery.configuration import config_with
from compressor.surgery.conversion import changed_unit
from compressor.surgery.job import files_with, stored_partial
from compressor.surgery.tensors import (
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


def refit_constants(state: State) -> Mapping[int, Mapping[str, Any]]:
    """Refit constants, and with `ridge` experts that stay, into the work folder; returns the plan with figures."""
    if state.step_of("correct") is None:
        return {}
    number, figures = state.stage[0], correct_constants(_in_order(state, _planned(state), state.progress))
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
    made = list[OutputTensor]()
    for layer in layers:
        prefixes = expert_prefixes(model.layout, layer)
        for expert, value in zip(planned[layer.name].dropped, values[layer.name], strict=True):
            name = f"{prefixes[expert]}{SUFFIX}"
            content = partial(_bytes_of, refuse_overflow(name, value))
            made.append(replace(tensor_output(name, value, layer.unit), content=content))
    outputs = in_order_of(model.architecture.units, [*copies, *made])
    config, zeroed = config_with(model.checkpoint.raw_config, model.architecture, model.layout, {})
    config[FIELD] = {str(entry.layer): list(entry.constants) for entry in plan.layers if entry.constants}

    def produce(unit: str) -> Iterator[tuple[str, Iterator[Piece]]]:
        own = [output for output in copies if output.unit == unit]
        if correct is not None and correct.method != CONSTANTS:
            changed = {output.name for output in own if roles[output.name].layer in planned}
            yield from _refitted(model, planned, state.cut().folder, unit, changed) if changed else ()
            own = [output for output in own if output.name not in changed]
        yield from stored_unit([*own, *made], unit)

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

    for name, content in changed_unit(partial, model.architecture, partial.model, change, unit):
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
    [found] = logits_with(written, Substituting(written, [constants]), [tokens])
    off, size = float((found - wanted).abs().max()), float(wanted.abs().max())
    if not off <= TOLERANCE * max(size, 1e-6):
        raise CompressionError(
            f"the written checkpoint's logits differ by {off:.3g} from the source's with constants; please report this "
            "model"
        )
