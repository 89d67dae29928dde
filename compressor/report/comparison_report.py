"""What a comparison found: a row for each way of making the model smaller, beside the original and random drops.

Tables and pictures show rows as entries, which have a label and in which random drops share one line.
"""

import json
import math
import textwrap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from compressor.data.sources import without_folders
from compressor.document.blocks import Block, Figure, Heading, Strong, Table, Text, Words
from compressor.document.markdown import markdown
from compressor.document.marks import LABEL_LENGTH, Line, colour, draw_lines, legend_beside, mark, spaced
from compressor.document.palette import ROLES, scale_axis
from compressor.document.picture import Drawing, png
from compressor.files import whole_folder
from compressor.formatting import human_bytes, human_count, joined
from compressor.records import finite, plain_json

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase
NAMES = ("comparison.json", "comparison.md", "comparison.png", "active.png")  # the last where top-k varies
# columns, the least important first
OPTIONAL = ("peak memory", "seconds", "flips", "parameters", "perplexity", "layer error")
LEGEND = (
    "Loss and KL (of the original's next-token distribution to the model's) are in nats per token. Flips is the share "
    "of positions whose greedy token is not the original's. Layer error is the mean over layers of ‖y - y'‖² / ‖y‖², "
    "tokens weighted, on calibration text that no plan saw. Seconds are those of "
    "deciding, and correcting with the evaluation on the way, without the calibration pass. Bold: the least loss "
    "among models of its size."
)
AXES_WIDTH, LEAST_HEIGHT = 6.6, 5.0  # inches
LINE_HEIGHT, LETTER_WIDTH = 0.185, 0.068  # inches of legend text
STYLES: Mapping[str, Any] = {"none": "solid", "ridge": (0, (1, 1)), "tune": (0, (5, 1.5))}
DECADES = 4  # of the logarithmic scale at the most


@dataclass(frozen=True, slots=True)
class Row:
    """One model of the comparison. Losses are in nats per evaluated token, on text that no part of a plan saw."""

    name: str  # the strategy with its options, or "original"
    strategy: str
    correction: str  # none, ridge or tune
    experts: int  # per MoE layer
    parameters: int
    bytes: int
    loss: float
    perplexity: float
    kl: float  # of the original's next-token distribution to this model's, nats per token
    flips: float  # share of the positions at which the greedy token is not the original's
    error: float | None  # mean over layers of ||y - y'||^2 / ||y||^2 on held-out calibration tokens
    seconds: float  # deciding, and correcting with the evaluation on the way; not the pass that all plans share
    peak_memory: int  # bytes of anonymous memory at the highest while it was corrected and evaluated
    loss_by_source: Mapping[str, float] = field(default_factory=dict)
    source: str | None = None  # the calibration source that it was planned for, if for one alone
    seed: int | None = None  # of a random drop
    split: int = 1  # parts that each expert became before; `experts` then counts parts
    top_k: int | None = None  # experts that a token visits, where that was chosen
    active: int | None = None  # parameters that a token passes; None where stored elements are no parameters
    undone: bool = False  # the correction took the whole model further away on held-out calibration text

    @property
    def kept(self) -> float:
        """Experts of the source's size that stay in each layer."""
        return self.experts / self.split

    @property
    def is_random(self) -> bool:
        """Whether experts were dropped at random."""
        return self.strategy == "random"


@dataclass(frozen=True, slots=True)
class Comparison:
    """All rows, the original first, with what they were measured on."""

    model: str
    rows: tuple[Row, ...]
    calibration: Mapping[str, Any]  # identity of the calibration data
    evaluation: Mapping[str, int]  # tokens of each evaluation set
    calibration_seconds: float  # the pass that all plans share
    seed: int
    versions: Mapping[str, str]
    protected: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by module; in no row merged or dropped

    @property
    def original(self) -> Row:
        """The model as it is."""
        return self.rows[0]

    def increase(self, row: Row) -> float:
        """Loss above the original's, nats per token."""
        return row.loss - self.original.loss

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types without folders; None for a number that JSON cannot write."""
        content = asdict(self)
        content["calibration"] = without_folders(self.calibration) if self.calibration else {}
        for entry, row in zip(content["rows"], self.rows, strict=True):
            entry["loss_increase"] = self.increase(row)
        found: dict[str, Any] = plain_json(content, finite)
        return found


def label(row: Row) -> str:
    """A line's name: 'reap, 2 parts, top 3 + ridge for wiki'; random drops that differ in their seed share one."""
    return "".join(
        (
            "random" if row.is_random else row.name,
            f", {row.split} parts" if row.split > 1 else "",
            f", top {row.top_k}" if row.top_k is not None else "",
            f" + {row.correction}" if row.correction != "none" else "",
            " (undone)" if row.undone else "",
            f" for {row.source}" if row.source is not None else "",
        )
    )


