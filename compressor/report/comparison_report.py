"""The result of a comparison: a row for each smaller model, beside the base; its table, plot, files
and best choice."""

import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Self

from compressor.answers.scores import ItemScores
from compressor.data.batches import EvaluationSet
from compressor.data.sources import without_folders
from compressor.divergence.evaluator import Difference, Figures
from compressor.document.blocks import Block, Figure, Heading, Strong, Table, Text, Words
from compressor.document.drawing import MARKERS, ROLES, colour, scale_axis
from compressor.document.markdown import markdown
from compressor.document.picture import Drawing, png
from compressor.files import write_files
from compressor.formatting import counted, human_bytes, human_count, joined, readable
from compressor.quality_gate.domains import several_domains
from compressor.quality_gate.report import change, level
from compressor.quality_gate.verdict import TaskGate
from compressor.records import finite, plain_json, report_json
from compressor.report.grid import STORED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

NAMES = ("comparison.json", "comparison.md", "comparison.png")
# columns, the least important first
OPTIONAL = ("peak memory", "seconds", "flips", "parameters", "perplexity", "layer error")
OPTIONAL_OF_FORMATS = (*OPTIONAL, "model", "loss", "bits")
LEGEND = (
    "Loss and KL (of the base's next-token distribution to the model's) are in nats per token. "
    "Flips is the share of positions whose greedy token is not the base's. "
)
STRATEGIES_LEGEND = (
    "Layer error is the mean over layers of ‖y - y'‖² / ‖y‖², tokens weighted, on calibration text "
    "that no plan saw. Seconds are those of deciding, and correcting with the evaluation on the "
    "way, without the calibration pass. "
)
FORMATS_LEGEND = (
    "± is one standard error paired by sequence. Bits are those of all bytes for each parameter "
    "of the base. Behind is "
    "the KL above that of the best model that is no larger. Bold: no model is smaller and better; "
)
TASKS_LEGEND = (
    "Of a task: its score, then its difference to the base's with one-sided 95% bounds, paired by "
    "item as in gate; of a perplexity its rise; of several random drops the mean and their range. "
    "Bold: as far as these items can tell, no worse than the best of its size; "
)
SOURCES_LEGEND = (
    "by source, what loses more than 3 times the mean of the other sources, beyond the error."
)
PLOTS = 2  # of tasks beside each other
FRONTIER = "no model is smaller and better"
BY_SOURCE = {"loss": "loss_by_source", "kl": "kl_by_source", "flips": "flips_by_source"}
SOURCE_TITLES = {
    "loss": "Loss by evaluation source: the base's, and its rise ± standard error; the largest "
    "rise first",
    "kl": "KL by evaluation source",
    "flips": "Flips by evaluation source",
}
STYLES: Mapping[str, Any] = {"none": "solid", "ridge": (0, (1, 1)), "tune": (0, (5, 1.5))}


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
    group_size: int | None = None  # weights of a row that share a scale, -1 for all
    parameters: int
    bytes: int  # of all tensors
    # parameters that a token passes; None where stored elements are no parameters
    active: int | None = None
    bits: float | None = None  # of all tensors for each parameter of the base

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
    def size_label(self) -> str:
        """'6 of 8 experts, int4', or '12 of 16 sub-experts, as stored'."""
        experts = counted(
            self.experts_before or self.experts, "sub-expert" if self.split > 1 else "expert"
        )
        return f"{self.experts} of {experts}, {self.format}"


