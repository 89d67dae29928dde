"""What the commands print."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.cli.terminal import tell
from compressor.comparison.report import Comparison, comparison_brief
from compressor.document.blocks import Block, Facts, Heading, Table, Text
from compressor.formatting import counted, human_bytes, human_count, share
from compressor.gates.report import full_content, gate_brief
from compressor.gates.verdict import GateResult
from compressor.model.constant_experts import NOT_STOCK
from compressor.model.inspection import Inspection
from compressor.recipe.document import constants_line, first_of, plan_blocks
from compressor.recipe.plan import KEPT_WHOLE
from compressor.recipe.plan import told_split as split_line
from compressor.recipe.plugins import helps
from compressor.recipe.recipe import make_step
from compressor.recipe.steps_plan import Plan
from compressor.serving.advice import Advice, Breach

if TYPE_CHECKING:  # what compresses, attributes or publishes is loaded only to do so
    from compressor.api.searching import Gated
    from compressor.attribution.report import Findings
    from compressor.gguf_files.blocks import GgufInspection
    from compressor.pipeline.outcome import Outcome
    from compressor.publishing.push import PushSummary
    from compressor.recipe.step import Step

STRATEGY_COLUMNS = ("name", "what it does", "needs", "options")
STEP_COLUMNS = ("step", "option", "default", "what it is")
NEEDS_COLUMNS = ("name", "shape", "meaning")
TRIED_COLUMNS = ("experts per layer", "verdict", "accepted")


def show_inspection(report: Inspection, as_json: bool) -> None:
    """The report of `inspect`."""
    outcomes, left_out = report.outcomes, report.left_out
    written = f"{human_bytes(report.bytes_written)} ({outcomes[0].experts} experts)" if outcomes else "-"
    facts = {
        "architecture": f"{report.model_class} ({report.family})",
        "MoE layers": f"{report.moe_layers} of {report.layers}",
        "experts": f"{report.experts} in each, top-{report.top_k}",
        "routing": report.routing,
        "quantization": report.quantization or "none",
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
    servers = server_blocks(report.servers) if report.servers else ()
    blocks = [Heading(report.model), Facts(tuple(facts.items())), *inspected_sizes(report), *servers]
    tell(as_json, asdict(report), blocks)


def inspected_sizes(report: "Inspection | GgufInspection") -> tuple[Table, Table]:
    """Sizes of the parts of a model, and of what would be left with fewer experts."""
    parts, left = (
        tuple(
            (str(of), human_count(each.parameters), human_bytes(each.bytes), share(each.bytes, report.bytes))
            for of, each in named
        )
        for named in ([(part.name, part) for part in report.parts], [(each.experts, each) for each in report.outcomes])
    )
    sizes = ("parameters", "bytes", "share")
    return Table("By part", ("part", *sizes), parts), Table("What would be left", ("experts", *sizes), left)


def server_blocks(advices: Sequence[Advice]) -> tuple[Block, ...]:
    """Which servers take which of these numbers of experts, and what speaks against one."""
    against: dict[Breach, list[str]] = {}
    for advice in advices:
        for breach in advice.breaches:  # which says the number, where it depends on it
            against.setdefault(breach, []).append(str(advice.experts))
    rows = tuple((", ".join(counts), breach.server, breach.effect, breach.says) for breach, counts in against.items())
    suits = [str(advice.experts) for advice in advices if advice.nearest == advice.experts]
    near = [f"nearest to {one.experts}: {one.nearest}" for one in advices if one.nearest not in (None, one.experts)]
    columns = ("experts", "server", "effect", "what it does")
    return (
        *([Table("Servers", columns, rows, frozenset(columns))] if rows else []),
        Text("; ".join([f"Numbers of experts that suit all servers: {', '.join(suits) or 'none of these'}", *near])),
    )


def server_line(advice: Advice) -> str:
    """In a line: the servers that run the number at full speed, and those that do not."""
    against = ", ".join(dict.fromkeys(breach.server for breach in advice.breaches))
    near = f" (nearest number for all: {advice.nearest})" if advice.nearest not in (None, advice.experts) else ""
    told = f"at full speed in {', '.join(advice.full_speed)}" if advice.full_speed else "in no server at full speed"
    return f"Servers: {told}" + (f"; not in {against}{near}" if against else "")


def show_plans(plans: Sequence[Plan], paths: Sequence[Path], as_json: bool) -> None:
    """One row a layer; as JSON the plan, or a list of several."""
    content = [plan.to_dict() for plan in plans]
    blocks = (block for plan, path in zip(plans, paths, strict=True) for block in plan_blocks(plan, path))
    tell(as_json, content if len(content) > 1 else content[0], blocks)


def show_outcome(outcome: "Outcome", as_json: bool, pushed: "PushSummary | None" = None) -> None:
    """What a run did, and where it was published."""
    tell(as_json, {**outcome.to_dict(), **published(pushed)}, outcome_blocks(outcome, pushed))


def outcome_blocks(outcome: "Outcome", pushed: "PushSummary | None" = None) -> tuple[Block, ...]:
    """Sizes before and after, what it took, and what was left out."""
    from compressor.pipeline.outcome import size_table

    stage = outcome.stage
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in outcome.seconds.items())
    zeroed = ", ".join(outcome.zeroed_fields)
    fields = f"; set to zero in the config: {zeroed}" if zeroed else ""
    names = f"left out, as stock transformers does not load them: {first_of(outcome.left_out, 4)}{fields}"
    of_steps = [
        block for step in outcome.plan.steps for block in make_step(step.name, step.options).describe(step.to_dict())
    ]
    title = f"Compressed by {outcome.strategy}" if stage.layers and outcome.strategy != KEPT_WHOLE else "Done"
    return (
        size_table(title, outcome.sizes()),
        *([Text(f"split {split_line(stage.split)}")] if stage.split is not None else []),
        *of_steps,
        *([Text(f"{phases}; peak memory {human_bytes(outcome.peak_memory)}")] if phases else []),
        *(Text(acceptance_line(name, figure)) for name, figure in outcome.acceptance.items()),
        *([Text(names)] if outcome.left_out else []),
        *([] if outcome.servers is None else [Text(server_line(outcome.servers))]),
        *([Text(f"{constants_line(stage)}; {NOT_STOCK}")] if stage.constants is not None else []),
        Text(f"Written to {outcome.out}"),
        *(push_blocks(pushed) if pushed is not None else ()),
    )


def acceptance_line(name: str, figure: Mapping[str, Any]) -> str:
    """How often a multi-token-prediction head says what the model then chooses."""
    shares = [f"{when} {figure[when]:.1%}" for when in ("before", "after") if when in figure]
    text = "held-out calibration text" if figure.get("heldout") else "calibration text"
    where = f"{figure['positions']:,} positions of {text}"
    return f"{name}: the head's likeliest token is the one that the model chooses, {', '.join(shares)} of {where}"


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
    rows = tuple(
        (e["name"], e["summary"], ", ".join(e["needs"]), ", ".join(f"{k}={v}" for k, v in e["options"].items()) or "-")
        for e in entries
    )
    tell(as_json, entries, [Table("Strategies", STRATEGY_COLUMNS, rows, frozenset(STRATEGY_COLUMNS))])


def show_steps(classes: "Sequence[type[Step]]", as_json: bool) -> None:
    """Each step's options with their defaults."""
    entries: list[dict[str, Any]] = [
        {
            "name": step.name,
            "summary": (step.__doc__ or "").strip().split("\n")[0],
            "options": {
                name: None if entry.is_required() else entry.get_default(call_default_factory=True)
                for name, entry in step.model_fields.items()
            },
            "help": {name: " ".join((entry.description or "").split()) for name, entry in step.model_fields.items()},
        }
        for step in classes
    ]
    rows = list[tuple[str, ...]]()
    for entry in entries:
        rows.append((entry["name"], "", "", entry["summary"]))
        rows += [("", name, _default(entry["options"].get(name)), text) for name, text in entry["help"].items()]
    tell(as_json, entries, [Table("Steps", STEP_COLUMNS, tuple(rows), frozenset(STEP_COLUMNS))])


