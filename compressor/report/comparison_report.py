"""The result of a comparison: a row for each smaller model, beside the base; its table, plot, files
and best choice."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from compressor.data.sources import without_folders
from compressor.document.blocks import Block, Figure, Heading, Strong, Table, Text, Words
from compressor.document.drawing import MARKERS, ROLES, colour, scale_axis
from compressor.document.markdown import markdown
from compressor.document.picture import Drawing, png
from compressor.files import write_files
from compressor.formatting import counted, human_bytes, human_count, joined, readable
from compressor.quality_gate.report import change, level
from compressor.quality_gate.verdict import TaskGate
from compressor.records import plain_json, report_json
from compressor.report.comparison_rows import (
    MEASURES,
    Group,
    Lines,
    Row,
    label,
    sort_key,
)
from compressor.report.grid import STORED

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

NAMES = ("comparison.json", "comparison.md", "comparison.png")
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
STYLES: Mapping[str, Any] = {"none": "solid", "ridge": (0, (1, 1)), "tune": (0, (5, 1.5))}


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
        """Rows within the limit, the least KL first; none that was drawn at random."""
        limit = math.inf if self.limit is None else self.limit
        rows = [row for row in self.rows if row.variant.bytes + self.cache <= limit]
        rows = [row for row in rows if not row.variant.is_random]
        return sorted(rows, key=lambda row: (sort_key(row.kl), row.variant.bytes))

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

    def bits(self, row: Row) -> float | None:
        """Return the bits of all tensors for each parameter of the base."""
        return None if self.parameters is None else 8 * row.variant.bytes / self.parameters

    def name_of(self, row: Row) -> str:
        """Return a row's share and format, with its strategy where there are several."""
        smaller = {label(other) for other in self.rows if other.variant.name != "base"}
        size = row.variant.size_label
        return f"{size}, {label(row)}" if len(smaller) > 1 else size

    def facts(self, row: Row) -> dict[str, Any]:
        """Return all that is known of a row, by the keys of the JSON."""
        facts = {**vars(row.variant), **vars(row), **vars(row.standing)}
        for part in ("variant", "by_source", "standing"):
            del facts[part]
        for measure in MEASURES:
            facts[f"{measure}_by_source"] = row.by_source.get(measure, {})
        return {
            **facts,
            "perplexity": math.exp(row.loss) if row.loss < 700 else math.inf,
            # in the order of `items`
            "answers": {task.task: task.values for task in row.answers},
            "label": self.name_of(row) if self.formats else label(row),
            "loss_increase": self.increase(row),
            "bits": self.bits(row),
        }

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types without folders; None for a number that JSON cannot write."""
        items = {}
        for task in self.base.answers:
            items[task.task] = [item.id for item in task.items]
        best = self.fitting[:1] if self.limit is not None else []
        content = {
            **vars(self),
            "rows": [self.facts(row) for row in self.rows],
            "calibration": self._calibration,
            "items": items,
            "best": self.name_of(best[0]) if best else None,
            "alike": [self.name_of(row) for row in self.alike] if best else [],
        }
        plain: dict[str, Any] = plain_json(content, named=False)
        return plain

    @property
    def _calibration(self) -> Mapping[str, Any]:
        return without_folders(self.calibration) if self.calibration else {}

    def data_line(self) -> Text:
        """Return the texts of calibration and evaluation in a sentence."""
        calibration = self._calibration
        read = []
        for part in calibration.get("sources") or ([calibration] if calibration else []):
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
            layers = []
            for name, experts in self.protected.items():
                layers.append(f"{name}: {', '.join(map(str, experts))}")
            sentence = f"Protected experts, in no row merged or dropped: {'; '.join(layers)}."
            blocks.append(Text(sentence))
        blocks += tables(self, [[row] for row in self.rows[1:]])
        blocks += map(Text, sentences(self))
        legend = FORMATS_LEGEND
        if not self.formats:
            bold = "Bold: the least loss among models of its size; "
            legend = STRATEGIES_LEGEND + (TASKS_LEGEND if self.base.tasks else bold)
        blocks.append(Text(LEGEND + legend + SOURCES_LEGEND))
        blocks.append(comparison_figure(self))
        made_with = [f"{name} {version}" for name, version in self.versions.items()]
        blocks.append(Text(f"Made with {', '.join(made_with)}."))
        return blocks

    def brief(self) -> list[Block]:
        """Return the blocks that a terminal shows; random drops share a line."""
        groups = dict[Any, list[Row]]()
        for number, row in enumerate(self.rows[1:]):
            variant = row.variant
            key = (label(row, "random"), variant.experts) if variant.is_random else number
            groups.setdefault(key, []).append(row)
        shown = tables(self, [*groups.values()])
        return [*shown, self.data_line(), *map(Text, sentences(self))]


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table: its title, and the cell of one row, or of several random drops."""

    title: str
    cell: Callable[[Group], Words]
    shown: bool = True  # in this comparison