@dataclass(frozen=True, kw_only=True)
class Row(Variant):
    """A variant with its measurements. Losses are in nats per evaluated token, on text that no part
    of a plan saw."""

    loss: float
    perplexity: float
    kl: float  # of the base's next-token distribution to this model's, nats per token
    flips: float  # share of the positions at which the greedy token is not the base's
    loss_by_source: Mapping[str, float] = field(default_factory=dict)
    kl_by_source: Mapping[str, float] = field(default_factory=dict)
    flips_by_source: Mapping[str, float] = field(default_factory=dict)
    # of differences from the base
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
    # of a comparison with number formats; standard errors are paired by sequence
    loss_by_sequence: tuple[float, ...] = ()
    kl_by_sequence: tuple[float, ...] = ()
    loss_error: float | None = None  # standard error of the increase
    kl_error: float | None = None
    behind: float | None = None  # KL above that of the best row that is no larger
    behind_error: float | None = None
    frontier: bool = False  # no row is smaller and better

    @classmethod
    def of(cls, figures: Figures, sets: Sequence[EvaluationSet], **facts: Any) -> Self:
        """Return the row of a variant from its facts and its figures, of which those of `sets`, the
        first evaluation sets, are shown."""
        means = figures.of(range(len(sets))).means
        facts["degraded"] = ()
        facts["errors_by_source"] = {}
        domains = several_domains(figures, {number: part.name for number, part in enumerate(sets)})
        if domains is not None:
            facts["degraded"] = tuple(domain.domain for domain in domains.degraded)
        for figure, field_name in BY_SOURCE.items():
            facts[field_name] = {}
            for number, part in enumerate(sets):
                facts[field_name][part.name] = max(figures.of({number}).means[figure], 0.0)
            if domains is not None:
                facts["errors_by_source"][figure] = {
                    domain.domain: getattr(domain, figure).standard_error
                    for domain in domains.domains
                }
        return cls(
            loss=means["loss"],
            perplexity=math.exp(means["loss"]) if means["loss"] < 700 else math.inf,
            kl=max(0.0, means["kl"]),
            flips=means["flips"],
            **facts,
        )

    def kl_from(self, other: "Row") -> Difference:
        """Return the change of the KL from another row to this one, paired by sequence."""
        return Difference.of(other.kl_by_sequence, self.kl_by_sequence)


# by name: where a line begins, then its rows by falling bytes
Lines = Mapping[str, Sequence[Sequence[Row]]]


def label(row: Row, name: str | None = None) -> str:
    """Return a row's name, or another one, with what else was done: 'reap, 2 parts, top 3 +
    ridge'."""
    text = name or row.name
    if row.split > 1:
        text += f", {row.split} parts"
    if row.top_k is not None:
        text += f", top {row.top_k}"
    if row.correction != "none":
        text += f" + {row.correction}"
    return f"{text} (undone)" if row.undone else text


def sort_key(loss: float) -> float:
    """Put what is not a number last."""
    return math.inf if math.isnan(loss) else loss