@dataclass(frozen=True, slots=True)
class Entry:
    """One line: a model, or the random drops to one expert count that differ in their seed alone."""

    label: str
    rows: tuple[Row, ...]

    @property
    def first(self) -> Row:
        """One of the rows, which are alike but in their seeds and what was measured."""
        return self.rows[0]

    @property
    def losses(self) -> tuple[float, ...]:
        """Loss of each row."""
        return tuple(row.loss for row in self.rows)

    @property
    def loss(self) -> float:
        """Mean over the rows."""
        return fmean(self.losses)

    @property
    def error(self) -> float | None:
        """Mean layer error, or None if a row has none."""
        errors = [row.error for row in self.rows if row.error is not None]
        return fmean(errors) if len(errors) == len(self.rows) else None


def sort_key(loss: float) -> float:
    """Puts what is not a number last."""
    return math.inf if math.isnan(loss) else loss


def entries(rows: Iterable[Row], apart: bool = False) -> tuple[Entry, ...]:
    """The rows in their order, random drops joined where the first of them stands unless they shall stay `apart`."""
    found: dict[tuple[str, int, int | None], list[Row]] = {}
    for number, row in enumerate(rows):
        is_joined = row.is_random and not apart
        seed = f", seed {row.seed}" if row.is_random and apart and row.seed is not None else ""
        found.setdefault((label(row) + seed, row.experts, None if is_joined else number), []).append(row)
    return tuple(Entry(key[0], tuple(together)) for key, together in found.items())


def ranked(comparison: Comparison, apart: bool = False) -> tuple[Entry, ...]:
    """All entries but the original: many experts first, and the least loss first among equally many."""
    return tuple(
        sorted(entries(comparison.rows[1:], apart), key=lambda entry: (-entry.first.kept, sort_key(entry.loss)))
    )


def with_active(comparison: Comparison) -> bool:
    """Whether rows differ in how many experts a token visits, and it is known what that comes to."""
    rows = comparison.rows
    return any(row.top_k is not None for row in rows) and all(row.active is not None for row in rows)


def data_line(comparison: Comparison) -> str:
    """What was calibrated with and evaluated on, and the seed, as a sentence."""
    calibrated = without_folders(comparison.calibration) if comparison.calibration else {}
    sources = calibrated.get("sources") or ([calibrated] if calibrated else [])

    def listed(tokens: Iterable[tuple[str, Any]]) -> str:
        return joined([f"{name} ({n:,} tokens)" if isinstance(n, int) else name for name, n in tokens]) or "no data"

    return (
        f"Calibrated with {listed((part['source'], part.get('tokens')) for part in sources)} in "
        f"{comparison.calibration_seconds:.1f} s, evaluated on {listed(comparison.evaluation.items())}, "
        f"seed {comparison.seed}."
    )


