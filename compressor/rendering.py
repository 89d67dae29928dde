"""Tables, JSON and progress bars for the terminal."""

import json
from collections.abc import Iterable, Sequence, Set
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from compressor.api import Summary
from compressor.comparison import Comparison
from compressor.comparison_series import Entry, data_line, finite_json, ranked
from compressor.inspection import Inspection
from compressor.plan import CompressionPlan

UNITS = ("B", "kB", "MB", "GB", "TB")
PIPED_WIDTH = 110  # columns of a table that no terminal limits
NARROW_COLUMNS = 6  # of the comparison that a narrower terminal shows


class Bars:
    """One progress bar for each phase, on stderr, naming the layer that was finished last."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[detail]}"),
            console=self._console,
        )
        self._task: TaskID | None = None

    def start(self, phase: str, total: int) -> None:
        """Open a bar."""
        self._task = self._bars.add_task(phase, total=total, detail="")

    def advance(self, detail: str) -> None:
        """Move the newest bar on."""
        if self._task is not None:
            self._bars.update(self._task, advance=1, detail=detail)

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not self._console.is_terminal:
            self._bars.live.transient = True  # in a log, the error stands alone
            self._bars.live.stop()
        else:
            self._bars.stop()


def human_bytes(count: float) -> str:
    """1234567 -> '1.23 MB'."""
    for unit in UNITS[:-1]:
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} {UNITS[-1]}"


def human_count(count: float) -> str:
    """1234567 -> '1.23M'."""
    for unit in ("", "k", "M", "B"):
        if count < 1000:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g}T"


def print_json(content: Any) -> None:
    """Indented JSON on stdout."""
    print(json.dumps(content, indent=2, ensure_ascii=False))


def _table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    numbers: bool = True,
    ruled: Set[int] = frozenset(),
) -> None:
    """Print a table, numbers aligned to the right; with two columns it is a list of facts, without a header.

    `ruled` are the numbers of rows with a line below them.
    """
    facts = len(columns) == 2
    table = Table(title=title, title_justify="left", show_header=not facts)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if numbers and number and not facts else "left", overflow="fold")
    for number, row in enumerate(rows):
        table.add_row(*row, end_section=number in ruled)
    _console().print(table)


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=max(console.width, PIPED_WIDTH))


def _share(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%" if whole else "-"


def show_inspection(report: Inspection, as_json: bool) -> None:
    """The report of `inspect`."""
    if as_json:
        print_json(asdict(report))
        return
    facts = [
        ("architecture", f"{report.model_class} ({report.family})"),
        ("MoE layers", f"{report.moe_layers} of {report.layers}"),
        ("experts", f"{report.experts} in each, top-{report.top_k}"),
        ("routing", report.routing),
        ("quantization", report.quantization or "none"),
        ("parameters", human_count(report.parameters)),
        ("bytes", human_bytes(report.bytes)),
        ("largest layer, loaded", human_bytes(report.largest_layer_bytes)),
        ("peak memory to compress", f"at most {human_bytes(report.peak_memory)} and the calibration activations"),
        ("bytes read, at most", human_bytes(report.bytes_read)),
        (
            "bytes written",
            f"{human_bytes(report.bytes_written)} ({report.outcomes[0].experts} experts)" if report.outcomes else "-",
        ),
    ]
    if report.left_out:
        facts.append(("not loaded by stock transformers", f"{len(report.left_out)} tensors, {report.left_out[0]} ..."))
    _table(report.model, ("", ""), facts)
    _table(
        "By part",
        ("part", "parameters", "bytes", "share"),
        [
            (part.name, human_count(part.parameters), human_bytes(part.bytes), _share(part.bytes, report.bytes))
            for part in report.parts
        ],
    )
    _table(
        "What would be left",
        ("experts", "parameters", "bytes", "share"),
        [
            (str(o.experts), human_count(o.parameters), human_bytes(o.bytes), _share(o.bytes, report.bytes))
            for o in report.outcomes
        ],
    )


def show_plan(plan: CompressionPlan, path: Path, as_json: bool) -> None:
    """One row a layer."""
    if as_json:
        print_json(plan.to_dict())
        return
    rows = []
    for layer in plan.layers:
        merged = [list(group.members) for group in layer.groups if len(group.members) > 1]
        rows.append((layer.module, str(layer.experts), str(len(layer.groups)), _short(layer.dropped), _short(merged)))
    _table(f"Plan by {plan.strategy}, written to {path}", ("layer", "experts", "kept", "dropped", "merged"), rows)


def _short(items: Sequence[Any], most: int = 12) -> str:
    text = " ".join(str(item) for item in items[:most])
    return text + (f" and {len(items) - most} more" if len(items) > most else "") or "-"


def summary_dict(summary: Summary) -> dict[str, Any]:
    """A summary as JSON types, without the plan's layers."""
    return {
        "output": summary.out,
        "strategy": summary.strategy,
        "experts": {"before": summary.experts_before, "after": summary.experts_after},
        "parameters": {"before": summary.before.parameters, "after": summary.after.parameters},
        "bytes": {"before": summary.before.bytes, "after": summary.after.bytes},
        "seconds": {name: round(value, 3) for name, value in summary.seconds.items()},
        "peak_memory_bytes": summary.peak_memory,
        "left_out": list(summary.left_out),
        "zeroed_fields": list(summary.zeroed_fields),
        "plan_digest": summary.plan.digest(),
    }