def related(rows: Sequence[Row]) -> tuple[Row, ...]:
    """Return the base, then the others by falling bytes, with errors over the base and the
    frontier.

    Every row needs its losses and KL by sequence.
    """
    best = None
    results = list[Row]()
    for row in sorted(rows, key=lambda row: (row.bytes, sort_key(row.kl))):
        is_best = best is None or sort_key(row.kl) < sort_key(best.kl)
        best = row if best is None or is_best else best
        behind = row.kl_from(best)
        compared = replace(
            row,
            loss_error=Difference.of(rows[0].loss_by_sequence, row.loss_by_sequence).standard_error,
            kl_error=row.kl_from(rows[0]).standard_error,
            behind=-behind.gain,
            behind_error=behind.standard_error,
            frontier=is_best,
        )
        results.insert(0, compared)
        if row is rows[0]:
            base = compared
    return base, *(row for row in results if row is not base)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All rows, the base first, with what they were measured on and the limit of bytes, if there is
    one."""

    model: str
    rows: tuple[Row, ...]
    calibration: Mapping[str, Any]  # identity of the calibration data
    evaluation: Mapping[str, int]  # tokens of each evaluation set
    calibration_seconds: float  # the pass that all plans share
    seed: int
    versions: Mapping[str, str]
    # by module; in no row merged or dropped
    protected: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    # number formats that were asked for; empty where all experts are as stored
    formats: tuple[str, ...] = ()
    formats_left_out: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()  # sentences on rows that could not be
    parameters: int | None = None  # of the base
    limit: int | None = None  # bytes that may be used
    context: int = 0  # tokens whose keys and values count
    cache: int = 0  # bytes of these

    @property
    def base(self) -> Row:
        return self.rows[0]

    @property
    def fitting(self) -> list[Row]:
        """Rows within the limit, the least KL first."""
        limit = math.inf if self.limit is None else self.limit
        rows = [row for row in self.rows if row.bytes + self.cache <= limit]
        return sorted(rows, key=lambda row: (sort_key(row.kl), row.bytes))

    @property
    def alike(self) -> list[Row]:
        """Rows that fit and whose KL is within a standard error of the best one's."""
        best, *others = self.fitting
        rows = []
        for row in others:
            gap = best.kl_from(row)
            if not gap.gain > gap.standard_error:
                rows.append(row)
        return rows

    def increase(self, row: Row) -> float:
        """Return a row's loss above the base's."""
        return row.loss - self.base.loss

    def rises(self, row: Row) -> dict[str, float]:
        """Return by how much a row's loss is above the base's on each evaluation source."""
        base = self.base.loss_by_source
        return {
            source: sort_key(loss - base[source]) for source, loss in row.loss_by_source.items()
        }

    def name_of(self, row: Row) -> str:
        """Return a row's share and format, with its strategy where there are several."""
        several = len({label(other) for other in self.rows if other.name != self.base.name}) > 1
        return f"{row.size_label}, {label(row)}" if several else row.size_label

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types without folders; None for a number that JSON cannot write."""
        calibration = without_folders(self.calibration) if self.calibration else {}
        calibrated = replace(self, calibration=calibration)
        content: dict[str, Any] = plain_json(calibrated, named=False)
        content["items"] = {}
        for task in self.base.answers:
            content["items"][task.task] = [item.id for item in task.items]
        for entry, row in zip(content["rows"], self.rows, strict=True):
            # in the order of `items`
            entry["answers"] = {task.task: list(task.values) for task in row.answers}
            entry["label"] = self.name_of(row) if self.formats else label(row)
            entry["loss_increase"] = finite(self.increase(row))
        has_best = self.limit is not None and bool(self.fitting)
        content["best"] = self.name_of(self.fitting[0]) if has_best else None
        content["alike"] = [self.name_of(row) for row in self.alike] if has_best else []
        return content

    def data_line(self) -> Text:
        """Return the texts of calibration and evaluation in a sentence."""
        calibration = without_folders(self.calibration) if self.calibration else {}
        sources = calibration.get("sources") or ([calibration] if calibration else [])
        read = []
        for part in sources:
            tokens = part.get("tokens")
            read.append(part["source"] + (f" ({tokens:,} tokens)" if tokens is not None else ""))
        evaluated = [f"{name} ({tokens:,} tokens)" for name, tokens in self.evaluation.items()]
        return Text(
            f"Calibrated with {joined(read) or 'no data'} in {self.calibration_seconds:.1f} s, "
            f"evaluated on {joined(evaluated) or 'no data'}, seed {self.seed}."
        )

    def document(self) -> list[Block]:
        """Return all of it, with the figure."""
        blocks: list[Block] = [Heading(f"{self.model}: comparison", level=1), self.data_line()]
        if self.protected:
            layers = [
                f"{name}: {', '.join(map(str, experts))}"
                for name, experts in self.protected.items()
            ]
            blocks.append(
                Text(f"Protected experts, in no row merged or dropped: {'; '.join(layers)}.")
            )
        blocks += _tables(self, self.rows[1:])
        blocks += map(Text, sentences(self))
        legend = LEGEND + FORMATS_LEGEND
        if not self.formats:
            bold = "Bold: the least loss among models of its size; "
            legend = LEGEND + STRATEGIES_LEGEND + (TASKS_LEGEND if self.base.tasks else bold)
        blocks.append(Text(legend + SOURCES_LEGEND))
        blocks.append(comparison_figure(self))
        made_with = [f"{name} {version}" for name, version in self.versions.items()]
        blocks.append(Text(f"Made with {', '.join(made_with)}."))
        return blocks

    def brief(self) -> list[Block]:
        """Return the blocks that a terminal shows; random drops share a line."""
        groups = dict[Any, list[Row]]()
        for number, row in enumerate(self.rows[1:]):
            key = (label(row, "random"), row.experts) if row.is_random else number
            groups.setdefault(key, []).append(row)
        rows = []
        for first, *others in groups.values():
            if not others:
                rows.append(first)
                continue
            # the means of random drops, and the highest peak
            drops = [first, *others]
            losses = [drop.loss for drop in drops]
            figures: dict[str, Any] = {
                "name": f"random ({len(drops)} seeds), loss {min(losses):.4f}..{max(losses):.4f}",
                "peak_memory": max(drop.peak_memory or 0 for drop in drops),
                "errors_by_source": {},
                "tasks": {task: _range(task, drops) for task in first.tasks},
            }
            for name in ("loss", "perplexity", "kl", "flips", "error", "seconds"):
                figures[name] = fmean(getattr(drop, name) or 0.0 for drop in drops)
            for name in ("degraded", "equal_to_best"):
                shared = set.intersection(*(set(getattr(drop, name)) for drop in drops))
                figures[name] = tuple(shared)
            for name in BY_SOURCE.values():
                figures[name] = {}
                for source in getattr(first, name):
                    figures[name][source] = fmean(getattr(drop, name)[source] for drop in drops)
            rows.append(replace(first, **figures))
        return [*_tables(self, rows), self.data_line(), *map(Text, sentences(self))]


def sentences(comparison: Comparison) -> list[str]:
    """Return the best within the limit, rows that could not be, and formats and more that were not
    tried."""
    if not comparison.formats:
        return []
    untried = [
        "GPTQ in place of rounding to nearest",
        *comparison.formats_left_out,
        "other group sizes",
        "fewer bits for attention",
    ]
    smaller = [row for row in comparison.rows if row.name != comparison.base.name]
    strategies = dict.fromkeys(row.name for row in smaller)
    if strategies:
        untried.append(f"strategies other than {', '.join(strategies)}")
    corrections = dict.fromkeys(row.correction for row in smaller if row.correction != "none")
    if corrections:
        untried.append(f"corrections other than {', '.join(corrections)}")
    return [
        *choice(comparison),
        *(f"Left out: {reason}." for reason in comparison.left_out),
        f"Not tried: {', '.join(untried)}, other shares and splits.",
    ]


def choice(comparison: Comparison) -> list[str]:
    """Return sentences on the best row within the limit, and on how sure that is; none without a
    limit."""
    if comparison.limit is None:
        return []
    limit = human_bytes(comparison.limit)
    if comparison.cache:
        limit += (
            f" beside {human_bytes(comparison.cache)} for {comparison.context:,} tokens of context"
        )
    fitting = comparison.fitting
    name_of = comparison.name_of
    if not fitting:
        least = min(comparison.rows, key=lambda row: row.bytes)
        return [
            f"Nothing fits in {limit}: the smallest is {name_of(least)}, with "
            f"{human_bytes(least.bytes)}."
        ]
    best = fitting[0]
    increase = _with_error(comparison.increase(best), best.loss_error, "+")
    figures = f"KL {_with_error(best.kl, best.kl_error)}, loss {increase} nats per token"
    size = f"{human_bytes(best.bytes)}, {best.bits:.3g} bits a weight"
    first = f"Best of {len(fitting)} that fit in {limit}: {name_of(best)} ({size}; {figures})."
    sequences = f"On {counted(len(best.kl_by_sequence), 'held-out sequence')}"
    if comparison.alike:
        names = joined([f"{name_of(row)} ({human_bytes(row.bytes)})" for row in comparison.alike])
        return [first, f"{sequences} it cannot be told apart from {names}."]
    if len(fitting) == 1:
        return [first]
    ahead = best.kl_from(fitting[1])
    gap = (
        f"{_with_error(ahead.gain, ahead.standard_error)} below that of the next, "
        f"{name_of(fitting[1])}"
    )
    return [first, f"{sequences} its KL is {gap}."]


def _with_error(value: float, error: float | None, sign: str = "") -> str:
    text = f"{value:{sign}.4f}"
    return text if error is None else f"{text} ± {error:.4f}"


def _range(task: str, rows: Sequence[Row]) -> TaskGate:
    """Return a task's mean score and drop in several rows, with the range in place of bounds; of
    one row its own."""
    gates = [row.tasks[task] for row in rows]
    if len(gates) == 1:
        return gates[0]
    drops = [gate.drop for gate in gates]
    score = fmean(gate.compressed for gate in gates)
    return replace(
        gates[0], compressed=score, drop=fmean(drops), lower=min(drops), upper=max(drops)
    )


def write_reports(comparison: Comparison, folder: Path, overwrite: bool = False) -> list[Path]:
    """Write JSON, Markdown and picture into a new folder."""
    document = comparison.document()
    (figure,) = (block for block in document if isinstance(block, Figure))
    contents = {
        # an item is no line
        NAMES[0]: report_json(comparison.to_dict(), None if comparison.base.answers else 2),
        NAMES[1]: markdown(document, {figure.name: NAMES[2]}),
        NAMES[2]: png(figure.title, figure.drawings),
    }
    return write_files(folder, contents, NAMES, overwrite)


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Sort rows: many experts first, and the least loss first among equally many."""
    return sorted(rows, key=lambda row: (-row.kept, sort_key(row.loss)))


