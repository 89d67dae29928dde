"""What a comparison of sizes found: a row for each share of the experts in each number format, by bytes."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from compressor.divergence.evaluator import Difference
from compressor.document.blocks import Block, Figure, Heading, Strong, Table, Text, Words
from compressor.document.drawing import MARKERS, ROLES, colour, draw_key, scale_axis
from compressor.document.picture import Drawing
from compressor.formatting import counted, human_bytes, joined
from compressor.report.comparison_report import ComparisonBasis, sort_key

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

STORED = "none"  # the format of experts that stay as they are stored
LEGEND = (
    "Loss, its increase and KL (of the base's next-token distribution to the model's) are in nats per token, ± one "
    "standard error paired by sequence. Bits are those of all bytes for each parameter of the base. Behind is the KL "
    "above that of the best model that is no larger. Bold: no model is smaller and better."
)


@dataclass(frozen=True, slots=True)
class Pair:
    """A share of the experts in a number format. Losses are in nats per token; errors are of means by sequence."""

    share: float
    experts: int  # that stay in each MoE layer; of those that were `split`, sub-experts
    experts_before: int
    split: int  # sub-experts that each expert became before
    scheme: str  # the format: none as stored, or that of the step `quantize`
    group_size: int | None  # weights of a row that share a scale, -1 for all
    bytes: int  # of all tensors
    bits: float  # of all tensors for each parameter of the base
    loss: float
    kl: float
    flips: float  # share of the positions at which the greedy token is not the base's
    kl_by_sequence: tuple[float, ...]
    loss_by_sequence: tuple[float, ...]
    loss_increase: float = 0.0
    loss_error: float = 0.0  # standard error of the increase
    kl_error: float = 0.0
    behind: float = 0.0  # KL above that of the best pair that is no larger
    behind_error: float = 0.0
    frontier: bool = False  # no pair is smaller and better

    @property
    def label(self) -> str:
        """'6 of 8 experts, int4'."""
        return f"{self.kept}, {format_label(self.scheme)}"

    @property
    def kept(self) -> str:
        """'6 of 8 experts', or '12 of 16 sub-experts'."""
        return f"{self.experts} of {counted(self.experts_before, 'sub-expert' if self.split > 1 else 'expert')}"

    @property
    def is_stored(self) -> bool:
        return self.scheme == STORED

    def ahead_of(self, other: "Pair") -> Difference:
        """What going to this pair from the other one does to the KL, paired by sequence."""
        return Difference.of(other.kl_by_sequence, self.kl_by_sequence)


def format_label(scheme: str) -> str:
    return "as stored" if scheme == STORED else scheme


def related(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Pairs by falling bytes, with what follows of others: increases over the first, the base, and the frontier."""
    base, best, found = pairs[0], None, list[Pair]()
    for pair in sorted(pairs, key=lambda each: (each.bytes, sort_key(each.kl))):
        increase = Difference.of(base.loss_by_sequence, pair.loss_by_sequence)
        frontier = best is None or sort_key(pair.kl) < sort_key(best.kl)
        best = pair if best is None or frontier else best
        behind = best.ahead_of(pair)
        found.append(
            replace(
                pair,
                loss_increase=pair.loss - base.loss,
                loss_error=increase.standard_error,
                kl_error=Difference.of(base.kl_by_sequence, pair.kl_by_sequence).standard_error,
                behind=behind.gain,
                behind_error=behind.standard_error,
                frontier=frontier,
            )
        )
    return tuple(reversed(found))


