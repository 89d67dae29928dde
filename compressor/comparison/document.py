"""A comparison as blocks: a row for each model in its document, random drops in one row in a terminal."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from compressor.comparison.picture import active_figure, comparison_figure
from compressor.comparison.rows import Comparison, Entry, best_rows, data_line, ranked, with_active
from compressor.document.blocks import Block, Heading, Strong, Table, Text, Words
from compressor.words import human_bytes, human_count

TEXTS = frozenset({"correction", "planned for"})
# columns, the least important first
OPTIONAL = ("peak memory", "seconds", "flips", "parameters", "perplexity", "layer error")
LEGEND = (
    "Loss and KL (of the original's next-token distribution to the model's) are in nats per token. Flips is the share "
    "of positions whose greedy token is not the original's. Layer error is the mean over layers of ‖y - y'‖² / ‖y‖², "
    "tokens weighted, on calibration text that no plan saw. Seconds are those of "
    "deciding, and correcting with the evaluation on the way, without the calibration pass. Bold: the least loss "
    "among models of its size."
)


def comparison_blocks(comparison: Comparison) -> tuple[Block, ...]:
    """The whole document: what was measured on what, a row for each model, the least loss of each count in bold."""
    layers = [f"{name}: {', '.join(map(str, experts))}" for name, experts in comparison.protected.items()]
    made_with = ", ".join(f"{name} {version}" for name, version in comparison.versions.items())
    best = [comparison.rows[number] for number in best_rows(comparison)]
    rows: list[tuple[Words, ...]] = []
    for entry in _shown(comparison, apart=True):
        cells = _cells(comparison, entry, apart=True)
        is_best = any(entry.rows[0] is each for each in best)
        rows.append(tuple(map(Strong, cells.values()) if is_best else cells.values()))
    return (
        Heading(f"{comparison.model}: comparison", level=1),
        Text(data_line(comparison)),
        *([Text(f"Protected experts, in no row merged or dropped: {'; '.join(layers)}.")] if layers else []),
        Table("", tuple(cells), tuple(rows), TEXTS),
        Text(LEGEND),
        comparison_figure(comparison),
        *([active_figure(comparison)] if with_active(comparison) else []),
        *([Text(f"Made with {made_with}.")] if made_with else []),
    )


def comparison_brief(comparison: Comparison) -> tuple[Block, ...]:
    """What a terminal shows: the original, then each expert count's models; means of random drops."""
    entries, sources = _shown(comparison), tuple(comparison.evaluation)
    ruled = {0} | {number for number, (one, other) in enumerate(pairwise(entries)) if one.kept != other.kept}
    cells = [_cells(comparison, entry) for entry in entries]
    caption = f"{comparison.model}: loss, its increase and KL in nats per token"
    tables = [
        Table(caption, tuple(cells[0]), tuple(tuple(row.values()) for row in cells), frozenset(), OPTIONAL, ruled)
    ]
    if len(sources) > 1:
        losses = tuple((_name(entry), str(entry.experts), *_by_source(entry, sources)) for entry in entries)
        tables.append(Table("Loss by evaluation source", ("model", "experts", *sources), losses, ruled=ruled))
    return *tables, Text(data_line(comparison))


def _shown(comparison: Comparison, apart: bool = False) -> tuple[Entry, ...]:
    return (Entry("original", (comparison.original,)), *ranked(comparison, apart))


def _cells(comparison: Comparison, entry: Entry, apart: bool = False) -> dict[str, str]:
    """A row by column: means of random drops, and the highest of their peaks.

    `apart` has columns for what a label joins otherwise, and for evaluation sources if there are several.
    """
    rows, first = entry.rows, entry.rows[0]
    is_original, sources = first is comparison.original, tuple(comparison.evaluation)
    named = {"model": _name(entry)}
    if apart:
        seeded = first.is_random and first.seed is not None
        named = {"model": f"random, seed {first.seed}" if seeded else first.name}
        named["correction"] = "-" if is_original else first.correction + " (undone)" * first.undone
        if any(each.split > 1 for each in comparison.rows):
            named["parts"] = str(first.split)
        if any(each.top_k is not None for each in comparison.rows):
            named["top-k"] = "as before" if first.top_k is None else str(first.top_k)
        if any(each.source is not None for each in comparison.rows):
            named["planned for"] = first.source or "-"
    by_source = {f"loss on {name}": loss for name, loss in zip(sources, _by_source(entry, sources), strict=True)}
    return {
        **named,
        "experts": str(entry.experts),
        "parameters": human_count(fmean(row.parameters for row in rows)),
        **({"active": human_count(fmean(row.active or 0 for row in rows))} if with_active(comparison) else {}),
        "loss": f"{entry.loss:.4f}",
        "increase": "-" if is_original else f"{fmean(map(comparison.increase, rows)):+.4f}",
        "perplexity": f"{fmean(row.perplexity for row in rows):.4g}",
        "KL": f"{fmean(row.kl for row in rows):.4f}",
        "flips": f"{fmean(row.flips for row in rows):.4f}",
        **(by_source if apart and len(sources) > 1 else {}),
        "layer error": "-" if entry.error is None else f"{entry.error:.4f}",
        "seconds": f"{fmean(row.seconds for row in rows):.1f}",
        "peak memory": human_bytes(max(row.peak_memory for row in rows)),
    }


def _name(entry: Entry) -> str:
    drops = f" ({len(entry.rows)} seeds), loss {min(entry.losses):.4f}..{max(entry.losses):.4f}"
    return entry.label + (drops if len(entry.rows) > 1 else "")


def _by_source(entry: Entry, sources: Sequence[str]) -> list[str]:
    found = [[row.loss_by_source[name] for row in entry.rows if name in row.loss_by_source] for name in sources]
    return [f"{fmean(losses):.4f}" if losses else "-" for losses in found]
