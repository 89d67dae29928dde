"""An inspected model on a terminal: its parts, what would be left of it, and servers that take
it."""

from typing import TYPE_CHECKING, Any

from compressor.document.blocks import Block, Facts, Heading, Table, Text
from compressor.formatting import human_bytes, human_count, share

if TYPE_CHECKING:  # it loads torch, and what reads GGUF files prints their sizes without
    from compressor.model.inspection import Inspection
    from compressor.model.serving import Breach


def inspection_blocks(report: "Inspection") -> list[Block]:
    """Return what `inspect` shows of a checkpoint."""
    outcomes = report.outcomes
    left_out = report.left_out
    written = (
        f"{human_bytes(report.bytes_written)} ({outcomes[0].experts} experts)" if outcomes else "-"
    )
    facts = {
        "architecture": f"{report.model_class} ({report.family})",
        "MoE layers": f"{report.moe_layers} of {report.layers}",
        "experts": f"{report.experts} in each, top-{report.top_k}",
        "routing": report.routing,
        "quantization": report.quantization or "none",
        "stock loading": report.loader_fault,
        "constants": report.constants,
        "parameters": human_count(report.parameters),
        "bytes": human_bytes(report.bytes),
        "largest layer, loaded": human_bytes(report.largest_layer_bytes),
        "peak memory to compress": f"at most {human_bytes(report.peak_memory)} and the "
        "calibration activations",
        "memory to export to ONNX": f"two layers; {human_bytes(report.export_memory)} to verify "
        "it in one piece",
        "bytes read, at most": human_bytes(report.bytes_read),
        "bytes written": written,
        "not loaded by stock transformers": f"{len(left_out)} tensors, {left_out[0]} ..."
        if left_out
        else "",
    }
    known = [(name, fact) for name, fact in facts.items() if fact]
    blocks: list[Block] = [Heading(report.model), Facts(known), *inspected_sizes(report)]
    if report.servers:
        against: dict[Breach, list[str]] = {}
        for advice in report.servers:
            for breach in advice.breaches:  # which names the number, where it depends on it
                against.setdefault(breach, []).append(str(advice.experts))
        columns = ("experts", "server", "effect", "what it does")
        rows = [
            (", ".join(counts), breach.server, breach.effect, breach.says)
            for breach, counts in against.items()
        ]
        if rows:
            blocks.append(Table("Servers", columns, rows, columns))
        suitable, nearest = list[str](), list[str]()
        for advice in report.servers:
            if advice.nearest == advice.experts:
                suitable.append(str(advice.experts))
            elif advice.nearest is not None:
                nearest.append(f"nearest to {advice.experts}: {advice.nearest}")
        suits = (
            f"Numbers of experts that suit all servers: {', '.join(suitable) or 'none of these'}"
        )
        blocks.append(Text("; ".join([suits, *nearest])))
    return blocks


def inspected_sizes(report: Any) -> tuple[Table, Table]:
    """Return sizes of the parts of a checkpoint or a GGUF file, and of what would be left with
    fewer experts."""

    def row(name: object, size: Any) -> tuple[str, ...]:
        return (
            str(name),
            human_count(size.parameters),
            human_bytes(size.bytes),
            share(size.bytes, report.bytes),
        )

    sizes = ("parameters", "bytes", "share")
    parts = [row(part.name, part) for part in report.parts]
    left = [row(outcome.experts, outcome) for outcome in report.outcomes]
    return Table("By part", ("part", *sizes), parts), Table(
        "What would be left", ("experts", *sizes), left
    )
