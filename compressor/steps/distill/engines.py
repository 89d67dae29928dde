"""Training the float32 masters of a model's layers: with the whole model in memory, or one decoder layer at a time.

Layer by layer, a step is a reverse pass, and a layer's state waits on disk. Its update is made while it is loaded on
the way back. No layer below has been replayed by then, and none above is used again, so that the step is that of the
whole model. Gradients are clipped to a norm of 1 for each decoder layer: that way never sees the norm of all.
"""

import logging
import math
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compressor.distributed.ranks import here
from compressor.evaluation.evaluator import Evaluator, Figures, Variants
from compressor.kept import keep_tensors, kept_tensors
from compressor.model.loading import set_tensor
from compressor.model.opened import OpenModel
from compressor.model.streaming import ReversePass, ReverseVisitor
from compressor.steps.distill.objective import NotFiniteError, Objective
from compressor.steps.distill.step import Distill
from compressor.steps.distill.trained import Masters, TrainedLayer, stored_dtypes, trained_layers
from compressor.words import human_bytes

logger = logging.getLogger(__name__)
READS = 2  # of the model, by a streamed step
MOST_NORM = 1.0  # of a decoder layer's gradients
MOMENTS = "of "  # begins the name of a tensor of the optimiser's state in a file

Values = Mapping[str, Tensor]
Moments = dict[str, dict[str, Tensor]]  # the optimiser's state by master


@dataclass(slots=True)
class LayerState:
    """A decoder layer's masters, and what the optimiser remembers of each."""

    masters: Masters
    moments: Moments = field(default_factory=dict)


def update(state: LayerState, gradients: Mapping[str, Tensor], optimizer: str, rate: float) -> None:
    """Clip the gradients and take a step, in place. Raises `NotFiniteError` for gradients that are no numbers.

    Adafactor (Shazeer and Stern 2018) keeps a row and a column of a matrix's second moments. Its steps are as long as
    Adam's at the same rate: root mean square `rate`, not relative to a tensor's size.
    """
    norm = math.sqrt(sum(float(value.double().square().sum()) for value in gradients.values()))
    if not math.isfinite(norm):
        raise NotFiniteError
    for name, leaf in state.masters.items():
        leaf.grad = gradients[name] * (min(1.0, MOST_NORM / norm) if norm else 1.0)
    leaves = list(state.masters.values())
    made: Any
    if optimizer == "adam":
        made = torch.optim.Adam(leaves, lr=rate)
    else:
        made = torch.optim.Adafactor(leaves, lr=rate, eps=(None, 1.0))  # a floor of 1 under a tensor's size: rate as is
    for name, leaf in state.masters.items():
        if name in state.moments:
            made.state[leaf] = state.moments[name]
    made.step()
    for name, leaf in state.masters.items():
        state.moments[name], leaf.grad = dict(made.state[leaf]), None


def file_of(folder: Path, unit: str) -> Path:
    """Where a layer's state lies."""
    return folder / f"{unit}.safetensors"


def keep_state(folder: Path, unit: str, state: LayerState) -> None:
    """Write a layer's state, whole or not at all."""
    moments = {f"{MOMENTS}{name} {kind}": value for name, own in state.moments.items() for kind, value in own.items()}
    keep_tensors(file_of(folder, unit), {**state.masters, **moments}, {"unit": unit})


def kept_state(folder: Path, unit: str, device: torch.device, moments: bool = True) -> LayerState:
    """A layer's state as `keep_state` has written it, in tensors of its own; perhaps the masters alone."""
    state = LayerState({})
    for name, value in kept_tensors(file_of(folder, unit)).items():
        if not name.startswith(MOMENTS):
            state.masters[name] = value.to(device, copy=True)
        elif moments:
            key, _, kind = name.removeprefix(MOMENTS).rpartition(" ")
            own = value.clone() if kind == "step" else value.to(device, copy=True)
            state.moments.setdefault(key, {})[kind] = own
    return state


