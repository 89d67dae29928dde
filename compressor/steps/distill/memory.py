"""Training with the whole model in memory: float32 masters beside what the model computes with."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from compressor.distributed.ranks import here
from compressor.evaluation.evaluator import Evaluator, Figures
from compressor.model.opened import OpenModel
from compressor.steps.distill.objective import Objective
from compressor.steps.distill.step import Distill
from compressor.steps.distill.trained import TrainedLayer
from compressor.steps.distill.training import Values, put_values, rounded
from compressor.steps.distill.updating import LayerState, NotFiniteError, keep_state, kept_state, update


class InMemory:
    """The model whole, and the state of all its layers."""

    def __init__(
        self,
        model: OpenModel,
        layers: Sequence[TrainedLayer],
        stored: Mapping[str, torch.dtype],
        options: Distill,
        seed: int,
    ) -> None:
        self.model, self.stored, self.optimizer = model, stored, options.optimiser
        self.layers: Mapping[str, TrainedLayer] = {layer.unit: layer for layer in layers}
        model.partial.load(model.partial.keys_under(""))
        state = model.partial.model.state_dict()
        self.own = {key: state[key].detach() for layer in layers for key in layer.keys}
        self.states = {layer.unit: LayerState(layer.begin(self.own, options.rank, seed)) for layer in layers}

    def step(self, objective: Objective, rate: float) -> None:
        """Take one step over all batches."""
        whole = self.model.partial.model
        for unit, layer in self.layers.items():
            put_values(self.model, layer.values(self.own, self.states[unit].masters), trainable=True)
        self._agree(objective, self._finite_losses(objective))
        for unit, layer in self.layers.items():
            state, parameters = self.states[unit], {key: whole.get_parameter(key) for key in layer.keys}
            dense = {key: parameter.grad for key, parameter in parameters.items()}
            gradients = layer.gradients(state.masters, dense)
            gradients = {name: here().all_reduce(value.float()) for name, value in gradients.items()}
            update(state, gradients, self.optimizer, rate)

    def _finite_losses(self, objective: Objective) -> bool:
        """Take the gradients of all batches' losses; whether all of these are numbers."""
        model, device = self.model.partial.model, self.model.partial.device
        try:
            with self._visited(objective), torch.enable_grad():
                for number, batch in enumerate(objective.batches):
                    if len(batch.tokens):
                        objective.entering(number)
                        output = model(input_ids=batch.tokens.to(device), use_cache=False)
                        objective.loss(number, output).backward()
        except NotFiniteError:
            return False
        return True

    def _agree(self, objective: Objective, finite: bool) -> None:
        """Add up the parts of the loss over all ranks. Raises `NotFiniteError` at all if it is due at one."""
        sums = torch.tensor([float(not finite), *objective.parts.values()], dtype=torch.float64)
        faults, *parts = here().all_reduce(sums).tolist()
        objective.parts = dict(zip(objective.parts, parts, strict=True))
        if faults:
            raise NotFiniteError

    @contextmanager
    def _visited(self, objective: Objective) -> Iterator[None]:
        """The layers' forwards as the objective has them, while the block runs."""
        modules = {unit: self.model.partial.model.get_submodule(unit) for unit in self.model.architecture.units}
        for unit, module in modules.items():
            own = module.forward
            if (forward := objective.replaced(unit, own)) is not own:
                module.forward = forward
        try:
            yield
        finally:
            for module in modules.values():
                module.__dict__.pop("forward", None)

    @torch.no_grad()
    def evaluated(self, evaluator: Evaluator) -> Figures:
        """Figures of the model as it would be stored now."""
        for unit, layer in self.layers.items():
            put_values(self.model, rounded(layer.values(self.own, self.states[unit].masters), self.stored))
        return evaluator.measure_loaded(self.model.partial.model)

    def save(self, folder: Path) -> None:
        """Write the state of every layer."""
        for unit, state in self.states.items():
            keep_state(folder, unit, state)

    def load(self, folder: Path) -> None:
        """Read the state of every layer."""
        self.states = {unit: kept_state(folder, unit, self.model.partial.device) for unit in self.layers}

    def values(self, folder: Path, unit: str) -> Values:
        """A layer's trained tensors in a kept state."""
        masters: Mapping[str, Tensor] = kept_state(folder, unit, self.model.partial.device, moments=False).masters
        return self.layers[unit].values(self.own, masters)

    def close(self) -> None:
        """Give the model's memory back."""
        self.model.partial.release("")
