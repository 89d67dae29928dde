"""What is printed of a recovery."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from compressor.cli.terminal import tell
from compressor.document.blocks import Block, Table, Text

if TYPE_CHECKING:  # what trains is loaded only to do so
    from compressor.api.recovering import RecoverySummary

COLUMNS = ("step", "from the original", "held-out loss", "training")


def show_recovery(summary: "RecoverySummary", as_json: bool) -> None:
    """The held-out curve, what came of it, and where the result was written."""
    content = {**asdict(summary), "curve": list(summary.curve)}
    told = recovery_blocks(summary.curve, content)
    tell(as_json, content, [*told, Text(f"Written to {summary.out}")])


def recovery_blocks(curve: Sequence[Mapping[str, Any]], result: Mapping[str, Any]) -> tuple[Block, ...]:
    """A row for each evaluation, in nats per token, and what was taken."""
    rows = tuple((str(entry["step"]), f"{entry['kl']:.4f}", f"{entry['loss']:.4f}", _parts(entry)) for entry in curve)
    what = (
        f"The state after {result['best']} steps was taken: {result['before']:.4f} to {result['after']:.4f} nats per "
        f"token from the original on held-out text, loss {result['loss_before']:.4f} to {result['loss_after']:.4f}"
        if result["changed"]
        else f"Nothing was changed, for held-out text came no nearer to the original ({result['before']:.4f} nats per "
        "token) by more than its standard error"
    )
    return Table("Held-out text", COLUMNS, rows, frozenset(COLUMNS[:3])), Text(f"{what}. It ended: {result['ended']}.")


def _parts(entry: Mapping[str, Any]) -> str:
    """The parts of the loss in training, mean of the steps before."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.4f}" for name, value in entry["training"].items()) or "-"
