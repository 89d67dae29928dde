"""What is asked of C3PO (arXiv 2504.07964): how pathways are optimised, and on what. Importing this loads no torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, PositiveInt

from compressor.entry_points import option
from compressor.records import check_fields

Optimizer = Literal["mode", "kernel", "ngd"]
Kernel = Literal["gaussian", "linear", "polynomial", "matern"]
Tokens = Literal["last", "scored"]  # which are moved: a prompt's last one, or all that an answer's tokens hang on
Positive = Annotated[FiniteFloat, Field(gt=0)]
METHOD = "c3po"
OWN = "own"  # prompts are embedded by the mean of the model's own token embeddings


@dataclass(frozen=True, slots=True)
class PathwayOptions:
    """How pathways are optimised; the defaults are the paper's, where it names one."""

    optimizer: Optimizer = option("ngd", "How pathways are optimised: mode, kernel or ngd.")
    neighbours: PositiveInt = option(3, "Nearest items of the reference set.")
    radius: Positive | None = option(None, "Instead: all items within this distance of their embeddings, from 0 to 2.")
    layers: PositiveInt = option(5, "The last MoE layers.")
    experts: PositiveInt = option(20, "Of each layer, the experts of largest weight, which alone are moved.")
    tokens: Tokens = option("last", "Which are moved: last (of the prompt), or scored: all that an answer depends on.")
    kernel: Kernel = option("gaussian", "gaussian, linear, polynomial or matern.")
    bandwidth: Positive | None = option(None, "Bandwidth of the kernel (default: the neighbours' mean distance).")
    share: Annotated[float, Field(ge=0, le=1)] | None = option(
        None, "Share of the way to the neighbours, 0 to 1 (default: a line search for kernel, a half for mode)."
    )
    steps: PositiveInt = option(10, "Steps of mode and ngd.")
    rate: Positive = option(1.0, "Size of the first step of ngd, in logits per nat.")

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True)
class Routing:
    """C3PO at test time: a model answers on pathways optimised by its reference set, a folder."""

    reference: str | Path
    options: PathwayOptions = field(default_factory=PathwayOptions)
    embedding: str = OWN  # which the set has to name, too: a file shall not choose what is downloaded
