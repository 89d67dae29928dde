"""A report as one HTML page, whose text alternatives and tables say in numbers what its figures show.

The page and a folder of its figures as PNG each appear complete or not at all.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from compressor.document import html
from compressor.document.blocks import Block, Facts, Figure, Heading, Note, Toned, Words
from compressor.drawing.picture import png
from compressor.errors import CompressionError
from compressor.files import check_folder, replacing, whole_folder
from compressor.gates.document import SIGNS
from compressor.locking import alone
from compressor.recipe.document import changed
from compressor.replaceable import is_page
from compressor.report import run_sections, sections
from compressor.report.data import ReportData
from compressor.report.figures import NAMES, figures
from compressor.report.layers import mean
from compressor.words import counted, human_bytes, human_count, joined, share, short

FIGURES = tuple(f"{name}.png" for name in NAMES)
WAYS = {"routers": "router calibration", "distill": "distillation"}  # steps in words
MADE_BY = "Made by moe-compress report from"  # by which a page is known again
SECTIONS: Sequence[tuple[str, str, str | None, Callable[[ReportData], list[Block]]]] = (
    # anchor, heading, figure, and what it says beside it
    ("done", "What was done", None, run_sections.done),
    ("sizes", "Sizes", "sizes", run_sections.sizes),
    ("experts", "Experts", "experts", sections.experts),
    ("similarity", "Similarity and groups", "similarity", sections.similarity),
    ("visits", "Visits before and after", "visits", sections.visits),
    ("errors", "Reconstruction error", "errors", sections.errors),
    ("steps", "Router calibration and distillation", "distillation", run_sections.steps),
    ("hubs", "Hubs and protected experts", None, sections.hubs),
    ("gate", "Accuracy gate", "gate", run_sections.gate),
    ("cost", "Time and memory", "times", run_sections.cost),
)


def page(data: ReportData, drawn: Sequence[Figure]) -> str:
    """The whole page; `drawn` are the figures of `figures`, or some of them."""
    by_name = {figure.name: figure for figure in drawn}
    blocks: list[Block] = []
    for anchor, heading, name, body in SECTIONS:
        blocks += [Heading(heading, 2, anchor), *([by_name[name]] if name in by_name else []), *body(data)]
    later = [WAYS.get(name, name) for step in data.steps if changed(step) and (name := str(step.get("name")))]
    ways = dict.fromkeys([data.strategy, *(["reconstruction"] if data.correction else []), *later])
    said = (
        f"{data.source} with {data.experts_after} instead of {counted(data.experts_before, 'expert')} in each MoE "
        f"layer, by {joined([*ways])}."
    )
    made_by = f"{MADE_BY} {data.title}; plan {data.plan_digest[:12]}."
    return html.page(data.title, "Compression report", said, Facts(_tiles(data)), blocks, made_by)


def _tiles(data: ReportData) -> tuple[tuple[str, Words], ...]:
    """The figures that one looks for first."""
    (a, b), (c, d) = data.parameters, data.nbytes
    errors = [layer.error for layer in data.layers if layer.error is not None]
    tiles: list[tuple[str, Words, str]] = [
        ("Experts per layer", f"{data.experts_before} → {data.experts_after}", f"top {data.top_k}"),
        ("Parameters", human_count(b), f"{share(b, a)} of {human_count(a)}"),
        ("Size on disk", human_bytes(d), f"{share(d, c)} of {human_bytes(c)}"),
        ("Layer error", short(mean(errors)), "mean over layers" if errors else "not measured"),
        (
            "Accuracy gate",
            Toned(data.gate.verdict, *SIGNS[data.gate.verdict]) if data.gate else "not run",
            _gate_note(data),
        ),
    ]
    return tuple((name, (value, " ", Note(note))) for name, value, note in tiles)


def _gate_note(data: ReportData) -> str:
    """On how much the verdict stands; a routed model is not the checkpoint as stock loaders run it."""
    if data.gate is None:
        return "see below"
    routed = f", routed by {data.gate.routing.method}" if data.gate.routing is not None else ""
    return counted(len(data.gate.tasks), "task") + routed


def check_report(page_file: Path, folder: Path | None, overwrite: bool) -> None:
    """Refuse places that cannot be written, or exist and are not to be replaced; `folder` is for the figures."""
    parent = Path(os.path.abspath(page_file)).parent
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise CompressionError(f"{parent} is not a folder that can be written to; name another place for the report")
    if page_file.is_dir():
        raise CompressionError(f"{page_file} is a folder; name a file, such as report.html")
    if page_file.exists() and not overwrite:
        raise CompressionError(f"{page_file} exists already; name another file or pass --overwrite")
    if page_file.exists() and not is_page(page_file, MADE_BY):
        raise CompressionError(
            f"{page_file} is not a report's page, so --overwrite will not replace it; name another file"
        )
    if folder is not None:
        check_folder(folder, FIGURES, overwrite)


def write_report(data: ReportData, page_file: Path, folder: Path | None = None, overwrite: bool = False) -> list[Path]:
    """Write the page and, into a new folder, its figures; returns the figures' files."""
    drawn = figures(data)
    text = page(data, drawn)
    check_report(page_file, folder, overwrite)  # measuring takes a while
    written = []
    if folder is not None:
        with whole_folder(folder, FIGURES, overwrite) as made:
            for figure in drawn:
                (made / f"{figure.name}.png").write_bytes(png(figure.title, figure.drawings))
                written.append(folder / f"{figure.name}.png")
    with alone(page_file) as work, replacing(page_file, work / page_file.name) as fresh:
        fresh.write_text(text, "utf-8", "backslashreplace")
    return written