def _tables(comparison: Comparison, rows: Sequence[Row]) -> list[Table]:
    """Return the base, then each size's models, the best in bold; of several sources, their figures
    as well."""
    base = comparison.base
    caption = f"{comparison.model}: loss, its increase and KL in nats per token"
    optional: tuple[str, ...] = OPTIONAL
    ruled = set[int]()
    if comparison.formats:  # sorted by bytes
        optional = OPTIONAL_OF_FORMATS
        shown = [base, *rows]
        bold = {number for number, row in enumerate(shown) if row.frontier}
    else:
        shown = [base, *ranked(rows)]
        for number, (row, following) in enumerate(pairwise(shown)):
            if row.kept != following.kept:
                ruled.add(number)
        ruled.add(0)
        bold = {number + 1 for number in ruled}
    if base.tasks:
        bold = set()
        caption += "; scores of tasks, their difference to the base's and its bounds"
        optional = (*OPTIONAL, "increase", "KL", "loss")
    cells = [_cells(comparison, row) for row in shown]
    lines = list[Sequence[Words]]()
    for number, row_cells in enumerate(cells):
        line = [*row_cells.values()]
        lines.append([*map(Strong, line)] if number in bold else line)
    tables = [Table(caption, tuple(cells[0]), lines, {"format"}, optional, ruled)]
    if len(comparison.evaluation) < 2:
        return tables
    totals = dict.fromkeys(comparison.evaluation, 0.0)
    for row in comparison.rows:
        for source, rise in comparison.rises(row).items():
            totals[source] += rise
    sources = sorted(totals, key=lambda source: -totals[source])
    columns = [name for name in ("model", "experts", "format") if name in cells[0]]
    for measure, title in SOURCE_TITLES.items():
        lines = []
        for row, row_cells in zip(shown, cells, strict=True):
            figures = getattr(row, BY_SOURCE[measure])
            line = [row_cells[name] for name in columns]
            for source in sources:
                figure = figures.get(source)
                error = row.errors_by_source.get(measure, {}).get(source)
                if figure is None:
                    text = "-"
                elif row is base:
                    text = f"{figure:.4f}"
                elif measure == "loss":
                    text = _with_error(figure - base.loss_by_source[source], error, "+")
                else:
                    text = _with_error(figure, error)
                line.append(Strong(text) if source in row.degraded else text)
            lines.append(line)
        tables.append(Table(title, (*columns, *sources), lines, ruled=ruled))
    return tables


