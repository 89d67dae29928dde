"""What a comparison found: a row for each way of making the model smaller, beside the base and random drops."""

import json
import math
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from compressor.data.sources import without_folders
from compressor.document.blocks import Block, Figure, Heading, Strong, Table, Text, Words
from compressor.document.drawing import MARKERS, ROLES, colour, scale_axis, spaced
from compressor.document.markdown import markdown
from compressor.document.picture import Drawing, png
from compressor.files import whole_folder
from compressor.formatting import human_bytes, human_count, joined, readable
from compressor.records import finite, plain_json

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase
NAMES = ("comparison.json", "comparison.md", "comparison.png")
# columns, the least important first
OPTIONAL = ("peak memory", "seconds", "flips", "parameters", "perplexity", "layer error")
LEGEND = (
    "Loss and KL (of the base's next-token distribution to the model's) are in nats per token. Flips is the share "
    "of positions whose greedy token is not the base's. Layer error is the mean over layers of ‖y - y'‖² / ‖y‖², "
    "tokens weighted, on calibration text that no plan saw. Seconds are those of "
    "deciding, and correcting with the evaluation on the way, without the calibration pass. Bold: the least loss "
    "among models of its size; by source, what loses more than 3 times the mean of the other sources, beyond the error."
)
BY_SOURCE = {"Loss": "loss_by_source", "KL": "kl_by_source", "Flips": "flips_by_source"}
STYLES: Mapping[str, Any] = {"none": "solid", "ridge": (0, (1, 1)), "tune": (0, (5, 1.5))}


@dataclass(frozen=True, slots=True)
class Row:
    """One model of the comparison. Losses are in nats per evaluated token, on text that no part of a plan saw."""

    name: str  # the strategy with its options, or "base"
    strategy: str
    correction: str  # none, ridge or tune
    experts: int  # per MoE layer
    parameters: int
    bytes: int
    loss: float
    perplexity: float
    kl: float  # of the base's next-token distribution to this model's, nats per token
    flips: float  # share of the positions at which the greedy token is not the base's
    error: float | None  # mean over layers of ||y - y'||^2 / ||y||^2 on held-out calibration tokens
    seconds: float  # deciding, and correcting with the evaluation on the way; not the pass that all plans share
    peak_memory: int  # bytes of anonymous memory at the highest while it was corrected and evaluated
    loss_by_source: Mapping[str, float] = field(default_factory=dict)
    kl_by_source: Mapping[str, float] = field(default_factory=dict)
    flips_by_source: Mapping[str, float] = field(default_factory=dict)
    suffering: tuple[str, ...] = ()  # sources that lose far more than the others
    seed: int | None = None  # of a random drop
    split: int = 1  # sub-experts that each expert became before; `experts` then counts those
    top_k: int | None = None  # experts that a token is routed to, where that was chosen
    active: int | None = None  # parameters that a token passes; None where stored elements are no parameters
    undone: bool = False  # the correction took the whole model further away on held-out calibration text

    @property
    def kept(self) -> float:
        """Experts of the base's size that stay in each layer."""
        return self.experts / self.split

    @property
    def is_random(self) -> bool:
        return self.strategy == "random"


@dataclass(frozen=True, kw_only=True)
class ComparisonBasis:
    """What a comparison of models was made with and measured on."""

    model: str
    calibration: Mapping[str, Any]  # identity of the calibration data
    evaluation: Mapping[str, int]  # tokens of each evaluation set
    calibration_seconds: float  # the pass that all plans share
    seed: int
    versions: Mapping[str, str]

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON types without folders; None for a number that JSON cannot write."""
        calibration = without_folders(self.calibration) if self.calibration else {}
        content: dict[str, Any] = plain_json({**asdict(self), "calibration": calibration}, finite)
        return content

    @property
    def data_line(self) -> Text:
        """What was calibrated with and evaluated on."""
        calibration = without_folders(self.calibration) if self.calibration else {}
        sources = calibration.get("sources") or ([calibration] if calibration else [])
        read = [token_count(part["source"], part.get("tokens")) for part in sources]
        evaluated = [token_count(name, tokens) for name, tokens in self.evaluation.items()]
        return Text(
            f"Calibrated with {joined(read) or 'no data'} in {self.calibration_seconds:.1f} s, "
            f"evaluated on {joined(evaluated) or 'no data'}, seed {self.seed}."
        )

    @property
    def made_with(self) -> Text:
        """The versions of packages."""
        return Text(f"Made with {', '.join(f'{name} {version}' for name, version in self.versions.items())}.")

    def document(self) -> tuple[Block, ...]:
        """Return all of it, with a figure."""
        raise NotImplementedError

    def brief(self) -> tuple[Block, ...]:
        """Return what a terminal shows."""
        raise NotImplementedError


def token_count(source: str, tokens: int | None) -> str:
    return source if tokens is None else f"{source} ({tokens:,} tokens)"


@dataclass(frozen=True, kw_only=True)
class Comparison(ComparisonBasis):
    """All rows, the base first, with what they were measured on."""

    rows: tuple[Row, ...]
    protected: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by module; in no row merged or dropped

    @property
    def base(self) -> Row:
        return self.rows[0]

    @property
    def with_active(self) -> bool:
        """Return True if rows differ in top-k, and it is known what that comes to in parameters."""
        return any(row.top_k is not None for row in self.rows) and all(row.active is not None for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        content = super().to_dict()
        for entry, row in zip(content["rows"], self.rows, strict=True):
            entry["loss_increase"] = finite(row.loss - self.base.loss)
        return content

    def document(self) -> tuple[Block, ...]:
        layers = [f"{name}: {', '.join(map(str, experts))}" for name, experts in self.protected.items()]
        protected = Text(f"Protected experts, in no row merged or dropped: {'; '.join(layers)}.")
        return (
            Heading(f"{self.model}: comparison", level=1),
            self.data_line,
            *([protected] if layers else []),
            *_tables(self, self.rows[1:]),
            Text(LEGEND),
            comparison_figure(self),
            self.made_with,
        )

    def brief(self) -> tuple[Block, ...]:
        return *_tables(self, without_seeds(self.rows[1:])), self.data_line


def label(row: Row, name: str | None = None) -> str:
    """Return a row's name, or another one, with what else was done: 'reap, 2 parts, top 3 + ridge'."""
    return "".join(
        (
            name or row.name,
            f", {row.split} parts" if row.split > 1 else "",
            f", top {row.top_k}" if row.top_k is not None else "",
            f" + {row.correction}" if row.correction != "none" else "",
            " (undone)" if row.undone else "",
        )
    )


