"""A comparison as files: comparison.json, a table for GitHub in comparison.md, and a picture, comparison.png."""

import json
from pathlib import Path

from compressor.comparison.plot import plot_comparison
from compressor.comparison.rows import Comparison, Row, best_rows, data_line, sort_key
from compressor.files import whole_folder
from compressor.words import human_bytes, human_count, markdown_table, plain

NAMES = ("comparison.json", "comparison.md", "comparison.png")
LEGEND = (
    "Loss and KL (of the original's next-token distribution to the model's) are in nats per token. Layer error is the "
    "mean over layers of ‖y - y'‖² / ‖y‖², tokens weighted, on calibration text that no plan saw. Seconds are those of "
    "deciding, and correcting with the evaluation on the way, without the calibration pass. Bold: the least loss of "
    "its number of experts."
)


def _decimals(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _cells(comparison: Comparison, row: Row) -> list[tuple[str, str]]:
    """A row's columns with what stands in them; sources get columns where there are several, or one was planned for."""
    original = row is comparison.original
    name = f"random, seed {row.seed}" if row.is_random and row.seed is not None else row.name
    planned = any(each.source is not None for each in comparison.rows)
    sources = comparison.evaluation if len(comparison.evaluation) > 1 else ()
    return [
        ("model", plain(name)),
        ("correction", "-" if original else row.correction),
        *([("planned for", "-" if row.source is None else plain(row.source))] if planned else []),
        ("experts", str(row.experts)),
        ("parameters", human_count(row.parameters)),
        ("loss", _decimals(row.loss)),
        ("increase", "-" if original else f"{comparison.increase(row):+.4f}"),
        ("perplexity", f"{row.perplexity:.4g}"),
        ("KL", _decimals(row.kl)),
        *((f"loss on {plain(source)}", _decimals(row.loss_by_source.get(source))) for source in sources),
        ("layer error", _decimals(row.error)),
        ("seconds", f"{row.seconds:.1f}"),
        ("peak memory", human_bytes(row.peak_memory)),
    ]


def markdown(comparison: Comparison) -> str:
    """A heading, what was measured on what, and one row a model; the least loss of each expert count is in bold.

    The original comes first, then models of many experts, and of equally many those of the least loss.
    """
    best, columns = best_rows(comparison), [name for name, _ in _cells(comparison, comparison.original)]
    rows = []
    first, *others = enumerate(comparison.rows)
    for number, row in [first, *sorted(others, key=lambda each: (-each[1].experts, sort_key(each[1].loss)))]:
        cells = [cell for _, cell in _cells(comparison, row)]
        rows.append([f"**{cell}**" for cell in cells] if number in best else cells)
    layers = [f"{name}: {', '.join(map(str, experts))}" for name, experts in comparison.protected.items()]
    protected = f"Protected experts, in no row merged or dropped: {'; '.join(layers)}."
    made_with = ", ".join(f"{name} {version}" for name, version in comparison.versions.items())
    lines = [
        f"# {plain(comparison.model)}: comparison", "",
        plain(data_line(comparison)), "",
        *([plain(protected), ""] if layers else []),
        *markdown_table(columns, rows, ("model", "correction", "planned for")), "",
        LEGEND, "",
        *([f"Made with {plain(made_with)}.", ""] if made_with else []),
    ]  # fmt: skip
    return "\n".join(lines)


def write_reports(comparison: Comparison, folder: Path, overwrite: bool = False) -> list[Path]:
    """Write JSON, Markdown and picture into a new folder, all of them or, when anything fails, nothing.

    With `overwrite` an earlier comparison is replaced once the new one is complete, and stays when anything fails.
    """
    with whole_folder(folder, NAMES, overwrite) as made:
        content = json.dumps(comparison.to_dict(), indent=2, ensure_ascii=False, allow_nan=False)
        (made / NAMES[0]).write_text(content + "\n", encoding="utf-8")
        (made / NAMES[1]).write_text(markdown(comparison), encoding="utf-8")
        plot_comparison(comparison, made / NAMES[2])
    return [folder / name for name in NAMES]
