"""What the commands print that make, move or show models."""

from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from compressor.cli.terminal import console, print_json, print_lines, print_table
from compressor.model.inspection import Inspection
from compressor.planning.options import helps
from compressor.plans.plan import CompressionPlan
from compressor.words import human_bytes, human_count, share

if TYPE_CHECKING:  # what compresses or publishes is loaded only to do so
    from compressor.api.compressing import Summary
    from compressor.publishing.push import PushSummary


def show_inspection(report: Inspection, as_json: bool) -> None:
    """The report of `inspect`."""
    if as_json:
        print_json(asdict(report))
        return
    facts = [
        ("architecture", f"{report.model_class} ({report.family})"),
        ("MoE layers", f"{report.moe_layers} of {report.layers}"),
        ("experts", f"{report.experts} in each, top-{report.top_k}"),
        ("routing", report.routing),
        ("quantization", report.quantization or "none"),
        ("parameters", human_count(report.parameters)),
        ("bytes", human_bytes(report.bytes)),
        ("largest layer, loaded", human_bytes(report.largest_layer_bytes)),
        ("peak memory to compress", f"at most {human_bytes(report.peak_memory)} and the calibration activations"),
        ("peak memory to export to ONNX", f"the whole model in float32, {human_bytes(report.export_memory)}"),
        ("bytes read, at most", human_bytes(report.bytes_read)),
        (
            "bytes written",
            f"{human_bytes(report.bytes_written)} ({report.outcomes[0].experts} experts)" if report.outcomes else "-",
        ),
    ]
    if report.left_out:
        facts.append(("not loaded by stock transformers", f"{len(report.left_out)} tensors, {report.left_out[0]} ..."))
    print_table(escape(report.model), ("", ""), facts)
    print_table(
        "By part",
        ("part", "parameters", "bytes", "share"),
        [
            (part.name, human_count(part.parameters), human_bytes(part.bytes), share(part.bytes, report.bytes))
            for part in report.parts
        ],
    )
    print_table(
        "What would be left",
        ("experts", "parameters", "bytes", "share"),
        [
            (str(o.experts), human_count(o.parameters), human_bytes(o.bytes), share(o.bytes, report.bytes))
            for o in report.outcomes
        ],
    )


def show_plans(plans: Sequence[CompressionPlan], paths: Sequence[Path], as_json: bool) -> None:
    """One row a layer; as JSON the plan, or a list of several."""
    if as_json:
        content = [plan.to_dict() for plan in plans]
        print_json(content if len(content) > 1 else content[0])
        return
    for plan, path in zip(plans, paths, strict=True):
        _show_plan(plan, path)


def _show_plan(plan: CompressionPlan, path: Path) -> None:
    rows = []
    for layer in plan.layers:
        merged = [list(group.members) for group in layer.groups if len(group.members) > 1]
        row = [layer.module, str(layer.experts), str(len(layer.groups)), _short(layer.dropped), _short(merged)]
        rows.append([*row, _short(plan.protected.get(layer.module, ()))] if plan.protected else row)
    data = "" if plan.calibration is None or "only" not in plan.calibration else f" for {plan.calibration['only']}"
    title = escape(f"Plan by {plan.strategy}{data}, written to {path}")
    columns = ["layer", "experts", "kept", "dropped", "merged"]
    print_table(title, [*columns, "protected"] if plan.protected else columns, rows)
    if plan.protected:
        print(_protected_line(plan))


def _protected_line(plan: CompressionPlan) -> str:
    count = sum(map(len, plan.protected.values()))
    return f"{count} protected expert{'s' if count > 1 else ''}, neither merged nor dropped"


def _short(items: Sequence[Any], most: int = 12) -> str:
    text = " ".join(str(item) for item in items[:most])
    return text + (f" and {len(items) - most} more" if len(items) > most else "") or "-"


