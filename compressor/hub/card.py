"""The model card of a compressed checkpoint, made of what was measured or recorded and of nothing else."""

import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from compressor.checkpoint.reader import INDEX_NAME, SINGLE_NAME, Checkpoint, Size
from compressor.checkpoint.source import ModelSource
from compressor.document.blocks import Block, Code, Details, Figure, Heading, Items, Link, Listing, Text, Words
from compressor.document.markdown import markdown
from compressor.document.picture import png
from compressor.errors import CompressionError, without_tokens
from compressor.evaluation.gate_report import card_metrics
from compressor.evaluation.gate_verdict import GateResult, TaskGate
from compressor.evaluation.judged import heldout_blocks
from compressor.formatting import counted, human_count, joined, label, one_line, share, span, without_paths
from compressor.model.constant_experts import NOT_STOCK
from compressor.model.inspection import stock_fault
from compressor.model.opened import OpenModel, open_model
from compressor.model.serving import FORMATS
from compressor.pipeline.outcome import Outcome
from compressor.recipe.document import changed, step_line
from compressor.recipe.plan import ExpertPlan, Source, correction_of, describe_split, parts_of
from compressor.recipe.recipe import RECIPE, recipe_of_plan, recipe_yaml
from compressor.recipe.registry import load_exporter, load_strategy
from compressor.recipe.steps_plan import CORRECT, PRUNE, QUANTIZE, Plan
from compressor.records import read_object
from compressor.report import page
from compressor.report.data import Measured, Report, all_dispositions, report_data
from compressor.report.figures import figures
from compressor.report.measuring import kept_measures
from compressor.run_record import COMPRESSION, read_record

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

ONNX_FILES = GRAPH, ONNX_RECORD = "model.onnx", "onnx_export.json"
ONNX_FOLDER = "onnx"
EMPTY: Mapping[str, Any] = MappingProxyType({})
CARD = "README.md"
TASK = "text-generation"
IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9.+-]*")  # of a licence
LANGUAGE = re.compile(r"[A-Za-z][A-Za-z0-9-]*")

Blocks = tuple[Block, ...]
MEASURED = ("similarity", "visits", "errors")  # figures of the last report that a card shows
MOST_TABLE = 150_000  # letters; what is longer nobody reads, and compression.json has it


@dataclass(frozen=True, slots=True)
class Facts:
    """What a card may say of a checkpoint: the outcome in its folder, and what its files hold."""

    folder: Path
    outcome: Report
    config: Mapping[str, Any]
    active: tuple[int | None, int] | None  # parameters less the experts that a token isn't routed to, before and after
    dtypes: Mapping[str, int]  # stored elements by dtype; empty where only a graph lies
    graph: str | None  # the folder in it of an exported ONNX graph with its record, "" for itself
    fault: str | None = None  # what stock transformers does wrong with quantised experts

    @property
    def strategies(self) -> tuple[str, ...]:
        """How experts were chosen, in the order of the steps; empty where none were."""
        chosen = [step for step in self.outcome.plan.steps if step.expert_plan is not None]
        return tuple(dict.fromkeys(str(step.options.get("strategy", step.name)) for step in chosen))


