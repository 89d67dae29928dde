"""The commands `inspect`, `plan`, `compress` and `apply` on a GGUF file, as an entry point
announces them."""

import shlex
from collections.abc import Collection, Mapping
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import compressor
from compressor.cli.options import Running
from compressor.cli.terminal import print_report, progress_bars
from compressor.distributed import refuse_several
from compressor.document.blocks import Block, Facts, Heading, Text
from compressor.errors import CompressionError
from compressor.extras import require
from compressor.formatting import counted, human_bytes, human_count, ranges
from compressor.gguf_files.header import SUFFIX, has_magic
from compressor.records import Json
from compressor.report.inspection import inspected_sizes

if TYPE_CHECKING:  # loaded only where there is a GGUF file
    import torch

    from compressor.gguf_files.blocks import GgufInspection
    from compressor.gguf_files.writing import GgufSummary
    from compressor.recipe.steps_plan import Plan

# options of `prune` that cutting a file has, too
CHOOSING = ("experts", "ratio", "strategy", "protect")
ACCEPTED = {*CHOOSING, "imatrix", "plan_file", "model", "output", "json", "overwrite"}


def recognises(model: str) -> bool:
    """Return True for a GGUF file, by its ending or by how it begins."""
    return model.lower().endswith(SUFFIX) or has_magic(Path(model))


def check_options(flags: Mapping[str, str], given: Collection[str]) -> None:
    """Refuse, by name, an option that needs numbers to compute with; `flags` are all options by
    parameter."""
    require("gguf")
    refuse_several("a GGUF file")
    other = sorted(flags[name] for name in given if name not in ACCEPTED)
    if other:
        raise CompressionError(
            f"{other[0]} does not go with a GGUF file, which is only cut; leave it out, or "
            "compress the checkpoint and convert the result"
        )


def inspect(model: str, experts: int | None, as_json: bool) -> None:
    """Print the parts and sizes of a file."""
    report: GgufInspection = compressor.inspect_gguf(model, experts)
    facts = {
        "architecture": f"{report.architecture}{f' ({report.name})' if report.name else ''}",
        "files": str(report.files),
        "MoE layers": f"{report.moe_layers} of {report.layers}",
        "experts": f"{report.experts} in each, top-{report.top_k}",
        "routing": report.routing,
        "shared experts": str(report.shared_experts or "none"),
        **report.quantization,
        "parameters": human_count(report.parameters),
        "bytes": human_bytes(report.bytes),
    }
    if report.heads:
        facts["predicts further tokens"] = f"blk.{ranges(report.heads)}"
    if report.pruned_before:
        facts["pruned before"] = "yes, by a plan in its metadata"
    blocks: list[Block] = [Heading(report.model), Facts(facts.items())]
    print_report(as_json, asdict(report), [*blocks, *inspected_sizes(report)])


def routed_counts(path: Path) -> Mapping[int, "torch.Tensor"]:
    """Return the tokens that were routed to each expert [E] by decoder layer, of an imatrix."""
    from compressor.gguf_files.choosing import routed_counts

    return routed_counts(path)


def plan(model: str, flags: Json, imatrix: Path | None) -> "Plan":
    """Return a plan for a file."""
    made: Plan = compressor.plan_gguf(model, **_choices(flags, imatrix))
    return made


def compress(model: str, output: Path, flags: Json, imatrix: Path | None, running: Running) -> None:
    """Write a file with fewer experts."""
    with progress_bars(running.as_json) as progress:
        summary = compressor.compress_gguf(
            model,
            output,
            **_choices(flags, imatrix),
            overwrite=running.overwrite,
            progress=progress,
        )
    _show_summary(summary, running.as_json)


def apply(plan_file: Path, model: str, output: Path, running: Running) -> None:
    """Write a file with the experts that a plan keeps."""
    with progress_bars(running.as_json) as progress:
        summary = compressor.apply_gguf(
            plan_file, model, output, overwrite=running.overwrite, progress=progress
        )
    _show_summary(summary, running.as_json)


def _choices(flags: Json, imatrix: Path | None) -> Json:
    chosen = {name: flags.get(f"prune.{name}") for name in CHOOSING}
    return {**chosen, "strategy": chosen["strategy"] or "auto", "imatrix": imatrix}


def _show_summary(summary: "GgufSummary", as_json: bool) -> None:
    """Sizes before and after, what could not be checked, and where the files are."""
    from compressor.pipeline.outcome import size_rows, size_table
    from compressor.report.terminal import next_blocks
    from compressor.steps.section import sections

    before, after = summary.before, summary.after
    content = {
        "output": list(summary.out),
        "architecture": summary.architecture,
        "strategy": summary.strategy,
        "experts": [summary.experts_before, summary.experts_after],
        "before": asdict(before),
        "after": asdict(after),
        "seconds": summary.seconds,
        "note": summary.note,
    }
    rows = size_rows((summary.experts_before, summary.experts_after), before, after)
    files = f" and {counted(len(summary.out) - 1, 'further part')}" if len(summary.out) > 1 else ""
    print_report(
        as_json,
        content,
        (
            size_table(f"Compressed by {summary.strategy}", rows),
            *chain.from_iterable(section.shown() for section in sections(summary.plan)),
            *([Text(f"{summary.note}.")] if summary.note else []),
            Text(f"Written to {summary.out[0]}{files}"),
            *next_blocks([f"llama-server -m {shlex.quote(summary.out[0])}"]),
        ),
    )
