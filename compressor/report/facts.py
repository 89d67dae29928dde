"""A report's sections that tell what was done and what it took: the run, the sizes, the gate, time and memory."""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from compressor.gates.content import COLUMNS, TEXTS, advice, cells, method, verdict_line
from compressor.report.bars import left, phases, size_rows
from compressor.report.data import ReportData
from compressor.report.dots import MARKS
from compressor.report.html import Html, bullets, command, facts, folded, joined, paragraph, table, tag
from compressor.words import counted, human_bytes


def shown(value: object) -> str:
    """A setting in words: a mapping as 'name value, name value'."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_inner(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, list | tuple):
        return ", ".join(map(_inner, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _inner(value: object) -> str:
    return f"({shown(value)})" if isinstance(value, Mapping) else shown(value)


def done(data: ReportData) -> Html:
    """What was done, with what, and what this page cannot show."""
    measured = counted(data.measured_tokens, "token") + (f" of {data.measured_text}" if data.measured_text else "")
    rows: list[tuple[str, object]] = [
        ("Source", data.source + (f", revision {data.revision}" if data.revision else "")),
        ("Strategy", data.strategy),
        *([("Options", shown(data.options))] if data.options else []),
        ("Experts per MoE layer", f"{data.experts_before} before, {data.experts_after} after, top {data.top_k}"),
        ("MoE layers", f"{len(data.layers):,}"),
        ("Correction", shown(data.correction) if data.correction else "none"),
        ("Sequential", "each layer on what the compressed earlier ones put out" if data.sequential else "no"),
        *_calibration(data.calibration),
        *([("Measured for this report", measured)] if data.measured_tokens else []),
        *([("Left out of the output", shown(data.left_out))] if data.left_out else []),
        *([("Fields set to zero", shown(data.zeroed_fields))] if data.zeroed_fields else []),
        ("Versions", shown(data.versions)),
        ("Plan digest", tag("code", data.plan_digest)),
    ]
    told = command(shlex.join(data.command)) if data.command else paragraph("The command was not recorded.")
    missing = [tag("aside", tag("h3", "What is missing here"), bullets(data.missing))] if data.missing else []
    return joined([facts(rows), tag("h3", "Command"), told, *missing])


def _calibration(identity: Mapping[str, Any] | None) -> list[tuple[str, object]]:
    if identity is None:
        return [("Calibration", "none; no text was read")]
    skipped, sources = ("source", "sources", "sha256", "asked"), identity.get("sources")
    sizes = {str(name).replace("_", " "): value for name, value in identity.items() if name not in skipped}
    several = isinstance(sources, Sequence) and len(sources) > 1
    return [
        ("Calibration", identity.get("source", "unnamed text")),
        ("Calibration's size", shown(sizes)),
        *([("Calibration's parts", bullets(map(shown, sources or ())))] if several else []),
        *([("Calibration's digest", tag("code", identity["sha256"]))] if "sha256" in identity else []),
    ]


def sizes(data: ReportData) -> Html:
    """Experts, parameters and bytes, exactly."""
    experts, *others = [(name, *said, left(a, b), f"{a:,}", f"{b:,}") for name, a, b, *said in size_rows(data)]
    rows = [(*experts[:-2], "", ""), *others]  # whose number is exact already
    return table("Sizes before and after", ("", "before", "after", "left", "before, exactly", "after, exactly"), rows)


def gate(data: ReportData) -> Html:
    """The verdict in words, its tasks, and how it came about; or how to come by one."""
    if data.gate is None:
        name = data.title
        run = ["moe-compress", "gate", data.source, name, "-o", f"{name}.gate"]
        run += ["--revision", data.revision] if data.revision else []
        return joined([
            paragraph("The accuracy gate was not run on this model, so nothing is known of its accuracy."),
            command(shlex.join(run)),
            paragraph(f"Then make this report again with --gate {name}.gate."),
        ])  # fmt: skip
    result = data.gate
    rows = [{**cells(task), "verdict": verdict(task.verdict)}.values() for task in result.tasks]
    tested = {
        "Tasks": {task.task: f"version {task.version}" for task in result.tasks},
        "Options": result.options, "Versions": result.versions, "Seconds": result.seconds,
    }  # fmt: skip
    return joined([
        tag("p", sign(result.verdict), " ", verdict_line(result), class_=f"verdict {result.verdict}"),
        *([tag("h3", "What would decide it"), bullets(advice(result))] if advice(result) else []),
        table(f"The gate's tasks, {result.base} and {result.compressed}", COLUMNS, rows, frozenset(TEXTS)),
        folded("How it was tested", paragraph(method(result)), facts((name, shown(of)) for name, of in tested.items())),
    ])  # fmt: skip


def sign(name: str) -> Html:
    """A verdict's sign, which its word repeats."""
    return tag("span", MARKS[name][2], aria_hidden="true", class_=f"sign {name}")


def verdict(name: str) -> Html:
    """A verdict as sign and word."""
    return tag("span", sign(name), " ", name, class_=f"verdict {name}")


def cost(data: ReportData) -> Html:
    """Seconds by phase, and the memory that the run held at its peak."""
    found = phases(data)
    total = sum(value for _, value in found)
    rows = [(str(number), name, f"{value:.2f}", left(total, value)) for number, (name, value) in enumerate(found, 1)]
    peak = f"Peak memory: {human_bytes(data.peak_memory)}." if data.peak_memory else "The peak memory was not recorded."
    if not found:
        return joined([paragraph("No times were recorded."), paragraph(peak)])
    rows.append(("", "all phases", f"{total:.2f}", left(total, total)))
    columns = ("number", "phase", "seconds", "share")
    return joined([paragraph(peak), table("Seconds by phase", columns, rows, frozenset({"phase"}))])