def columns_of(comparison: Comparison) -> list[Column]:
    """Return the columns of a comparison's table, from left to right."""
    base = comparison.base
    has_formats = bool(comparison.formats)

    def model(group: Group) -> Words:
        losses = [row.loss for row in group]
        seeds = f"random ({len(group)} seeds), loss {min(losses):.4f}..{max(losses):.4f}"
        return label(group[0], seeds if len(group) > 1 else None)

    def experts(group: Group) -> Words:
        variant = group[0].variant
        of_base = variant.experts_label.removesuffix(" experts")
        return of_base if has_formats else str(variant.experts)

    def score(task_name: str, group: Group) -> Words:
        """'0.7100 -0.0200 [-0.0310, -0.0120]': a score, its difference to the base's and bounds."""
        task = _range(task_name, group)
        text = level(task.compressed)
        if group[0] is not base:
            sign = 1 if task.kind == "likelihood" else -1
            ends = sorted((sign * task.lower, sign * task.upper))
            bounds = ", ".join(change(bound, task.kind) for bound in ends)
            text += f" {change(sign * task.drop, task.kind)} [{bounds}]"
        is_best = all(task_name in row.equal_to_best for row in group)
        return Strong(text) if is_best else text

    def worst_source(group: Group) -> Words:
        rises = _rises(comparison, group)
        if not rises or group[0] is base:
            return "-"
        worst = max(rises, key=lambda source: rises[source])
        return f"{worst} {rises[worst]:+.4f}"

    def number(
        key: str,
        form: Callable[[Any], str] = "{:.4f}".format,
        error: str = "",
        merge: Callable[[list[Any]], Any] = fmean,
        blank: Callable[[Row], bool] = lambda row: False,
    ) -> Callable[[Group], Words]:
        """Return the cells of a fact, by default its mean over random drops; a single row's have
        their standard error."""

        def cell(group: Group) -> Words:
            facts = [comparison.facts(row) for row in group]
            values = [known[key] for known in facts]
            if None in values or blank(group[0]):
                return "-"
            return _with_error(form(merge(values)), facts[0][error] if error else None)

        return cell

    # where rows differ in top-k, and it is known what that comes to in parameters
    variants = [row.variant for row in comparison.rows]
    differ = any(variant.top_k is not None for variant in variants)
    has_active = differ and all(variant.active is not None for variant in variants)

    def with_context(nbytes: int) -> str:
        return human_bytes(nbytes + comparison.cache)

    columns = [
        Column("model", model),
        Column("experts", experts),
        *(Column(task, partial(score, task)) for task in base.tasks),
        Column("format", lambda group: group[0].variant.format, has_formats),
        Column("bytes", number("bytes", human_bytes), has_formats),
        Column("with context", number("bytes", with_context), has_formats and comparison.cache > 0),
        Column("bits", number("bits", "{:.2f}".format), has_formats),
        Column("parameters", number("parameters", human_count)),
        Column("active", number("active", human_count), has_active),
        Column("loss", number("loss")),
        Column(
            "increase",
            number("loss_increase", "{:+.4f}".format, "loss_error", blank=lambda row: row is base),
        ),
        Column("worst source", worst_source, len(comparison.evaluation) > 1),
        Column("perplexity", number("perplexity", "{:.4g}".format)),
        Column("KL", number("kl", error="kl_error")),
        Column("predicted KL", number("predicted", "{:.4f}".format), comparison.limit is not None),
        Column("flips", number("flips")),
        Column(
            "behind",
            number("behind", error="behind_error", blank=lambda row: row.standing.frontier),
            has_formats,
        ),
        Column("layer error", number("error"), not has_formats),
        Column("seconds", number("seconds", "{:.1f}".format), not has_formats),
        Column("peak memory", number("peak_memory", human_bytes, merge=max), not has_formats),
    ]
    return [column for column in columns if column.shown]


