"""What the commands print that judge models: the gate, comparisons and attributions."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.cli.rendering import outcome_blocks, outcome_dict, published
from compressor.cli.terminal import tell
from compressor.comparison.document import comparison_brief
from compressor.comparison.rows import Comparison
from compressor.document.blocks import Block, Table, Text
from compressor.gates.document import gate_brief
from compressor.gates.report import full_content
from compressor.gates.verdict import GateResult

if TYPE_CHECKING:  # what compresses, attributes or publishes is loaded only to do so
    from compressor.api.searching import Gated
    from compressor.attribution.report import Findings
    from compressor.publishing.push import PushSummary

TRIED_COLUMNS = ("experts per layer", "verdict", "accepted")


def written_line(paths: Sequence[Path]) -> tuple[Block, ...]:
    """Where files were written; nothing if none were."""
    return (Text(f"Written: {', '.join(map(str, paths))}"),) if paths else ()


def show_gate(result: GateResult, as_json: bool, written: Sequence[Path] = ()) -> None:
    """A row for each task, then the verdict and what would decide it; `written` are the reports' files."""
    tell(as_json, _content(result, written), [*gate_brief(result), *written_line(written)])


def _content(result: GateResult, written: Sequence[Path]) -> dict[str, Any]:
    return {**full_content(result), "written": [str(path) for path in written]}


def show_gated(
    found: "Gated", as_json: bool, written: Sequence[Path] = (), pushed: "PushSummary | None" = None
) -> None:
    """What a compression under a gate did, and the gate of the model in place, or of the last one if none passed."""
    result, outcome = found.decisive.result, found.outcome
    tried = [{"experts": x.experts, "accepted": x.accepted, "verdict": x.result.verdict} for x in found.attempts]
    made = None if outcome is None else outcome_dict(outcome)
    content = {**_content(result, written), "attempts": tried, "compression": made, **published(pushed)}
    rows = tuple((str(x.experts), x.result.verdict, "yes" if x.accepted else "no") for x in found.attempts)
    missing = [Text(f"{result.compressed} was not written.")]
    tell(
        as_json,
        content,
        (
            *([Table("Models tried", TRIED_COLUMNS, rows, frozenset(TRIED_COLUMNS))] if len(rows) > 1 else []),
            *gate_brief(result),
            *written_line(written),
            *(missing if outcome is None else outcome_blocks(outcome, pushed)),
        ),
    )


def show_comparison(comparison: Comparison, as_json: bool, written: Sequence[Path] = ()) -> None:
    """The original, then each expert count's models, the least loss first; random drops share a line."""
    tell(as_json, comparison.to_dict(), [*comparison_brief(comparison), *written_line(written)])


def show_attribution(found: "Findings", as_json: bool, written: Sequence[Path] = ()) -> None:
    """Hubs, the strongest senders, the kinds, and how exact it all is; `written` are the reports' files."""
    from compressor.attribution.report import brief_blocks, brief_content

    content = {**brief_content(found), "written": [str(path) for path in written]}
    tell(as_json, content, (*brief_blocks(found), *written_line(written)))
