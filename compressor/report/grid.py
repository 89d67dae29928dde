"""The grid of a comparison: experts, sub-experts, top-k, strategies, corrections and number formats to try."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from compressor.data.batches import Calibration, EvaluationSet
from compressor.errors import CompressionError
from compressor.formatting import known_names
from compressor.model.serving import FORMATS
from compressor.pipeline.resolve import HELDOUT, Session, read_calibration, read_evaluation
from compressor.recipe.step import TextOptions
from compressor.report.comparison_report import STORED
from compressor.steps.prune.options import Prune
from compressor.steps.quantize.scheme import BITS

SHARES = (Fraction(1), Fraction(3, 4), Fraction(1, 2), Fraction(1, 4))
SCHEMES = (STORED, *BITS)
TRANSFORMERS = "transformers"
SERVED = (*FORMATS, TRANSFORMERS)  # that formats can be chosen for


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Models to compare. With number formats (`schemes`), a row is a share of the experts in a format.

    Without formats, `experts` or `ratios` say how many experts stay, and random prunings are compared with. With
    formats, `shares` do, and the limit of `nbytes` or `bits` chooses the best.
    """

    experts: Sequence[int] = ()  # to keep in each layer, of the base's size
    ratios: Sequence[float] = ()  # shares of the experts to remove
    splits: Sequence[int | str] = ()  # sub-experts of each expert; by default 1, with formats "auto"
    top_ks: Sequence[int] = ()
    strategies: Sequence[str] | None = None  # name or name:option=value; by default all installed, with formats auto
    corrections: Sequence[str] | None = None  # by default none and the strategy's own, with formats its own
    protect: Any = None
    evaluate: Sequence[str] = ()  # text to measure on; by default calibration text that no plan saw
    evaluation_samples: int = 64  # sequences to measure on, at most
    random_seeds: int = 3
    constants: bool = False  # rows in which constants stand for experts, too
    schemes: Sequence[str] = ()  # formats, "none" for as stored
    shares: Sequence[float | Fraction] = SHARES  # of the experts that stay, with formats
    servers: Sequence[str] = ()  # that have to load the formats
    nbytes: int | None = None  # limit of all tensors
    bits: float | None = None  # the same for each parameter of the base
    context: int = 0  # tokens whose keys and values count as bytes, too

    def read_texts(self, run: Session, text: TextOptions, seed: int) -> tuple[Calibration, Sequence[EvaluationSet]]:
        """Return the calibration text, and the text to evaluate on, which may be reserved of the calibration's."""
        sets = read_evaluation(run, self.evaluate, text, seed, self.evaluation_samples) if self.evaluate else ()
        data = read_calibration(run, text, seed, HELDOUT, 0 if self.evaluate else self.evaluation_samples)
        return data, sets or data.reserved

    def __post_init__(self) -> None:
        Prune(protect=self.protect)  # which checks it
        if not self.schemes:
            if bool(self.experts) == bool(self.ratios):
                raise CompressionError("say how many experts to keep by --experts or --ratio")
            if self.constants and (self.top_ks or 1 not in (self.splits or (1,))):
                raise CompressionError(
                    "constants stand for whole experts, and top-k stays; leave out --top-k, and name 1 among --split"
                )
            return
        if self.experts or self.ratios or self.top_ks or self.constants:
            names = "--experts, --ratio, --top-k and --format"
            raise CompressionError(f"sizes are compared by --shares and --schemes; leave out {names}")
        if self.bits is not None and (self.nbytes is not None or self.bits <= 0):
            raise CompressionError(f"--bits {self.bits:g} should be a number above 0, and stands in place of --bytes")
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise CompressionError("shares of the experts that stay are above 0 and up to 1, such as 1,3/4,1/2")
        _check_names("format", self.schemes, SCHEMES)
        _check_names("server", self.servers, SERVED)


def _check_names(kind: str, names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            raise CompressionError(f"there is no {kind} {name!r}; {known_names(name, known)}")
