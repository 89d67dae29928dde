"""Options of the step `routers`: router calibration, which moves routers toward the base, after
C3PO."""

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from compressor.recipe.step import DEFAULT_LENGTH, StepOptions


class Routers(StepOptions):
    """Move the routers toward the base on text, as far as that lowers the KL on held-out text."""

    name: ClassVar[str] = "routers"
    implementation: ClassVar[str] = "compressor.steps.routers.step:RoutersStep"
    in_place: ClassVar[bool] = True

    method: Literal["router", "bias", "auto", "none"] = "router"
    """Calibrate router weights (router), a bias per expert (bias) or the better one (auto)."""
    rounds: int = Field(4, ge=1, le=1000)
    """Gradient rounds, each on its share of the text."""
    sequences: int = Field(200, ge=1, le=10**6)
    """Calibration sequences."""
    sequence_length: int = Field(DEFAULT_LENGTH, ge=2, le=10**6)
    """Tokens in each sequence."""
    optimizer: Literal["own", "mode", "kernel", "ngd"] = "own"
    """Optimiser of the pathways that a bias averages: own (each answer), mode, kernel or ngd."""
    reference: str | None = None
    """Reference set of the checkpoint, whose optimised pathways a bias averages."""
    accept: Literal["gain", "always"] = "gain"
    """Keep the best change if it's a gain on held-out text (gain), or whatever it does there
    (always)."""

    @model_validator(mode="after")
    def _enough(self) -> Self:
        if self.sequences < self.rounds:
            raise ValueError(
                f"{self.sequences} sequences are fewer than {self.rounds} rounds; give at least "
                "as many"
            )
        return self