def sort_key(loss: float) -> float:
    """Put what is not a number last."""
    return math.inf if math.isnan(loss) else loss


def ranked(rows: Iterable[Row]) -> list[Row]:
    """Sort rows: many experts first, and the least loss first among equally many."""
    return sorted(rows, key=lambda row: (-row.kept, sort_key(row.loss)))


def without_seeds(rows: Iterable[Row]) -> list[Row]:
    """Return the rows in their order, random drops that differ in their seeds as one."""
    groups = dict[Any, list[Row]]()
    for number, row in enumerate(rows):
        key = (label(row, "random"), row.experts) if row.is_random else number
        groups.setdefault(key, []).append(row)
    return [drops[0] if len(drops) == 1 else _mean(drops) for drops in groups.values()]


def _mean(drops: Sequence[Row]) -> Row:
    """Return a row with the means of random drops, and the highest peak."""
    first, losses = drops[0], [drop.loss for drop in drops]
    figures: dict[str, Any] = {
        "name": f"random ({len(drops)} seeds), loss {min(losses):.4f}..{max(losses):.4f}",
        "peak_memory": max(drop.peak_memory for drop in drops),
        "suffering": tuple(set.intersection(*(set(drop.suffering) for drop in drops))),
    }
    for name in ("loss", "perplexity", "kl", "flips", "error", "seconds"):
        figures[name] = fmean(getattr(drop, name) or 0.0 for drop in drops)
    for name in BY_SOURCE.values():
        figures[name] = {}
        for source in getattr(first, name):
            figures[name][source] = fmean(getattr(drop, name)[source] for drop in drops)
    return replace(first, **figures)