def tables(comparison: Comparison, smaller: Sequence[Group]) -> list[Table]:
    """Return the base, then each size's models, the best in bold; of several sources, their figures
    as well."""
    base = comparison.base
    caption = f"{comparison.model}: loss, its increase and KL in nats per token"
    # columns, the least important first
    optional = ["peak memory", "seconds", "flips", "parameters", "perplexity", "layer error"]
    groups = [[base], *smaller]
    ruled = set[int]()
    if comparison.formats:  # sorted by bytes
        optional += ["model", "loss", "bits"]
        bold = {place for place, group in enumerate(groups) if group[0].standing.frontier}
    else:
        groups[1:] = sorted(smaller, key=rank)
        sizes = [group[0].variant.kept for group in groups]
        ruled = {place for place, (size, after) in enumerate(pairwise(sizes)) if size != after}
        ruled.add(0)
        bold = {place + 1 for place in ruled}
    if base.tasks:
        bold = set()
        caption += "; scores of tasks, their difference to the base's and its bounds"
        optional += ["increase", "KL", "loss"]
    columns = columns_of(comparison)
    titles = [column.title for column in columns]
    lines = list[Sequence[Words]]()
    for place, group in enumerate(groups):
        line = [column.cell(group) for column in columns]
        lines.append([*map(Strong, line)] if place in bold else line)
    shown = [Table(caption, titles, lines, {"format"}, optional, ruled)]
    if len(comparison.evaluation) < 2:
        return shown
    totals = dict.fromkeys(comparison.evaluation, 0.0)
    for row in comparison.rows:
        for source, rise in _rises(comparison, [row]).items():
            totals[source] += rise
    sources = sorted(totals, key=lambda source: -totals[source])
    names = [column for column in columns if column.title in ("model", "experts", "format")]
    for measure, title in MEASURES.items():
        lines = []
        for group in groups:
            line = [column.cell(group) for column in names]
            for source in sources:
                text = _source_cell(comparison, group, measure, source)
                is_degraded = all(source in row.degraded for row in group)
                line.append(Strong(text) if is_degraded else text)
            lines.append(line)
        titles = [column.title for column in names] + sources
        shown.append(Table(title, titles, lines, ruled=ruled))
    return shown


def _source_cell(comparison: Comparison, group: Group, measure: str, source: str) -> str:
    """Return a figure on a source of text: of the base its own, of others the rise of the loss, or
    the distance from the base."""
    figure = _means(group, measure).get(source)
    if figure is None:
        return "-"
    base = comparison.base
    if group[0] is base:
        return f"{figure:.4f}"
    error = group[0].errors_by_source.get(measure, {}).get(source) if len(group) == 1 else None
    if measure == "loss":
        return _with_error(f"{figure - base.by_source[measure][source]:+.4f}", error)
    return _with_error(f"{figure:.4f}", error)


def _means(group: Group, measure: str) -> dict[str, float]:
    """Return the means of a measure over the rows, by source."""
    means = {}
    for source in group[0].by_source.get(measure, {}):
        means[source] = fmean(row.by_source[measure][source] for row in group)
    return means


def _rises(comparison: Comparison, group: Group) -> dict[str, float]:
    """Return by how much the loss is above the base's on each evaluation source."""
    base = comparison.base.by_source.get("loss", {})
    means = _means(group, "loss")
    return {source: sort_key(loss - base[source]) for source, loss in means.items()}


def _with_error(text: str, error: float | None) -> str:
    return text if error is None else f"{text} ± {error:.4f}"


def rank(group: Group) -> tuple[float, float]:
    """Sort many experts first, and the least loss first among equally many."""
    return -group[0].variant.kept, sort_key(fmean(row.loss for row in group))


