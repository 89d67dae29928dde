"""The commands on GGUF files: their options, and what they print."""

import shlex
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from compressor.cli.options import flag, given
from compressor.cli.terminal import print_report
from compressor.distributed import refuse_several
from compressor.document.blocks import Facts, Heading, Text
from compressor.errors import CompressionError
from compressor.extras import require
from compressor.formatting import counted, human_bytes, human_count, ranges

if TYPE_CHECKING:  # loaded only where there is a GGUF file
    from compressor.gguf_files.blocks import GgufInspection
    from compressor.gguf_files.writing import GgufSummary

CHOOSING = ("experts", "ratio", "strategy", "protect", "imatrix")
Imatrix = Annotated[
    Path | None,
    flag("Of a GGUF model: an importance matrix of llama-imatrix, by which experts are chosen."),
]


def takes_gguf(context: typer.Context, model: str, imatrix: Path | None, known: Collection[str]) -> bool:
    """Return True if the model is a GGUF file; options that need numbers to compute with are then refused, by name."""
    from compressor.gguf_files.header import is_gguf

    if not is_gguf(model):
        if imatrix is not None:
            raise CompressionError("--imatrix goes with a GGUF file; name one as the model, or leave it out")
        return False
    require("gguf")
    refuse_several("a GGUF file")
    options = {option.name: option.opts[0] for option in context.command.params}
    refused = given(context) - {*known, "model", "output", "json", "overwrite"}
    if refused:
        first = min(options[name] for name in refused)
        raise CompressionError(
            f"{first} does not go with a GGUF file, which is only cut; leave it out, or compress the checkpoint and "
            "convert the result"
        )
    return True


def choosing(flags: dict[str, Any], imatrix: Path | None) -> dict[str, Any]:
    """Return the options that choose experts of a GGUF file."""
    chosen = {name: flags.get(f"prune.{name}") for name in CHOOSING if name != "imatrix"}
    return {**chosen, "strategy": chosen["strategy"] or "auto", "imatrix": imatrix}


def show_gguf_summary(summary: "GgufSummary", as_json: bool) -> None:
    """Print sizes before and after, what could not be checked, and where the files are."""
    from compressor.pipeline.outcome import size_rows, size_table
    from compressor.recipe.document import protected_blocks_of
    from compressor.report.terminal import next_blocks

    before = summary.before
    after = summary.after
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
            *protected_blocks_of(summary.plan.expert_plan.protected),
            *([Text(f"{summary.note}.")] if summary.note else []),
            Text(f"Written to {summary.out[0]}{files}"),
            *next_blocks([f"llama-server -m {shlex.quote(summary.out[0])}"]),
        ),
    )


def show_gguf_inspection(report: "GgufInspection", as_json: bool) -> None:
    """Print what `inspect` shows of a GGUF file."""
    from compressor.report.inspection import inspected_sizes

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
        **({"predicts further tokens": f"blk.{ranges(report.heads)}"} if report.heads else {}),
        **({"pruned before": "yes, by a plan in its metadata"} if report.pruned_before else {}),
    }
    blocks = (Heading(report.model), Facts(tuple(facts.items())), *inspected_sizes(report))
    print_report(as_json, asdict(report), blocks)
