"""Correction of a model in which constants stand for experts: the constants, and what is kept, refitted in order."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from compressor.data.batches import Calibration
from compressor.evaluation.evaluator import Riding
from compressor.kept import keep_tensors, kept_tensors, told_of
from compressor.memory import give_back
from compressor.model.architecture import MoeLayer
from compressor.model.constant_experts import Substitutes, substitute
from compressor.model.experts import parameter_names
from compressor.model.loading import parent_and_name, set_tensor
from compressor.model.opened import pick_dtype
from compressor.model.streaming import Pass, Replay
from compressor.progress import Progress
from compressor.steps.correct.cut_layer import Constants, Recording
from compressor.steps.correct.in_order import RecordingVisitor
from compressor.steps.correct.refit import correct_layer
from compressor.steps.correct.step import CONSTANTS, Correct

VALUES = "constants"  # the name under which a layer's refitted ones are kept


@dataclass(slots=True)
class InOrder(RecordingVisitor):
    """Refits the constants of each layer on what the corrected earlier layers put out; keeps the layers in `folder`."""

    calibration: Calibration
    substitutes: Mapping[str, Substitutes]  # by experts module, as planned
    correction: Correct
    folder: Path
    progress: Progress
    seed: int = 0
    figures: dict[str, Any] = field(default_factory=dict)  # of the corrected layers, by experts module

    def before(self, unit: str, replay: Replay) -> None:
        """Record the loaded layer, refit it with its constants, and let the batches pass that."""
        layers = [layer for layer in self.at.moe_layers if layer.name in self.substitutes]
        fresh = [layer for layer in layers if told_of(kept_at(self.folder, layer)) is None]
        for layer, recording in zip(fresh, self.record(fresh, replay), strict=True):
            self._refit(layer, recording)
        for layer in layers:
            self._take(layer)
        give_back()

    def passed(self, unit: str) -> None:
        for layer in self.at.moe_layers:
            substitute(self.model.partial.model.get_submodule(layer.name), None)

    def _slots(self, layer: MoeLayer) -> tuple[list[int], list[int]]:
        """The experts that are kept, and each expert's slot: constants stand behind the kept."""
        dropped = self.substitutes[layer.name].dropped
        kept = [expert for expert in range(layer.experts) if expert not in dropped]
        place = {expert: slot for slot, expert in enumerate([*kept, *dropped])}
        return kept, [place[expert] for expert in range(layer.experts)]

    def _refit(self, layer: MoeLayer, recording: Recording) -> None:
        model, planned = self.model.partial.model, self.substitutes[layer.name]
        kept, slots = self._slots(layer)
        experts = model.get_submodule(layer.name)
        for name in parameter_names(experts):
            set_tensor(model, f"{layer.name}.{name}", getattr(experts, name)[kept])
        writing = pick_dtype("auto", self.model.config, self.model.checkpoint)
        wide = planned.values.to(experts.down_proj.device, torch.float32, copy=True)
        constants = Constants(wide, wide.to(writing, copy=True), torch.tensor(slots, device=wide.device))
        figures = correct_layer(model, layer, recording, self.correction, self.seed, writing, constants)
        tensors = {VALUES: constants.best}
        if self.correction.method != CONSTANTS:
            keys = [tensor.key for tensor in layer.tensors]
            tensors |= {key: getattr(*parent_and_name(model, key)) for key in keys}
        keep_tensors(kept_at(self.folder, layer), tensors, figures)

    def _take(self, layer: MoeLayer) -> None:
        """Compute with the layer that is kept."""
        model, path = self.model.partial.model, kept_at(self.folder, layer)
        tensors, device = kept_tensors(path), self.model.partial.device
        kept, _ = self._slots(layer)
        experts = model.get_submodule(layer.name)
        values = tensors.pop(VALUES).to(device, self.model.partial.dtype)
        for key, value in tensors.items():
            set_tensor(model, key, value.to(device))
        sliced = len(experts.down_proj) == len(kept)
        rows = {expert: row for row, expert in enumerate(kept)} if sliced else None
        substitute(experts, Substitutes(self.substitutes[layer.name].dropped, values, rows))
        self.figures[layer.name] = told_of(path)


def kept_at(folder: Path, layer: MoeLayer) -> Path:
    """The file of a corrected layer."""
    return folder / f"{layer.name}.safetensors"


def correct_constants(visitor: InOrder, riding: Riding | None = None) -> dict[str, Any]:
    """Carry the pass out; returns each corrected layer's figures. An evaluator's batches run to the model's end."""
    batches, evaluation = visitor.calibration.batches, [] if riding is None else riding.batches
    if riding is not None:
        riding.first = len(batches)
    one = Pass(visitor.model, batches, visitor.progress, "correct", visitor.seed, evaluation=evaluation)
    one.run(*(each for each in (visitor, riding) if each is not None))
    return visitor.figures