def _cells(comparison: Comparison, row: Row) -> dict[str, Words]:
    """Return a row's cells by column."""
    is_base = row is comparison.base
    cells: dict[str, Words] = {"model": label(row), "experts": str(row.experts)}
    for name, task in row.tasks.items():
        # a score, its difference to the base's and the bounds: '0.7100 -0.0200 [-0.0310, -0.0120]'
        text = level(task.compressed)
        if not is_base:
            sign = 1 if task.kind == "likelihood" else -1
            bounds = [
                change(bound, task.kind) for bound in sorted((sign * task.lower, sign * task.upper))
            ]
            text += f" {change(sign * task.drop, task.kind)} [{', '.join(bounds)}]"
        cells[name] = Strong(text) if name in row.equal_to_best else text
    if comparison.formats:
        cells["experts"] = row.size_label.partition(",")[0].removesuffix(" experts")
        cells["format"] = row.format
        cells["bytes"] = human_bytes(row.bytes)
        if comparison.cache:
            cells["with context"] = human_bytes(row.bytes + comparison.cache)
        cells["bits"] = f"{row.bits:.2f}"
    cells["parameters"] = human_count(row.parameters)
    # where rows differ in top-k, and it is known what that comes to in parameters
    if any(other.top_k is not None for other in comparison.rows) and all(
        other.active is not None for other in comparison.rows
    ):
        cells["active"] = human_count(row.active or 0)
    cells["loss"] = f"{row.loss:.4f}"
    increase = _with_error(comparison.increase(row), row.loss_error, "+")
    cells["increase"] = "-" if is_base else increase
    if len(comparison.evaluation) > 1:
        cells["worst source"] = "-"
        rises = comparison.rises(row)
        if rises and not is_base:
            worst = max(rises, key=lambda source: rises[source])
            cells["worst source"] = f"{worst} {rises[worst]:+.4f}"
    cells["perplexity"] = f"{row.perplexity:.4g}"
    cells["KL"] = _with_error(row.kl, row.kl_error)
    cells["flips"] = f"{row.flips:.4f}"
    if comparison.formats:
        cells["behind"] = "-" if row.frontier else _with_error(row.behind or 0.0, row.behind_error)
    else:
        cells["layer error"] = "-" if row.error is None else f"{row.error:.4f}"
        cells["seconds"] = f"{row.seconds or 0.0:.1f}"
        cells["peak memory"] = human_bytes(row.peak_memory or 0)
    return cells


