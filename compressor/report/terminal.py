"""A plan and a run on a terminal: in advance, and when they are done."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from compressor.document.blocks import Block, Items, Table, Text
from compressor.formatting import counted, human_bytes, human_count, share
from compressor.model.serving import servers_in_words
from compressor.pipeline.dry_run import DryRun
from compressor.pipeline.outcome import Outcome, size_table
from compressor.quality_gate.domain_divergence import heldout_blocks
from compressor.quality_gate.report import power_blocks
from compressor.recipe.plan import KEPT_WHOLE
from compressor.recipe.steps_plan import Plan
from compressor.report.facts import facts
from compressor.run_record import read_record
from compressor.steps.dispositions import experts_table
from compressor.steps.section import sections


def plan_blocks(plan: Plan, path: Path) -> list[Block]:
    """Return a row for each layer of a plan that was written there, what came of its steps, and
    their names."""
    title = f"Plan by {plan.strategy}, written to {path}"
    blocks: list[Block] = [
        experts_table(plan.expert_plan, title) if plan.expert_plan.layers else Text(title)
    ]
    for section in sections(plan):
        blocks += section.shown()
    if len(plan.steps) > 1:
        blocks.append(Text(f"Steps: {', '.join(step.name for step in plan.steps)}"))
    return blocks


def outcome_blocks(outcome: Outcome) -> list[Block]:
    """Return sizes, what came of each step, held-out text, the facts, and the commands that make
    sense next."""
    decided = outcome.expert_plan.layers and outcome.strategy != KEPT_WHOLE
    blocks: list[Block] = [
        size_table(f"Compressed by {outcome.strategy}" if decided else "Done", outcome.sizes())
    ]
    for section in outcome.sections:
        blocks += section.shown()
    if outcome.heldout is not None:
        blocks += heldout_blocks(outcome.heldout)
    for label, value in facts(outcome, "terminal").pairs:
        assert not isinstance(value, Items)
        blocks.append(Text((f"{label}: ", value)))
    blocks.append(Text(f"Written to {outcome.out}"))
    if outcome.pushed is not None:
        blocks += outcome.pushed.blocks()
    folder, commands = Path(outcome.out), list[str]()
    if not any(folder.glob("*.safetensors")):  # it is another exporter's
        return blocks
    if not (outcome.expert_plan.has_constants or outcome.attempts):
        record, plan = read_record(folder), outcome.plan
        base = (record and (record.base or record.source)) or (plan.base or plan.source).model
        commands.append(shlex.join(["moe-compress", "gate", base, outcome.out]))
    if outcome.pushed is None:
        commands.append(f"{shlex.join(['moe-compress', 'push', outcome.out])} NAMESPACE/NAME")
    return [*blocks, *next_blocks(commands)]


def next_blocks(commands: Sequence[str]) -> list[Block]:
    """Return commands to copy, each on its own line."""
    return [Text("Next:"), *(Text(f"  {command}") for command in commands)] if commands else []


def dry_run_blocks(run: DryRun) -> list[Block]:
    """Return a run in advance: steps, shapes before and after, servers, text, memory, and the power
    of its gate."""
    steps = []
    solves = False
    for number, step in enumerate(run.steps, 1):
        options = ", ".join(f"{name}={value}" for name, value in step["options"].items())
        steps.append((str(number), step["name"], options, str(step["passes"])))
        solves |= step["options"].get("correct", {}).get("method", "none") != "none"
    shapes = []
    for name, before in asdict(run.before).items():
        after = getattr(run.after, name)
        write = human_bytes if "bytes" in name else human_count if "parameters" in name else str
        of_layer = name.removeprefix("layer_")
        what = name if of_layer == name else f"{of_layer} of an MoE layer"
        shapes.append((what, write(before), write(after), share(after, before)))
    blocks: list[Block] = [
        Text(f"Dry run of {run.model}: nothing is written."),
        Table("Steps", ("", "step", "options", "passes"), steps, {"step", "options"}),
        *map(Text, run.notes),
        Table(counted(run.moe_layers, "MoE layer"), ("", "before", "after", "left"), shapes),
        Text(f"Servers: {servers_in_words(run.servers)}"),
    ]
    for text in run.texts:
        sizes = [f"{count:,} of {length:,} ({name})" for name, count, length in text.parts]
        if text.samples:
            held = f", {text.heldout:.1%} of them held out" if text.heldout else ""
            size = f"{text.samples:,} sequences of {text.sequence_length:,} tokens{held}"
            sizes.insert(0, size)
        sources = ", ".join(text.sources)
        blocks.append(Text(f"Text: {text.tokens:,} tokens of {sources}: {'; '.join(sizes)}"))
    if not run.texts:
        blocks.append(Text("Text: none is read"))
    held = (
        f"{human_bytes(run.layers_memory)} for two decoder layers, "
        f"{human_bytes(run.activations)} for hidden states"
    )
    if run.memory < run.layers_memory + run.activations + run.samples:
        held += ", in files beyond 4 GB"
    if run.samples:
        size = human_bytes(run.samples)
        held += f", {size} for outputs of all experts on the sampled tokens of a layer"
    if run.whole_memory:
        held += f"; {human_bytes(run.whole_memory)} for a whole model that is trained"
    solving = "; correct takes about as much again" if solves else ""
    resident = f"{human_bytes(run.weights)} more where the model stays on the device (--resident)"
    blocks.append(Text(f"Memory: {human_bytes(run.memory)} ({held}){solving}; {resident}"))
    return blocks if run.gate is None else [*blocks, *power_blocks(run.gate)]
