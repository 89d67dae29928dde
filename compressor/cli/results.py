"""What the commands print that judge models: the gate, comparisons and attributions."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from rich.markup import escape

from compressor.attribution.figures import Attribution
from compressor.attribution.hubs import Hub, SuperExpert
from compressor.attribution.report import (
    HUB_COLUMNS,
    KIND_COLUMNS,
    SENDER_COLUMNS,
    exactness,
    hub_cells,
    kind_rows,
    overlap_line,
    sender_rows,
)
from compressor.attribution.summary import brief_content
from compressor.cli.rendering import published, show_summary, summary_dict
from compressor.cli.terminal import PIPED_WIDTH, console, print_json, print_lines, print_table
from compressor.comparison.rows import Comparison, Entry, data_line, ranked
from compressor.gates.content import COLUMNS, advice, cells, verdict_line
from compressor.gates.report import full_content
from compressor.gates.verdict import GateResult
from compressor.words import human_bytes, human_count

if TYPE_CHECKING:  # what compresses or publishes is loaded only to do so
    from compressor.api.searching import Gated
    from compressor.publishing.push import PushSummary

WIDE = 150  # columns of a terminal that shows all of the table's
MIDDLE = tuple(column for column in COLUMNS if column not in ("metric", "detectable"))
NARROW = ("task", "base", "compressed", "drop", "at most", "verdict")
HEADERS = {
    "compressed": "com-\npressed",
    "at least": "at\nleast",
    "at most": "at\nmost",
    "lost / gained": "lost /\ngained",
}  # where lines are short
NARROW_COLUMNS = 6  # that a narrower terminal shows


def show_gate(result: GateResult, as_json: bool, written: Sequence[Path] = ()) -> None:
    """A row for each task, then the verdict and what would decide it; `written` are the reports' files."""
    if as_json:
        print_json({**full_content(result), "written": [str(path) for path in written]})
        return
    _show_tasks(result)
    print_lines(_written(written))


def show_gated(
    found: "Gated", as_json: bool, written: Sequence[Path] = (), pushed: "PushSummary | None" = None
) -> None:
    """What a compression under a gate did, and the gate of the model in place, or of the last one if none passed."""
    result = found.decisive.result
    if as_json:
        tried = [{"experts": x.experts, "accepted": x.accepted, "verdict": x.result.verdict} for x in found.attempts]
        summary = None if found.summary is None else summary_dict(found.summary)
        report = {**full_content(result), "written": [str(path) for path in written]}
        print_json({**report, "attempts": tried, "compression": summary, **published(pushed)})
        return
    if len(found.attempts) > 1:
        rows = [(str(x.experts), x.result.verdict, "yes" if x.accepted else "no") for x in found.attempts]
        print_table("Models tried", ("experts per layer", "verdict", "accepted"), rows)
    _show_tasks(result)
    print_lines(_written(written))
    if found.summary is None:
        print_lines([f"{result.compressed} was not written."])
    else:
        show_summary(found.summary, False, pushed)


def _show_tasks(result: GateResult) -> None:
    width = console().width
    columns = COLUMNS if width >= WIDE else MIDDLE if width >= PIPED_WIDTH else NARROW
    rows = [[escape(cells(task)[column]) for column in columns] for task in result.tasks]
    sure = f"bounds one-sided, each with confidence {100 * result.confidence:g}%"
    print_table(
        f"{escape(result.compressed)} against {escape(result.base)}: {sure}",
        [HEADERS.get(column, column) for column in columns],
        rows,
    )
    lines = [verdict_line(result), *advice(result)]
    if result.reused_base:
        lines.append("The base's results were stored by an earlier run.")
    print_lines(lines)


def _written(paths: Sequence[Path]) -> list[str]:
    return [f"Written: {', '.join(map(str, paths))}"] if paths else []


def _comparison_cells(comparison: Comparison, entry: Entry) -> dict[str, str]:
    """By column, the less important ones last; means of random drops, and the highest of their peaks."""
    rows, original = entry.rows, entry.rows[0] is comparison.original
    return {
        "model": _name(entry),
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


def _name(entry: Entry) -> str:
    drops = f" ({len(entry.rows)} seeds), loss {min(entry.losses):.4f}..{max(entry.losses):.4f}"
    return escape(entry.label + (drops if len(entry.rows) > 1 else ""))


def show_comparison(comparison: Comparison, as_json: bool) -> None:
    """The original, then each expert count's models, the least loss first; random drops share a line."""
    if as_json:
        print_json(comparison.to_dict())
        return
    shown = (Entry("original", (comparison.original,)), *ranked(comparison))
    ruled = {0} | {number for number, (one, other) in enumerate(pairwise(shown)) if one.experts != other.experts}
    cells = [_comparison_cells(comparison, entry) for entry in shown]
    narrow = console().width < PIPED_WIDTH
    columns = list(cells[0])[: NARROW_COLUMNS if narrow else None]
    title = f"{escape(comparison.model)}: loss, its increase and KL in nats per token"
    print_table(title, columns, [[row[column] for column in columns] for row in cells], ruled=ruled)
    sources = list(comparison.evaluation)
    if len(sources) > 1:
        rows = [(_name(entry), str(entry.experts), *_by_source(entry, sources)) for entry in shown]
        print_table("Loss by evaluation source", ("model", "experts", *map(escape, sources)), rows, ruled=ruled)
    console().print(data_line(comparison), highlight=False, markup=False)
    if narrow:
        print("Perplexity, parameters, seconds and peak memory: in a wider terminal, or with --json.")


def _by_source(entry: Entry, sources: Sequence[str]) -> list[str]:
    found = [[row.loss_by_source[name] for row in entry.rows if name in row.loss_by_source] for name in sources]
    return [f"{fmean(losses):.4f}" if losses else "-" for losses in found]


def show_attribution(
    attribution: Attribution,
    hubs: Sequence[Hub],
    supers: Sequence[SuperExpert],
    top: int,
    as_json: bool,
    written: Sequence[Path] = (),
) -> None:
    """Hubs, the strongest senders, the kinds, and how exact it all is; `written` are the reports' files."""
    if as_json:
        print_json({**brief_content(attribution, hubs, supers), "written": [str(path) for path in written]})
        return
    _show_hubs(attribution, hubs, supers)
    _show_senders(attribution, top)
    print_table("What shapes routing", KIND_COLUMNS, kind_rows(attribution))
    print_lines([overlap_line(hubs, supers), exactness(attribution), *_written(written)])


def _show_hubs(attribution: Attribution, hubs: Sequence[Hub], supers: Sequence[SuperExpert]) -> None:
    if not hubs:
        print("No hubs above the threshold.")
        return
    massive = {(each.module, each.expert) for each in supers}
    rows = [(*hub_cells(hub), "yes" if (hub.module, hub.expert) in massive else "no") for hub in hubs]
    print_table(f"{escape(attribution.model)}: routing hubs", (*HUB_COLUMNS, "super expert"), rows)


def _show_senders(attribution: Attribution, top: int) -> None:
    if rows := sender_rows(attribution, top, escape):
        print_table("Strongest senders", SENDER_COLUMNS, rows)
