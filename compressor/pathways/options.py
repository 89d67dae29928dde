"""What is asked of C3PO (arXiv 2504.07964): how pathways are optimised, and on what. Importing this loads no torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from compressor.entry_points import option
from compressor.errors import CompressionError

Optimizer = Literal["mode", "kernel", "ngd"]
Kernel = Literal["gaussian", "linear", "polynomial", "matern"]
KERNELS: tuple[Kernel, ...] = get_args(Kernel)
Tokens = Literal["last", "scored"]  # which are moved: a prompt's last one, or all that an answer's tokens hang on
METHOD = "c3po"
OWN = "own"  # prompts are embedded by the mean of the model's own token embeddings


@dataclass(frozen=True, slots=True)
class PathwayOptions:
    """How pathways are optimised; the defaults are the paper's, where it names one."""

    optimizer: Optimizer = option("ngd", "How pathways are optimised: mode, kernel or ngd.")
    neighbours: int = option(3, "Nearest items of the reference set.")
    radius: float | None = option(None, "Instead: all items within this distance of their embeddings, from 0 to 2.")
    layers: int = option(5, "The last MoE layers.")
    experts: int = option(20, "Of each layer, the experts of largest weight, which alone are moved.")
    tokens: Tokens = option("last", "Which are moved: last (of the prompt), or scored: all that an answer depends on.")
    kernel: Kernel = option("gaussian", "gaussian, linear, polynomial or matern.")
    bandwidth: float | None = option(None, "Bandwidth of the kernel (default: the neighbours' mean distance).")
    share: float | None = option(
        None, "Share of the way to the neighbours, 0 to 1 (default: a line search for kernel, a half for mode)."
    )
    steps: int = option(10, "Steps of mode and ngd.")
    rate: float = option(1.0, "Size of the first step of ngd, in logits per nat.")

    def __post_init__(self) -> None:
        for name, value, known in (
            ("optimizer", self.optimizer, get_args(Optimizer)),
            ("kernel", self.kernel, KERNELS),
            ("tokens", self.tokens, get_args(Tokens)),
        ):
            if value not in known:
                raise CompressionError(f"there is no {name} {value!r}; known are {', '.join(known)}")
        for name in ("neighbours", "layers", "experts", "steps"):
            if getattr(self, name) < 1:
                raise CompressionError(f"{name} {getattr(self, name)} leaves nothing to do; give at least 1")
        for name in ("radius", "bandwidth", "rate"):
            number = getattr(self, name)
            if number is not None and not 0 < number < float("inf"):
                raise CompressionError(f"{name} {number} is not a number above 0; give one")
        if self.share is not None and not 0 <= self.share <= 1:
            raise CompressionError(f"share {self.share} is not between 0 and 1; give one that is")


@dataclass(frozen=True, slots=True)
class Routing:
    """C3PO at test time: a model answers on pathways optimised by its reference set, a folder."""

    reference: str | Path
    options: PathwayOptions = field(default_factory=PathwayOptions)
    embedding: str = OWN  # which the set has to name, too: a file shall not choose what is downloaded