def sentences(comparison: Comparison) -> list[str]:
    """Return the best within the limit, rows that could not be, and formats and more that were not
    tried."""
    if not comparison.formats:
        return []
    untried = ["GPTQ in place of rounding to nearest", *comparison.formats_left_out]
    if comparison.limit is None:
        untried += ["other group sizes", "fewer bits for attention"]
    smaller = [row.variant for row in comparison.rows if row.variant.name != "base"]
    smaller = [variant for variant in smaller if not variant.is_random]
    strategies = dict.fromkeys(variant.name for variant in smaller)
    if strategies:
        untried.append(f"strategies other than {', '.join(strategies)}")
    corrections = dict.fromkeys(variant.correction for variant in smaller)
    corrections.pop("none", None)
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
        least = min(comparison.rows, key=lambda row: (row.variant.bytes, row.variant.is_random))
        size = human_bytes(least.variant.bytes)
        return [f"Nothing fits in {limit}: the smallest is {name_of(least)}, with {size}."]
    best = fitting[0]
    increase = _with_error(f"{comparison.increase(best):+.4f}", best.standing.loss_error)
    kl = _with_error(f"{best.kl:.4f}", best.standing.kl_error)
    size = f"{human_bytes(best.variant.bytes)}, {comparison.bits(best):.3g} bits a weight"
    first = (
        f"Best of {len(fitting)} that fit in {limit}: {name_of(best)} ({size}; KL {kl}, loss "
        f"{increase} nats per token)."
    )
    sequences = f"On {counted(len(best.kl_by_sequence), 'held-out sequence')}"
    alike = []
    for row in comparison.alike:
        alike.append(f"{name_of(row)} ({human_bytes(row.variant.bytes)})")
    if alike:
        return [first, f"{sequences} it cannot be told apart from {joined(alike)}."]
    if len(fitting) == 1:
        return [first]
    ahead = best.kl_from(fitting[1])
    gap = _with_error(f"{ahead.gain:.4f}", ahead.standard_error)
    return [first, f"{sequences} its KL is {gap} below that of the next, {name_of(fitting[1])}."]


def _range(task: str, group: Group) -> TaskGate:
    """Return a task's mean score and drop in several rows, with the range in place of bounds; of
    one row its own."""
    gates = [row.tasks[task] for row in group]
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


def lines_of(comparison: Comparison) -> dict[str, list[list[Row]]]:
    """Return the lines of a plot by name, each from the base on by falling bytes, random drops
    together.

    Formats of all experts are one line, and each format of a strategy is one, which begins at all
    experts in that format."""
    base = comparison.base
    by_bytes = dict[str, dict[int, list[Row]]]()
    uncut = {}
    for row in comparison.rows:
        if row.variant.strategy == base.variant.strategy:
            uncut[row.variant.scheme] = row
    rows = list(comparison.rows[1:])
    if not comparison.formats:
        rows.sort(key=lambda row: rank([row]))
    for row in rows:
        variant = row.variant
        start = base
        if variant.strategy == base.variant.strategy:
            name = "formats alone"
        else:
            start = uncut.get(variant.scheme, base)
            name = label(row, "random" if variant.is_random else None)
            if variant.scheme != STORED:
                name += f", {variant.scheme}"
        by_bytes.setdefault(name, {0: [start]}).setdefault(variant.bytes, []).append(row)
    return {name: list(line.values()) for name, line in by_bytes.items()}


def _legend_label(name: str, line: Sequence[Group]) -> str:
    """Return a line's name on several short lines; of random drops with how many they are."""
    drops = max(map(len, line))
    if line[-1][0].variant.is_random:
        name += f" (mean and range of {drops})" if drops > 1 else " (one drop)"
    return textwrap.fill(readable(name), 44)


