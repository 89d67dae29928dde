"""The gate's result as a table on the terminal."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.markup import escape

from compressor.cli.tables import PIPED_WIDTH, console, print_json, print_table
from compressor.gates.markdown import COLUMNS, advice, cells, verdict_line
from compressor.gates.report import full_content
from compressor.gates.verdict import GateResult

if TYPE_CHECKING:
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


def show_gate(result: GateResult, as_json: bool, written: Sequence[Path] = ()) -> None:
    """A row for each task, then the verdict and what would decide it; `written` are the reports' files."""
    if as_json:
        print_json({**full_content(result), "written": [str(path) for path in written]})
        return
    _show_tasks(result)
    _show_lines([f"Written: {', '.join(map(str, written))}"] if written else [])


def show_gated(
    found: "Gated", as_json: bool, written: Sequence[Path] = (), pushed: "PushSummary | None" = None
) -> None:
    """What a compression under a gate did, and the gate of the model in place, or of the last one if none passed."""
    from compressor.cli.rendering import published, show_summary, summary_dict

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
    _show_lines([f"Written: {', '.join(map(str, written))}"] if written else [])
    if found.summary is None:
        _show_lines([f"{result.compressed} was not written."])
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
    _show_lines(lines)


def _show_lines(lines: Sequence[str]) -> None:
    for line in lines:
        console().print(line, highlight=False, markup=False, soft_wrap=True)
