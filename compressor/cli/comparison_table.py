"""A comparison as a table on the terminal."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from rich.markup import escape

from compressor.cli.tables import PIPED_WIDTH, console, print_json, print_table
from compressor.comparison.rows import Comparison, Entry, data_line, ranked
from compressor.words import human_bytes, human_count

NARROW_COLUMNS = 6  # that a narrower terminal shows


def _cells(comparison: Comparison, entry: Entry) -> dict[str, str]:
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
    cells = [_cells(comparison, entry) for entry in shown]
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
