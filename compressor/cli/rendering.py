"""The blocks and JSON that commands print."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.cli.terminal import PROGRAM, print_report
from compressor.document.blocks import Block, Facts, Heading, Table, Text
from compressor.formatting import counted, human_bytes, human_count, share, span
from compressor.model.constant_experts import NOT_STOCK
from compressor.model.serving import server_line
from compressor.quality_gate.domain_divergence import heldout_blocks
from compressor.quality_gate.report import full_content, gate_blocks, power_blocks
from compressor.quality_gate.verdict import GateResult
from compressor.recipe.document import first_of
from compressor.recipe.plan import KEPT_WHOLE
from compressor.recipe.recipe import make_step
from compressor.recipe.steps_plan import QUANTIZE
from compressor.report.comparison_report import Comparison
from compressor.run_record import read_record

if TYPE_CHECKING:  # what compresses or publishes is loaded only to do so
    from compressor.hub.push import PushSummary
    from compressor.pipeline.dry_run import DryRun
    from compressor.pipeline.outcome import Attempt, Outcome


def show_dry_run(run: "DryRun", as_json: bool) -> None:
    """Print a run in advance: steps, shapes before and after, servers, text, memory, and the power of its gate."""
    steps, rows = list[tuple[str, ...]](), list[tuple[str, ...]]()
    for number, step in enumerate(run.steps, 1):
        options = ", ".join(f"{name}={value}" for name, value in step["options"].items())
        steps.append((str(number), step["name"], options, str(step["passes"])))
    for name, before in asdict(run.before).items():
        after = getattr(run.after, name)
        write = human_bytes if "bytes" in name else human_count if "parameters" in name else str
        what = f"{name.removeprefix('layer_')} of an MoE layer" if name.startswith("layer_") else name
        rows.append((what, write(before), write(after), share(after, before)))
    blocks: list[Block] = [
        Text(f"Dry run of {run.model}: nothing is written."),
        Table("Steps", ("", "step", "options", "passes"), tuple(steps), frozenset({"step", "options"})),
        *map(Text, run.notes),
        Table(f"{counted(run.moe_layers, 'MoE layer')}", ("", "before", "after", "left"), tuple(rows)),
        Text(server_line(run.servers)),
    ]
    for text in run.texts:
        held = f", {text.heldout:.1%} of them held out" if text.heldout else ""
        sizes = [f"{text.samples:,} sequences of {text.sequence_length:,} tokens{held}"] if text.samples else []
        sizes += [f"{count:,} of {length:,} ({name})" for name, count, length in text.parts]
        blocks.append(Text(f"Text: {text.tokens:,} tokens of {', '.join(text.sources)}: {'; '.join(sizes)}"))
    if not run.texts:
        blocks.append(Text("Text: none is read"))
    layers, hidden = human_bytes(run.layers_memory), human_bytes(run.activations)
    spill = ", in files beyond 4 GB" if run.memory < run.layers_memory + run.activations else ""
    held = f"{layers} for two decoder layers, {hidden} for hidden states{spill}"
    whole = f"; {human_bytes(run.whole_memory)} for a whole model that is trained" if run.whole_memory else ""
    resident = f"{human_bytes(run.weights)} more where the model stays on the device (--resident)"
    solving = "; correct takes about as much again" if any(step["name"] == "correct" for step in run.steps) else ""
    blocks.append(Text(f"Memory: {human_bytes(run.memory)} ({held}{whole}){solving}; {resident}"))
    if run.gate is not None:
        blocks += power_blocks(run.gate)
    print_report(as_json, run.to_dict(), blocks)


def show_outcome(outcome: "Outcome", as_json: bool) -> None:
    """Print the outcome of a run, and where it was published."""
    blocks = () if as_json else (*outcome_blocks(outcome), *next_commands(outcome))
    print_report(as_json, {**outcome.to_dict(), **published(outcome.pushed)}, blocks)


def outcome_blocks(outcome: "Outcome") -> list[Block]:
    """Return sizes before and after, times and memory, and tensors that were left out."""
    from compressor.pipeline.outcome import size_table

    expert_plan = outcome.expert_plan
    title = f"Compressed by {outcome.strategy}" if expert_plan.layers and outcome.strategy != KEPT_WHOLE else "Done"
    blocks: list[Block] = [size_table(title, outcome.sizes())]
    for step in outcome.plan.steps:
        if step.name != QUANTIZE or step.to_dict() == outcome.quantized:  # not undone by later steps
            blocks += make_step(step.name, step.options).step().describe(step.to_dict())
    if outcome.heldout is not None:
        blocks += heldout_blocks(outcome.heldout)
    if outcome.seconds:
        phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in outcome.seconds.items())
        blocks.append(Text(f"{phases}; peak memory {human_bytes(outcome.peak_memory)}"))
    for name, figure in outcome.acceptance.items():
        shares = [f"{when} {figure[when]:.1%}" for when in ("before", "after") if when in figure]
        text = "held-out calibration text" if figure.get("heldout") else "calibration text"
        agrees = f"the head's argmax token is the one that the model chooses, {', '.join(shares)}"
        blocks.append(Text(f"{name}: {agrees} of {figure['positions']:,} positions of {text}"))
    if outcome.left_out:
        names = first_of(outcome.left_out, 4)
        blocks.append(Text(f"left out, as stock transformers does not load them: {names}"))
    if outcome.zeroed_fields:
        zeroed = ", ".join(outcome.zeroed_fields)
        blocks.append(Text(f"set to zero in the config, as no multi-token-prediction head is stored: {zeroed}"))
    if outcome.servers is not None:
        blocks.append(Text(server_line(outcome.servers)))
    if outcome.loader_fault is not None:
        blocks.append(Text(f"Stock loading: {outcome.loader_fault}"))
    if expert_plan.has_constants:
        gone = counted(sum(len(layer.constants) for layer in expert_plan.layers), "expert")
        counts = span(len(layer.groups) for layer in expert_plan.layers)
        blocks.append(Text(f"constants for {gone}; the layers keep {counts} each; {NOT_STOCK}"))
    blocks.append(Text(f"Written to {outcome.out}"))
    return blocks if outcome.pushed is None else [*blocks, *push_blocks(outcome.pushed)]


def next_commands(outcome: "Outcome") -> list[Block]:
    """Return the commands that make sense next: test the output against its base, try it, publish it."""
    folder, commands = Path(outcome.out), list[str]()
    if not any(folder.glob("*.safetensors")):  # it is another exporter's
        return []
    if not (outcome.expert_plan.has_constants or outcome.attempts):
        record, plan = read_record(folder), outcome.plan
        base = (record and (record.base or record.source)) or (plan.base or plan.source).model
        commands.append(f"{PROGRAM} gate {shlex.quote(base)} {shlex.quote(outcome.out)}")
    if outcome.pushed is None:
        commands.append(f"{PROGRAM} push {shlex.quote(outcome.out)} NAMESPACE/NAME")
    return next_blocks(commands)


def next_blocks(commands: Sequence[str]) -> list[Block]:
    """Return commands to copy, each on its own line."""
    return [Text("Next:"), *(Text(f"  {command}") for command in commands)] if commands else []


def published(pushed: "PushSummary | None") -> dict[str, Any]:
    """Return the entry of a push in --json; empty without one."""
    return {} if pushed is None else {"push": {**asdict(pushed), "changed": pushed.changed}}


def push_blocks(summary: "PushSummary") -> list[Block]:
    """Return the files that were sent, or would be, and where they are now."""
    verb, also = ("would go", "would be") if summary.dry_run else ("went", "was")
    blocks, lines = list[Block](), list[str]()
    if summary.changed:
        title = f"{summary.repo_id}{' (dry run: nothing is sent)' if summary.dry_run else ''}"
        rows = [(file.path, human_bytes(file.nbytes), str(file.state)) for file in summary.uploaded]
        rows += [(name, "-", "removed") for name in summary.removed]
        blocks.append(Table(title, ("file", "size", "on the Hub"), tuple(rows), frozenset({"on the Hub"})))
        files = f"{counted(len(summary.uploaded), 'file')}, {human_bytes(summary.uploaded_bytes)}"
        target = f"{'a pull request against ' if summary.create_pr else ''}{summary.branch} of {summary.repo_id}"
        lines += [f"Commit: {summary.message}", f"{files} {verb} to {target} in one commit."]
        if summary.unchanged:
            lines.append(f"{len(summary.unchanged)} more are there already.")
    else:
        lines.append(f"Nothing has changed: {summary.branch} of {summary.repo_id} has these files already.")
    if summary.removed:
        lines.append("Removed are parts of an earlier model that would be taken for parts of this one.")
    if summary.left_out:
        lines.append(f"Not pushed, since it is no part of the model: {', '.join(summary.left_out)}")
    if summary.tag is not None:
        lines.append(f"The commit {also} tagged {summary.tag}.")
    if summary.pull_request is not None:
        lines.append(f"Pull request: {summary.pull_request}")
    return [*blocks, *map(Text, lines), Text(summary.url)]


def show_export(name: str, output: Path, summary: Any, as_json: bool) -> None:
    """Print an exporter's summary, in its own blocks if it has any, and where its output is."""
    if hasattr(summary, "describe"):
        return print_report(as_json, summary.to_dict(), [*summary.describe(), Text(f"Written to {summary.folder}")])
    values = asdict(summary) if is_dataclass(summary) and not isinstance(summary, type) else {}
    facts = {key: str(value) for key, value in values.items()}
    blocks: list[Block] = [Heading(f"Exported as {name}"), Facts(tuple(facts.items()))] if facts else []
    content = {"format": name, **facts, "folder": str(output)}
    return print_report(as_json, content, [*blocks, Text(f"Written to {output}")])