def _legend_label(name: str, line: Sequence[Sequence[Row]]) -> str:
    """Return a line's name on several short lines; of random drops with how many they are."""
    drops = max(map(len, line))
    if line[-1][0].is_random:
        name += f" (mean and range of {drops})" if drops > 1 else " (one drop)"
    return textwrap.fill(readable(name), 44)


def comparison_figure(comparison: Comparison) -> Figure:
    """Return losses upwards over falling bytes: a line for each way from the base on, random drops
    in a band.

    Rings mark the frontier, and a dashed line the limit of bytes.
    """
    base = comparison.base
    # by name and falling bytes, random drops together: formats of all experts are one line, and
    # each format of a strategy is one, which begins at all experts in that format
    by_bytes = dict[str, dict[int, list[Row]]]()
    uncut = {row.scheme: row for row in comparison.rows if row.strategy == base.strategy}
    rows = comparison.rows[1:]
    for row in rows if comparison.formats else ranked(rows):
        start = base
        if row.strategy == base.strategy:
            name = "formats alone"
        else:
            start = uncut.get(row.scheme, base)
            name = label(row, "random" if row.is_random else None)
            if row.scheme != STORED:
                name += f", {row.scheme}"
        by_bytes.setdefault(name, {0: [start]}).setdefault(row.bytes, []).append(row)
    lines = {name: list(line.values()) for name, line in by_bytes.items()}
    legend = ["base"]
    alt = [f"Loss above the base's {base.loss:.4f} by experts kept."]
    for name, line in lines.items():
        legend.append(_legend_label(name, line))
        points = [
            f"{group[0].kept:g} {fmean(map(comparison.increase, group)):+.4f}" for group in line[1:]
        ]
        alt.append(f"{name}: {', '.join(points)}.")
    caption = (
        "Loss above the base's by the bytes of all tensors; the legend lists lines in the order in "
        "which they end. Colour is the strategy and its format, line style the correction, and the "
        "grey band random drops."
    )
    frontier = [row for row in comparison.rows if row.frontier and math.isfinite(row.loss)]
    if frontier:
        legend.append(FRONTIER)
        caption += " Rings mark models that none is smaller and better than, by KL."
        points = [f"{row.size_label}, {human_bytes(row.bytes)}" for row in frontier]
        alt.append(f"The frontier: {'; '.join(points)}.")
    legend_lines = "\n".join(legend).splitlines()
    size = 7.3 + 0.068 * max(map(len, legend_lines)), max(5.0, 0.6 + 0.185 * len(legend_lines))
    title = f"{comparison.model}: loss over bytes"
    draw = partial(_draw_losses, comparison=comparison, lines=lines, frontier=frontier)
    drawings = [Drawing(title, " ".join(alt), size, draw)]
    if base.tasks:
        size = size[0], max(2.8 * math.ceil(len(base.tasks) / PLOTS), size[1])
        title = f"{comparison.model}: scores over experts kept"
        alternative = f"Scores of {', '.join(base.tasks)}; the table has them."
        scores = partial(_draw_scores, comparison=comparison, lines=lines)
        drawings.insert(0, Drawing(title, alternative, size, scores))
        caption += " Bands of scores are the bounds of the difference to the base."
    return Figure("comparison", title, caption, drawings)


