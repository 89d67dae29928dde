"""The rows of a comparison: each a variant of the model, what was measured of it, and where it
stands."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from compressor.answers.scores import ItemScores
from compressor.data.batches import EvaluationSet
from compressor.divergence.evaluator import Difference, Figures
from compressor.formatting import counted
from compressor.quality_gate.domains import several_domains
from compressor.quality_gate.verdict import TaskGate
from compressor.report.grid import STORED

MEASURES = {
    "loss": "Loss by evaluation source: the base's, and its rise ± standard error; the largest "
    "rise first",
    "kl": "KL by evaluation source",
    "flips": "Flips by evaluation source",
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A model of the comparison before it is measured: by default the base, as it is stored."""

    name: str = "base"  # the strategy with its options, or "base"
    strategy: str = "base"
    correction: str = "none"  # none, ridge or tune
    seed: int | None = None  # of a random drop
    experts: int  # per MoE layer
    experts_before: int | None = None
    split: int = 1  # sub-experts that each expert became before; `experts` then counts those
    top_k: int | None = None  # experts that a token is routed to, where that was chosen
    share: float | None = None  # of the experts that stay
    scheme: str = STORED  # the format: none as stored, or that of the step `quantize`
    # where formats differ by layer, as the option of that step has them
    layers: Mapping[str, Mapping[str, str]] | None = None
    predicted: float | None = None  # KL, before it was measured
    group_size: int | None = None  # weights of a row that share a scale, -1 for all
    parameters: int
    bytes: int  # of all tensors
    # parameters that a token passes; None where stored elements are no parameters
    active: int | None = None

    @property
    def kept(self) -> float:
        """Experts of the base's size that stay in each layer."""
        return self.experts / self.split

    @property
    def is_random(self) -> bool:
        return self.strategy == "random"

    @property
    def format(self) -> str:
        return "as stored" if self.scheme == STORED else self.scheme

    @property
    def experts_label(self) -> str:
        """'6 of 8 experts', or '12 of 16 sub-experts'."""
        kind = "sub-expert" if self.split > 1 else "expert"
        return f"{self.experts} of {counted(self.experts_before or self.experts, kind)}"

    @property
    def size_label(self) -> str:
        """'6 of 8 experts, int4', or '12 of 16 sub-experts, as stored'."""
        return f"{self.experts_label}, {self.format}"


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How a row compares with the base and with all rows; errors are paired by sequence."""

    loss_error: float | None = None  # standard error of the increase
    kl_error: float | None = None
    behind: float | None = None  # KL above that of the best row that is no larger
    behind_error: float | None = None
    frontier: bool = False  # no row is smaller and better


@dataclass(frozen=True, kw_only=True)
class Row:
    """A variant with its measurements. Losses are in nats per evaluated token, on text that no part
    of a plan saw."""

    variant: Variant
    loss: float
    kl: float  # of the base's next-token distribution to this model's, nats per token
    flips: float  # share of the positions at which the greedy token is not the base's
    # loss, KL and flips by evaluation source, and standard errors of differences from the base
    by_source: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    errors_by_source: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    degraded: tuple[str, ...] = ()  # sources that lose far more than the others
    # mean over layers of ||y - y'||^2 / ||y||^2 on held-out calibration tokens
    error: float | None = None
    # deciding, and correcting with the evaluation; not the pass that all plans share
    seconds: float | None = None
    # bytes of anonymous memory at the highest while it was corrected and evaluated
    peak_memory: int | None = None
    # the correction took the whole model further away on held-out calibration text
    undone: bool = False
    answers: tuple[ItemScores, ...] = ()  # to the items of each task
    # by name: the score, and the drop from the base's
    tasks: Mapping[str, TaskGate] = field(default_factory=dict)
    # tasks on which the items can't tell it from the best of its size
    equal_to_best: tuple[str, ...] = ()
    # of a comparison with number formats
    loss_by_sequence: tuple[float, ...] = ()
    kl_by_sequence: tuple[float, ...] = ()
    standing: Standing = Standing()

    def kl_from(self, other: "Row") -> Difference:
        """Return the change of the KL from another row to this one, paired by sequence."""
        return Difference.of(other.kl_by_sequence, self.kl_by_sequence)


Group: TypeAlias = Sequence[Row]  # one row, or several random drops that are shown as one
# by name: where a line begins, then its rows by falling bytes
Lines: TypeAlias = Mapping[str, Sequence[Group]]


def row_of(variant: Variant, figures: Figures, sets: Sequence[EvaluationSet], **more: Any) -> Row:
    """Return a variant's row by its figures, of which those of `sets`, the first evaluation sets,
    are shown."""
    means: dict[str, Any] = figures.of(range(len(sets))).means
    by_source: dict[str, dict[str, float]] = {measure: {} for measure in MEASURES}
    for number, part in enumerate(sets):
        for measure, mean in figures.of({number}).means.items():
            by_source[measure][part.name] = max(mean, 0.0)
    domains = several_domains(figures, {number: part.name for number, part in enumerate(sets)})
    errors = dict[str, dict[str, float]]()
    degraded = list[str]()
    if domains is not None:
        degraded = [domain.domain for domain in domains.degraded]
        for measure in MEASURES:
            errors[measure] = {}
            for domain in domains.domains:
                errors[measure][domain.domain] = getattr(domain, measure).standard_error
    means["kl"] = max(0.0, means["kl"])
    return Row(
        variant=variant,
        by_source=by_source,
        errors_by_source=errors,
        degraded=tuple(degraded),
        **means,
        **more,
    )


def label(row: Row, name: str | None = None) -> str:
    """Return a row's name, or another one, with what else was done: 'reap, 2 parts, top 3 +
    ridge'."""
    variant = row.variant
    text = name or variant.name
    if variant.split > 1:
        text += f", {variant.split} parts"
    if variant.top_k is not None:
        text += f", top {variant.top_k}"
    if variant.correction != "none":
        text += f" + {variant.correction}"
    return f"{text} (undone)" if row.undone else text


def sort_key(loss: float) -> float:
    """Put what is not a number last."""
    return math.inf if math.isnan(loss) else loss


def related(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the base, then the others by falling bytes, each with its standing.

    Every row needs its losses and KL by sequence.
    """
    order = sorted(rows, key=lambda row: (row.variant.bytes, sort_key(row.kl)))
    base = rows[0]
    best = order[0]
    results = list[Row]()
    for row in order:
        if sort_key(row.kl) < sort_key(best.kl):
            best = row
        behind = row.kl_from(best)
        standing = Standing(
            loss_error=Difference.of(base.loss_by_sequence, row.loss_by_sequence).standard_error,
            kl_error=row.kl_from(base).standard_error,
            behind=-behind.gain,
            behind_error=behind.standard_error,
            frontier=row is best,
        )
        results.append(replace(row, standing=standing))
    first = results.pop(order.index(base))
    return first, *reversed(results)
