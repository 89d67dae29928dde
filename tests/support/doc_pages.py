"""The pages of the documentation as the tests read them: files, code blocks, and the commands in them; test support."""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer

from compressor.cli import main as cli
from compressor.cli.settings import paths_spelled_out
from scripts.write_docs import reference

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/ci/README.md")),
    *sorted(DOCS.rglob("*.md")),
]
GENERATED: Mapping[Path, Callable[[], str]] = {DOCS / reference.COMMANDS: reference.commands_page}
PROGRAM = "moe-compress"
RUN = "<!-- run -->"  # the line above a block whose commands run on the demo model


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    """Return the Markdown of a page, generated or in the tree."""
    return GENERATED[page]() if page in GENERATED else page.read_text(encoding="utf-8")


@dataclass(frozen=True)
class Block:
    """A fenced block of code."""

    language: str
    text: str
    runs: bool

    @property
    def commands(self) -> list[list[str]]:
        """Its lines as arguments, without comments; a backslash joins a line to the next."""
        lines = self.text.replace("\\\n", " ").splitlines()
        return [words for line in lines if (words := shlex.split(line, comments=True))]


def blocks(page: Path) -> list[Block]:
    found = re.findall(
        rf"^({re.escape(RUN)}\n)?```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    return [Block(language, text, bool(mark)) for mark, language, text in found]


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


@cache
def group() -> Any:
    found: Any = typer.main.get_command(cli.app)
    return found


def parse(arguments: list[str]) -> dict[str, Any]:
    """What the command line makes of its arguments, without running anything; a fault raises."""
    whole = group()
    context = whole.context_class(whole, info_name=PROGRAM)
    name, command, rest = whole.resolve_command(context, paths_spelled_out(arguments))
    if hasattr(command, "commands"):
        context = command.context_class(command, info_name=name, parent=context)
        name, command, rest = command.resolve_command(context, rest)
    values: dict[str, Any] = command.make_context(name, rest, parent=context).params
    return values


@cache
def options(command: str | None = None) -> set[str]:
    """The options of a command, or of all of them; of a group's name, those of its commands."""
    commands = group().commands
    named = commands.values() if command is None else [commands[command]]
    chosen = [each for one in named for each in getattr(one, "commands", {"": one}).values()]
    known = [entry for each in chosen for entry in each.params]
    return {option for entry in known for option in (*entry.opts, *entry.secondary_opts)} | {"--help", "--version"}


def links(page: Path) -> Iterator[tuple[Path, str]]:
    """The files and anchors that a page's relative links name."""
    text = re.sub(r"`[^`\n]*`", "", prose(page))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+:", target):
            path, _, anchor = target.partition("#")
            yield (page.parent / path).resolve() if path else page, anchor
