"""A push to the Hub as blocks: what went where."""

from typing import TYPE_CHECKING

from compressor.document.blocks import Block, Table, Text
from compressor.words import counted, human_bytes

if TYPE_CHECKING:  # what publishes is loaded only to do so
    from compressor.publishing.push import PushSummary


def push_blocks(summary: "PushSummary") -> tuple[Block, ...]:
    """The files that were sent, or would be, and where they are now."""
    lines = tuple(map(Text, _lines(summary)))
    if not summary.changed:
        return lines
    title = f"{summary.repo_id}{' (dry run: nothing is sent)' if summary.dry_run else ''}"
    rows = [(file.path, human_bytes(file.nbytes), str(file.state)) for file in summary.uploaded]
    rows += [(name, "-", "removed") for name in summary.removed]
    return Table(title, ("file", "size", "on the Hub"), tuple(rows), frozenset({"on the Hub"})), *lines


def _lines(summary: "PushSummary") -> list[str]:
    verb, also = ("would go", "would be") if summary.dry_run else ("went", "was")
    place = f"{'a pull request against ' if summary.create_pr else ''}{summary.branch} of {summary.repo_id}"
    lines = []
    if summary.changed:
        files = f"{counted(len(summary.uploaded), 'file')}, {human_bytes(summary.uploaded_bytes)}"
        lines += [f"Commit: {summary.message}", f"{files} {verb} to {place} in one commit."]
    else:
        lines.append(f"Nothing has changed: {summary.branch} of {summary.repo_id} has these files already.")
    if summary.unchanged and summary.changed:
        lines.append(f"{len(summary.unchanged)} more are there already.")
    if summary.removed:
        lines.append("Removed are parts of an earlier model that would be taken for parts of this one.")
    if summary.left_out:
        lines.append(f"Not pushed, since it is no part of the model: {', '.join(summary.left_out)}")
    if summary.tag is not None:
        lines.append(f"The commit {also} tagged {summary.tag}.")
    if summary.pull_request is not None:
        lines.append(f"Pull request: {summary.pull_request}")
    return [*lines, summary.url]
