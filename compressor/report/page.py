"""A report as one HTML page that needs nothing beside it: no network, no script, no font of its own.

Its text alternatives and tables say in numbers what its figures show, and it follows the reader's light or dark mode.
The page and a folder of its figures as PNG each appear complete or not at all.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from compressor.errors import CompressionError
from compressor.files import check_folder, whole_folder, write_whole
from compressor.report import facts as report_facts
from compressor.report import sections as report_sections
from compressor.report.bars import left
from compressor.report.data import ReportData
from compressor.report.drawing import Picture, png, stylesheet
from compressor.report.figures import ERRORS, GATE, NAMES, SIMILARITY, SIZES, TIMES, VISITS, pictures
from compressor.report.html import Html, figure, joined, tag
from compressor.report.layers import mean, short
from compressor.words import counted, human_bytes, human_count

FIGURES = tuple(f"{name}.png" for name in NAMES)
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
Body = Callable[[ReportData], Html]
SECTIONS: Sequence[tuple[str, str, str | None, Body]] = (  # id, heading, figure, and what it says beside it
    ("done", "What was done", None, report_facts.done),
    ("sizes", "Sizes", SIZES, report_facts.sizes),
    ("similarity", "Similarity and groups", SIMILARITY, report_sections.similarity),
    ("visits", "Visits before and after", VISITS, report_sections.visits),
    ("errors", "Reconstruction error", ERRORS, report_sections.errors),
    ("hubs", "Hubs and protected experts", None, report_sections.hubs),
    ("gate", "Accuracy gate", GATE, report_facts.gate),
    ("cost", "Time and memory", TIMES, report_facts.cost),
)


def page(data: ReportData, figures: Sequence[Picture]) -> str:
    """The whole page; `figures` are those of `pictures`, or some of them."""
    by_name = {picture.name: picture for picture in figures}
    links = [tag("li", tag("a", heading, href=f"#{name}")) for name, heading, *_ in SECTIONS]
    body = [
        tag("a", "Skip to the report", href="#report", class_="skip"),
        _head(data),
        tag("nav", tag("ol", joined(links)), aria_label="Sections"),
        tag("main", joined(_section(data, by_name, *section) for section in SECTIONS), id="report", tabindex="-1"),
        tag("footer", tag("p", f"Made by moe-compress report from {data.title}; plan {data.plan_digest[:12]}.")),
    ]
    return f"<!DOCTYPE html>\n{tag('html', _meta(data), tag('body', joined(body)), lang='en')}\n"


def _meta(data: ReportData) -> Html:
    return tag(
        "head",
        Html('\n<meta charset="utf-8">\n'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">\n'),
        Html('<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'),
        tag("title", f"{data.title}: compression report"),
        Html(f"\n<style>\n{stylesheet()}</style>\n"),
    )


def _head(data: ReportData) -> Html:
    """The title, what happened in a sentence, and the figures that one looks for first."""
    said = (
        f"{data.source} with {data.experts_after} instead of {counted(data.experts_before, 'expert')} in each MoE "
        f"layer, by {data.strategy}{' and a correction' if data.correction else ''}."
    )
    tiles = [
        tag("div", tag("dt", name), tag("dd", value), tag("dd", note, class_="said"))
        for name, value, note in _tiles(data)
    ]
    return tag(
        "header", tag("p", "Compression report", class_="kind"), tag("h1", data.title), tag("p", said, class_="lead"),
        tag("dl", joined(tiles), class_="tiles"),
    )  # fmt: skip


def _tiles(data: ReportData) -> list[tuple[str, object, str]]:
    (a, b), (c, d) = data.parameters, data.nbytes
    errors = [layer.error for layer in data.layers if layer.error is not None]
    verdict = report_facts.verdict(data.gate.verdict) if data.gate else "not run"
    return [
        ("Experts per layer", f"{data.experts_before} → {data.experts_after}", f"top {data.top_k}"),
        ("Parameters", human_count(b), f"{left(a, b)} of {human_count(a)}"),
        ("Size on disk", human_bytes(d), f"{left(c, d)} of {human_bytes(c)}"),
        ("Layer error", short(mean(errors)), "mean over layers" if errors else "not measured"),
        ("Accuracy gate", verdict, counted(len(data.gate.tasks), "task") if data.gate else "see below"),
    ]


def _section(
    data: ReportData, figures: dict[str, Picture], name: str, heading: str, drawn: str | None, body: Body
) -> Html:
    picture = figures.get(drawn) if drawn else None
    contents = [tag("h2", heading, id=f"{name}-heading")]
    contents += [figure(picture)] if picture else []
    contents += [tag("div", body(data), class_="told")]
    shape = (
        "plain" if picture is None else "wide" if len(picture.parts) > 1 else "around" if drawn == GATE else "beside"
    )
    return tag("section", joined(contents), id=name, class_=shape, aria_labelledby=f"{name}-heading")


def check_report(page_file: Path, figures: Path | None, overwrite: bool) -> None:
    """Refuse places that cannot be written, or exist and are not to be replaced."""
    parent = Path(os.path.abspath(page_file)).parent
    if not (parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)):
        raise CompressionError(f"{parent} is not a folder that can be written to; name another place for the report")
    if page_file.is_dir():
        raise CompressionError(f"{page_file} is a folder; name a file, such as report.html")
    if page_file.exists() and not overwrite:
        raise CompressionError(f"{page_file} exists already; name another file or pass --overwrite")
    if figures is not None:
        check_folder(figures, FIGURES, overwrite)


def write_report(data: ReportData, page_file: Path, figures: Path | None = None, overwrite: bool = False) -> list[Path]:
    """Write the page and, into a new folder, its figures; returns the figures' files."""
    drawn = pictures(data)
    text = page(data, drawn)
    check_report(page_file, figures, overwrite)  # measuring takes a while
    written = []
    if figures is not None:
        with whole_folder(figures, FIGURES, overwrite) as made:
            for picture in drawn:
                (made / f"{picture.name}.png").write_bytes(png(picture))
                written.append(figures / f"{picture.name}.png")
    write_whole(Path(os.path.abspath(page_file)), text, 0o644, "backslashreplace")
    return written
