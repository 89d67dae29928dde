"""What `push` prints."""

from dataclasses import asdict
from typing import Any

from rich.markup import escape

from compressor.cli.tables import console, print_json, print_table
from compressor.publishing.push import PushSummary
from compressor.words import human_bytes


def push_dict(summary: PushSummary) -> dict[str, Any]:
    """What --json prints."""
    return {**asdict(summary), "changed": summary.changed}


def show_push(summary: PushSummary, as_json: bool) -> None:
    """The files that were sent, or would be, and where they are now."""
    if as_json:
        print_json(push_dict(summary))
        return
    title = f"{summary.repo_id}{' (dry run: nothing is sent)' if summary.dry_run else ''}"
    if summary.changed:
        rows = [[escape(file.path), human_bytes(file.nbytes), str(file.state)] for file in summary.uploaded]
        rows += [[escape(name), "-", "removed"] for name in summary.removed]
        print_table(escape(title), ("file", "size", "on the Hub"), rows)
    for line in _lines(summary):
        console().print(line, highlight=False, markup=False, soft_wrap=True)


def _lines(summary: PushSummary) -> list[str]:
    verb, also = ("would go", "would be") if summary.dry_run else ("went", "was")
    place = f"{'a pull request against ' if summary.create_pr else ''}{summary.branch} of {summary.repo_id}"
    lines = []
    if summary.changed:
        lines.append(f"Commit: {summary.message}")
        count = len(summary.uploaded)
        files = f"{count} file{'s' if count != 1 else ''}, {human_bytes(summary.uploaded_bytes)}"
        lines.append(f"{files} {verb} to {place} in one commit.")
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