def _default(value: Any) -> str:
    return "-" if value is None or value == {} else value if isinstance(value, str) else json.dumps(value)


def show_needs(statistics: Mapping[str, Any], as_json: bool) -> None:
    """Name, shape and meaning of each statistic."""
    content = [{"name": name, "shape": each.shape, "meaning": each.meaning} for name, each in statistics.items()]
    rows = tuple((entry["name"], entry["shape"] or "-", entry["meaning"]) for entry in content)
    tell(as_json, content, [Table("Statistics", NEEDS_COLUMNS, rows, frozenset(NEEDS_COLUMNS))])


def show_demo(rows: Sequence[Any], as_json: bool) -> None:
    """The demo's table: one row a model."""
    title = "The demo model before and after: loss in nats per held-out token, mean accuracy on held-out questions"
    sizes = tuple(
        (
            row.name,
            str(row.experts),
            human_count(row.parameters),
            human_bytes(row.bytes),
            f"{row.loss:.3f}",
            f"{row.mean_accuracy:.1%}",
        )
        for row in rows
    )
    skills = tuple(rows[0].accuracy)
    by_skill = tuple((row.name, *(f"{row.accuracy[skill]:.1%}" for skill in skills)) for row in rows)
    tell(
        as_json,
        [asdict(row) for row in rows],
        [
            Table(title, ("model", "experts", "parameters", "bytes", "loss", "accuracy"), sizes),
            Table("Accuracy by skill (chance is 25%)", ("model", *skills), by_skill),
        ],
    )


