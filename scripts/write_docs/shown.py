"""The outputs that pages show below commands, in 80 columns, as a reader would see them.

A block of text below `<!-- shown: FIRST | LAST; status N -->` holds the lines of the last commands that run, from the
one that contains FIRST to the one that contains LAST (by default to the next empty line or the end), and N is the last
command's exit status, by default 0. Pages are run one after the other, each in a folder of its own.
"""

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
COLUMNS = "80"
RUN = re.compile(r"^<!-- run -->\n```(?P<language>bash|python)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
SHOWN = re.compile(
    r"^<!-- shown: (?P<first>[^|;\n]+?)( \| (?P<last>[^;\n]+?))?(; status (?P<status>\d))? -->\n"
    r"```text\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Printed:
    """A block of a page: the text that it shows, what the commands print now, and both exit statuses."""

    start: int  # of the shown text in the page
    shown: str
    printed: str
    status: int
    ended: int


def masked(text: str) -> list[str]:
    """Return the lines without figures, drawing and spaces, which depend on them."""
    lines = (re.sub(r"[─━┌┐└┘├┤┬┴┼┏┓┗┛┡┩┯╇┳┻│┃\s]+", " ", line).strip() for line in text.splitlines())
    return [re.sub(r"[-+]?\d[\d.,]*( ?[kMG]?B\b)?", "N", line) for line in lines if line]


def excerpt(output: str, first: str, last: str | None) -> str:
    """Return the lines from the one that contains `first` to the one that contains `last`."""
    chosen = list[str]()
    for line in output.splitlines():
        if not chosen and first not in line:
            continue
        if last is None and not line.strip():
            break
        chosen.append(line.rstrip())
        if last is not None and last in line:
            break
    return "\n".join(chosen or [f"(no line with {first!r})"]) + "\n"


def run(code: str, language: str, folder: Path) -> tuple[str, int]:
    """Run a block's commands in a page's folder; returns what they print, and the last one's exit status."""
    environment = {**os.environ, "COLUMNS": COLUMNS, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    environment |= {"MOE_COMPRESSOR_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    if language == "python":
        commands = [[sys.executable, "-c", code]]
    else:
        lines = code.replace("\\\n", " ").splitlines()
        words = [shlex.split(line, comments=True) for line in lines]
        commands = [[sys.executable, "-m", "compressor", *rest[1:]] for rest in words if rest]
    printed, status = "", 0
    for command in commands:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        status = done.returncode
        printed += done.stdout.replace(f"{ROOT}/", "")
    return printed, status


def blocks(page: Path) -> Iterator[Printed]:
    """Run a page's commands, and yield the blocks that show what they print."""
    text = page.read_text(encoding="utf-8")
    found = sorted([*RUN.finditer(text), *SHOWN.finditer(text)], key=lambda match: match.start())
    last = max(match.start() for match in found if match.re is SHOWN)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "compressor").mkdir()
        (folder / "compressor" / "demo").symlink_to(ROOT / "compressor" / "demo")
        printed, status = "", 0
        for match in found:
            if match.start() > last:
                break
            if match.re is RUN:
                printed, status = run(match["code"], match["language"], folder)
                continue
            part = excerpt(printed, match["first"], match["last"])
            yield Printed(match.start("text"), match["text"], part, int(match["status"] or 0), status)


def pages() -> list[Path]:
    """Return the pages that show outputs."""
    return [page for page in PAGES if SHOWN.search(page.read_text(encoding="utf-8"))]


def page_with_outputs(page: Path, figures: bool) -> str:
    """Return a page with what its commands print now; without `figures` only where words differ."""
    text = page.read_text(encoding="utf-8")
    for block in reversed([*blocks(page)]):
        if block.status != block.ended:
            print(f"{page.name}: exit status {block.ended}, not {block.status}:\n{block.printed}")
        if figures or masked(block.shown) != masked(block.printed):
            text = text[: block.start] + block.printed + text[block.start + len(block.shown) :]
    return text
