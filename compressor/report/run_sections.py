"""A report's sections that tell what was done and what it took: the run, the sizes, the gate, time and memory."""

import shlex
from collections.abc import Sequence
from dataclasses import replace

from compressor.document.blocks import Block, Code, Details, Facts, Heading, Items, Listing, Table, Text, Words
from compressor.gates.document import SIGNS, advice_blocks, task_table, tested_blocks, verdict_block
from compressor.recipe.document import step_blocks, step_line
from compressor.recipe.plan import told_split
from compressor.report.data import ReportData
from compressor.report.figures import phases, size_rows
from compressor.report.layers import shown
from compressor.words import counted, human_bytes, share


def done(data: ReportData) -> list[Block]:
    """What was done, with what, and what this page cannot show."""
    measured = counted(data.measured_tokens, "token") + (f" of {data.measured_text}" if data.measured_text else "")
    rows: list[tuple[str, Words | Items]] = [
        ("Source", data.source + (f", revision {data.revision}" if data.revision else "")),
        ("Strategy", data.strategy),
        *([("Options", shown(data.options))] if data.options else []),
        ("Experts per MoE layer", f"{data.experts_before} before, {data.experts_after} after, top {data.top_k}"),
        *([("Split", told_split(data.split))] if data.split else []),
        ("MoE layers", f"{len(data.layers):,}"),
        ("Correction", shown(data.correction) if data.correction else "none"),
        *((str(step.get("name")).capitalize(), step_line(step)) for step in data.steps),
        ("Sequential", "each layer on what the compressed earlier ones put out" if data.sequential else "no"),
        *_calibration(data),
        *([("Measured for this report", measured)] if data.measured_tokens else []),
        *([("Left out of the output", shown(data.left_out))] if data.left_out else []),
        *([("Fields set to zero", shown(data.zeroed_fields))] if data.zeroed_fields else []),
        ("Versions", shown(data.versions)),
        ("Plan digest", Code(data.plan_digest)),
    ]
    told = Listing(shlex.join(data.command)) if data.command else Text("The command was not recorded.")
    missing = (Heading("What is missing here", 3), Items(data.missing))
    return [Facts(tuple(rows)), Heading("Command", 3), told, *(missing if data.missing else ())]


def _calibration(data: ReportData) -> list[tuple[str, Words | Items]]:
    if (identity := data.calibration) is None:
        return [("Calibration", "none; no text was read" + (" to choose experts" if data.steps else ""))]
    skipped, sources = ("source", "sources", "sha256", "asked"), identity.get("sources")
    sizes = {str(name).replace("_", " "): value for name, value in identity.items() if name not in skipped}
    several = isinstance(sources, Sequence) and len(sources) > 1
    return [
        ("Calibration", str(identity.get("source", "unnamed text"))),
        ("Calibration's size", shown(sizes)),
        *([("Calibration's parts", Items(tuple(map(shown, sources or ()))))] if several else []),
        *([("Calibration's digest", Code(str(identity["sha256"])))] if "sha256" in identity else []),
    ]


def steps(data: ReportData) -> list[Block]:
    """What each step on the whole model did, in order."""
    found = [block for step in data.steps for block in step_blocks(step)]
    return found or [Text("No routers were calibrated, and nothing was distilled.")]


def sizes(data: ReportData) -> list[Block]:
    """Experts, parameters and bytes, exactly."""
    rows = [(name, *said, share(b, a), f"{a:,}", f"{b:,}") for name, a, b, *said in size_rows(data)]
    rows[0] = (*rows[0][:-2], "", "")  # its number is exact already
    columns = ("", "before", "after", "left", "before, exactly", "after, exactly")
    return [Table("Sizes before and after", columns, tuple(rows))]


def gate(data: ReportData) -> list[Block]:
    """The verdict in words, its tasks, and how it came about; or how to come by one."""
    if (result := data.gate) is not None:
        verdict = replace(verdict_block(result), tone=SIGNS[result.verdict][0])
        tested = Details("How it was tested", tested_blocks(result))
        return [verdict, *advice_blocks(result), task_table(result), tested]
    name = data.title
    run = ["moe-compress", "gate", data.source, name, "-o", f"{name}.gate"]
    run += ["--revision", data.revision] if data.revision else []
    return [
        Text("The accuracy gate was not run on this model, so nothing is known of its accuracy."),
        Listing(shlex.join(run)),
        Text(f"Then make this report again with --gate {name}.gate."),
    ]


def cost(data: ReportData) -> list[Block]:
    """Seconds by phase, and the memory that the run held at its peak."""
    found = phases(data)
    total = sum(value for _, value in found)
    rows = [(str(number), name, f"{value:.2f}", share(value, total)) for number, (name, value) in enumerate(found, 1)]
    peak = f"Peak memory: {human_bytes(data.peak_memory)}." if data.peak_memory else "The peak memory was not recorded."
    if not found:
        return [Text("No times were recorded."), Text(peak)]
    rows.append(("", "all phases", f"{total:.2f}", share(total, total)))
    columns = ("number", "phase", "seconds", "share")
    return [Text(peak), Table("Seconds by phase", columns, tuple(rows), frozenset({"phase"}))]
