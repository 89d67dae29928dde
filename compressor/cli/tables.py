"""Plain tables, numbers for people and JSON on stdout."""

import json
from collections.abc import Iterable, Sequence, Set
from typing import Any

from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 110  # columns of a table that no terminal limits






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