def written_line(paths: Sequence[Path]) -> tuple[Block, ...]:
    """Return a line on where files were written; empty if none were."""
    return (Text(f"Written: {', '.join(map(str, paths))}"),) if paths else ()


def show_gate(result: GateResult, as_json: bool, written: Sequence[Path] = ()) -> None:
    """Print a row for each task, then the verdict and what would decide it; `written` are the reports' files."""
    content = {**full_content(result), "written": [str(path) for path in written]}
    print_report(as_json, content, [*gate_blocks(result), *written_line(written)])


def show_gated(
    result: GateResult,
    outcome: "Outcome | None",
    attempts: "Sequence[Attempt]",
    written: Sequence[Path],
    as_json: bool,
) -> None:
    """Show the gate of the model in place, or of the last one if none passed, and the outcome of what is in place."""
    content = {
        **full_content(result),
        "written": [str(path) for path in written],
        "attempts": [{"experts": x.experts, "accepted": x.accepted, "verdict": x.result.verdict} for x in attempts],
        "compression": None if outcome is None else outcome.to_dict(),
        **published(None if outcome is None else outcome.pushed),
    }
    blocks: list[Block] = [*gate_blocks(result), *written_line(written)]
    if len(attempts) > 1:
        rows = tuple((str(x.experts), x.result.verdict, "yes" if x.accepted else "no") for x in attempts)
        blocks.insert(0, Table("Models tried", ("experts per layer", "verdict", "accepted"), rows))
    if outcome is None:
        blocks.append(Text(f"{result.compressed} was not written."))
    elif not as_json:
        blocks += [*outcome_blocks(outcome), *next_commands(outcome)]
    print_report(as_json, content, blocks)


def show_comparison(comparison: Comparison, as_json: bool, written: Sequence[Path] = ()) -> None:
    """Print all models; random drops share a line."""
    print_report(as_json, comparison.to_dict(), [*comparison.brief(), *written_line(written)])