@dataclass(frozen=True, kw_only=True)
class SizeComparison(ComparisonBasis):
    """All pairs, the largest first, with what they were made by and measured on."""

    pairs: tuple[Pair, ...]
    parameters: int  # of the base
    strategy: str
    correction: str
    limit: int | None  # bytes that may be used
    context: int  # tokens whose keys and values count
    cache: int  # bytes of these
    left_out: tuple[str, ...]  # sentences on pairs that could not be
    schemes_left_out: tuple[str, ...]

    @property
    def base(self) -> Pair:
        return next(pair for pair in self.pairs if pair.share == 1 and pair.is_stored)

    @property
    def fitting(self) -> list[Pair]:
        """Pairs within the limit, the least KL first."""
        own = [pair for pair in self.pairs if self.limit is None or pair.bytes + self.cache <= self.limit]
        return sorted(own, key=lambda pair: (sort_key(pair.kl), pair.bytes))

    @property
    def alike(self) -> list[Pair]:
        """Those that fit and whose KL is within a standard error of the best one's."""
        best, *others = self.fitting
        return [pair for pair in others if not (gap := best.ahead_of(pair)).gain > gap.standard_error]

    def to_dict(self) -> dict[str, Any]:
        content = super().to_dict()
        for entry, pair in zip(content["pairs"], self.pairs, strict=True):
            entry["label"] = pair.label
        has_best = self.limit is not None and bool(self.fitting)
        content["best"] = self.fitting[0].label if has_best else None
        content["alike"] = [pair.label for pair in self.alike] if has_best else []
        return content

    def document(self) -> tuple[Block, ...]:
        heading = Heading(f"{self.model}: prune or quantise", level=1)
        return heading, *self.brief(), Text(LEGEND), size_figure(self), self.made_with

    def brief(self) -> tuple[Block, ...]:
        return _table(self), self.data_line, *map(Text, sentences(self))


def sentences(made: SizeComparison) -> list[str]:
    """What is best within the limit, what could not be tried, and what was not."""
    return [*choice(made), *(f"Left out: {text}." for text in made.left_out), untried(made)]


def choice(made: SizeComparison) -> list[str]:
    """Sentences on the best pair within the limit, and on how sure that is; none without a limit."""
    if made.limit is None:
        return []
    cache = f" beside {human_bytes(made.cache)} for {made.context:,} tokens of context" if made.cache else ""
    limit = f"{human_bytes(made.limit)}{cache}"
    if not (fitting := made.fitting):
        least = made.pairs[-1]
        return [f"Nothing fits in {limit}: the smallest is {least.label}, with {human_bytes(least.bytes)}."]
    best, sequences = fitting[0], len(fitting[0].kl_by_sequence)
    figures = f"KL {_with_error(best.kl, best.kl_error)}, loss {_with_error(best.loss_increase, best.loss_error, '+')}"
    size = f"{human_bytes(best.bytes)}, {best.bits:.3g} bits a weight"
    first = f"Best of {len(fitting)} that fit in {limit}: {best.label} ({size}; {figures} nats per token)."
    if alike := made.alike:
        names = joined([f"{pair.label} ({human_bytes(pair.bytes)})" for pair in alike])
        return [first, f"On {counted(sequences, 'held-out sequence')} it cannot be told apart from {names}."]
    if len(fitting) == 1:
        return [first]
    ahead = best.ahead_of(fitting[1])
    gap = f"{_with_error(ahead.gain, ahead.standard_error)} below that of the next, {fitting[1].label}"
    return [first, f"On {counted(sequences, 'held-out sequence')} its KL is {gap}."]


def untried(made: SizeComparison) -> str:
    """What else could be smaller or better, in a sentence."""
    formats = [*made.schemes_left_out, "other group sizes"]
    correction = "" if made.correction == STORED else f", corrections other than {made.correction}"
    return (
        f"Not tried: GPTQ in place of rounding to nearest, {', '.join(formats)}, fewer bits for attention, strategies "
        f"other than {made.strategy}{correction}, other shares and splits."
    )


def _with_error(value: float, error: float, sign: str = "") -> str:
    return f"{value:{sign}.4f} ± {error:.4f}"


