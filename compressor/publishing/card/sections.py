"""The text of a model card, section by section, as blocks; every figure in it was measured or is recorded."""

from collections.abc import Mapping
from typing import Any

from compressor.document.blocks import Block, Code, Heading, Items, Link, Listing, Strong, Table, Text, Words
from compressor.errors import CompressionError
from compressor.gates.content import change, level, method, verdict_line
from compressor.gates.verdict import GateResult, TaskGate
from compressor.planning.further import separate, sources_of
from compressor.publishing.card.command import Command
from compressor.publishing.card.facts import Active, Facts
from compressor.publishing.card.layers import Fates, experts_before, winners
from compressor.publishing.card.metadata import base_id
from compressor.recipe.layer import correction_of
from compressor.recipe.plan import CompressionPlan
from compressor.recipe.registry import load_strategy
from compressor.recipe.split import told_split
from compressor.recipe.whole import KEPT_WHOLE
from compressor.words import counted, joined, label, one_line, short

Blocks = tuple[Block, ...]

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
    return one_line(name) + (f" ({one_line(summary)})" if summary else "")


def base_name(plan: CompressionPlan) -> Words:
    """The base: a link to its revision on the Hub, or a folder's name."""
    name = base_id(plan)
    if name is None:
        return f'the local checkpoint "{label(plan.source.model)}"'
    return Link(name, f"https://huggingface.co/{name}"), f" (revision {one_line(str(plan.source.revision))})"


def introduction(facts: Facts) -> Blocks:
    """What it is, in one paragraph, with the strategies that won layers where several were tried."""
    plan = facts.plan
    if plan.split is not None and plan.strategy == KEPT_WHOLE:
        return (Text(("This is ", base_name(plan), _split_told(plan, plan.split))),)
    if plan.constants is not None:
        return (Text(("This is ", base_name(plan), _substituted_told(plan))),)
    won = [f"{cited(name)} in {counted(count, 'layer')}" for name, count in winners(plan).items()]
    decided = f"; decided by {joined(won)}" if won else ""
    finer = f" after a split of {told_split(plan.split)}" if plan.split is not None else ""
    visits = f" A token visits {plan.top_k} of them." if plan.top_k is not None else ""
    said = (
        f" with {plan.experts} instead of {experts_before(plan)} experts in each of its "
        f"{counted(len(plan.layers), 'MoE layer')}{finer}: {Fates.of(plan)}.{visits} "
        f"Strategy: {cited(plan.strategy)}{decided}. "
        f"{_corrected(plan)} {_baked(plan)}{_recovered(plan)}It was made with moe-compressor and is an ordinary "
        "checkpoint of its architecture, with fewer experts."
    )
    return (Text(("This is ", base_name(plan), said)),)


def _split_told(plan: CompressionPlan, split: Mapping[str, Any]) -> str:
    """That experts were split and none was lost."""
    return (
        f" with each of the {split.get('experts')} experts in its {counted(len(plan.layers), 'MoE layer')} split into "
        f"{split.get('parts')} narrower ones, {plan.experts} in all, of which a token visits so many times more. They "
        f"compute what the original's do, up to rounding. {_recovered(plan)}It was made with moe-compressor and is an "
        "ordinary checkpoint of its architecture."
    )


def _substituted_told(plan: CompressionPlan) -> str:
    """How many experts are constants, and that stock transformers cannot load them."""
    gone, before = sum(len(layer.constants) for layer in plan.layers), sum(layer.experts for layer in plan.layers)
    counts = sorted({len(layer.groups) for layer in plan.layers})
    each = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return (
        f" in which constants stand for {gone:,} of the {before:,} experts of its "
        f"{counted(len(plan.layers), 'MoE layer')}; {each} stay in each (MoNE, arXiv:2507.00390). The routers are "
        f"whole. {_corrected(plan)} It was made with moe-compressor. Stock transformers cannot load it; vLLM can, from "
        "the version on that serves the config field approximate_experts."
    )


def _corrected(plan: CompressionPlan) -> str:
    if plan.correction is None:
        changed = plan.baked or plan.recovered
        return "No layer was refitted by itself afterwards." if changed else "No weight was refitted afterwards."
    method = str(plan.correction.get("method"))
    figures = [correction_of(layer) for layer in plan.layers]
    better = sum(entry.get("kept") not in (None, "none") for entry in figures)
    what = f": {REFITTED[method]}" if method in REFITTED else ""
    return (
        f"What was left was then refitted to each layer's original output (correction {one_line(method)}{what}), which "
        f"was kept in {better} of {counted(len(figures), 'layer')}."
    )


