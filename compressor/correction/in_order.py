"""Layers in order, each on what the compressed earlier layers make of the calibration text.

For each layer: run the original on the batches that stand before it, plan it (or take the plan that there is), cut
it, correct it toward what the original put out, and let the batches pass the smaller layer. One pass, one layer in
memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from compressor.calibration.batches import Calibration
from compressor.calibration.collecting import Observers, Routers
from compressor.calibration.heldout import Judge
from compressor.calibration.statistics import LayerStatistics
from compressor.correction.recording import Recording
from compressor.correction.refit import Correction, correct_layer
from compressor.correction.shadow import SmallerLayers
from compressor.memory import give_back
from compressor.model.architecture import MoeLayer, layers_by_unit
from compressor.model.opened import OpenModel, pick_dtype, refuse_shared_experts
from compressor.model.streaming import stream_layers
from compressor.plans.plan import LayerPlan
from compressor.progress import Progress
from compressor.surgery.cut_files import CutFiles
from compressor.surgery.cutting import cut_layers

Decide = Callable[[LayerStatistics], LayerPlan]
NOTHING = Correction()
COMPRESSED = "compressed"  # what the earlier layers were while a layer was planned


@dataclass(slots=True)
class _Pass:
    """One layer at a time of a pass in order."""

    model: OpenModel
    experts: int
    calibration: Calibration | None
    decide: Decide
    needs: frozenset[str]
    correction: Correction
    files: CutFiles | None
    seed: int
    measure: bool
    plans: dict[str, LayerPlan] = field(default_factory=dict)
    active: list[Any] = field(default_factory=list)  # what watches the batches of a rehearsal
    smaller: SmallerLayers = field(init=False)
    routers: Routers = field(init=False)

    def __post_init__(self) -> None:
        self.smaller, self.routers = SmallerLayers(self.model, self.experts), Routers(self.model)

    def finished(self, layers: list[MoeLayer]) -> dict[str, LayerPlan]:
        """Plans of these layers where an earlier run has cut them all."""
        found = {} if self.files is None else {layer.name: self.files.plan(layer) for layer in layers}
        known = {name: plan for name, plan in found.items() if plan is not None}
        return known if len(known) == len(layers) else {}

    def compress(self, unit: str, layers: list[MoeLayer], rehearse: Callable[[], None]) -> None:
        """Have the smaller layer take over the loaded one."""
        known = self.finished(layers)
        if known and self.files is not None:
            self.plans.update(known)
            device = self.model.partial.device
            cut = {k: v.to(device) for layer in layers for k, v in self.files.tensors(layer).items()}
            self.take_over(unit, layers, cut)
            return
        statistics, recordings = self.watched(layers, rehearse)
        for layer, seen in zip(layers, statistics, strict=True):
            self.plans[layer.name] = self.decide(seen)
        del statistics
        self.take_over(unit, layers, cut_layers(self.model.partial.model, layers, self.plans))
        for layer, recording in zip(layers, recordings, strict=False):
            give_back()
            writing = pick_dtype("auto", self.model.config, self.model.checkpoint)
            figures = correct_layer(self.smaller.model, layer, recording, self.correction, self.seed, writing)
            plan = self.plans[layer.name]
            self.plans[layer.name] = replace(plan, figures={**plan.figures, "correction": figures})
        give_back()
        if self.files is not None:
            state = self.smaller.model.state_dict()
            for layer in layers:
                keys = [*(tensor.key for tensor in layer.tensors), *layer.tables]
                self.files.save(self.plans[layer.name], layer, {key: state[key] for key in keys})

    def take_over(self, unit: str, layers: list[MoeLayer], cut: Mapping[str, torch.Tensor]) -> None:
        """Fill the smaller layer, and give the original experts' memory back."""
        self.smaller.enter(unit, cut)
        for layer in layers:
            self.model.partial.release(layer.name)

    def watched(
        self, layers: list[MoeLayer], rehearse: Callable[[], None]
    ) -> tuple[list[LayerStatistics], list[Recording]]:
        """What the original layer shows on the batches that stand before it: statistics, and what to correct toward."""
        model, calibration = self.model.partial.model, self.calibration
        bare = [LayerStatistics(layer, seed=self.seed) for layer in layers]
        if calibration is None:
            return bare, []
        observers = [
            Observers(self.model, layer, self.needs, calibration, self.routers, self.seed)
            for layer in layers
            if self.needs
        ]
        recordings = [Recording(layer, calibration.tokens) for layer in layers] if self.measure else []
        for recording in recordings:
            recording.attach(model)
        self.active = [*observers, *recordings]
        if self.active:
            rehearse()
        self.active = []
        for recording in recordings:
            recording.detach()
        return [watching.finish() for watching in observers] or bare, recordings

    def entering(self, batch: int) -> None:
        """A batch is about to run."""
        for watching in self.active:
            if isinstance(watching, Recording):
                watching.enter(self.calibration is not None and batch in self.calibration.heldout)
            else:
                watching.enter(batch)






def compress_in_order(
    model: OpenModel,
    experts: int,
    calibration: Calibration | None,
    decide: Decide,
    progress: Progress,
    *,
    needs: frozenset[str] = frozenset(),
    correction: Correction = NOTHING,
    files: CutFiles | None = None,
    seed: int = 0,
    measure: bool = False,
    judge: Judge | None = None,
    phase: str = "correct",
) -> tuple[LayerPlan, ...]:
    """Plan (by `decide`), cut and correct every layer in order; returns the plans with the corrections' figures.

    `measure` has the error of layers measured that are not corrected. The batches of `judge` run through the
    compressed model to its end.
    """
    refuse_shared_experts(model)
    architecture, by_unit = model.architecture, layers_by_unit(model.architecture.layers)
    batches = () if calibration is None else calibration.batches
    evaluation = [] if judge is None else judge.tokens
    state = _Pass(
        model, experts, calibration, decide, needs, correction, files, seed, measure=measure or correction.wanted
    )

    def standing(unit: str, rehearse: Callable[[], None]) -> None:
        if unit in by_unit:
            state.compress(unit, by_unit[unit], rehearse)

    def entering(batch: int) -> None:
        state.entering(batch)
        if judge is not None and batch >= len(batches):
            judge.entering(batch - len(batches))

    def finished(batch: int, output: Any) -> None:
        if judge is not None:
            judge.finished(batch - len(batches), output)

    progress.start(phase, len(by_unit))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        passed = stream_layers(
            model.partial,
            [*batches, *evaluation],
            architecture.units,
            architecture.units if evaluation else by_unit,
            entering=entering,
            standing=standing,
            stand_ins=state.smaller.forwards,
            rehearsing=range(len(batches)),
            finishing=range(len(batches), len(batches) + len(evaluation)),
            finished=finished,
        )
        try:
            for unit in passed:
                if unit in by_unit:
                    state.smaller.leave(unit)
                    progress.advance(unit)
        finally:
            passed.close()
    return tuple(state.plans[layer.name] for layer in architecture.layers)
