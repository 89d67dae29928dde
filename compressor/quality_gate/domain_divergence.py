"""Divergence of a smaller model from its base by domain of text: the record, and its blocks."""

from collections.abc import Mapping

from compressor.document.blocks import Block, Strong, Table, Text
from compressor.frozen import frozen

CONFIDENCE = 0.95
# a domain is degraded above this multiple of the mean of the other domains
TIMES = 3.0
LEAST = 1e-3  # nats per token, below which none does
TOGETHER = "all together"
MEASURES: Mapping[str, str] = {"loss": "loss", "kl": "KL from the base"}
LEGEND = (
    "Loss and KL (of the base's next-token distribution to the smaller model's) are in nats per "
    "token; flips is the share of positions whose greedy token is not the base's. In brackets: "
    "one-sided bounds of the difference from the base, paired by sequence, each with confidence "
    "{confidence:g}%."
)
END_COLUMNS = (
    "domain",
    "ends",
    "base at the end",
    "smaller at the end",
    "change at the end",
    "base elsewhere",
    "smaller elsewhere",
    "change elsewhere",
)
LEGEND_OF_ENDS = (
    " Both models read the base's own answers. At the end: the mean probability of the token that "
    "ends an answer, or its thinking, where the base's answer has it; elsewhere: at all other "
    "tokens of the answers."
)


@frozen
class Paired:
    """A figure of both models on the same sequences; the change is the smaller model's figure less
    the base's."""

    base: float
    compressed: float
    change: float
    lower: float  # one-sided bounds of the change
    upper: float
    standard_error: float


@frozen
class StopTokenFigures:
    """The probability of a set of stop tokens where one is due, and elsewhere; None without such
    positions."""

    name: str
    count: int  # positions where a stop token is the next token
    here: Paired | None
    elsewhere: Paired | None


@frozen
class DomainFigures:
    """Figures of one domain, or of all together: loss and KL in nats per token, flips as a share of
    positions."""

    domain: str
    sequences: int
    tokens: int
    loss: Paired
    kl: Paired
    flips: Paired
    stop_tokens: tuple[StopTokenFigures, ...] = ()


@frozen
class DegradedDomain:
    """A domain whose figure rises by more than `TIMES` the mean of the others, beyond the error of
    both."""

    domain: str
    measure: str  # a key of `MEASURES`
    change: float  # nats per token
    others: float  # mean of the other domains' changes

    @property
    def sentence(self) -> str:
        verb = "rises by" if self.measure == "loss" else "is"
        return (
            f"The domain {self.domain} is degraded: its {MEASURES[self.measure]} {verb} "
            f"{self.change:.3g} nats per token, more than {TIMES:g} times the mean of the other "
            f"domains, {self.others:.3g}."
        )


@frozen
class DomainDivergence:
    """Divergence of a smaller model from its base on text, by domain."""

    domains: tuple[DomainFigures, ...]
    together: DomainFigures | None  # None of a single domain
    degraded: tuple[DegradedDomain, ...]
    confidence: float = CONFIDENCE
    note: str = ""  # on the text, such as too few sequences

    @property
    def rows(self) -> tuple[DomainFigures, ...]:
        """The domains, then all together."""
        return self.domains if self.together is None else (*self.domains, self.together)

    @property
    def overall(self) -> DomainFigures:
        """The figures of all text."""
        return self.domains[0] if self.together is None else self.together


def heldout_blocks(divergence: DomainDivergence) -> list[Block]:
    """Return a sentence on a run's held-out text, and a table where it has several sources."""
    loss, rise, kl, flips = overall_words(divergence.overall)
    sentence = (
        f"Held-out text ({divergence.overall.sequences:,} sequences): loss of the base and of the "
        f"output {loss} ({rise}) nats per token, KL from the base {kl}, another greedy token at "
        f"{flips} of positions (±: 95% interval)"
    )
    blocks: list[Block] = [Text(sentence)]
    if divergence.together is not None:
        blocks += divergence_blocks(divergence, "Held-out text by source, compared with the base")
    if divergence.note:
        blocks.append(Text(divergence.note))
    return blocks


def overall_words(row: DomainFigures) -> tuple[str, str, str, str]:
    """Return both losses, their difference, KL and flips, with 95% intervals by Student's t over
    sequences."""
    import scipy  # which loads NumPy, and every command's help comes past here

    width = -float(scipy.special.stdtrit(row.sequences - 1, 0.025))
    loss, kl, flips = row.loss, row.kl, row.flips
    return (
        f"{loss.base:.4f} → {loss.compressed:.4f}",
        f"{loss.change:+.4f} ± {width * loss.standard_error:.4f}",
        f"{kl.change:.4f} ± {width * kl.standard_error:.4f}",
        f"{flips.change:.1%} ± {width * flips.standard_error:.1%}",
    )


def divergence_blocks(divergence: DomainDivergence, title: str) -> list[Block]:
    """Return the degraded domains, a table of all domains, and a table for each set of stop
    tokens."""
    degraded = {domain.domain for domain in divergence.degraded}
    rows = [
        (
            Strong(row.domain) if row.domain in degraded else row.domain,
            f"{row.sequences:,}",
            f"{row.tokens:,}",
            f"{row.loss.base:.4f} → {row.loss.compressed:.4f}",
            _change(row.loss),
            _change(row.kl, sign=""),
            _change(row.flips, 100, "", "%"),
        )
        for row in divergence.rows
    ]
    ruled = {len(divergence.domains) - 1}
    columns = ("domain", "sequences", "tokens", "loss", "rise of the loss", "KL", "flips")
    if divergence.together is not None:
        title = f"{title}; worst first"
    blocks: list[Block] = [Text(Strong(domain.sentence), "bad") for domain in divergence.degraded]
    blocks.append(Table(title, columns, rows, {"domain"}, ("tokens", "sequences"), ruled))
    legend = LEGEND.format(confidence=100 * divergence.confidence)
    for index, stop_tokens in enumerate(divergence.domains[0].stop_tokens):
        if index == 0:
            legend += LEGEND_OF_ENDS
        ends = []
        for row in divergence.rows:
            figures = row.stop_tokens[index]
            cells = [row.domain, f"{figures.count:,}"]
            for pair in (figures.here, figures.elsewhere):
                if pair is None:
                    cells += ["-", "-", "-"]
                else:
                    cells += [f"{pair.base:.4f}", f"{pair.compressed:.4f}", _change(pair)]
            ends.append(tuple(cells))
        caption = f"Probability of the token that ends {stop_tokens.name}"
        blocks.append(Table(caption, END_COLUMNS, ends, {"domain"}, ("ends",), ruled))
    return [*blocks, Text(legend)]


def _change(pair: Paired, scale: float = 1.0, sign: str = "+", unit: str = "") -> str:
    """Return a change with its bounds in brackets."""
    change, lower, upper = (scale * value for value in (pair.change, pair.lower, pair.upper))
    digits = 3 if abs(change) >= 0.1 else 5
    return f"{change:{sign}.{digits}f}{unit} ({lower:.{digits}f} to {upper:.{digits}f})"