def _push_dict(summary: "PushSummary") -> dict[str, Any]:
    return {**asdict(summary), "changed": summary.changed}


def show_push(summary: "PushSummary", as_json: bool) -> None:
    """The files that were sent, or would be, and where they are now."""
    tell(as_json, _push_dict(summary), push_blocks(summary))


def push_blocks(summary: "PushSummary") -> tuple[Block, ...]:
    """The files that were sent, or would be, and where they are now."""
    lines = tuple(map(Text, _push_lines(summary)))
    if not summary.changed:
        return lines
    title = f"{summary.repo_id}{' (dry run: nothing is sent)' if summary.dry_run else ''}"
    rows = [(file.path, human_bytes(file.nbytes), str(file.state)) for file in summary.uploaded]
    rows += [(name, "-", "removed") for name in summary.removed]
    return Table(title, ("file", "size", "on the Hub"), tuple(rows), frozenset({"on the Hub"})), *lines


def _push_lines(summary: "PushSummary") -> list[str]:
    verb, also = ("would go", "would be") if summary.dry_run else ("went", "was")
    place = f"{'a pull request against ' if summary.create_pr else ''}{summary.branch} of {summary.repo_id}"
    lines = []
    if summary.changed:
        files = f"{counted(len(summary.uploaded), 'file')}, {human_bytes(summary.uploaded_bytes)}"
        lines += [f"Commit: {summary.message}", f"{files} {verb} to {place} in one commit."]
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
    said = asdict(summary) if is_dataclass(summary) and not isinstance(summary, type) else {}
    if hasattr(summary, "fallen_back") and hasattr(summary, "verification"):
        content = {**said, "folder": str(summary.folder), "fallen_back": len(summary.fallen_back)}
        told: list[Block] = [Heading(f"{summary.model} as ONNX"), Facts(tuple(_graph_facts(summary).items()))]
        told += [Text(f"{route.layer}: {route.route}, since {route.reason}") for route in summary.fallen_back]
        output = summary.folder
    else:
        facts = {key: str(value) for key, value in said.items()}
        content = {"format": name, **facts, "folder": str(output)}
        told = [Heading(f"Exported as {name}"), Facts(tuple(facts.items()))] if facts else []
    tell(as_json, content, [*told, Text(f"Written to {output}")])