def show_summary(summary: Summary, as_json: bool) -> None:
    """What a compression did."""
    if as_json:
        print_json(summary_dict(summary))
        return
    before, after = summary.before, summary.after
    rows = [
        ("experts per layer", str(summary.experts_before), str(summary.experts_after), ""),
        (
            "parameters",
            human_count(before.parameters),
            human_count(after.parameters),
            _share(after.parameters, before.parameters),
        ),
        ("bytes", human_bytes(before.bytes), human_bytes(after.bytes), _share(after.bytes, before.bytes)),
    ]
    _table(f"Compressed by {summary.strategy}", ("", "before", "after", "left"), rows)
    console = Console()
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in summary.seconds.items())
    console.print(f"{phases}; peak memory {human_bytes(summary.peak_memory)}", highlight=False)
    if summary.left_out:
        fields = f"; set to zero in the config: {', '.join(summary.zeroed_fields)}" if summary.zeroed_fields else ""
        names = _short(summary.left_out, 4)
        console.print(f"left out, as stock transformers does not load them: {names}{fields}", highlight=False)
    print(f"Written to {summary.out}")


def show_strategies(loaded: Sequence[Any], as_json: bool) -> None:
    """Name, summary, needs and options of each strategy."""
    entries = [
        {
            "name": s.name,
            "summary": s.summary,
            "needs": sorted(s.needs),
            "options": asdict(s.options) if s.options else {},
        }
        for s in loaded
    ]
    if as_json:
        print_json(entries)
        return
    rows = [
        (e["name"], e["summary"], ", ".join(e["needs"]), ", ".join(f"{k}={v}" for k, v in e["options"].items()) or "-")
        for e in entries
    ]
    _table("Strategies", ("name", "what it does", "needs", "options"), rows, numbers=False)


def show_demo(rows: Sequence[Any], as_json: bool) -> None:
    """The demo's table: one row a model."""
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    _table(
        "The demo model before and after: loss in nats per held-out token, mean accuracy on held-out questions",
        ("model", "experts", "parameters", "bytes", "loss", "accuracy"),
        [
            (
                row.name,
                str(row.experts),
                human_count(row.parameters),
                human_bytes(row.bytes),
                f"{row.loss:.3f}",
                f"{row.mean_accuracy:.1%}",
            )
            for row in rows
        ],
    )
    skills = list(rows[0].accuracy)
    _table(
        "Accuracy by skill (chance is 25%)",
        ("model", *skills),
        [(row.name, *(f"{row.accuracy[skill]:.1%}" for skill in skills)) for row in rows],
    )


def _comparison_cells(comparison: Comparison, entry: Entry) -> dict[str, str]:
    """By column, the less important ones last; means of random drops, and the highest of their peaks."""
    rows, original = entry.rows, entry.rows[0] is comparison.original
    return {
        "model": _comparison_name(entry),
        "experts": str(entry.experts),
        "loss": f"{entry.loss:.4f}",
        "increase": "-" if original else f"{fmean(map(comparison.increase, rows)):+.4f}",
        "KL": f"{fmean(row.kl for row in rows):.4f}",
        "layer\nerror": "-" if entry.error is None else f"{entry.error:.4f}",
        "perplex-\nity": f"{fmean(row.perplexity for row in rows):.4g}",
        "param-\neters": human_count(fmean(row.parameters for row in rows)),
        "seconds": f"{fmean(row.seconds for row in rows):.1f}",
        "peak\nmemory": human_bytes(max(row.peak_memory for row in rows)),
    }


def _comparison_name(entry: Entry) -> str:
    drops = f" ({len(entry.rows)} seeds), loss {min(entry.losses):.4f}..{max(entry.losses):.4f}"
    return escape(entry.label + (drops if len(entry.rows) > 1 else ""))


def show_comparison(comparison: Comparison, as_json: bool) -> None:
    """The original, then each expert count's models, the least loss first; random drops share a line."""
    if as_json:
        print_json(finite_json(comparison.to_dict()))
        return
    shown = (Entry("original", (comparison.original,)), *ranked(comparison))
    ruled = {0} | {number for number, (one, other) in enumerate(pairwise(shown)) if one.experts != other.experts}
    cells = [_comparison_cells(comparison, entry) for entry in shown]
    narrow = _console().width < PIPED_WIDTH
    columns = list(cells[0])[: NARROW_COLUMNS if narrow else None]
    title = f"{escape(comparison.model)}: loss, its increase and KL in nats per token"
    _table(title, columns, [[row[column] for column in columns] for row in cells], ruled=ruled)
    sources = list(comparison.evaluation)
    if len(sources) > 1:
        rows = [(_comparison_name(entry), str(entry.experts), *_by_source(entry, sources)) for entry in shown]
        _table("Loss by evaluation source", ("model", "experts", *map(escape, sources)), rows, ruled=ruled)
    _console().print(data_line(comparison), highlight=False, markup=False)
    if narrow:
        print("Perplexity, parameters, seconds and peak memory: in a wider terminal, or with --json.")


def _by_source(entry: Entry, sources: Sequence[str]) -> list[str]:
    found = [[row.loss_by_source[name] for row in entry.rows if name in row.loss_by_source] for name in sources]
    return [f"{fmean(losses):.4f}" if losses else "-" for losses in found]