def summary_dict(summary: "Summary") -> dict[str, Any]:
    """A summary as JSON types, without the plan's layers."""
    return {
        "output": summary.out,
        "strategy": summary.strategy,
        "experts": {"before": summary.experts_before, "after": summary.experts_after},
        "parameters": {"before": summary.before.parameters, "after": summary.after.parameters},
        "bytes": {"before": summary.before.bytes, "after": summary.after.bytes},
        "seconds": {name: round(value, 3) for name, value in summary.seconds.items()},
        "peak_memory_bytes": summary.peak_memory,
        "left_out": list(summary.left_out),
        "zeroed_fields": list(summary.zeroed_fields),
        "protected_experts": sum(map(len, summary.plan.protected.values())),
        "plan_digest": summary.plan.digest(),
    }


def show_summary(summary: "Summary", as_json: bool, pushed: "PushSummary | None" = None) -> None:
    """What a compression did, and where it was published."""
    if as_json:
        print_json({**summary_dict(summary), **published(pushed)})
        return
    before, after = summary.before, summary.after
    rows = [
        ("experts per layer", str(summary.experts_before), str(summary.experts_after), ""),
        (
            "parameters",
            human_count(before.parameters),
            human_count(after.parameters),
            share(after.parameters, before.parameters),
        ),
        ("bytes", human_bytes(before.bytes), human_bytes(after.bytes), share(after.bytes, before.bytes)),
    ]
    print_table(escape(f"Compressed by {summary.strategy}"), ("", "before", "after", "left"), rows)
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in summary.seconds.items())
    lines = Console()
    lines.print(f"{phases}; peak memory {human_bytes(summary.peak_memory)}", highlight=False)
    if summary.plan.protected:
        print(_protected_line(summary.plan))
    if summary.left_out:
        fields = f"; set to zero in the config: {', '.join(summary.zeroed_fields)}" if summary.zeroed_fields else ""
        names = escape(_short(summary.left_out, 4))
        lines.print(f"left out, as stock transformers does not load them: {names}{fields}", highlight=False)
    print(f"Written to {summary.out}")
    if pushed is not None:
        show_push(pushed, as_json=False)


def published(pushed: "PushSummary | None") -> dict[str, Any]:
    """What --json adds of a push; nothing without one."""
    return {} if pushed is None else {"push": _push_dict(pushed)}


def show_strategies(loaded: Sequence[Any], as_json: bool) -> None:
    """Name, summary, needs and options of each strategy."""
    entries = [
        {
            "name": s.name,
            "summary": s.summary,
            "needs": sorted(s.needs),
            "options": asdict(s.options) if s.options else {},
            "help": helps(s.options),
        }
        for s in loaded
    ]
    if as_json:
        print_json(entries)
        return
    rows = [
        (e["name"], e["summary"], ", ".join(e["needs"]), ", ".join(f"{k}={v}" for k, v in e["options"].items()) or "-")
        for e in entries
    ]
    columns = ("name", "what it does", "needs", "options")
    print_table("Strategies", columns, [[escape(cell) for cell in row] for row in rows], numbers=False)


def show_needs(table: Sequence[tuple[str, str, str]], as_json: bool) -> None:
    """Name, shape and meaning of each statistic."""
    heads = ("name", "shape", "meaning")
    if as_json:
        print_json([dict(zip(heads, row, strict=True)) for row in table])
        return
    print_table("Statistics", heads, [(name, shape or "-", meaning) for name, shape, meaning in table], numbers=False)


def show_demo(rows: Sequence[Any], as_json: bool) -> None:
    """The demo's table: one row a model."""
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    print_table(
        "The demo model before and after: loss in nats per held-out token, mean accuracy on held-out questions",
        ("model", "experts", "parameters", "bytes", "loss", "accuracy"),
        [
            (
                row.name,
                str(row.experts),
                human_count(row.parameters),
                human_bytes(row.bytes),
                f"{row.loss:.3f}",
                f"{row.mean_accuracy:.1%}",
            )
            for row in rows
        ],
    )
    skills = list(rows[0].accuracy)
    print_table(
        "Accuracy by skill (chance is 25%)",
        ("model", *skills),
        [(row.name, *(f"{row.accuracy[skill]:.1%}" for skill in skills)) for row in rows],
    )


def _push_dict(summary: "PushSummary") -> dict[str, Any]:
    """What --json prints."""
    return {**asdict(summary), "changed": summary.changed}