def _graph_facts(summary: Any) -> Mapping[str, str]:
    """Which MoE layers of a graph are a single node, and how well it agrees with the stock model."""
    checked, cost = summary.verification, summary.rounding
    facts = {
        "file": f"{human_bytes(summary.nbytes)}{', weights in a file of their own' if summary.external else ''}",
        "nodes": str(summary.nodes),
        "MoE layers as one node": f"{len(summary.routes) - len(summary.fallen_back)} of {len(summary.routes)}",
        "largest logit difference": f"{checked.largest_difference:.1e} (allowed {checked.tolerance:.1e})",
        "compared with": checked.reference,
        "verified": checked.how,
        "greedy tokens": f"{checked.tokens_equal} of {checked.tokens_compared} the same",
    }
    if checked.ties:
        facts["near ties of routers"] = f"{checked.ties} of {checked.tokens} tokens got another expert"
    if cost is not None:
        facts["cost of rounding"] = (
            f"logits differ by up to {cost.largest_difference:.2g} of {cost.largest_logit:.2g}, "
            f"{cost.same_choice:.1%} of likeliest tokens the same"
        )
    return facts


def written_line(paths: Sequence[Path]) -> tuple[Block, ...]:
    """Where files were written; nothing if none were."""
    return (Text(f"Written: {', '.join(map(str, paths))}"),) if paths else ()


def show_gate(result: GateResult, as_json: bool, written: Sequence[Path] = ()) -> None:
    """A row for each task, then the verdict and what would decide it; `written` are the reports' files."""
    tell(as_json, _gate_content(result, written), [*gate_brief(result), *written_line(written)])


def _gate_content(result: GateResult, written: Sequence[Path]) -> dict[str, Any]:
    return {**full_content(result), "written": [str(path) for path in written]}


def show_gated(
    found: "Gated", as_json: bool, written: Sequence[Path] = (), pushed: "PushSummary | None" = None
) -> None:
    """What a compression under a gate did, and the gate of the model in place, or of the last one if none passed."""
    result, outcome = found.decisive.result, found.outcome
    tried = [{"experts": x.experts, "accepted": x.accepted, "verdict": x.result.verdict} for x in found.attempts]
    made = None if outcome is None else outcome.to_dict()
    content = {**_gate_content(result, written), "attempts": tried, "compression": made, **published(pushed)}
    rows = tuple((str(x.experts), x.result.verdict, "yes" if x.accepted else "no") for x in found.attempts)
    missing = [Text(f"{result.compressed} was not written.")]
    tell(
        as_json,
        content,
        (
            *([Table("Models tried", TRIED_COLUMNS, rows, frozenset(TRIED_COLUMNS))] if len(rows) > 1 else []),
            *gate_brief(result),
            *written_line(written),
            *(missing if outcome is None else outcome_blocks(outcome, pushed)),
        ),
    )


def show_comparison(comparison: Comparison, as_json: bool, written: Sequence[Path] = ()) -> None:
    """The original, then each expert count's models, the least loss first; random drops share a line."""
    tell(as_json, comparison.to_dict(), [*comparison_brief(comparison), *written_line(written)])


def show_attribution(found: "Findings", as_json: bool, written: Sequence[Path] = ()) -> None:
    """Hubs, the strongest senders, the kinds, and how exact it all is; `written` are the reports' files."""
    from compressor.attribution.report import brief_blocks, brief_content

    content = {**brief_content(found), "written": [str(path) for path in written]}
    tell(as_json, content, (*brief_blocks(found), *written_line(written)))