def _table(made: SizeComparison) -> Table:
    rows = list[tuple[Words, ...]]()
    for pair in made.pairs:
        cells = {
            "experts": pair.kept.removesuffix(" experts"),
            "format": format_label(pair.scheme),
            "bytes": human_bytes(pair.bytes),
            **({"with context": human_bytes(pair.bytes + made.cache)} if made.cache else {}),
            "bits": f"{pair.bits:.2f}",
            "loss": f"{pair.loss:.4f}",
            "increase": _with_error(pair.loss_increase, pair.loss_error, "+"),
            "KL": _with_error(pair.kl, pair.kl_error),
            "flips": f"{pair.flips:.4f}",
            "behind": "-" if pair.frontier else _with_error(pair.behind, pair.behind_error),
        }
        rows.append(tuple(map(Strong, cells.values())) if pair.frontier else tuple(cells.values()))
    caption = f"{made.model}: loss, its increase and KL in nats per token; bold: no model is smaller and better"
    return Table(caption, tuple(cells), tuple(rows), frozenset({"format"}), ("flips", "loss", "bits"))


def size_figure(made: SizeComparison) -> Figure:
    """Losses upwards over bytes: a colour for each share, a marker for each format, rings on the frontier."""
    names = {pair.share: pair.kept for pair in sorted(made.pairs, key=lambda pair: -pair.share)}
    shades = {share: colour(number) for number, share in enumerate(names)}
    schemes = list(dict.fromkeys(pair.scheme for pair in reversed(made.pairs)))
    marks = dict(zip(schemes, MARKERS, strict=False))
    frontier = [pair for pair in made.pairs if pair.frontier]
    lines = (
        ("prune alone", [pair for pair in made.pairs if pair.is_stored], "solid"),
        ("quantise alone", [pair for pair in made.pairs if pair.share == 1], (0, (1, 1))),
    )

    def draw(canvas: "FigureBase") -> None:
        axes = canvas.add_subplot()

        def plot(pairs: Iterable[Pair], **style: Any) -> None:
            points = [(pair.bytes, pair.loss_increase) for pair in pairs if math.isfinite(pair.loss_increase)]
            if points:
                axes.plot(*zip(*points, strict=True), **style)

        for _, pairs, style in lines:
            plot(pairs, color=ROLES["muted"], linewidth=1.0, linestyle=style, zorder=1)
        ring = {"marker": "o", "markersize": 12, "markerfacecolor": "none", "markeredgecolor": ROLES["ink"]}
        plot(frontier, linestyle="none", zorder=2, **ring)
        for pair in made.pairs:
            plot(
                [pair],
                color=shades[pair.share],
                marker=marks[pair.scheme],
                markersize=6,
                markeredgecolor="white",
                zorder=3,
            )
        if made.limit is not None:
            axes.axvline(made.limit - made.cache, color=ROLES["bad"], linewidth=0.8, linestyle="dashed")
        words = scale_axis(axes, "y", [pair.loss_increase for pair in made.pairs], 4)
        above = f"loss above the base's {made.base.loss:.4f} (nats per token)"
        axes.set_ylabel("\n".join(filter(None, (above, words))))
        words = scale_axis(axes, "x", [pair.bytes for pair in made.pairs])
        axes.xaxis.set_major_formatter(lambda nbytes, _: human_bytes(nbytes))
        axes.set_xlabel(f"size of all tensors{f', {words}' if words else ''}")
        axes.grid()
        dot: dict[str, Any] = {"marker": "o", "linestyle": "none"}
        looks = [(kept, {**dot, "color": shades[count]}) for count, kept in names.items()]
        looks += [
            (format_label(scheme), {**dot, "marker": mark, "color": ROLES["muted"]}) for scheme, mark in marks.items()
        ]
        looks += [(label, {"marker": "", "color": ROLES["muted"], "linestyle": style}) for label, _, style in lines]
        looks.append(("no model is smaller and better", {**ring, "markersize": 9, "linestyle": "none"}))
        draw_key(canvas, looks, loc="outside right upper", handlelength=2.4)

    title = f"{made.model}: prune or quantise"
    alt = " ".join(f"{each.label}: {human_bytes(each.bytes)} {each.loss_increase:+.4f}." for each in frontier)
    caption = "Loss above the base's by bytes; rings mark models that none is smaller and better than, by KL."
    return Figure("comparison", title, caption, (Drawing(title, f"The frontier: {alt}", (8.6, 5.2), draw),))
