"""The same training with one decoder layer in memory: a step is a reverse pass, and a layer's state waits on disk.

The update of a layer is made while it is loaded on the way back. No layer below has been replayed by then, and none
above is used again, so that the step is that of the whole model.
"""

import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from compressor.evaluation.evaluator import Evaluator, Figures, Variants
from compressor.model.opened import OpenModel
from compressor.model.streaming import ReversePass, ReverseVisitor
from compressor.steps.distill.objective import Objective
from compressor.steps.distill.step import Distill
from compressor.steps.distill.trained import TrainedLayer
from compressor.steps.distill.training import Values, put_values, rounded
from compressor.steps.distill.updating import LayerState, file_of, keep_state, kept_state, update
from compressor.words import human_bytes

logger = logging.getLogger(__name__)
READS = 2  # of the model, by a step


class Streamed:
    """The model as it is stored, and the present state of its layers in the folder `now`."""

    def __init__(
        self,
        model: OpenModel,
        layers: Sequence[TrainedLayer],
        stored: Mapping[str, torch.dtype],
        options: Distill,
        seed: int,
        now: Path,
    ) -> None:
        self.model, self.stored, self.optimizer, self.now = model, stored, options.optimiser, now
        self.layers: Mapping[str, TrainedLayer] = {layer.unit: layer for layer in layers}
        shutil.rmtree(now, ignore_errors=True)
        for unit, layer in self.layers.items():
            model.partial.load(layer.keys)
            keep_state(now, unit, LayerState(layer.begin(self.own(layer), options.rank, seed)))
            model.partial.release(unit)

    def own(self, layer: TrainedLayer) -> dict[str, Tensor]:
        """A loaded layer's tensors, as the checkpoint has them."""
        return {key: self.model.partial.model.get_parameter(key).detach() for key in layer.keys}

    def step(self, objective: Objective, rate: float) -> None:
        """Take one step over all batches: once through the layers, and back."""
        run = ReversePass(self.model, [batch.tokens for batch in objective.batches])
        run.run(objective.loss, _Updating(self, rate), objective)

    @torch.no_grad()
    def evaluated(self, evaluator: Evaluator) -> Figures:
        """Figures of the model as it would be stored now."""
        return evaluator.measure(self.model, _Rounded(self))[0]

    def save(self, folder: Path) -> None:
        """Keep the present state, of which no file is ever written again: a second name is enough."""
        _linked(self.now, folder, self.layers)

    def load(self, folder: Path) -> None:
        """Go back to a state that was kept."""
        _linked(folder, self.now, self.layers)

    def values(self, folder: Path, unit: str) -> Values:
        """A layer's trained tensors in a kept state."""
        layer, partial = self.layers[unit], self.model.partial
        partial.load(layer.keys)
        found = layer.values(self.own(layer), kept_state(folder, unit, partial.device, moments=False).masters)
        partial.release(unit)
        return found

    def close(self) -> None:
        """Nothing is loaded between steps."""


class _Updating(ReverseVisitor):
    """Has layers compute with their masters on both ways, and updates each once its gradients are there."""

    def __init__(self, engine: Streamed, rate: float) -> None:
        self.engine, self.rate = engine, rate

    def loaded(self, unit: str) -> None:
        if (layer := self.engine.layers.get(unit)) is not None:
            engine = self.engine
            masters = kept_state(engine.now, unit, engine.model.partial.device, moments=False).masters
            put_values(engine.model, layer.values(engine.own(layer), masters), trainable=True)

    def done(self, unit: str) -> None:
        if (layer := self.engine.layers.get(unit)) is not None:
            engine, whole = self.engine, self.engine.model.partial.model
            state = kept_state(engine.now, unit, engine.model.partial.device)
            dense = {key: whole.get_parameter(key).grad for key in layer.keys}
            update(state, layer.gradients(state.masters, dense), engine.optimizer, self.rate)
            keep_state(engine.now, unit, state)


class _Rounded(Variants):
    """Has layers compute with what would be stored of them now."""

    def __init__(self, engine: Streamed) -> None:
        self.engine = engine

    def loaded(self, unit: str) -> None:
        if (layer := self.engine.layers.get(unit)) is not None:
            engine = self.engine
            masters = kept_state(engine.now, unit, engine.model.partial.device, moments=False).masters
            put_values(engine.model, rounded(layer.values(engine.own(layer), masters), engine.stored))


def _linked(source: Path, folder: Path, units: Mapping[str, TrainedLayer]) -> None:
    """Give every layer's file a name in another folder, too; a copy where the file system cannot."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for unit in units:
        try:
            os.link(file_of(source, unit), file_of(folder, unit))
        except OSError:
            shutil.copyfile(file_of(source, unit), file_of(folder, unit))


def log_cost(model: OpenModel, steps: int) -> None:
    """Say beforehand how much will be read."""
    size = sum(info.nbytes for info in model.checkpoint.tensors.values())
    logger.warning(
        "training layer by layer reads the model's %s %d times a step: %s in %d steps",
        human_bytes(size),
        READS,
        human_bytes(READS * steps * size),
        steps,
    )