def _draw_scores(canvas: "FigureBase", comparison: Comparison, lines: Lines) -> None:
    """Draw a plot for each task: the base's score, and a line for each way over the experts
    kept."""
    tasks = comparison.base.tasks

    def bounds(name: str, rows: Sequence[Row]) -> tuple[float, float, float]:
        """Return the least, the mean and the highest score that the difference to the base
        allows."""
        task = _range(name, rows)
        if rows[0] is comparison.base:
            return task.base, task.base, task.base
        if task.kind == "likelihood":
            return task.base * (1 + task.lower), task.compressed, task.base * (1 + task.upper)
        return task.base - task.upper, task.compressed, task.base - task.lower

    for number, (name, task) in enumerate(tasks.items()):
        axes = canvas.add_subplot(math.ceil(len(tasks) / PLOTS), PLOTS, number + 1)
        axes.axhline(task.base, color=ROLES["ink"], linewidth=1.0, label="base")
        _draw_lines(axes, comparison, lines, lambda row: row.kept, partial(bounds, name))
        axes.set_title(readable(name))
        axes.set_ylabel(readable(task.metric))
        if task.kind == "likelihood":
            scale_axis(axes, "y", [row.tasks[name].compressed for row in comparison.rows])
        axes.set_xlabel("experts kept in each layer")
        axes.set_xticks(sorted({row.kept for row in comparison.rows}))
        axes.invert_xaxis()
        axes.grid()
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside right upper", handlelength=3.2)


def _draw_lines(
    axes: "Axes",
    comparison: Comparison,
    lines: Lines,
    place: Callable[[Row], float],
    measure: Callable[[Sequence[Row]], tuple[float, float, float]],
) -> None:
    """Draw each line through the means of its groups, with a band from least to highest."""
    strategies = list(
        dict.fromkeys((row.name, row.scheme) for row in comparison.rows[1:] if not row.is_random)
    )
    for number, (name, line) in enumerate(lines.items()):
        row = line[-1][0]
        places = [place(group[0]) for group in line]
        least, means, highest = zip(*map(measure, line), strict=True)
        shade = ROLES["muted"]
        style = "dashed"
        if not row.is_random:
            shade = colour(strategies.index((row.name, row.scheme)))
            style = STYLES.get(row.correction, "dashdot")
        # filled in the first round of markers, hollow in the second
        is_hollow = number // len(MARKERS) % 2
        if least != highest:
            axes.fill_between(places, least, highest, color=shade, alpha=0.2, linewidth=0)
        axes.plot(
            places,
            means,
            label=_legend_label(name, line),
            color=shade,
            linewidth=1.4,
            linestyle=style,
            marker=MARKERS[number % len(MARKERS)],
            markersize=6,
            markerfacecolor="white" if is_hollow else shade,
            markeredgecolor=shade if is_hollow else "white",
            markeredgewidth=1.0,
            markevery=slice(1, None),  # where a line begins, a marker says nothing
        )


def _draw_losses(
    canvas: "FigureBase", comparison: Comparison, lines: Lines, frontier: Sequence[Row]
) -> None:
    """Draw the losses; bytes fall to the right, where the legend is."""
    axes = canvas.add_subplot()
    increase = comparison.increase

    def losses(rows: Sequence[Row]) -> tuple[float, float, float]:
        increases = list(map(increase, rows))
        return min(increases), fmean(increases), max(increases)

    ordered = sorted(lines.items(), key=lambda line: -sort_key(losses(line[1][-1])[1]))
    _draw_lines(axes, comparison, dict(ordered), lambda row: row.bytes, losses)
    axes.axhline(0.0, color=ROLES["ink"], linewidth=1.0, label="base")
    if frontier:
        axes.plot(
            [row.bytes for row in frontier],
            list(map(increase, frontier)),
            label=FRONTIER,
            linestyle="none",
            marker="o",
            markersize=12,
            markerfacecolor="none",
            markeredgecolor=ROLES["ink"],
        )
    if comparison.limit is not None:
        limit = comparison.limit - comparison.cache
        axes.axvline(limit, color=ROLES["bad"], linewidth=0.8, linestyle="dashed")
    canvas.legend(loc="outside right upper", handlelength=3.2)
    scale = scale_axis(axes, "y", list(map(increase, comparison.rows)), 4)
    above = f"loss above the base's {comparison.base.loss:.4f} (nats per token)"
    axes.set_ylabel(f"{above}\n{scale}" if scale else above)
    experts = (
        f"size of all tensors (the base has {counted(comparison.base.experts, 'expert')} in "
        "each MoE layer)"
    )
    nbytes = [row.bytes for row in comparison.rows]
    if max(nbytes) > 10 * min(nbytes):
        experts += f", {scale_axis(axes, 'x', nbytes)}"
    axes.invert_xaxis()
    axes.xaxis.set_major_formatter(lambda size, _: human_bytes(size))
    axes.set_xlabel(experts)
    axes.grid()
