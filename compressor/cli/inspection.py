"""`inspect`: what a model is made of, and what compressing it would take."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

import compressor
from compressor.cli.model_files import package_of
from compressor.cli.options import RUNNING, Model, Running, flag, options_of
from compressor.cli.terminal import print_report
from compressor.document.blocks import Block, Facts, Heading, Table, Text
from compressor.formatting import human_bytes, human_count, share
from compressor.model.serving import Breach

if TYPE_CHECKING:
    from compressor.model.inspection import Inspection


def inspect(
    context: typer.Context,
    model: Model,
    running: Annotated[Running, options_of(Running, RUNNING, ("revision", "as_json"))],
    experts: Annotated[int | None, flag("Show the sizes with this many experts left.")] = None,
) -> None:
    """Show what a model is made of and what compressing it would take; reads no weight."""
    package = package_of(context, model)
    if package is not None:
        package.inspect(model, experts, running.as_json)
        return
    show_inspection(compressor.inspect(model, running.revision, experts), running.as_json)


def show_inspection(report: "Inspection", as_json: bool) -> None:
    """The report of `inspect`."""
    outcomes, left_out = report.outcomes, report.left_out
    written = f"{human_bytes(report.bytes_written)} ({outcomes[0].experts} experts)" if outcomes else "-"
    facts = {
        "architecture": f"{report.model_class} ({report.family})",
        "MoE layers": f"{report.moe_layers} of {report.layers}",
        "experts": f"{report.experts} in each, top-{report.top_k}",
        "routing": report.routing,
        "quantization": report.quantization or "none",
        **({"stock loading": report.loader_fault} if report.loader_fault else {}),
        **({"constants": report.constants} if report.constants else {}),
        "parameters": human_count(report.parameters),
        "bytes": human_bytes(report.bytes),
        "largest layer, loaded": human_bytes(report.largest_layer_bytes),
        "peak memory to compress": f"at most {human_bytes(report.peak_memory)} and the calibration activations",
        "memory to export to ONNX": f"two layers; {human_bytes(report.export_memory)} to verify it in one piece",
        "bytes read, at most": human_bytes(report.bytes_read),
        "bytes written": written,
        **({"not loaded by stock transformers": f"{len(left_out)} tensors, {left_out[0]} ..."} if left_out else {}),
    }
    blocks: list[Block] = [Heading(report.model), Facts(tuple(facts.items())), *inspected_sizes(report)]
    if advices := report.servers:
        against: dict[Breach, list[str]] = {}
        for advice in advices:
            for breach in advice.breaches:  # which names the number, where it depends on it
                against.setdefault(breach, []).append(str(advice.experts))
        columns = ("experts", "server", "effect", "what it does")
        rows = tuple((", ".join(counts), each.server, each.effect, each.says) for each, counts in against.items())
        blocks += [Table("Servers", columns, rows, frozenset(columns))] if rows else []
        suits = ", ".join(str(one.experts) for one in advices if one.nearest == one.experts) or "none of these"
        near = [f"nearest to {one.experts}: {one.nearest}" for one in advices if one.nearest not in (None, one.experts)]
        blocks.append(Text("; ".join([f"Numbers of experts that suit all servers: {suits}", *near])))
    print_report(as_json, asdict(report), blocks)


def inspected_sizes(report: Any) -> tuple[Table, Table]:
    """Sizes of the parts of a model, and of what would be left with fewer experts."""

    def row(name: object, size: Any) -> tuple[str, ...]:
        return str(name), human_count(size.parameters), human_bytes(size.bytes), share(size.bytes, report.bytes)

    sizes = ("parameters", "bytes", "share")
    parts = tuple(row(part.name, part) for part in report.parts)
    left = tuple(row(each.experts, each) for each in report.outcomes)
    return Table("By part", ("part", *sizes), parts), Table("What would be left", ("experts", *sizes), left)