def write_reports(comparison: Comparison, folder: Path, overwrite: bool = False) -> list[Path]:
    """Write JSON, Markdown and picture into a new folder, all of them or, when anything fails, nothing.

    With `overwrite` an earlier comparison is replaced once the new one is complete, and stays when anything fails.
    """
    with whole_folder(folder, NAMES, overwrite) as made:
        figures = comparison_figures(comparison)
        text = markdown(comparison_blocks(comparison), {figure.name: f"{figure.name}.png" for figure in figures})
        content = json.dumps(comparison.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
        (made / NAMES[0]).write_text(content + "\n", encoding="utf-8")
        (made / NAMES[1]).write_text(text, encoding="utf-8")
        for figure in figures:
            (made / f"{figure.name}.png").write_bytes(png(figure.title, figure.drawings))
    return [folder / name for name in NAMES[: 2 + len(figures)]]


def comparison_blocks(comparison: Comparison) -> tuple[Block, ...]:
    """The whole document: what was measured on what, a row for each model, the least loss of each count in bold."""
    layers = [f"{name}: {', '.join(map(str, experts))}" for name, experts in comparison.protected.items()]
    made_with = ", ".join(f"{name} {version}" for name, version in comparison.versions.items())
    return (
        Heading(f"{comparison.model}: comparison", level=1),
        Text(data_line(comparison)),
        *([Text(f"Protected experts, in no row merged or dropped: {'; '.join(layers)}.")] if layers else []),
        *_tables(comparison, apart=True),
        Text(LEGEND),
        *comparison_figures(comparison),
        *([Text(f"Made with {made_with}.")] if made_with else []),
    )


def comparison_brief(comparison: Comparison) -> tuple[Block, ...]:
    """What a terminal shows: the original, then each expert count's models; means of random drops."""
    return *_tables(comparison), Text(data_line(comparison))


def _tables(comparison: Comparison, apart: bool = False) -> list[Table]:
    """The original, then each expert count's models, the best in bold; loss on each evaluation source if several."""
    shown = (Entry("original", (comparison.original,)), *ranked(comparison, apart))
    ruled = {0} | {place for place, (one, other) in enumerate(pairwise(shown)) if one.first.kept != other.first.kept}
    cells = [_cells(comparison, entry) for entry in shown]
    rows: list[tuple[Words, ...]] = [
        tuple(map(Strong, row.values())) if place - 1 in ruled else tuple(row.values())
        for place, row in enumerate(cells)
    ]
    caption = f"{comparison.model}: loss, its increase and KL in nats per token"
    tables = [Table(caption, tuple(cells[0]), tuple(rows), frozenset(), OPTIONAL, ruled)]
    if len(sources := tuple(comparison.evaluation)) > 1:
        by_source = [
            [[row.loss_by_source[name] for row in entry.rows if name in row.loss_by_source] for name in sources]
            for entry in shown
        ]
        losses = tuple(
            (row["model"], row["experts"], *(f"{fmean(each):.4f}" if each else "-" for each in found))
            for row, found in zip(cells, by_source, strict=True)
        )
        tables.append(Table("Loss by evaluation source", ("model", "experts", *sources), losses, ruled=ruled))
    return tables


def _cells(comparison: Comparison, entry: Entry) -> dict[str, str]:
    """A row by column: means of random drops, and the highest of their peaks."""
    rows, name = entry.rows, entry.label
    if len(rows) > 1:
        name += f" ({len(rows)} seeds), loss {min(entry.losses):.4f}..{max(entry.losses):.4f}"
    increase = fmean(map(comparison.increase, rows))
    return {
        "model": name,
        "experts": str(entry.first.experts),
        "parameters": human_count(fmean(row.parameters for row in rows)),
        **({"active": human_count(fmean(row.active or 0 for row in rows))} if with_active(comparison) else {}),
        "loss": f"{entry.loss:.4f}",
        "increase": "-" if entry.first is comparison.original else f"{increase:+.4f}",
        "perplexity": f"{fmean(row.perplexity for row in rows):.4g}",
        "KL": f"{fmean(row.kl for row in rows):.4f}",
        "flips": f"{fmean(row.flips for row in rows):.4f}",
        "layer error": "-" if entry.error is None else f"{entry.error:.4f}",
        "seconds": f"{fmean(row.seconds for row in rows):.1f}",
        "peak memory": human_bytes(max(row.peak_memory for row in rows)),
    }


def comparison_figures(comparison: Comparison) -> list[Figure]:
    """Loss by experts kept, and by active parameters where rows differ in top-k."""
    return [comparison_figure(comparison), *([active_figure(comparison)] if with_active(comparison) else [])]


def comparison_figure(comparison: Comparison) -> Figure:
    """Loss by experts kept, a line for each label; the x axis falls from the original's count, so lines fan out."""
    shown, original = ranked(comparison), comparison.original
    by_label: dict[str, list[Entry]] = {}
    for entry in shown:
        by_label.setdefault(entry.label, []).append(entry)
    alt = [f"Loss above the original's {original.loss:.4f}, the least first."]
    for count, entries in groupby(shown, lambda entry: entry.first.kept):
        increases = (f"{entry.label} {entry.loss - original.loss:+.4f}" for entry in entries)
        alt.append(f"With {count:g} experts: {', '.join(increases)}.")
    parts = ", parts counted as parts of one" if any(row.split > 1 for row in comparison.rows) else ""
    draw = partial(
        _draw,
        comparison=comparison,
        lines=(lines := _lines(comparison, by_label, lambda row: row.kept)),
        axis=f"experts kept in each MoE layer{parts} (the original has {original.experts})",
        ticks={row.kept for row in comparison.rows},
    )
    title = f"{comparison.model}: loss with fewer experts"
    caption = (
        "Loss above the original's by the experts kept in each MoE layer; the legend lists lines in the order in which "
        "they end. Colour is the strategy, line style the correction, and the grey band random drops."
    )
    return Figure("comparison", title, caption, (Drawing(title, " ".join(alt), _size(lines), draw),))


def active_figure(comparison: Comparison) -> Figure:
    """Loss by the parameters that a token passes, a line for each model that was cut to several top-k."""
    by_model, original = dict[str, list[Entry]](), comparison.original
    for row in sorted(comparison.rows[1:], key=lambda row: -(row.active or 0)):
        if not row.is_random:
            model = f"{label(replace(row, top_k=None))}, {row.experts} experts"
            by_model.setdefault(model, []).append(Entry(model, (row,)))
    alt = [f"Loss above the original's {original.loss:.4f} by active parameters."]
    for model, entries in by_model.items():
        increases = (f"{human_count(each.first.active or 0)} {each.loss - original.loss:+.4f}" for each in entries)
        alt.append(f"{model}: {', '.join(increases)}.")
    draw = partial(
        _draw,
        comparison=comparison,
        lines=(lines := _lines(comparison, by_model, lambda row: row.active or 0)),
        axis=f"parameters that a token passes (of the original's: {human_count(original.active or 0)})",
    )
    title = f"{comparison.model}: loss with fewer active parameters"
    caption = "Loss above the original's by the parameters that a token passes."
    return Figure("active", title, caption, (Drawing(title, " ".join(alt), _size(lines), draw),))


def _lines(comparison: Comparison, named: Mapping[str, Sequence[Entry]], x: Callable[[Row], float]) -> list[Line]:
    """Lines from the original, in the order of their ends; random drops in a band from the least to the greatest."""
    original, lines = comparison.original, []
    strategies = list(dict.fromkeys(row.name for row in comparison.rows[1:] if not row.is_random))
    for number, (text, entries) in enumerate(named.items()):
        row, drops = entries[0].first, max(len(entry.rows) for entry in entries)
        line = Line(
            text,
            [x(original), *(x(entry.first) for entry in entries)],
            [0.0, *(entry.loss - original.loss for entry in entries)],
            ROLES["muted"] if row.is_random else colour(strategies.index(row.name)),
            "dashed" if row.is_random else STYLES.get(row.correction, "dashdot"),
            **mark(number),
        )
        if row.is_random:
            low, high = ([0.0, *(end(entry.losses) - original.loss for entry in entries)] for end in (min, max))
            drawn = f"{text} ({f'mean and range of {drops}' if drops > 1 else 'one drop'})"
            line = replace(line, label=drawn, low=low, high=high)
        lines.append(line)
    return sorted(lines, key=lambda line: -sort_key(line.y[-1]))


def _size(lines: Sequence[Line]) -> tuple[float, float]:
    texts = [
        part for text in ("original", *(line.label for line in lines)) for part in textwrap.wrap(text, LABEL_LENGTH)
    ]
    return AXES_WIDTH + 0.7 + LETTER_WIDTH * max(map(len, texts)), max(LEAST_HEIGHT, 0.6 + LINE_HEIGHT * len(texts))


def _draw(
    canvas: "FigureBase", comparison: Comparison, lines: Sequence[Line], axis: str, ticks: Collection[float] = ()
) -> None:
    """Losses upwards, the original's size on the left, and its loss a line across."""
    axes = canvas.add_subplot()
    zero = axes.axhline(0.0, color=ROLES["ink"], linewidth=1.0)
    ends = [(sort_key(line.y[-1]), line.label) for line in lines]
    handles = list(zip(ends, draw_lines(axes, lines), strict=True))
    handles.append(((0.0, "original"), zero))
    handles.sort(key=lambda each: -each[0][0])
    legend_beside(canvas, [handle for _, handle in handles], [text for (_, text), _ in handles])
    scale = scale_axis(axes, "y", [comparison.increase(row) for row in comparison.rows], DECADES)
    loss = f"loss above the original's {comparison.original.loss:.4f} (nats per token)"
    axes.set_ylabel(f"{loss}\n{scale}" if scale else loss)
    axes.invert_xaxis()
    axes.grid(axis="y")
    if ticks:
        axes.set_xticks(spaced([*ticks]))
        axes.set_xticks(sorted(ticks), minor=True)
    axes.set_xlabel(axis)