def entry_of(content: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object within JSON of a file that anybody may have edited; an empty one where there is none."""
    found = content.get(name)
    return found if isinstance(found, Mapping) else EMPTY


def without_folders(value: Any) -> Any:
    """A value of an option in which paths are names."""
    if isinstance(value, Mapping):
        return {name: without_folders(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(inner) for inner in value]
    return label(value) if isinstance(value, str) else value


def read_facts(folder: Path, gate: GateResult | None = None, measured: Measured | None = None) -> Facts:
    """Everything that a card says, from the files in `folder`; raises `CompressionError` where they disagree."""
    if not (folder / COMPRESSION).is_file():
        raise CompressionError(
            f"{folder} has no {COMPRESSION}, so nothing is known about how it was made; name an output of "
            "moe-compress, or write its README.md by hand"
        )
    outcome = report_data(folder, measured, gate=gate)
    if outcome.recorded_digest != outcome.plan.digest():
        raise CompressionError(f"{folder / COMPRESSION}: its plan_digest is not its plan's; restore the file")
    if (result := outcome.gate) is not None:  # with names that YAML and a web page can hold

        def shown(row: TaskGate) -> TaskGate:
            return replace(row, task=one_line(row.task), metric=one_line(row.metric), version=one_line(row.version))

        tasks, pooled = tuple(map(shown, result.tasks)), result.pooled and shown(result.pooled)
        base, compressed, options = label(result.base), label(result.compressed), without_folders(result.options)
        result = replace(result, base=base, compressed=compressed, tasks=tasks, pooled=pooled, options=options)
        outcome = replace(outcome, gate=result)
    has_weights = any((folder / name).is_file() for name in (SINGLE_NAME, INDEX_NAME))
    graphs = [place for place in ("", ONNX_FOLDER) if all((folder / place / name).is_file() for name in ONNX_FILES)]
    if not has_weights and "" not in graphs:
        raise CompressionError(f"{folder} has neither {SINGLE_NAME} nor {GRAPH}; name an output of moe-compress")
    model = None
    if has_weights:
        with suppress(CompressionError):  # as for constants
            model = open_model(ModelSource(str(folder), None, folder), device="cpu")
    return Facts(
        folder=folder,
        outcome=outcome,
        config=read_object(folder / "config.json"),
        active=_active_parameters(model, outcome) if model is not None else None,
        dtypes=_check_weights(folder, outcome.after) if has_weights else {},
        graph=graphs[0] if graphs else None,
        fault=stock_fault(model) if model is not None else None,
    )


def _check_weights(folder: Path, recorded: Size) -> dict[str, int]:
    """Stored elements by dtype; raises `CompressionError` unless the bytes are as many as the record says."""
    tensors = Checkpoint(folder).tensors.values()
    counted = Size.of(tensors)
    if counted.bytes != recorded.bytes:  # of packed weights, the record counts what they stand for
        raise CompressionError(
            f"the weights in {folder} hold {counted.bytes} bytes, its {COMPRESSION} says {recorded.bytes}; they do not "
            "belong together, compress again"
        )
    dtypes = Counter[str]()
    for tensor in tensors:
        dtypes[tensor.dtype] += math.prod(tensor.shape)
    return dict(sorted(dtypes.items(), key=lambda entry: (-entry[1], entry[0])))


def _active_parameters(model: OpenModel, outcome: Outcome) -> tuple[int | None, int] | None:
    """Counted from headers by the stock model's layout; None where stored elements are not parameters of one expert.

    The base's alone are None where it stores its tensors in another way.
    """
    layout, towers = model.layout, {layer.unit.rstrip("0123456789") for layer in model.architecture.layers}
    if layout.quantized or not layout.regular or len(towers) > 1:
        return None
    plan, before, after = outcome.expert_plan, outcome.before.parameters, outcome.after.parameters
    expert, row = Counter[str](), Counter[str]()  # by layer: elements of one expert, and of its router row
    for name, role in layout.roles.items():
        info, counts = model.checkpoint.tensors[name], row if role.is_router else expert
        if role.kind == "fused":
            counts[role.layer] += info.parameters // info.shape[role.dim]
        elif role.kind == "expert" and role.expert == 0:
            counts[role.layer] += info.parameters
    if set(expert) != {layer.module for layer in plan.layers}:
        return None  # layers that share their experts
    idle = sum((plan.experts - layer.top_k) * expert[layer.module] for layer in plan.layers)
    gone = sum((layer.experts - plan.experts) * expert[layer.module] for layer in plan.layers)
    parts = parts_of(outcome.plan.split)
    rows = sum((layer.experts // parts - plan.experts) * row[layer.module] for layer in plan.layers)
    same = plan.top_k is None and before - after == gone + rows
    return before - gone - idle if same else None, after - idle


@dataclass(frozen=True, slots=True)
class Card:
    """README.md with its metadata, and the pictures that it shows."""

    text: str
    pictures: Mapping[str, bytes]  # PNG by path in the repository


def card_text(
    folder: Path,
    repo_id: str,
    gate: GateResult | None = None,
    *,
    command: str | None = None,
    base: Path | None = None,
    measured: Measured | None = None,
) -> Card:
    """The card of the checkpoint in `folder` as the repository `repo_id`; raises `CompressionError` if it cannot be.

    `gate` is by default the result beside the weights, if it is about them. `command` is the one that was run, `base`
    the folder of a local base, whose card gives the licence, and `measured` what a report found, to be shown too.
    """
    if not is_hub_id(repo_id):
        raise CompressionError(f"{repo_id!r} is no name of a repository on the Hub; write it as owner/name")
    facts = read_facts(folder, gate, measured)
    data, plan, name = facts.outcome, facts.outcome.plan, repo_id.rpartition("/")[2]
    names = ("experts", "gate", "distillation", *(MEASURED if measured else ()))
    drawn = {figure.name: figure for figure in figures(data, names)}
    images = {figure: f"images/{figure}.png" for figure in drawn}
    header = metadata(facts, repo_id, base_metadata(plan.source, base))

    def pictures(*names: str) -> list[Figure]:
        return [drawn[name] for name in names if name in drawn]

    blocks = (
        Heading(one_line(name), 1),
        *introduction(facts),
        *comparison(facts),
        *pictures("gate", "distillation"),
        *provenance(facts, command, again(plan, name)),
        Heading("Experts"),
        *pictures("experts"),
        *experts_details(data.expert_plan),
        *pictures(*MEASURED),
        *loading(facts, repo_id),
        *limits(facts, header.get("license") is not None),
    )
    text = without_tokens(f"---\n{header.to_yaml()}\n---\n\n{markdown(blocks, images)}")
    return Card(text, {images[name]: png(figure.title, figure.drawings) for name, figure in drawn.items()})


def known_here(folder: Path) -> dict[str, Any]:
    """What only this machine knows of an output, as arguments of `card_text`: command, local base, measures."""
    record, measured = read_record(folder), kept_measures(folder)
    base = Path(record.source) if record is not None and record.revision is None else None
    return {
        "command": shlex.join(record.command) if record is not None and record.command else None,
        "base": base if base is not None and base.is_dir() else None,
        "measured": measured,
    }


Again = tuple[str, tuple[str, ...]]  # a recipe's YAML, and the command lines that carry it out


def again(plan: Plan, out: str) -> Again | None:
    """What asks for this plan again and writes it to `out`; None where the plan does not record all that it takes.

    A plan of one source of several (`--per-source`) needs two commands. Local models and text files are named without
    their folders.
    """
    texts = [text for text in (plan.calibration, *(step.text for step in plan.steps)) if text is not None]
    if not all(isinstance(text.get("asked"), Mapping) for text in texts):
        return None
    try:
        for number, step in enumerate(plan.steps):
            options = {name: without_folders(value) for name, value in step.options.items()}
            if step.name == PRUNE and "options" in options:  # a strategy's own, which stay as they are
                options["options"] = dict(step.options["options"])
            plan = plan.with_entry(number, options=options)
        made = recipe_of_plan(plan).model_copy(update={"model": label(plan.source.model)})
    except CompressionError:  # a step that is not installed, or options that were edited
        return None
    command = shlex.join(["moe-compress", "compress", RECIPE, "-o", one_line(out)])
    return recipe_yaml(made).decode().rstrip(), (command,)


def cited(name: str) -> str:
    """A strategy and, in brackets, what `list strategies` says of it with its paper, if it is installed."""
    try:
        summary = load_strategy(name).summary.rstrip(".")
    except CompressionError:
        summary = ""
    return one_line(name) + (f" ({one_line(summary)})" if summary else "")


def introduction(facts: Facts) -> Blocks:
    """What it is, in one paragraph, with the strategies that won layers where several were tried."""
    outcome, expert_plan, split = facts.outcome, facts.outcome.expert_plan, facts.outcome.plan.split
    fewer = ", with fewer experts" if expert_plan.layers else ""
    kind = f" It is an ordinary checkpoint of its architecture{fewer}."
    layers = counted(len(expert_plan.layers), "MoE layer")
    after_split = f", after a split of {describe_split(split)}" if split else ""
    if expert_plan.has_constants:
        replaced = sum(len(layer.constants) for layer in expert_plan.layers)
        before = sum(layer.experts for layer in expert_plan.layers)
        what = (
            f" in which constants stand for {replaced:,} of the {before:,} experts of its {layers}; "
            f"{span(len(layer.groups) for layer in expert_plan.layers)} stay in each (MoNE, arXiv:2507.00390). The "
            "routers are whole."
        )
        kind = f" {NOT_STOCK[0].upper()}{NOT_STOCK[1:]}."
    elif not expert_plan.layers:
        same = " The sub-experts compute what the base's experts do, up to rounding." if split else ""
        what = f", of which all experts stay{after_split}.{same}"
    else:
        winners = Counter(won for layer in expert_plan.layers if isinstance(won := layer.figures.get("won"), str))
        won = [f"{cited(name)} in {counted(count, 'layer')}" for name, count in sorted(winners.items())]
        decided = f"; decided by {joined(won)}" if won else ""
        routed = f" A token is routed to {expert_plan.top_k} of them." if expert_plan.top_k is not None else ""
        what = (
            f" with {expert_plan.experts} instead of {span(layer.experts for layer in expert_plan.layers)} experts "
            f"in each of its {layers}{after_split}: {all_dispositions(expert_plan.layers)}.{routed} "
            f"Strategy: {', then '.join(map(cited, facts.strategies))}{decided}."
        )
    if outcome.quantized:
        what += f" {step_line(outcome.quantized)}."
        kind = ""
    made = f"{what} It was made with moe-compressor.{kind}"
    source = outcome.plan.source
    base: Words = f'the local checkpoint "{label(source.model)}"'
    if (name := base_id(source)) is not None:
        base = Link(name, f"https://huggingface.co/{name}"), f" (revision {one_line(str(source.revision))})"
    return (Text(("This is ", base, made)),)


def comparison(facts: Facts) -> Blocks:
    """Base and compressed model, side by side."""
    (table,) = page.sizes(facts.outcome)
    note = "Parameters are weights, in whatever format, without the scales of quantised ones."
    if facts.active is not None:
        before, after = facts.active
        known = ("-", "-", "-") if before is None else (human_count(before), share(after, before), f"{before:,}")
        row = ("active parameters", known[0], human_count(after), known[1], known[2], f"{after:,}")
        table = replace(table, rows=(*table.rows, row))
        note += " Active parameters are all but the experts that a token is not routed to."
    gate = page.gate(facts.outcome) if facts.outcome.gate is not None else ()
    heldout = facts.outcome.heldout
    sources = () if heldout is None else heldout_blocks(heldout)
    return Heading("Before and after"), table, Text(note), *sources, *gate


def provenance(facts: Facts, command: str | None, again: Again | None) -> Blocks:
    """The recipe of all steps, the text that was read, versions and digest; `command` is the last one, if known."""
    repeated: Blocks = (Text("The plan does not record what it was made with, so there is no recipe to repeat it."),)
    recipe, commands = again or ("", ())
    if recipe:
        repeated = (
            Text(
                "This recipe makes the same plan, all steps in one run. It is made from the plan, so it has no "
                "edits by hand; local files and folders are in it by their names alone."
            ),
            Listing(recipe, "yaml"),
            Listing("\n".join(commands), "bash"),
        )
    ran: Blocks = ()
    if command is not None:
        title = "The last command that was run, in which paths are shortened to names:"
        ran = Text(title), Listing(without_paths(command), "bash")
    whole = (Code("compression.json"), " holds the whole plan with its coefficients.")
    return Heading("How it was made"), *repeated, *ran, page.made_with(facts.outcome), Text(whole)


def experts_details(plan: ExpertPlan) -> Blocks:
    """What became of each expert, layer by layer, as a table that folds away."""
    if not plan.layers:
        return (Text("All experts stay."),)
    table, legend = page.experts(plan)
    if sum(len(str(cell)) for row in table.rows for cell in row) > MOST_TABLE:
        record = Code("compression.json"), " has it under ", Code("plan"), "."
        return legend, Text(("The list is too long for a page: ", *record))
    return (Details("Layer by layer", (legend, table)),)


def loading(facts: Facts, repo_id: str) -> Blocks:
    """How to load it, by what is there."""
    blocks: list[Block] = [Heading("How to load it")]
    serve = Listing(f"vllm serve {repo_id}", "bash")
    if facts.outcome.expert_plan.has_constants:
        vllm = (
            "In vLLM, from the version on that serves the config field approximate_experts, where it supports this "
            "architecture unquantised (not tested with this checkpoint):"
        )
        blocks += [Text(vllm), serve]
    elif facts.dtypes:
        names = facts.config.get("architectures")
        name = str(names[0]) if isinstance(names, list) and names else ""
        is_own = name.isidentifier() and name.isascii() and not name.endswith("ForCausalLM")
        model_class = name if is_own else "AutoModelForCausalLM"
        has_tokenizer = any((facts.folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
        code = [
            f"from transformers import {model_class}{', AutoTokenizer' if has_tokenizer else ''}",
            "",
            f'model = {model_class}.from_pretrained("{repo_id}", dtype="auto", device_map="auto")',
            *([f'tokenizer = AutoTokenizer.from_pretrained("{repo_id}")'] if has_tokenizer else []),
        ]
        checked = (
            "In transformers (names and shapes of all tensors were checked against the stock model of version "
            f"{one_line(str(facts.outcome.versions.get('transformers', 'unknown')))}; "
        )
        needs = " needs the package accelerate, and the format "
        package = (needs, Code("compressed-tensors")) if facts.outcome.quantized else (" needs the package accelerate",)
        stock: list[Block] = [
            Text((checked, Code("device_map"), *package, "):")),
            Listing("\n".join(code), "python"),
        ]
        fault, scheme = one_line(facts.fault or ""), scheme_of(facts.outcome)
        blocks.extend([Text(f"{fault[0].upper()}{fault[1:]}.")] if fault else stock)
        if scheme is None or scheme in FORMATS["vllm"]:
            vllm = "In vLLM, where it supports this architecture (not tested with this checkpoint):"
            blocks += [Text(vllm), serve]
    if facts.graph is not None:
        folder = f"model/{facts.graph}" if facts.graph else "model"
        shell = f'hf download {repo_id} --local-dir model\nmoe-compress generate {folder} "Once upon a time"'
        session = f'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{folder}/model.onnx")'
        blocks += [
            Text("In ONNX Runtime; or from the terminal, once the repository is downloaded:"),
            Listing(shell, "bash"),
            Listing(session, "python"),
            *load_exporter("onnx").read_summary(facts.folder / facts.graph).describe(),
        ]
    return tuple(blocks)


def limits(facts: Facts, has_licence: bool) -> Blocks:
    """The last section; `has_licence` if the card inherits one."""
    outcome, sentences = facts.outcome, list[str]()
    if outcome.gate is None:
        sentences.append(
            "Accuracy was not measured: there is no gate result for these weights. Compare it with the base on "
            "your own tasks before you use it."
        )
    else:
        sentences.append("Accuracy was measured on the tasks above and on nothing else.")
    if outcome.plan.calibration is not None:
        sentences.append("What experts do on other kinds of text than the calibration text did not count.")
    elif outcome.expert_plan.layers:
        sentences.append("No text was read to choose experts: weights alone decided.")
    sentences.append(_refitted(outcome))
    stored = joined([f"{one_line(name)} ({count:,} elements)" for name, count in facts.dtypes.items()])
    if not facts.dtypes:
        sentences.append("There are no safetensors here, only the ONNX graph.")
    elif quantization := entry_of(facts.config, "quantization_config"):
        kind = one_line(str(quantization.get("quant_method")))
        as_what = "were quantised by the step quantize" if outcome.quantized else "are quantised as the base's are"
        sentences.append(f"The weights {as_what} ({kind}), stored as {stored}.")
        if scheme_of(outcome) == "fp8":
            sentences.append("Servers round activations to FP8, too; what that costs was not measured.")
    else:
        sentences.append(f"The weights are not quantised; they are stored as {stored}.")
    if outcome.expert_plan.has_constants:
        sentences.append(
            "The format was checked by the tool's own forward: the written tensors give the logits that the base gives "
            "with these constants."
        )
    if not has_licence:
        sentences.append("No licence was found in a card of the base; the base's own terms hold.")
    return Heading("Limits"), Items(tuple(filter(None, sentences)))


def _refitted(outcome: Outcome) -> str:
    """What was refitted or trained, and what that leaves; a step that changed nothing does not count."""
    taken, found = {step["name"] for step in outcome.steps if changed(step)}, list[str]()
    methods = [one_line(str(step.options.get("method", "tune"))) for step in outcome.plan.of(CORRECT)]
    layers = outcome.expert_plan.layers
    if methods:
        figures = [correction_of(layer) for layer in layers]
        better = sum(entry.get("kept") not in (None, "none") for entry in figures)
        found.append(
            f"Reconstruction ({', then '.join(methods)}) refitted the remaining experts to each layer's base output on "
            f"the calibration text and was kept in {better} of {counted(len(figures), 'layer')}; the errors before and "
            "after are those of single layers and say nothing about accuracy."
        )
    if "distill" in taken:
        found.append(
            "Distillation trained the model end to end toward the base on text that its maker chose; what the base "
            "gets wrong, and what that text does not show, did not come closer to right."
        )
    elif "routers" in taken:
        found.append("Router calibration moved the routers alone toward the base's next token, on text of its maker's.")
    elif methods:
        found.append("Nothing was fine-tuned end to end.")
    elif not taken:
        found.append("Nothing was refitted or fine-tuned" + (" after experts were taken out." if layers else "."))
    return " ".join(found)


def scheme_of(outcome: Outcome) -> str | None:
    """Numbers that weights were rounded to; None if none were."""
    return one_line(str(outcome.quantized["options"].get("scheme", "int4"))) if outcome.quantized else None


def relation(outcome: Outcome) -> str:
    """Of the Hub's four relations (adapter, merge, quantized, finetune) the one to the base.

    "merge" is for several bases, "quantized" for what was only rounded; unsaid, the Hub would guess that where it sees
    ONNX files.
    """
    return "quantized" if {step.name for step in outcome.plan.steps} == {QUANTIZE} else "finetune"


def is_hub_id(name: str) -> bool:
    """Whether the Hub could have a repository of this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def base_id(source: Source) -> str | None:
    """The base's repository on the Hub; None for a local folder, whose name may be somebody else's there."""
    return source.model if source.revision is not None and is_hub_id(source.model) else None


def base_metadata(source: Source, base: Path | None = None) -> Mapping[str, Any]:
    """The metadata of the base's card, in its folder `base` or on the Hub; empty where it cannot be had or read."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.repocard import metadata_load

    try:
        if base is not None:
            path = base / CARD
        elif (name := base_id(source)) is not None:
            path = Path(hf_hub_download(name, CARD, revision=source.revision))
        else:
            return {}
        found = metadata_load(path)
    except Exception:  # no network, no card, no YAML: there is nothing to inherit, and nothing depends on it
        return {}
    return found if isinstance(found, Mapping) else {}


def licence(base: Mapping[str, Any], folder: Path, repository: str | None, revision: str | None) -> dict[str, Any]:
    """The base's licence as it is; what is no identifier becomes `other`, with its text as the name."""
    given = base.get("license")
    if isinstance(given, list) and given and all(_matches(IDENTIFIER, entry) for entry in given):
        return {"license": [str(entry) for entry in given]}
    if not isinstance(given, str) or not given.strip():
        return {}
    known = _matches(IDENTIFIER, given)
    found = {"license": given if known else "other"}
    name, link = base.get("license_name") if known else given, base.get("license_link")
    if isinstance(name, str) and name.strip():
        found["license_name"] = one_line(name)
    if isinstance(link, str):
        link = one_line(link)
        if re.match(r"https?://", link) or (Path(link).name == link and (folder / link).is_file()):
            found["license_link"] = link
        elif repository is not None and not link.startswith("/") and ".." not in Path(link).parts:
            found["license_link"] = f"https://huggingface.co/{repository}/blob/{revision}/{link}"
    return found


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def languages(base: Mapping[str, Any]) -> list[str] | None:
    """The base's languages, without what is no language's code."""
    given = base.get("language")
    entries = given if isinstance(given, list) else [given]
    codes = ["no" if entry is False else entry for entry in entries]  # which is what YAML makes of Norwegian
    return [str(code) for code in codes if _matches(LANGUAGE, code)] or None


def metadata(facts: Facts, repo_id: str, base: Mapping[str, Any]) -> "ModelCardData":
    """The card's metadata; `base` is that of the base's card."""
    from huggingface_hub import ModelCardData

    outcome, layers = facts.outcome, facts.outcome.expert_plan.layers
    repository, revision = base_id(outcome.plan.source), outcome.plan.source.revision
    results = [] if outcome.gate is None else card_metrics(outcome.gate)
    pipeline = base.get("pipeline_tag")
    library = "vllm" if outcome.expert_plan.has_constants else "transformers"
    return ModelCardData(
        **licence(base, facts.folder, repository, revision),
        language=languages(base),
        base_model=repository,
        **({"base_model_relation": relation(outcome)} if repository is not None else {}),
        library_name=library if facts.dtypes else "onnx",
        pipeline_tag=pipeline if _matches(IDENTIFIER, pipeline) else TASK,
        tags=[
            "moe",
            "moe-compressor",
            *map(one_line, facts.strategies),
            *(["merged", "expert-merging"] if any(layer.merged for layer in layers) else []),
            *(["pruned", "expert-pruning"] if any(layer.dropped for layer in layers) else []),
            *(["compressed-tensors", scheme] if (scheme := scheme_of(outcome)) is not None else []),
            *(["onnx"] if facts.graph is not None else []),
        ],
        **({"model_name": repo_id.rpartition("/")[2], "eval_results": results} if results else {}),
    )