def comparison_figure(comparison: Comparison) -> Figure:
    """Return losses upwards over falling bytes: a line for each way from the base on, random drops
    in a band.

    Rings mark the frontier, and a dashed line the limit of bytes.
    """
    base = comparison.base
    lines = lines_of(comparison)
    legend = ["base"]
    alt = [f"Loss above the base's {base.loss:.4f} by experts kept."]
    for name, line in lines.items():
        legend.append(_legend_label(name, line))
        points = []
        for group in line[1:]:
            increase = fmean(map(comparison.increase, group))
            points.append(f"{group[0].variant.kept:g} {increase:+.4f}")
        alt.append(f"{name}: {', '.join(points)}.")
    caption = (
        "Loss above the base's by the bytes of all tensors; the legend lists lines in the order in "
        "which they end. Colour is the strategy and its format, line style the correction, and the "
        "grey band random drops."
    )
    frontier = []
    for row in comparison.rows:
        if row.standing.frontier and math.isfinite(row.loss):
            frontier.append(row)
    if frontier:
        legend.append(FRONTIER)
        caption += " Rings mark models that none is smaller and better than, by KL."
        variants = [row.variant for row in frontier]
        points = [f"{variant.size_label}, {human_bytes(variant.bytes)}" for variant in variants]
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

    def bounds(name: str, group: Group) -> tuple[float, float, float]:
        """Return the least, the mean and the highest score that the difference to the base
        allows."""
        task = _range(name, group)
        if group[0] is comparison.base:
            return task.base, task.base, task.base
        if task.kind == "likelihood":
            return task.base * (1 + task.lower), task.compressed, task.base * (1 + task.upper)
        return task.base - task.upper, task.compressed, task.base - task.lower

    for number, (name, task) in enumerate(tasks.items()):
        axes = canvas.add_subplot(math.ceil(len(tasks) / PLOTS), PLOTS, number + 1)
        axes.axhline(task.base, color=ROLES["ink"], linewidth=1.0, label="base")
        _draw_lines(axes, comparison, lines, "kept", partial(bounds, name))
        axes.set(
            title=readable(name),
            ylabel=readable(task.metric),
            xlabel="experts kept in each layer",
            xticks=sorted({row.variant.kept for row in comparison.rows}),
        )
        if task.kind == "likelihood":
            scale_axis(axes, "y", [row.tasks[name].compressed for row in comparison.rows])
        axes.invert_xaxis()
        axes.grid()
    canvas.legend(*axes.get_legend_handles_labels(), loc="outside right upper", handlelength=3.2)


def _draw_lines(
    axes: "Axes",
    comparison: Comparison,
    lines: Lines,
    place: str,
    measure: Callable[[Group], tuple[float, float, float]],
) -> None:
    """Draw each line through the means of its groups, with a band from least to highest, over a
    property of variants."""
    variants = [row.variant for row in comparison.rows[1:] if not row.variant.is_random]
    strategies = list(dict.fromkeys((variant.name, variant.scheme) for variant in variants))
    for number, (name, line) in enumerate(lines.items()):
        variant = line[-1][0].variant
        places = [getattr(group[0].variant, place) for group in line]
        least, means, highest = zip(*map(measure, line), strict=True)
        shade = ROLES["muted"]
        style = "dashed"
        if not variant.is_random:
            shade = colour(strategies.index((variant.name, variant.scheme)))
            style = STYLES.get(variant.correction, "dashdot")
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
    canvas: "FigureBase", comparison: Comparison, lines: Lines, frontier: Group
) -> None:
    """Draw the losses; bytes fall to the right, where the legend is."""
    axes = canvas.add_subplot()
    increase = comparison.increase

    def losses(group: Group) -> tuple[float, float, float]:
        increases = list(map(increase, group))
        return min(increases), fmean(increases), max(increases)

    ordered = sorted(lines.items(), key=lambda line: -sort_key(losses(line[1][-1])[1]))
    _draw_lines(axes, comparison, dict(ordered), "bytes", losses)
    axes.axhline(0.0, color=ROLES["ink"], linewidth=1.0, label="base")
    if frontier:
        axes.plot(
            [row.variant.bytes for row in frontier],
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
    base = comparison.base
    scale = scale_axis(axes, "y", list(map(increase, comparison.rows)), 4)
    above = f"loss above the base's {base.loss:.4f} (nats per token)"
    axes.set_ylabel(f"{above}\n{scale}" if scale else above)
    before = counted(base.variant.experts, "expert")
    size = f"size of all tensors (the base has {before} in each MoE layer)"
    nbytes = [row.variant.bytes for row in comparison.rows]
    if max(nbytes) > 10 * min(nbytes):
        size += f", {scale_axis(axes, 'x', nbytes)}"
    axes.invert_xaxis()
    axes.xaxis.set_major_formatter(lambda size, _: human_bytes(size))
    axes.set_xlabel(size)
    axes.grid()
