"""Plain tables, numbers for people and JSON on stdout."""

import json
from collections.abc import Iterable, Sequence, Set
from typing import Any

from rich.console import Console
from rich.table import Table

UNITS = ("B", "kB", "MB", "GB", "TB")
PIPED_WIDTH = 110  # columns of a table that no terminal limits


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


def print_table(
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
    console().print(table)


def console() -> Console:
    """What prints on stdout, wide enough for a table where no terminal limits it."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=max(plain.width, PIPED_WIDTH))


def share(part: float, whole: float) -> str:
    """1, 8 -> '12.5%'."""
    return f"{100 * part / whole:.1f}%" if whole else "-"
