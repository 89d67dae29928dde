"""The grid of a comparison: experts, sub-experts, top-k, strategies, corrections and number formats
to try.

Loads no torch: the options of `compare` are made of it.
"""

from fractions import Fraction
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from compressor.data.sources import SAMPLE_TOKENS
from compressor.errors import CompressionError
from compressor.formatting import known_names
from compressor.options import Names, Options, one_or_several, several
from compressor.steps.prune.options import Prune, SampleTokens
from compressor.steps.quantize.options import SERVERS, Quantize

STORED = "none"  # the format of experts that stay as they are stored
SCHEMES = (STORED, *get_args(Quantize.model_fields["scheme"].annotation))
TRANSFORMERS = "transformers"
SERVED = (*SERVERS, TRANSFORMERS)  # that formats can be chosen for


# shares of the experts that a limit of bytes chooses among
FITTING = (1, Fraction(7, 8), Fraction(3, 4), Fraction(5, 8), Fraction(1, 2))
Counts = Annotated[tuple[int, ...], BeforeValidator(several)]


class Grid(Options):
    """Models to compare. With number formats (`schemes`), a row is a share of the experts in a
    format.

    Without formats, `experts` or `ratios` say how many experts stay, and random prunings are
    compared with. With formats, `shares` do, and the limit of `nbytes` or `bits` chooses the best.
    """

    experts: Counts = ()
    """Experts to keep, one count or several: 6,4."""
    protect: Any = None
    """As for `compress`: auto, graph:N, or a JSON list."""
    ratios: Annotated[tuple[float, ...], BeforeValidator(several)] = ()
    """Shares of the experts to remove instead, such as 0.25,0.5."""
    splits: Annotated[tuple[int | Literal["auto"], ...], BeforeValidator(several)] = ()
    """Sub-experts to split each expert into first: 1,2,4 (default: 1; with formats auto)."""
    top_ks: Counts = ()
    """num_experts_per_tok, one or several (default: unchanged)."""
    strategies: Names = ()
    """Comma-separated names, options as name:option=value (default: all; with formats auto)."""
    corrections: Names = ()
    """Corrections, such as none,ridge,tune (default: its own, and none)."""
    evaluate: Annotated[tuple[str, ...], BeforeValidator(one_or_several)] = ()
    """Text to measure on. May be repeated (default: calibration text that no plan saw)."""
    evaluation_samples: int = Field(64, ge=1)
    """Sequences to measure on, at most."""
    sample_tokens: SampleTokens = SAMPLE_TOKENS
    """Tokens of the text on which each layer's experts are compared, or all."""
    random_seeds: int = Field(3, ge=1)
    """Random prunings to compare with."""
    sizes: bool = False
    """Shares of the experts in number formats, by bytes."""
    bits: float | None = Field(None, gt=0)
    """Bits for each parameter of the base, in place of --bytes."""
    context: int = Field(0, ge=0)
    """Tokens whose keys and values count as bytes, too."""
    shares: Annotated[tuple[Fraction, ...], BeforeValidator(several)] = (
        Fraction(1),
        Fraction(3, 4),
        Fraction(1, 2),
        Fraction(1, 4),
    )
    """Shares of the experts that stay."""
    schemes: Names = ()
    """Number formats, none for as stored (default: none and all of `quantize`)."""
    # fields without a text, which the command line sets by itself
    constants: bool = False  # rows in which constants stand for experts, too
    servers: Names = ()  # that have to load the formats
    nbytes: int | None = None  # limit of all tensors

    @model_validator(mode="before")
    @classmethod
    def _all_schemes(cls, content: dict[str, Any]) -> dict[str, Any]:
        wants_sizes = (
            content.get("sizes")
            or content.get("nbytes") is not None
            or content.get("bits") is not None
        )
        limited = content.get("nbytes") is not None or content.get("bits") is not None
        shares = {"shares": FITTING} if limited else {}
        return {"schemes": SCHEMES, **shares, **content} if wants_sizes else content

    @model_validator(mode="after")
    def _check(self) -> Self:
        Prune(protect=self.protect)  # which checks it
        if self.schemes:
            if self.experts or self.ratios or self.top_ks or self.constants:
                names = "--experts, --ratio, --top-k and --format"
                raise CompressionError(
                    f"sizes are compared by --shares and --schemes; leave out {names}"
                )
            if self.bits is not None and self.nbytes is not None:
                raise CompressionError("--bits stands in place of --bytes; give one of them")
            if not self.shares or not all(0 < share <= 1 for share in self.shares):
                raise CompressionError(
                    "shares of the experts that stay are above 0 and up to 1, such as 1,3/4,1/2"
                )
            for kind, chosen, known in (
                ("format", self.schemes, SCHEMES),
                ("server", self.servers, SERVED),
            ):
                for name in chosen:
                    if name not in known:
                        raise CompressionError(
                            f"there is no {kind} {name!r}; {known_names(name, known)}"
                        )
        elif bool(self.experts) == bool(self.ratios):
            raise CompressionError("say how many experts to keep by --experts or --ratio")
        elif "auto" in self.splits:
            raise CompressionError(
                "--split auto goes with number formats; name numbers of sub-experts, such as 1,2"
            )
        elif self.constants and (self.top_ks or 1 not in (self.splits or (1,))):
            raise CompressionError(
                "constants stand for whole experts, and top-k stays; leave out --top-k, and name "
                "1 among --split"
            )
        return self