def _baked(plan: CompressionPlan) -> str:
    """What a bake brought, on text that it was not made of; nothing where none was asked for."""
    if plan.bake is None:
        return ""
    if not plan.baked:
        return "A bake into the routers was tried and changed nothing, for held-out text liked no step of it. "
    result = plan.bake["result"]
    taken = result.get("taken", plan.bake.get("method"))
    return (
        "The routers were moved toward the original's next-token distributions (bake: "
        f"{one_line(str(taken))}), {_nearer(result)}"
    )


def _nearer(result: Mapping[str, Any]) -> str:
    return (
        f"from which it was then {short(result.get('after'))} instead of {short(result.get('before'))} nats per token "
        "away on text held out of that. "
    )


def _recovered(plan: CompressionPlan) -> str:
    """What a recovery brought, on text that it was not trained on; nothing where none was asked for."""
    if plan.recover is None:
        return ""
    if not plan.recovered:
        return "A recovery was tried and changed nothing, for held-out text came no nearer to the original. "
    result = plan.recover["result"]
    return (
        f"It was trained toward the original's next-token distributions (recovery: {_trained(plan.recover)}), "
        f"{_nearer(result)}"
    )


def _trained(asked: Mapping[str, Any]) -> str:
    return f"{one_line(str(asked.get('method')))}, {one_line(str(asked.get('steps')))} steps at most"


def comparison(facts: Facts) -> Blocks:
    """Base and compressed model, side by side."""
    gate, active = facts.gate, facts.active
    rows = [
        ("experts in each MoE layer", experts_before(facts.plan), str(facts.plan.experts), "", ""),
        ("parameters", *_numbers(facts.before.parameters, facts.after.parameters), ""),
        *([_active_row(active)] if active is not None else []),
        ("bytes of all tensors", *_numbers(facts.before.bytes, facts.after.bytes), ""),
        *([_task_row(task) for task in gate.tasks] if gate is not None else []),
    ]
    columns = ("", "base", "this model", "change", "verdict")[: 5 if gate is not None else 4]
    note = "Parameters are stored elements, in whatever format."
    if active is not None:
        note += " Active parameters are all but the experts that a token is not sent to."
    table = Table("", columns, tuple(row[: len(columns)] for row in rows))
    return Heading("Before and after"), table, Text(note), *(_gate_notes(gate) if gate is not None else ())


def _numbers(before: int, after: int) -> tuple[str, str, str]:
    return f"{before:,}", f"{after:,}", f"{100 * (after - before) / before:+.1f}%"


def _active_row(active: Active) -> tuple[str, ...]:
    name = "active parameters for a token"
    if active.before is None:
        return name, "-", f"{active.after:,}", "", ""
    return name, *_numbers(active.before, active.after), ""


def _task_row(task: TaskGate) -> tuple[str, ...]:
    name = f"{one_line(task.task)}, {one_line(task.metric)} ({counted(task.items, 'item')})"
    drop = f"drop {change(task.drop, task.kind)}, at most {change(task.upper, task.kind)}"
    return name, level(task.base), level(task.compressed), drop, task.verdict


def _gate_notes(gate: GateResult) -> Blocks:
    judged = ((gate.base, gate.base_identity), (gate.compressed, gate.compressed_identity))
    base, made = (
        label(name) + (f" (commit {one_line(str(identity['commit']))})" if "commit" in identity else "")
        for name, identity in judged
    )
    rise = ", of a perplexity its relative rise" if any(task.kind == "likelihood" for task in gate.tasks) else ""
    how = (
        f"The tasks compare {made} with {base}. A drop is base less compressed{rise}; at most: its one-sided upper "
        f"bound with confidence {100 * gate.confidence:g}%. {method(gate)}"
    )
    return Text(Strong(one_line(verdict_line(gate), None))), Text(how)


