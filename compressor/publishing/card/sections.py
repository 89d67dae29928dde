"""The text of a model card, section by section; every figure in it was measured or is recorded."""

from typing import Any
from urllib.parse import quote

from compressor.errors import CompressionError
from compressor.gates.content import change, level, method, verdict_line
from compressor.gates.verdict import GateResult, TaskGate
from compressor.planning.registry import load_strategy
from compressor.plans.layer import correction_of
from compressor.plans.plan import CompressionPlan
from compressor.publishing.card.command import Command, sources_of
from compressor.publishing.card.facts import Active, Facts
from compressor.publishing.card.layers import Fates, experts_before, winners
from compressor.publishing.card.metadata import base_id
from compressor.words import counted, fenced, joined, label, markdown_table, named, one_line, shown

MOST_ALTERNATIVE = 4_000  # letters that describe a picture
REFITTED = {
    "ridge": "the down projections in closed form (ridge regression)",
    "tune": "the down projections in closed form, then router rows, gate, up and down projections by gradient steps",
}


def cited(name: str) -> str:
    """A strategy and, in brackets, what `moe-compress strategies` says of it with its paper, if it is installed."""
    try:
        summary = load_strategy(name).summary.rstrip(".")
    except CompressionError:
        summary = ""
    return f"{shown(name)} ({shown(summary)})" if summary else shown(name)


def base_name(plan: CompressionPlan) -> str:
    """The base in Markdown: a link to its revision on the Hub, or a folder's name."""
    name = base_id(plan)
    if name is None:
        return f'the local checkpoint "{shown(label(plan.source.model))}"'
    revision = shown(plan.source.revision)
    return f"[{shown(name)}](https://huggingface.co/{name}) (revision {revision})"


def introduction(facts: Facts) -> list[str]:
    """What it is, in one paragraph, with the strategies that won layers where several were tried."""
    plan = facts.plan
    before, layers = experts_before(plan), counted(len(plan.layers), "MoE layer")
    won = [f"{cited(name)} in {counted(count, 'layer')}" for name, count in winners(plan).items()]
    decided = f"; decided by {joined(won)}" if won else ""
    sentences = [
        f"This is {base_name(plan)} with {plan.experts} instead of {before} experts in each of its {layers}: "
        f"{Fates.of(plan)}.",
        f"Strategy: {cited(plan.strategy)}{decided}.",
        _corrected(plan),
        "It was made with moe-compressor and is an ordinary checkpoint of its architecture, with fewer experts.",
    ]
    return [" ".join(sentences), ""]


def _corrected(plan: CompressionPlan) -> str:
    if plan.correction is None:
        return "No weight was refitted afterwards."
    method = str(plan.correction.get("method"))
    figures = [correction_of(layer) for layer in plan.layers]
    better = sum(entry.get("kept") not in (None, "none") for entry in figures)
    what = f": {REFITTED[method]}" if method in REFITTED else ""
    return (
        f"What was left was then refitted to each layer's original output (correction {shown(method)}{what}), which "
        f"was kept in {better} of {counted(len(figures), 'layer')}."
    )


def comparison(facts: Facts) -> list[str]:
    """Base and compressed model, side by side."""
    gate, active = facts.gate, facts.active
    rows = [
        ["experts in each MoE layer", experts_before(facts.plan), str(facts.plan.experts), "", ""],
        ["parameters", *_numbers(facts.before.parameters, facts.after.parameters), ""],
        *([_active_row(active)] if active is not None else []),
        ["bytes of all tensors", *_numbers(facts.before.bytes, facts.after.bytes), ""],
        *([_task_row(task) for task in gate.tasks] if gate is not None else []),
    ]
    header = ["", "base", "this model", "change", "verdict"][: 5 if gate is not None else 4]
    note = "Parameters are stored elements, in whatever format."
    if active is not None:
        note += " Active parameters are all but the experts that a token is not sent to."
    return [
        "## Before and after", "",
        *markdown_table(header, (row[: len(header)] for row in rows), ("",)), "",
        note, "",
        *(_gate_notes(gate) if gate is not None else []),
    ]  # fmt: skip


def _numbers(before: int, after: int) -> list[str]:
    return [f"{before:,}", f"{after:,}", f"{100 * (after - before) / before:+.1f}%"]


def _active_row(active: Active) -> list[str]:
    name = "active parameters for a token"
    if active.before is None:
        return [name, "-", f"{active.after:,}", "", ""]
    return [name, *_numbers(active.before, active.after), ""]


def _task_row(task: TaskGate) -> list[str]:
    name = f"{shown(task.task)}, {shown(task.metric)} ({counted(task.items, 'item')})"
    drop = f"drop {change(task.drop, task.kind)}, at most {change(task.upper, task.kind)}"
    return [name, level(task.base), level(task.compressed), drop, task.verdict]


