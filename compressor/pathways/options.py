"""Options of C3PO (arXiv 2504.07964): how pathways are optimised, and on what. Importing this loads no torch."""

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, PositiveInt

from compressor.records import check_fields

Optimizer = Literal["mode", "kernel", "ngd"]
Kernel = Literal["gaussian", "linear", "polynomial", "matern"]
Tokens = Literal["last", "scored"]  # the prompt's last token, or all tokens that the answer's likelihood depends on
Positive = Annotated[FiniteFloat, Field(gt=0)]
OWN = "own"  # prompts are embedded by the mean of the model's own token embeddings


@dataclass(frozen=True, slots=True)
class PathwayOptions:
    """Optimisation of pathways; defaults are the paper's, where it names one."""

    optimizer: Optimizer = "ngd"
    neighbours: PositiveInt = 3  # nearest items of the reference set
    radius: Positive | None = None  # instead: all items within this distance of their embeddings, from 0 to 2
    layers: PositiveInt = 5  # the last MoE layers
    experts: PositiveInt = 20  # of each layer, those of largest weight, which alone are moved
    tokens: Tokens = "last"
    kernel: Kernel = "gaussian"
    bandwidth: Positive | None = None  # of the kernel; None: the neighbours' mean distance
    share: Annotated[float, Field(ge=0, le=1)] | None = None  # of the way to the neighbours; None: searched, or a half
    steps: PositiveInt = 10  # of mode and ngd
    rate: Positive = 1.0  # size of the first step of ngd, in logits per nat

    def __post_init__(self) -> None:
        check_fields(self)