def making(facts: Facts, command: str | None, again: Command | None) -> Blocks:
    """The commands, the text that was read, versions and digest; `command` is the last that was run, if it is known.

    Where there were several, those rebuilt from the plan stand there, if all of them can be.
    """
    plan = facts.plan
    several = bool(separate(plan))
    told: Blocks = (Text("The plan does not record what it was asked for, so there is no command to repeat it."),)
    if command is not None and (again is None or not several):
        which = "By this command as the last of several" if several else "Made by this command"
        told = Text(f"{which}, in which paths are shortened to names:"), Listing(command, "bash")
    elif again is not None:
        said = (
            "These commands, one after another, ask for the same again. They are rebuilt from the plan, so they say "
            "nothing of edits by hand; local files and folders stand in them by their names alone."
            if several
            else "This command asks for the same plan. It is rebuilt from the plan, so it says nothing of edits by "
            "hand; local files and folders stand in it by their names alone."
        )
        told = Text(said), Listing("\n".join(again.lines), "bash")
    versions = joined([f"{one_line(name)} {one_line(str(version))}" for name, version in facts.versions.items()])
    items: tuple[Words, ...] = (
        ("Plan: SHA-256 ", Code(plan.digest())),
        ("Source: ", base_name(plan), f", fingerprint {one_line(plan.source.fingerprint)}"),
        f"Versions: {versions}",
        *(["Each layer was planned on what the compressed earlier layers put out."] if plan.sequential else []),
    )
    whole = (Code("compression.json"), " holds the whole plan with its coefficients.")
    return Heading("How it was made"), *told, *_data(plan), Items(items), Text(whole)


def _data(plan: CompressionPlan) -> Blocks:
    """The sources of the calibration, the bake and the recovery with their digests, a table for each."""
    texts = (("the bake", plan.bake), ("the recovery", plan.recover))
    later = [_sources(f"Text of {name}", entry["calibration"]) for name, entry in texts if entry is not None]
    if plan.calibration is None:
        return Text("No text was read to choose experts." if later else "No text was read to make it."), *later
    table, only = _sources("Calibration text", plan.calibration), plan.calibration.get("only")
    told = () if only is None else (Text(f"Of these sources only {label(str(only))} decided."),)
    return table, *told, *later


def _sources(title: str, calibration: Mapping[str, Any]) -> Table:
    columns = ("source", "weight", "sequences", "tokens", "held out", "SHA-256 of the token ids")
    fields = ("weight", "samples", "tokens", "heldout_samples", "sha256")
    rows = tuple(
        (label(str(entry["source"])), *(_cell(entry.get(name)) for name in fields)) for entry in sources_of(calibration)
    )
    return Table(title, columns, rows, frozenset({columns[-1]}))


def _cell(value: Any) -> str:
    if type(value) is int:
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else one_line(str(value))


def loading(facts: Facts, repo_id: str) -> Blocks:
    """How to load it, by what is there."""
    blocks: Blocks = (Heading("How to load it"), *(() if facts.only_graph else _transformers(facts, repo_id)))
    if facts.graph is None:
        return blocks
    folder = f"model/{facts.graph.place}" if facts.graph.place else "model"
    return (
        *blocks,
        Text("In ONNX Runtime; or from the terminal, once the repository is downloaded:"),
        Listing(f'hf download {repo_id} --local-dir model\nmoe-compress generate {folder} "Once upon a time"', "bash"),
        Listing(f'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{folder}/model.onnx")', "python"),
    )


def _transformers(facts: Facts, repo_id: str) -> Blocks:
    names = facts.config.get("architectures")
    found = str(names[0]) if isinstance(names, list) and names else ""
    name = found if found.isidentifier() and found.isascii() and not found.endswith("ForCausalLM") else ""
    class_name = name or "AutoModelForCausalLM"
    has_tokenizer = any((facts.folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
    code = [
        f"from transformers import {class_name}{', AutoTokenizer' if has_tokenizer else ''}",
        "",
        f'model = {class_name}.from_pretrained("{repo_id}", dtype="auto", device_map="auto")',
        *([f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}")'] if has_tokenizer else []),
    ]
    checked = (
        "In transformers (names and shapes of all tensors were checked against the stock model of version "
        f"{one_line(str(facts.versions.get('transformers', 'unknown')))}; "
    )
    if facts.plan.constants is not None:
        return (
            Text(
                "Stock transformers cannot load it, for its constants. In vLLM, from the version on that serves the "
                "config field approximate_experts, where it supports this architecture unquantised (not tested with "
                "this checkpoint):"
            ),
            Listing(f"vllm serve {repo_id}", "bash"),
        )
    return (
        Text((checked, Code("device_map"), " needs the package accelerate):")),
        Listing("\n".join(code), "python"),
        Text("In vLLM, where it supports this architecture (not tested with this checkpoint):"),
        Listing(f"vllm serve {repo_id}", "bash"),
    )
