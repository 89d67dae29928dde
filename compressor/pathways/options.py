"""Options of C3PO (arXiv 2504.07964): how pathways are optimised, and on what. Importing this loads
no torch."""

import re
from typing import Annotated, Literal, get_type_hints

from pydantic import Field, FiniteFloat, PositiveInt

from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.records import value_as

Optimizer = Literal["mode", "kernel", "ngd", "oracle"]
Kernel = Literal["gaussian", "linear", "polynomial", "matern"]
Schedule = Literal["cosine", "constant"]
# of layers or tokens: 5 or last:5, first:5, middle:5, all, or several, such as first:5+last:5
Span = str | int
# all tokens that the answer's likelihood depends on, in place of a span of the prompt's
SCORED = "scored"
Positive = Annotated[FiniteFloat, Field(gt=0)]
OWN = "own"  # prompts are embedded by the mean of the model's own token embeddings


def selected(span: Span, count: int) -> tuple[int, ...]:
    """Return which of `count` things a span names, in order; 'last' is the last one."""
    numbers = set[int]()
    for part in str(span).split("+"):
        match = re.fullmatch(r"all|(?:(first|middle|last):)?([1-9][0-9]*)|last", part)
        if match is None:
            raise CompressionError(
                f"{span!r} names no layers or tokens; write 5, last:5, first:5, middle:5 or all"
            )
        wanted = count if part == "all" else int(match[2] or 1)
        length = min(wanted, count)
        starts = {"first": 0, "middle": (count - length) // 2}
        start = starts.get(match[1], count - length)
        numbers.update(range(start, start + length))
    return tuple(sorted(numbers))


@frozen
class PathwayOptions:
    """Optimisation of pathways; defaults are the paper's, where it names one."""

    optimizer: Optimizer = "ngd"  # oracle: by the item's own answer, an upper bound
    neighbours: PositiveInt = 3  # nearest items of the reference set
    # instead: all items within this distance of their embeddings, from 0 to 2
    radius: Positive | None = None
    layers: Span = 5  # MoE layers
    experts: PositiveInt = 20  # of each layer, those of largest weight, which alone are moved
    tokens: Span = "last"  # of the prompt
    kernel: Kernel = "gaussian"
    bandwidth: Positive | None = None  # of the kernel; None: the neighbours' mean distance
    # of the way to the neighbours; None: searched, or a half
    share: Annotated[float, Field(ge=0, le=1)] | None = None
    steps: PositiveInt = 10  # of mode and ngd
    rate: Positive = 1.0  # size of the first step of ngd, in logits per nat
    schedule: Schedule = "cosine"  # of that rate

    def __post_init__(self) -> None:
        # by types and bounds
        for name, hint in get_type_hints(type(self), include_extras=True).items():
            value_as(getattr(self, name), hint, name)
        selected(self.layers, 1)
        if self.tokens != SCORED:
            selected(self.tokens, 1)