class Engine(ABC):
    """A model in training, in memory or layer by layer."""

    def __init__(self, model: OpenModel, options: Distill, seed: int) -> None:
        layers = trained_layers(model, options)
        self.model, self.optimizer, self.rank, self.seed = model, options.optimiser, options.rank, seed
        self.layers: Mapping[str, TrainedLayer] = {layer.unit: layer for layer in layers}  # by decoder layer
        self.stored = stored_dtypes(model, layers)

    @abstractmethod
    def step(self, objective: Objective, rate: float) -> None:
        """Take one step on the objective's batches. Raises `NotFiniteError` where a loss or a gradient is no number."""

    @abstractmethod
    def evaluated(self, evaluator: Evaluator) -> Figures:
        """Figures of the model as it would be stored now."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Keep the state of all layers in a new folder."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Go back to a state that was kept."""

    @abstractmethod
    def values(self, folder: Path, unit: str) -> Values:
        """A layer's trained tensors in float32 in a kept state, by state-dict key."""

    def close(self) -> None:
        """Nothing stays loaded."""
        self.model.partial.release("")

    def loaded(self, layer: TrainedLayer) -> dict[str, Tensor]:
        """A loaded layer's tensors."""
        return {key: self.model.partial.model.get_parameter(key).detach() for key in layer.keys}

    def gradients(self, layer: TrainedLayer, masters: Masters) -> dict[str, Tensor]:
        """The masters' gradients of those of a loaded layer's tensors."""
        whole = self.model.partial.model
        return layer.gradients(masters, {key: whole.get_parameter(key).grad for key in layer.keys})

    def put(self, layer: TrainedLayer, own: Values, masters: Values, train: bool) -> None:
        """Have a loaded layer compute with its masters: asking for gradients, or rounded as they would be stored.

        What is loaded may be the checkpoint's own file, mapped: it is replaced, never written.
        """
        partial = self.model.partial
        for key, value in layer.values(own, masters).items():
            as_is = value if train else value.to(self.stored[key]).float()
            computed = as_is.detach().to(partial.device, partial.empty[key].dtype)
            set_tensor(partial.model, key, nn.Parameter(computed, requires_grad=train))


class InMemory(Engine):
    """The model whole, and the state of all its layers."""

    def __init__(self, model: OpenModel, options: Distill, seed: int) -> None:
        super().__init__(model, options, seed)
        model.partial.load(model.partial.keys_under(""))
        state = model.partial.model.state_dict()
        self.read = {key: state[key].detach() for layer in self.layers.values() for key in layer.keys}
        self.states = {unit: LayerState(layer.begin(self.read, self.rank, seed)) for unit, layer in self.layers.items()}

    def step(self, objective: Objective, rate: float) -> None:
        for unit, layer in self.layers.items():
            self.put(layer, self.read, self.states[unit].masters, train=True)
        finite = self._finite_losses(objective)
        sums = torch.tensor([float(not finite), *objective.parts.values()], dtype=torch.float64)
        faults, *parts = here().all_reduce(sums).tolist()
        objective.parts = dict(zip(objective.parts, parts, strict=True))
        if faults:  # at one rank, so at all
            raise NotFiniteError
        for unit, layer in self.layers.items():
            state = self.states[unit]
            gradients = self.gradients(layer, state.masters)
            gradients = {name: here().all_reduce(value.float()) for name, value in gradients.items()}
            update(state, gradients, self.optimizer, rate)

    def _finite_losses(self, objective: Objective) -> bool:
        """Take the gradients of all batches' losses, the layers' forwards as the objective has them.

        Return True if all losses are numbers.
        """
        model, device = self.model.partial.model, self.model.partial.device
        modules = {unit: model.get_submodule(unit) for unit in self.model.architecture.units}
        try:
            for unit, module in modules.items():
                module.forward = objective.replaced(unit, module.forward)
            with torch.enable_grad():
                for number, batch in enumerate(objective.batches):
                    if len(batch.tokens):
                        objective.entering(number)
                        output = model(input_ids=batch.tokens.to(device), use_cache=False)
                        objective.loss(number, output).backward()
        except NotFiniteError:
            return False
        finally:
            for module in modules.values():
                module.__dict__.pop("forward", None)
        return True

    @torch.no_grad()
    def evaluated(self, evaluator: Evaluator) -> Figures:
        for unit, layer in self.layers.items():
            self.put(layer, self.read, self.states[unit].masters, train=False)
        return evaluator.measure_loaded(self.model.partial.model)

    def save(self, folder: Path) -> None:
        for unit, state in self.states.items():
            keep_state(folder, unit, state)

    def load(self, folder: Path) -> None:
        self.states = {unit: kept_state(folder, unit, self.model.partial.device) for unit in self.layers}

    def values(self, folder: Path, unit: str) -> Values:
        masters = kept_state(folder, unit, self.model.partial.device, moments=False).masters
        return self.layers[unit].values(self.read, masters)