def show_push(summary: "PushSummary", as_json: bool) -> None:
    """The files that were sent, or would be, and where they are now."""
    if as_json:
        print_json(_push_dict(summary))
        return
    title = f"{summary.repo_id}{' (dry run: nothing is sent)' if summary.dry_run else ''}"
    if summary.changed:
        rows = [[escape(file.path), human_bytes(file.nbytes), str(file.state)] for file in summary.uploaded]
        rows += [[escape(name), "-", "removed"] for name in summary.removed]
        print_table(escape(title), ("file", "size", "on the Hub"), rows)
    print_lines(_push_lines(summary))


def _push_lines(summary: "PushSummary") -> list[str]:
    verb, also = ("would go", "would be") if summary.dry_run else ("went", "was")
    place = f"{'a pull request against ' if summary.create_pr else ''}{summary.branch} of {summary.repo_id}"
    lines = []
    if summary.changed:
        lines.append(f"Commit: {summary.message}")
        count = len(summary.uploaded)
        files = f"{count} file{'s' if count != 1 else ''}, {human_bytes(summary.uploaded_bytes)}"
        lines.append(f"{files} {verb} to {place} in one commit.")
    else:
        lines.append(f"Nothing has changed: {summary.branch} of {summary.repo_id} has these files already.")
    if summary.unchanged and summary.changed:
        lines.append(f"{len(summary.unchanged)} more are there already.")
    if summary.removed:
        lines.append("Removed are parts of an earlier model that would be taken for parts of this one.")
    if summary.left_out:
        lines.append(f"Not pushed, since it is no part of the model: {', '.join(summary.left_out)}")
    if summary.tag is not None:
        lines.append(f"The commit {also} tagged {summary.tag}.")
    if summary.pull_request is not None:
        lines.append(f"Pull request: {summary.pull_request}")
    return [*lines, summary.url]


def show_export(name: str, output: Path, summary: Any, as_json: bool) -> None:
    """What an exporter says of its work, and where that lies."""
    if hasattr(summary, "fallen_back") and hasattr(summary, "verification"):
        _show_graph(summary, as_json)
        return
    said = asdict(summary) if is_dataclass(summary) and not isinstance(summary, type) else {}
    facts = {key: str(value) for key, value in said.items()}
    if as_json:
        print_json({"format": name, **facts, "folder": str(output)})
        return
    if facts:
        rows = [tuple(map(escape, row)) for row in facts.items()]
        print_table(escape(f"Exported as {name}"), ("what", "value"), rows)
    print_lines([f"Written to {output}"])


def _show_graph(summary: Any, as_json: bool) -> None:
    """Which MoE layers of a graph are no single node and why, and how well it agrees with the stock model."""
    if as_json:
        content = asdict(summary)
        print_json({**content, "folder": str(summary.folder), "fallen_back": len(summary.fallen_back)})
        return
    checked, cost = summary.verification, summary.rounding
    rows = [
        ("file", f"{human_bytes(summary.nbytes)}{', weights in a file of their own' if summary.external else ''}"),
        ("nodes", str(summary.nodes)),
        ("MoE layers as one node", f"{len(summary.routes) - len(summary.fallen_back)} of {len(summary.routes)}"),
        ("largest logit difference", f"{checked.largest_difference:.1e} (allowed {checked.tolerance:.1e})"),
        ("compared with", checked.reference),
        ("greedy tokens", f"{checked.tokens_equal} of {checked.tokens_compared} the same"),
    ]
    if checked.ties:
        rows.append(("near ties of routers", f"{checked.ties} of {checked.tokens} tokens got another expert"))
    if cost is not None:
        rows.append(
            (
                "cost of rounding",
                f"logits differ by up to {cost.largest_difference:.2g} of {cost.largest_logit:.2g}, "
                f"{cost.same_choice:.1%} of likeliest tokens the same",
            )
        )
    print_table(escape(f"{summary.model} as ONNX"), ("what", "measured"), [(name, escape(text)) for name, text in rows])
    for route in summary.fallen_back:
        console().print(escape(f"{route.layer}: {route.route}, since {route.reason}"))
    console().print(escape(f"Written to {summary.folder}"))
