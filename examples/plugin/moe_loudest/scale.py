"""The step `scale`: every routed expert's output times a factor."""

from typing import ClassVar

from pydantic import Field
from torch import Tensor

from compressor.plugins import Result, State, Step, StepOptions


class Scale(StepOptions):
    """Multiply each expert's down projection by a factor."""

    name: ClassVar[str] = "scale"
    implementation: ClassVar[str] = "moe_loudest.scale:ScaleStep"
    in_place: ClassVar[bool] = True

    factor: float = Field(1.0, gt=0)
    """Factor of down projections."""


class ScaleStep(Step[Scale]):
    def write(self, state: State) -> Result:
        """Return the down projections of routed experts, times the factor, by decoder layer."""
        layers = (layer.name for layer in state.model.architecture.layers)
        return Result({"factor": self.options.factor}, (self._of(state, name) for name in layers))

    def _of(self, state: State, layer: str) -> dict[str, Tensor]:
        stored = state.model.checkpoint
        names = [name for name in stored.tensors if name.startswith(f"{layer}.")]
        tensors = {name: stored.read(name) for name in names if "down_proj" in name}
        factor = self.options.factor
        return {name: (old.float() * factor).to(old.dtype) for name, old in tensors.items()}