def _gate_notes(gate: GateResult) -> list[str]:
    judged = ((gate.base, gate.base_identity), (gate.compressed, gate.compressed_identity))
    base, made = (
        shown(label(name)) + (f" (commit {shown(identity['commit'])})" if "commit" in identity else "")
        for name, identity in judged
    )
    perplexity = any(task.kind == "likelihood" for task in gate.tasks)
    rise = ", of a perplexity its relative rise" if perplexity else ""
    return [
        f"**{named(one_line(verdict_line(gate), None))}**", "",
        f"The tasks compare {made} with {base}. A drop is base less compressed{rise}; at most: its one-sided upper "
        f"bound with confidence {100 * gate.confidence:g}%. {named(method(gate))}", "",
    ]  # fmt: skip


def making(facts: Facts, command: str | None, again: Command | None) -> list[str]:
    """The command, the text that was read, versions and digest; `command` is the one that was run, if it is known."""
    plan = facts.plan
    if command is not None:
        told = ["Made by this command, in which paths are shortened to names:", "", *fenced(command, "bash")]
    elif again is not None:
        told = [
            "This command asks for the same plan. It is rebuilt from the plan, so it says nothing of edits by hand; "
            "local files and folders stand in it by their names alone.", "",
            *fenced("\n".join(again.lines), "bash"),
        ]  # fmt: skip
    else:
        told = ["The plan does not record what it was asked for, so there is no command to repeat it.", ""]
    return [
        "## How it was made", "",
        *told,
        *_data(plan),
        f"- Plan: SHA-256 `{plan.digest()}`",
        f"- Source: {base_name(plan)}, fingerprint {shown(plan.source.fingerprint)}",
        f"- Versions: {joined([f'{shown(name)} {shown(version)}' for name, version in facts.versions.items()])}",
        *(["- Each layer was planned on what the compressed earlier layers put out."] if plan.sequential else []),
        "",
        "`compression.json` holds the whole plan with its coefficients.", "",
    ]  # fmt: skip


def _data(plan: CompressionPlan) -> list[str]:
    """The calibration sources with their digests, as a table."""
    if plan.calibration is None:
        return ["No text was read to make it.", ""]
    columns = ("source", "weight", "sequences", "tokens", "held out", "SHA-256 of the token ids")
    fields = ("weight", "samples", "tokens", "heldout_samples", "sha256")
    rows = [[shown(label(str(entry["source"]))), *(_cell(entry.get(name)) for name in fields)]
            for entry in sources_of(plan.calibration)]  # fmt: skip
    only = plan.calibration.get("only")
    return [
        "Calibration text:", "",
        *markdown_table(columns, rows, (columns[0], columns[-1])), "",
        *([f"Of these sources only {shown(label(str(only)))} decided.", ""] if only is not None else []),
    ]  # fmt: skip


def _cell(value: Any) -> str:
    if type(value) is int:
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else shown(value)


def loading(facts: Facts, repo_id: str) -> list[str]:
    """How to load it, by what is there."""
    lines = ["## How to load it", "", *([] if facts.only_graph else _transformers(facts, repo_id))]
    if facts.graph is None:
        return lines
    folder = f"model/{facts.graph.place}" if facts.graph.place else "model"
    return [
        *lines,
        "In ONNX Runtime; or from the terminal, once the repository is downloaded:", "",
        *fenced(f'hf download {repo_id} --local-dir model\nmoe-compress generate {folder} "Once upon a time"', "bash"),
        *fenced(f'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{folder}/model.onnx")', "python"),
    ]  # fmt: skip


def _transformers(facts: Facts, repo_id: str) -> list[str]:
    names = facts.config.get("architectures")
    found = str(names[0]) if isinstance(names, list) and names else ""
    name = found if found.isidentifier() and found.isascii() and not found.endswith("ForCausalLM") else ""
    class_name = name or "AutoModelForCausalLM"
    has_tokenizer = any((facts.folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
    code = [
        f"from transformers import {class_name}{', AutoTokenizer' if has_tokenizer else ''}", "",
        f'model = {class_name}.from_pretrained("{repo_id}", dtype="auto", device_map="auto")',
        *([f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}")'] if has_tokenizer else []),
    ]  # fmt: skip
    return [
        "In transformers (names and shapes of all tensors were checked against the stock model of version "
        f"{shown(facts.versions.get('transformers', 'unknown'))}; `device_map` needs the package accelerate):", "",
        *fenced("\n".join(code), "python"),
        "In vLLM, where it supports this architecture (not tested with this checkpoint):", "",
        *fenced(f"vllm serve {repo_id}", "bash"),
    ]  # fmt: skip


def picture(path: str, alternative: str) -> list[str]:
    """A picture with its alternative text."""
    return [f"![{named(one_line(alternative, MOST_ALTERNATIVE))}]({quote(path)})", ""]