def write_reports(comparison: ComparisonBasis, folder: Path, overwrite: bool = False) -> list[Path]:
    """Write JSON, Markdown and picture into a new folder, all of them or, when anything fails, nothing.

    With `overwrite` an earlier comparison is replaced once the new one is complete, and stays when anything fails.
    """
    document = comparison.document()
    (figure,) = (block for block in document if isinstance(block, Figure))
    with whole_folder(folder, NAMES, overwrite) as made:
        text = json.dumps(comparison.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
        (made / NAMES[0]).write_text(text + "\n", encoding="utf-8")
        (made / NAMES[1]).write_text(markdown(document, {figure.name: NAMES[2]}), encoding="utf-8")
        (made / NAMES[2]).write_bytes(png(figure.title, figure.drawings))
    return [folder / name for name in NAMES]


def _tables(comparison: Comparison, rows: Iterable[Row]) -> list[Table]:
    """Return the base, then each expert count's models, the best in bold; of several sources, their figures as well."""
    shown = [comparison.base, *ranked(rows)]
    ruled = {0} | {number for number, (one, other) in enumerate(pairwise(shown)) if one.kept != other.kept}
    lines = list[tuple[Words, ...]]()
    for number, row in enumerate(shown):
        cells = _cells(comparison, row)
        is_best = number - 1 in ruled
        lines.append(tuple(map(Strong, cells.values())) if is_best else tuple(cells.values()))
    caption = f"{comparison.model}: loss, its increase and KL in nats per token"
    tables = [Table(caption, tuple(cells), tuple(lines), frozenset(), OPTIONAL, ruled)]
    if len(comparison.evaluation) > 1:
        columns = ("model", "experts", *comparison.evaluation)
        for what, field_name in BY_SOURCE.items():
            lines = [_by_source(row, getattr(row, field_name), columns[2:]) for row in shown]
            tables.append(Table(f"{what} by evaluation source", columns, tuple(lines), ruled=ruled))
    return tables


def _by_source(row: Row, values: Mapping[str, float], sources: Iterable[str]) -> tuple[Words, ...]:
    cells: list[Words] = [label(row), str(row.experts)]
    for name in sources:
        text = f"{values[name]:.4f}" if name in values else "-"
        cells.append(Strong(text) if name in row.suffering else text)
    return tuple(cells)


def _cells(comparison: Comparison, row: Row) -> dict[str, str]:
    return {
        "model": label(row),
        "experts": str(row.experts),
        "parameters": human_count(row.parameters),
        **({"active": human_count(row.active or 0)} if comparison.with_active else {}),
        "loss": f"{row.loss:.4f}",
        "increase": "-" if row is comparison.base else f"{row.loss - comparison.base.loss:+.4f}",
        "perplexity": f"{row.perplexity:.4g}",
        "KL": f"{row.kl:.4f}",
        "flips": f"{row.flips:.4f}",
        "layer error": "-" if row.error is None else f"{row.error:.4f}",
        "seconds": f"{row.seconds:.1f}",
        "peak memory": human_bytes(row.peak_memory),
    }


def comparison_figure(comparison: Comparison) -> Figure:
    """Losses upwards over falling counts of experts, a line for each label from the base on; random drops in a band."""
    rows, base = comparison.rows, comparison.base
    lines, first = dict[str, dict[float, list[float]]](), dict[str, Row]()  # increases by label and experts kept
    for row in ranked(rows[1:]):
        name = label(row, "random") if row.is_random else label(row)
        lines.setdefault(name, {}).setdefault(row.kept, []).append(row.loss - base.loss)
        first.setdefault(name, row)
    strategies = list(dict.fromkeys(row.name for row in rows[1:] if not row.is_random))
    labels, alt = dict[str, str](), [f"Loss above the base's {base.loss:.4f} by experts kept."]
    for name, points in lines.items():
        drops = max(map(len, points.values()))
        band = f" ({f'mean and range of {drops}' if drops > 1 else 'one drop'})" if first[name].is_random else ""
        labels[name] = textwrap.fill(readable(name + band), 44)
        alt.append(f"{name}: {', '.join(f'{kept:g} {fmean(each):+.4f}' for kept, each in points.items())}.")

    def draw(canvas: "FigureBase") -> None:
        axes = canvas.add_subplot()
        handles = [(0.0, "base", axes.axhline(0.0, color=ROLES["ink"], linewidth=1.0))]
        for number, (name, points) in enumerate(lines.items()):
            row, xs = first[name], [base.kept, *points]
            shade = ROLES["muted"] if row.is_random else colour(strategies.index(row.name))
            face, edge = ("white", shade) if number // len(MARKERS) % 2 else (shade, "white")
            mean = [0.0, *(fmean(each) for each in points.values())]
            if row.is_random:
                low = [0.0, *(min(each) for each in points.values())]
                high = [0.0, *(max(each) for each in points.values())]
                axes.fill_between(xs, low, high, color=shade, alpha=0.2, linewidth=0)
            (line,) = axes.plot(
                xs,
                mean,
                color=shade,
                linewidth=1.4,
                linestyle="dashed" if row.is_random else STYLES.get(row.correction, "dashdot"),
                marker=MARKERS[number % len(MARKERS)],
                markersize=6,
                markerfacecolor=face,
                markeredgecolor=edge,
                markeredgewidth=1.0,
                markevery=slice(1, None),  # all lines start at the base, where a marker says nothing
            )
            handles.append((sort_key(mean[-1]), labels[name], line))
        _, texts, drawn = zip(*sorted(handles, key=lambda each: -each[0]), strict=True)
        canvas.legend(drawn, texts, loc="outside right upper", handlelength=3.2)
        scale = scale_axis(axes, "y", [row.loss - base.loss for row in rows], 4)
        axes.set_ylabel("\n".join(filter(None, (f"loss above the base's {base.loss:.4f} (nats per token)", scale))))
        parts = ", parts counted as parts of one" if any(row.split > 1 for row in rows) else ""
        axes.set_xlabel(f"experts kept in each MoE layer{parts} (the base has {base.experts})")
        axes.set_xticks(spaced([row.kept for row in rows]))
        axes.set_xticks(sorted({row.kept for row in rows}), minor=True)
        axes.invert_xaxis()
        axes.grid(axis="y")

    legend = "\n".join(["base", *labels.values()]).splitlines()
    size = 7.3 + 0.068 * max(map(len, legend)), max(5.0, 0.6 + 0.185 * len(legend))
    title = f"{comparison.model}: loss with fewer experts"
    caption = (
        "Loss above the base's by the experts kept in each MoE layer; the legend lists lines in the order in which "
        "they end. Colour is the strategy, line style the correction, and the grey band random drops."
    )
    return Figure("comparison", title, caption, (Drawing(title, " ".join(alt), size, draw),))