class Streamed(Engine):
    """The model as it is stored, and the present state of its layers in the folder `now`."""

    def __init__(self, model: OpenModel, options: Distill, seed: int, now: Path) -> None:
        super().__init__(model, options, seed)
        self.now = now
        size = sum(info.nbytes for info in model.checkpoint.tensors.values())
        logger.warning(
            "training layer by layer reads the model's %s %d times a step: %s in %d steps",
            human_bytes(size),
            READS,
            human_bytes(READS * options.steps * size),
            options.steps,
        )
        shutil.rmtree(now, ignore_errors=True)
        for unit, layer in self.layers.items():
            model.partial.load(layer.keys)
            keep_state(now, unit, LayerState(layer.begin(self.loaded(layer), self.rank, seed)))
            model.partial.release(unit)

    def step(self, objective: Objective, rate: float) -> None:
        run = ReversePass(self.model, [batch.tokens for batch in objective.batches])
        run.run(objective.loss, _Updating(self, rate), objective)

    @torch.no_grad()
    def evaluated(self, evaluator: Evaluator) -> Figures:
        return evaluator.measure(self.model, _Rounded(self))[0]

    def save(self, folder: Path) -> None:
        _linked(self.now, folder, self.layers)

    def load(self, folder: Path) -> None:
        _linked(folder, self.now, self.layers)

    def values(self, folder: Path, unit: str) -> Values:
        layer, partial = self.layers[unit], self.model.partial
        partial.load(layer.keys)
        found = layer.values(self.loaded(layer), kept_state(folder, unit, partial.device, moments=False).masters)
        partial.release(unit)
        return found

    def close(self) -> None:
        """Nothing is loaded between steps."""

    def put_now(self, unit: str, train: bool) -> None:
        """Have a loaded layer compute with the masters in `now`."""
        if (layer := self.layers.get(unit)) is not None:
            masters = kept_state(self.now, unit, self.model.partial.device, moments=False).masters
            self.put(layer, self.loaded(layer), masters, train)


class _Updating(ReverseVisitor):
    """Has layers compute with their masters on both ways, and updates each once its gradients are there."""

    def __init__(self, engine: Streamed, rate: float) -> None:
        self.engine, self.rate = engine, rate

    def loaded(self, unit: str) -> None:
        self.engine.put_now(unit, train=True)

    def done(self, unit: str) -> None:
        engine = self.engine
        if (layer := engine.layers.get(unit)) is not None:
            state = kept_state(engine.now, unit, engine.model.partial.device)
            update(state, engine.gradients(layer, state.masters), engine.optimizer, self.rate)
            keep_state(engine.now, unit, state)


class _Rounded(Variants):
    """Has layers compute with what would be stored of them now."""

    def __init__(self, engine: Streamed) -> None:
        self.engine = engine

    def loaded(self, unit: str) -> None:
        self.engine.put_now(unit, train=False)


def _linked(source: Path, folder: Path, units: Mapping[str, TrainedLayer]) -> None:
    """Give every layer's file, which is never written again, a name in another folder, too; or copy it there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for unit in units:
        try:
            os.link(file_of(source, unit), file_of(folder, unit))
        except OSError:
            shutil.copyfile(file_of(source, unit), file_of(folder, unit))
