"""Correction of layers in which constants stand for experts: the constants, and what is kept, refitted in order.

With G the gate weights [T, D] of the D replaced experts and r what the layer still misses, the change of the constants
minimises ||r - G C||^2 + penalty ||C||^2, each token weighted as everywhere in a correction. The penalty, or no change
at all, is chosen on held-out tokens. `ridge` and `tune` then do to the kept experts what they do to any cut layer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.data.batches import Calibration
from compressor.evaluation.evaluator import Riding
from compressor.kept import keep_tensors, kept_tensors, told_of
from compressor.memory import give_back
from compressor.model.architecture import MoeLayer
from compressor.model.constant_experts import Substitutes, substitute
from compressor.model.experts import parameter_names
from compressor.model.loading import parent_and_name, set_tensor
from compressor.model.opened import OpenModel, pick_dtype
from compressor.model.streaming import LayerVisitor, Pass, Replay
from compressor.progress import Progress
from compressor.steps.correct.cut_layer import CHUNK, CutLayer, Recording
from compressor.steps.correct.refit import MOST_RATE, Refit, Step, correct_layer
from compressor.steps.correct.ridge import PENALTIES, refit_down
from compressor.steps.correct.step import CONSTANTS, Correct
from compressor.steps.correct.tuning import Schedule, tune

VALUES = "constants"  # the name under which a layer's refitted ones are kept
SMALL = (1e-6, *PENALTIES)  # times the normal matrix's mean diagonal


@dataclass(slots=True)
class SubstitutedLayer(CutLayer):
    """A layer of which N experts are kept; slots from N on are constants, `values` [D, H] in float32."""

    values: Tensor = field(default_factory=lambda: torch.zeros(0, 1))
    best_values: Tensor = field(default_factory=lambda: torch.zeros(0, 1))  # as they will be stored
    slots: Tensor = field(default_factory=lambda: torch.arange(0))  # [E] of each expert

    @classmethod
    def made(
        cls, values: Tensor, slots: Tensor, dtype: torch.dtype, recording: Recording, *modules: Any
    ) -> "SubstitutedLayer":
        """Of constants [D, H], each expert's slot, an experts module with the kept ones alone, router and block."""
        found = cls.of(recording, *modules)
        assert isinstance(found, SubstitutedLayer)
        experts = modules[0]
        wide = values.to(next(experts.parameters()).device, torch.float32, copy=True)
        found.values, found.best_values, found.slots = wide, wide.to(dtype, copy=True), slots.to(wide.device)
        return found

    def more_kept(self) -> list[tuple[Tensor, Tensor]]:
        """The constants."""
        return [(self.values, self.best_values)]

    def route(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Gate weights [n, K] and slots [n, K] that the router gives the tokens at `rows` [n]."""
        positional, by_keyword = self.recording.router_arguments(rows, self.block)
        output = self.router(*positional, **by_keyword)
        return output[1].reshape(len(rows), -1).float(), self.slots[output[2].reshape(len(rows), -1).long()]

    @property
    def choices(self) -> int:
        """How many the kept experts and the constants are."""
        return len(self.parameters) + len(self.values)

    def put_out(self, slot: int, x: Tensor) -> Tensor:
        """What a kept expert makes of its inputs, or a constant of any: [m, H] -> [m, H]."""
        kept = len(self.parameters)
        if slot < kept:
            return CutLayer.put_out(self, slot, x)
        return self.values[slot - kept].expand(*x.shape[:-1], -1)

    def gates(self, rows: Tensor) -> Tensor:
        """[n, D]: the gate weights of the replaced experts at the tokens at `rows` [n]."""
        weights, index = self.route(rows)
        found = weights.new_zeros(len(rows), len(self.parameters) + len(self.values))
        return found.scatter_add_(1, index, weights)[:, len(self.parameters) :]


@torch.no_grad()
def refit_constants(refit: Refit) -> None:
    """Change `refit.cut.values` [D, H] in place by the least squares of what the layer misses; guarded by held-out."""
    cut = refit.cut
    assert isinstance(cut, SubstitutedLayer)
    normal, right = _normal(cut, refit.rows)
    scale = float(normal.diagonal().mean()) if len(normal) else 0.0
    if scale == 0:
        return
    judged_normal, judged_right = _normal(cut, refit.judged)
    best, least = None, 0.0
    for penalty in SMALL:
        regular = normal.clone()
        regular.diagonal().add_(penalty * scale)
        factor, failed = torch.linalg.cholesky_ex(regular)
        if failed:
            continue
        change = torch.cholesky_solve(right, factor)
        off = float((change * (judged_normal @ change)).sum() - 2 * (change * judged_right).sum())  # and ||r||^2
        if off < least:
            best, least = change, off
    if best is not None:
        cut.values += best.to(cut.values.dtype)


def _normal(cut: SubstitutedLayer, rows: Tensor) -> tuple[Tensor, Tensor]:
    """G^T W G [D, D] and G^T W r [D, H] in float64, W the tokens' weights."""
    count, width = cut.values.shape
    normal = torch.zeros(count, count, dtype=torch.float64, device=cut.values.device)
    right = torch.zeros(count, width, dtype=torch.float64, device=cut.values.device)
    for chunk in rows.split(CHUNK):
        target = cut.targets(chunk)
        share = cut.token_weights(target).double()[:, None]
        gates = cut.gates(chunk).double()
        normal += gates.T @ (gates * share)
        right += gates.T @ (cut.gap(chunk, target).double() * share)
    return normal, right


def _ridge(refit: Refit) -> None:
    refit_down(refit.cut, refit.rows, refit.judged)
    refit_constants(refit)


def _tune(refit: Refit) -> None:
    cut, asked = refit.cut, refit.correction
    assert isinstance(cut, SubstitutedLayer)
    rate = min(asked.rate * refit.error, MOST_RATE)
    leaves = [*refit.router.values(), cut.values]
    tune(cut, refit.rows, leaves, Schedule(asked.steps, asked.tokens, rate, refit.seed))


STEPS_OF: Mapping[str, Mapping[str, Step]] = {
    CONSTANTS: {CONSTANTS: refit_constants},
    "ridge": {CONSTANTS: refit_constants, "ridge": _ridge},
    "tune": {CONSTANTS: refit_constants, "ridge": _ridge, "tune": _tune},
}


@dataclass(slots=True)
class InOrder(LayerVisitor):
    """Refits the constants of each layer on what the corrected earlier layers put out; keeps the layers in `folder`."""

    model: OpenModel
    substitutes: Mapping[str, Substitutes]  # by experts module, as planned
    calibration: Calibration
    correction: Correct
    folder: Path
    progress: Progress
    seed: int = 0
    figures: dict[str, Any] = field(default_factory=dict)  # of the corrected layers, by experts module
    recordings: list[Recording] = field(default_factory=list)

    def entering(self, batch: int) -> None:
        for recording in self.recordings:
            recording.enter(batch)

    def before(self, unit: str, replay: Replay) -> None:
        """Record the loaded layer, refit it with its constants, and let the batches pass that."""
        layers = [layer for layer in self.at.moe_layers if layer.name in self.substitutes]
        fresh = [layer for layer in layers if told_of(kept_at(self.folder, layer)) is None]
        expected, heldout = self.calibration.tokens, self.calibration.heldout
        self.recordings = [Recording(layer, expected, heldout) for layer in fresh]
        for recording in self.recordings:
            recording.attach(self.model.partial.model)
        if self.recordings:
            replay(range(len(self.calibration.batches)))
        recordings, self.recordings = self.recordings, []
        for layer, recording in zip(fresh, recordings, strict=True):
            recording.detach()
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
        made: list[SubstitutedLayer] = []

        def cut_layer(*args: Any) -> SubstitutedLayer:
            made.append(SubstitutedLayer.made(planned.values, torch.tensor(slots), writing, *args))
            return made[0]

        figures = correct_layer(model, layer, recording, self.correction, self.seed, writing, cut_layer, STEPS_OF)
        tensors = {VALUES: made[0].best_values if made else planned.values.to(writing)}
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
    batches, evaluation = visitor.calibration.batches, list[Tensor]()
    visitors: list[LayerVisitor] = [visitor]
    if riding is not None:
        riding.first, evaluation = len(batches), riding.batches
        visitors.append(riding)
    Pass(visitor.model, batches, visitor.progress, "correct", visitor.seed, evaluation=evaluation).run(*visitors)
    return visitor.figures
