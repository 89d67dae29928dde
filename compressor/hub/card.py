"""The model card of a compressed checkpoint, made of what was measured or recorded and of nothing
else."""

import logging
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.checkpoint.reader import INDEX_NAME, SINGLE_NAME, Checkpoint, Size
from compressor.checkpoint.source import ModelSource
from compressor.data.sources import hub_id, read_blend, short_names
from compressor.document.blocks import (
    Block,
    Code,
    Details,
    Heading,
    Items,
    Link,
    Listing,
    Text,
    Words,
)
from compressor.document.markdown import markdown
from compressor.document.picture import png
from compressor.errors import CompressionError, without_tokens
from compressor.files import GRAPH
from compressor.formatting import (
    counted,
    human_count,
    joined,
    label,
    one_line,
    share,
    span,
    without_paths,
)
from compressor.model.constant_experts import NOT_STOCK
from compressor.model.opened import open_model, served_model, shared_experts
from compressor.model.serving import Served, advise
from compressor.pipeline.outcome import read_plan
from compressor.quality_gate.report import card_metrics
from compressor.quality_gate.verdict import GateResult
from compressor.recipe.document import changed, step_line
from compressor.recipe.plan import KEPT_WHOLE, Source, correction_of, describe_split
from compressor.recipe.recipe import RECIPE, recipe_of_plan, recipe_yaml
from compressor.recipe.registry import load_exporter, load_strategy
from compressor.recipe.steps_plan import PRUNE, QUANTIZE, Plan
from compressor.records import read_object
from compressor.report import page
from compressor.report.data import Report, all_dispositions, report_data
from compressor.report.facts import facts as outcome_facts
from compressor.report.figures import figures
from compressor.run_record import COMPRESSION, read_record
from compressor.steps.job import idle_parameters
from compressor.steps.quantize.options import FORMATS

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

logger = logging.getLogger(__name__)

ONNX_RECORD = "onnx_export.json"
ONNX_FOLDER = "onnx"
CARD = "README.md"
TASK = "text-generation"
HUGGING_FACE = "https://huggingface.co"
# the Hub's list (huggingface.co/docs/hub/repositories-licenses); it refuses a card with any other
LISTED = """
apache-2.0 mit openrail openrail++ bigscience-openrail-m creativeml-openrail-m
bigscience-bloom-rail-1.0
bigcode-openrail-m afl-3.0 artistic-2.0 bsl-1.0 bsd bsd-2-clause bsd-3-clause bsd-3-clause-clear
c-uda cc cc0-1.0
cc-by-2.0 cc-by-2.5 cc-by-3.0 cc-by-4.0 cc-by-sa-3.0 cc-by-sa-4.0 cc-by-nc-2.0 cc-by-nc-3.0
cc-by-nc-4.0
cc-by-nd-4.0 cc-by-nc-nd-3.0 cc-by-nc-nd-4.0 cc-by-nc-sa-2.0 cc-by-nc-sa-3.0 cc-by-nc-sa-4.0
cdla-sharing-1.0
cdla-permissive-1.0 cdla-permissive-2.0 wtfpl ecl-2.0 epl-1.0 epl-2.0 etalab-2.0 eupl-1.1 eupl-1.2
agpl-3.0 gfdl
gpl gpl-2.0 gpl-3.0 lgpl lgpl-2.1 lgpl-3.0 lgpl-lr isc h-research intel-research lppl-1.3c ms-pl
apple-ascl
apple-amlr mpl-2.0 odc-by odbl openmdw-1.0 osl-3.0 postgresql ofl-1.1 ncsa unlicense zlib pddl
deepfloyd-if-license fair-noncommercial-research-license llama2 llama3 llama3.1 llama3.2 llama3.3
llama4
grok2-community gemma unknown other
"""
LICENCES = frozenset(LISTED.split())
SPELLED_OUT = """
gnu affero general public: agpl
gnu lesser general public: lgpl
gnu general public: gpl
mozilla public: mpl
eclipse public: epl
creative commons zero: cc0
creative commons attribution: cc-by
noncommercial: nc
non-commercial: nc
sharealike: sa
share alike: sa
noderivatives: nd
noderivs: nd
odbl-1.0: odbl
odc-by-1.0: odc-by
pddl-1.0: pddl
llama : llama
the|licen[cs]e|version|community|international|universal:
"""

CARD_FIGURES = ("experts", "distillation")


@dataclass(frozen=True, slots=True)
class CardFacts:
    """The facts of a checkpoint's card: the outcome in its folder, and the contents of its
    files."""

    folder: Path
    outcome: Report
    config: Mapping[str, Any]
    graph: str | None  # the folder in it of an exported ONNX graph with its record, "" for itself
    # stored elements by dtype; empty where only a graph lies
    dtypes: Mapping[str, int] = field(default_factory=dict)
    served: Served | None = None  # as servers see it; None where only a graph lies
    # parameters less the experts that a token isn't routed to, before and after
    active: tuple[int | None, int] | None = None
    base_model: str | None = None  # on the Hub

    @property
    def strategies(self) -> tuple[str, ...]:
        """The names of the strategies that chose experts, in the order of the steps."""
        chosen = [step for step in self.outcome.plan.steps if step.expert_plan is not None]
        return tuple(dict.fromkeys(step.options.get("strategy", step.name) for step in chosen))

    @property
    def scheme(self) -> str | None:
        """The name of the numbers that weights were rounded to; None if none were."""
        quantized = self.outcome.quantized
        return quantized["options"].get("scheme", "int4") if quantized else None


def without_folders(value: Any) -> Any:
    """Return a value of an option in which paths are names."""
    if isinstance(value, Mapping):
        return {name: without_folders(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(inner) for inner in value]
    return label(value) if isinstance(value, str) else value


def read_facts(folder: Path, gate: GateResult | None = None) -> CardFacts:
    """Return all that a card says, from the files in `folder`; raises `CompressionError` where they
    disagree."""
    if not (folder / COMPRESSION).is_file():
        raise CompressionError(
            f"{folder} has no {COMPRESSION}, so nothing is known about how it was made; name an "
            "output of moe-compress, or write its README.md by hand"
        )
    outcome = report_data(folder, gate=gate)
    if outcome.recorded_digest != outcome.plan.digest():
        raise CompressionError(
            f"{folder / COMPRESSION}: its plan_digest is not its plan's; restore the file"
        )
    if outcome.gate is not None:
        base, compressed = label(outcome.gate.base), label(outcome.gate.compressed)
        options = without_folders(outcome.gate.options)
        outcome = replace(
            outcome, gate=replace(outcome.gate, base=base, compressed=compressed, options=options)
        )
    config = read_object(folder / "config.json")
    graphs = []
    for inner in ("", ONNX_FOLDER):
        if (folder / inner / GRAPH).is_file() and (folder / inner / ONNX_RECORD).is_file():
            graphs.append(inner)
    graph = graphs[0] if graphs else None
    if not any((folder / name).is_file() for name in (SINGLE_NAME, INDEX_NAME)):
        if graph != "":
            raise CompressionError(
                f"{folder} has neither {SINGLE_NAME} nor {GRAPH}; name an output of moe-compress"
            )
        return CardFacts(folder, outcome, config, graph)
    tensors = Checkpoint(folder).tensors.values()
    nbytes = Size.of(tensors).bytes
    # of packed weights, the record counts parameters that they stand for
    if nbytes != outcome.after.bytes:
        raise CompressionError(
            f"the weights in {folder} hold {nbytes} bytes, its {COMPRESSION} says "
            f"{outcome.after.bytes}; they do not belong together, compress again"
        )
    dtypes = Counter[str]()
    for tensor in sorted(tensors, key=lambda tensor: tensor.dtype):
        dtypes[tensor.dtype] += math.prod(tensor.shape)
    facts = CardFacts(folder, outcome, config, graph, dict(dtypes.most_common()))
    try:
        model = open_model(ModelSource(str(folder), None, folder), device="cpu")
    except CompressionError:  # as for constants
        return facts
    facts = replace(facts, served=served_model(model))
    plan = outcome.expert_plan
    layers = model.architecture.layers
    towers = {layer.decoder_layer.rstrip("0123456789") for layer in layers}
    all_planned = {layer.name for layer in layers} == {layer.module for layer in plan.layers}
    # where stored elements are not parameters of one expert, nothing is known
    stored_singly = model.layout.regular and not model.layout.quantized
    if not (all_planned and stored_singly) or len(towers) > 1 or shared_experts(model):
        return facts
    after = outcome.after.parameters - idle_parameters(model, model.architecture.experts)
    before = None
    if plan.top_k is None:  # the base's own
        before = outcome.before.parameters - idle_parameters(model, plan.layers[0].experts)
    return replace(facts, active=(before, after))


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
    base_model: str | None = None,
) -> Card:
    """Return the card of the checkpoint in `folder` as the repository `repo_id`.

    `gate` is by default the result beside the weights, if it is about them. `command` is the one
    that was run, `base` the folder of a local base, whose card gives the licence, and `base_model`
    its id on the Hub, as its user says."""
    if not is_hub_id(repo_id):
        raise CompressionError(
            f"{repo_id!r} is no name of a repository on the Hub; write it as owner/name"
        )
    facts = read_facts(folder, gate)
    data = facts.outcome
    recorded = base_id(data.plan.source)
    if recorded is not None and base_model not in (None, recorded):
        raise CompressionError(
            f"{folder} was made from {recorded}, not {base_model}; leave --base-model out"
        )
    facts = replace(facts, base_model=recorded or base_model)
    name = repo_id.rpartition("/")[2]
    drawn = {figure.name: figure for figure in figures(data, CARD_FIGURES)}
    images = {figure: f"images/{figure}.png" for figure in drawn}
    made: list[Block] = []
    recipe = recipe_text(data.plan)
    if recipe is None:
        missing = "A step is not installed where this card was made"
        made.append(Text(f"{missing}, so it has no recipe to repeat it."))
    else:
        note = (
            "This recipe makes the same plan, all steps in one run. It is made from the plan, so "
            "it has no edits by hand; local files and folders are in it by their names alone."
        )
        run = shlex.join(["moe-compress", "compress", RECIPE, "-o", name])
        made += [Text(note), Listing(recipe, "yaml"), Listing(run, "bash")]
    if command is not None:
        made.append(Text("The last command that was run, in which paths are shortened to names:"))
        made.append(Listing(without_paths(command), "bash"))
    became = page.experts(data.expert_plan)
    header = metadata(facts, repo_id, base_metadata(data.plan.source, base, base_model))
    blocks: list[Block | None] = [
        Heading(one_line(name), 1),
        introduction(facts),
        *comparison(facts),
        drawn.get("distillation"),
        Heading("How it was made"),
        *made,
        outcome_facts(data, "card"),
        Text((Code("compression.json"), " holds the whole plan with its coefficients.")),
        Heading("Experts"),
        drawn.get("experts"),
        Details("Layer by layer", became) if data.layers else became[0],
        *loading(facts, repo_id),
        Heading("Limits"),
        Items(limits(facts, header.get("license") is not None)),
    ]
    text = markdown([block for block in blocks if block is not None], images)
    text = without_tokens(f"---\n{header.to_yaml()}\n---\n\n{text}")
    pictures = {images[name]: png(figure.title, figure.drawings) for name, figure in drawn.items()}
    return Card(text, pictures)


def known_here(folder: Path) -> dict[str, Any]:
    """Return what only this machine knows of an output, as arguments of `card_text`: the command
    and a local base."""
    known = dict[str, Any]()
    record = read_record(folder)
    if record is not None:
        known["command"] = shlex.join(record.command) if record.command else None
        if record.revision is None and Path(record.source).is_dir():
            known["base"] = Path(record.source)
    return known


def recipe_text(plan: Plan) -> str | None:
    """Return the YAML that makes this plan again; None where a step of it is not installed.

    Local models and text files are named without their folders.
    """
    try:
        for number, step in enumerate(plan.steps):
            options = {name: without_folders(value) for name, value in step.options.items()}
            # a strategy's own, which stay as they are
            if step.name == PRUNE and "options" in options:
                options["options"] = dict(step.options["options"])
            plan = plan.with_entry(number, options=options)
        recipe = recipe_of_plan(plan).model_copy(update={"model": label(plan.source.model)})
    except CompressionError:
        return None
    return recipe_yaml(recipe).decode().rstrip()


def introduction(facts: CardFacts) -> Text:
    """Return what it is and what became of the base's experts, in one paragraph."""
    outcome = facts.outcome
    plan = outcome.expert_plan
    source = outcome.plan.source
    split = outcome.plan.split
    base: Words = f'the local checkpoint "{label(source.model)}"'
    if facts.base_model is not None:
        name = facts.base_model
        revision = "of a local copy" if source.revision is None else f"revision {source.revision}"
        base = Link(name, f"{HUGGING_FACE}/{name}"), f" ({revision})"
    count = counted(len(plan.layers), "MoE layer")
    after_split = f", after a split of {describe_split(split)}" if split else ""
    kind = " It is an ordinary checkpoint of its architecture"
    if plan.has_constants:
        kind = f" {NOT_STOCK[0].upper()}{NOT_STOCK[1:]}."
        replaced = sum(len(layer.constants) for layer in plan.layers)
        before = sum(layer.experts for layer in plan.layers)
        what = (
            f" in which constants stand for {replaced:,} of the {before:,} experts of its {count}; "
            f"{span(len(layer.groups) for layer in plan.layers)} stay in each (MoNE, "
            "arXiv:2507.00390). The routers are whole."
        )
    elif facts.outcome.strategy != KEPT_WHOLE:
        kind += ", with fewer experts."
        routed = f" A token is routed to {plan.top_k} of them." if plan.top_k is not None else ""
        kept = span(len(layer.groups) for layer in plan.layers)
        cited = []
        for name in facts.strategies:
            with suppress(CompressionError):  # it need not be installed here
                name = f"{name} ({load_strategy(name).summary.rstrip('.')})"
            cited.append(name)
        what = (
            f" with {kept} instead of {span(layer.experts for layer in plan.layers)} experts in "
            f"each of its {count}{after_split}: {all_dispositions(plan.layers)}.{routed} Strategy: "
            f"{', then '.join(cited)}."
        )
    else:
        kind += "."
        what = f", of which all experts stay{after_split}."
        if split:
            what += " The sub-experts compute what the base's experts do, up to rounding."
    if outcome.quantized:
        what += f" {step_line(outcome.quantized)}."
        kind = ""
    return Text(("This is ", base, f"{what} It was made with moe-compressor.{kind}"))


def comparison(facts: CardFacts) -> list[Block]:
    """Return base and compressed model, side by side."""
    table = page.sizes(facts.outcome)
    note = "Parameters are weights, in whatever format, without the scales of quantised ones."
    if facts.active is not None:
        before, after = facts.active
        row = ["active parameters", "-", human_count(after), "-", "-", f"{after:,}"]
        if before is not None:
            row[1] = human_count(before)
            row[3] = share(after, before)
            row[4] = f"{before:,}"
        table = replace(table, rows=(*table.rows, row))
        note += " Active parameters are all but the experts that a token is not routed to."
    blocks: list[Block] = [Heading("Before and after"), table, Text(note)]
    if facts.outcome.heldout is not None:
        blocks += page.heldout(facts.outcome)
    if facts.outcome.gate is not None:
        blocks += page.gate(facts.outcome)
    return blocks


def loading(facts: CardFacts, repo_id: str) -> list[Block]:
    """Return how to load it, by what is there."""
    outcome = facts.outcome
    blocks: list[Block] = [Heading("How to load it")]
    vllm = ""
    if outcome.expert_plan.has_constants:
        vllm = (
            "In vLLM from 0.33 on, where it supports this architecture unquantised (not tested "
            "with this checkpoint); "
            "ask `moe-compress check` with --server whether it computes this model:"
        )
    elif facts.dtypes:
        fault = outcome.loader_fault
        if fault:
            blocks.append(Text(f"{fault[0].upper()}{fault[1:]}."))
        else:
            name = (facts.config.get("architectures") or ["AutoModelForCausalLM"])[0]
            model_class = "AutoModelForCausalLM" if name.endswith("ForCausalLM") else name
            arguments = 'dtype="auto", device_map="auto"'
            if facts.served is not None and not facts.served.aligned:
                arguments += ', experts_implementation="eager"'
            python = f"from transformers import {model_class}"
            loaded = f'model = {model_class}.from_pretrained("{repo_id}", {arguments})'
            if (facts.folder / "tokenizer_config.json").is_file():
                python += ", AutoTokenizer"
                loaded += f'\ntokenizer = AutoTokenizer.from_pretrained("{repo_id}")'
            checked = (
                "In transformers (names and shapes of all tensors were checked against the stock "
                f"model of version {outcome.versions.get('transformers', 'unknown')}; "
            )
            packages: Words = " needs the package accelerate"
            if outcome.quantized:
                packages = packages, ", and the format ", Code("compressed-tensors")
            blocks += [
                Text((checked, Code("device_map"), packages, "):")),
                Listing(f"{python}\n\n{loaded}", "python"),
            ]
        for breach in [] if facts.served is None else advise(facts.served).breaches:
            if breach.server == "vLLM" and breach.effect in ("fails", "wrong"):
                blocks.append(Text(f"vLLM {breach.says}."))
        if facts.scheme is None or "vllm" in FORMATS[facts.scheme].servers:
            vllm = "In vLLM, where it supports this architecture (not tested with this checkpoint):"
    if vllm:
        blocks += [Text(vllm), Listing(f"vllm serve {repo_id}", "bash")]
    if facts.graph is not None:
        folder = f"model/{facts.graph}" if facts.graph else "model"
        shell = (
            f'hf download {repo_id} --local-dir model\nmoe-compress generate {folder} "Once '
            'upon a time"'
        )
        session = (
            f'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{folder}/model.onnx")'
        )
        blocks += [
            Text("In ONNX Runtime; or from the terminal, once the repository is downloaded:"),
            Listing(shell, "bash"),
            Listing(session, "python"),
            *load_exporter("onnx").read_summary(facts.folder / facts.graph).describe(),
        ]
    return blocks


def limits(facts: CardFacts, has_licence: bool) -> list[str]:
    """Return what was not measured, and what the figures say nothing about; `has_licence` if the
    card inherits one."""
    outcome = facts.outcome
    text = outcome.plan.calibration
    sentences = ["Accuracy was measured on the tasks above and on nothing else."]
    if outcome.gate is None:
        sentences = [
            "Accuracy was not measured: there is no gate result for these weights. Compare it with "
            "the base on your own tasks before you use it."
        ]
    if text is not None:
        # by domain where the default blend knows a source
        domains = {entry.source: entry.domain for entry in read_blend()}
        sources = [entry["source"] for entry in text.get("sources", [text])]
        names = zip(sources, short_names(sources), strict=True)
        named = joined([domains.get(source, name) for source, name in names])
        sentences.append(
            f"The calibration text was {named}; what experts do on other text did not count."
        )
        if text.get("left_out"):
            sentences.append(f"Sources that could not be read: {', '.join(text['left_out'])}.")
    elif outcome.layers:
        sentences.append("No text was read to choose experts: weights alone decided.")
    refitted = " ".join(_refitted(outcome))
    if refitted:
        sentences.append(refitted)
    stored = joined([f"{name} ({count:,} elements)" for name, count in facts.dtypes.items()])
    quantization = facts.config.get("quantization_config")
    if not facts.dtypes:
        sentences.append("There are no safetensors here, only the ONNX graph.")
    elif quantization:
        how = (
            "were quantised by the step quantize"
            if outcome.quantized
            else "are quantised as the base's are"
        )
        sentences.append(f"The weights {how} ({quantization['quant_method']}), stored as {stored}.")
    else:
        sentences.append(f"The weights are not quantised; they are stored as {stored}.")
    if facts.scheme == "fp8":
        sentences.append("Servers round activations to FP8, too; what that costs was not measured.")
    if outcome.expert_plan.has_constants:
        sentences.append(
            "The format was checked by the tool's own forward: the written tensors give the logits "
            "that the base gives with these constants."
        )
    if not has_licence:
        sentences.append("No licence was found in a card of the base; the base's own terms hold.")
    return sentences


def suggested_name(folder: Path) -> str:
    """Return the name that the field gives to a model like this one: `BASE-E96of128-W4A16`."""
    try:
        plan = read_plan(folder)
    except (OSError, CompressionError):  # not made here
        return folder.resolve().name
    name = label(plan.source.model).rpartition("/")[2]
    experts = plan.expert_plan
    if experts.layers:
        before = max(layer.experts for layer in experts.layers)
        name += "-MoNE" if experts.has_constants else f"-E{experts.experts}of{before}"
    for step in plan.of(QUANTIZE):
        scheme = step.options.get("scheme", "int4")
        bits = scheme.removeprefix("int")
        name += f"-W{bits}A16" if bits.isdecimal() else f"-{scheme.upper()}"
    return re.sub(r"[^\w.-]+|[-.]{2,}", "-", name, flags=re.ASCII).strip("-.")


def _refitted(outcome: Report) -> Iterator[str]:
    """Yield what was refitted or trained, and what that leaves; a step that changed nothing does
    not count."""
    trained = {step["name"] for step in outcome.steps if changed(step)}
    asked = [step.options.get("correct", {}).get("method", "none") for step in outcome.plan.steps]
    methods = [method for method in asked if method != "none"]
    if methods:
        corrections = [correction_of(layer.plan) for layer in outcome.layers]
        better = sum(figures.get("kept") not in (None, "none") for figures in corrections)
        yield (
            f"Reconstruction ({', then '.join(methods)}) refitted the remaining experts to each "
            f"layer's base output on the calibration text and was kept in {better} of "
            f"{counted(len(corrections), 'layer')}; the errors before and after are those of "
            "single layers and say nothing about accuracy."
        )
    if "distill" in trained:
        yield (
            "Distillation trained the model end to end toward the base on text that its maker "
            "chose; what the base "
            "gets wrong, and what that text does not show, did not come closer to right."
        )
    elif "routers" in trained:
        yield (
            "Router calibration moved the routers alone toward the base's next token, on text "
            "of its maker's."
        )
        for step in outcome.steps:
            if (step.get("result") or {}).get("confirmed") is False:
                yield (
                    "It was forced (routers.accept: always): held-out text did not confirm that "
                    "it is a gain."
                )
    elif methods:
        yield "Nothing was fine-tuned end to end."
    elif not trained:
        yield "Nothing was refitted or fine-tuned" + (
            " after experts were taken out." if outcome.layers else "."
        )


def is_hub_id(name: str) -> bool:
    """Return True if the Hub could have a repository of this name."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def base_id(source: Source) -> str | None:
    """Return the base's repository on the Hub; None for a local folder, whose name may be somebody
    else's there."""
    return source.model if source.revision is not None and is_hub_id(source.model) else None


def base_metadata(
    source: Source, base: Path | None = None, base_model: str | None = None
) -> Mapping[str, Any]:
    """Return the metadata of the base's card, in its folder `base` or on the Hub; empty where it
    can't be read."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.repocard import metadata_load

    try:
        if base is not None and (base_model is None or (base / CARD).is_file()):
            return metadata_load(base / CARD) or {}
        name = base_model or base_id(source)
        if name is not None:
            return metadata_load(hf_hub_download(name, CARD, revision=source.revision)) or {}
    # no network, no card, no YAML: there is nothing to inherit, and nothing depends on it
    except Exception as error:
        logger.debug("the card of the base cannot be read: %s", error)
    return {}


def licence(
    base: Mapping[str, Any], folder: Path, repository: str | None, revision: str | None
) -> dict[str, Any]:
    """Return the base's licence as the Hub spells it; one that its list lacks becomes `other`, with
    a name."""
    given = base.get("license")
    names: list[Any] = given if isinstance(given, list) else [given]
    if not names or not all(isinstance(name, str) and name for name in names):
        return {}
    known, unlisted = list[str](), list[str]()
    for name in names:
        # an SPDX identifier, or a name written out
        text = " ".join(name.lower().split())
        for line in SPELLED_OUT.strip().splitlines():
            words, _, short = line.partition(":")
            text = re.sub(rf"\b({words})\b", short.strip(), text)
        text = re.sub(r"-?v(?=[0-9])", "-", "-".join(re.findall(r"[a-z0-9.+]+", text)))
        text = re.sub(r"(-only|-or-later|(?<=[0-9])\+)$", "", text)
        spellings = (name.lower(), text, f"{text}.0")
        listed = [spelling for spelling in spellings if spelling in LICENCES]
        if not listed:
            unlisted.append(one_line(name))
        known.append(listed[0] if listed else "other")
    fields: dict[str, Any] = {"license": known if isinstance(given, list) else known[0]}
    name, link = ", ".join(unlisted) or base.get("license_name"), base.get("license_link")
    if name:
        fields["license_name"] = name
    if link and (link.startswith("http") or (folder / link).is_file()):
        fields["license_link"] = link
    elif link and repository is not None:
        address = f"{HUGGING_FACE}/{repository}/blob/{revision or 'main'}/{link}"
        fields["license_link"] = address
    return fields


def warn_of_licence(model: str, revision: str | None) -> None:
    """Say before a run what the card will make of a base's licence that the Hub's list lacks."""
    folder = Path(model)
    source = Source(model, revision, "")
    base = base_metadata(source, folder) if folder.is_dir() else base_metadata(source, None, model)
    fields = licence(base, folder, None, revision)
    if fields.get("license_name") not in (None, base.get("license_name")):
        name = fields["license_name"]
        logger.warning(
            "the Hub's list of licences lacks %r; the card will say other, with that as its name",
            name,
        )


def metadata(facts: CardFacts, repo_id: str, base: Mapping[str, Any]) -> "ModelCardData":
    """Return the card's metadata; `base` is that of the base's card."""
    from huggingface_hub import ModelCardData

    outcome = facts.outcome
    plan = outcome.plan
    layers = outcome.expert_plan.layers
    repository = facts.base_model
    tags = ["moe", "moe-compressor", *facts.strategies]
    if any(layer.merged for layer in layers):
        tags += ["merged", "expert-merging"]
    if any(layer.dropped for layer in layers):
        tags += ["pruned", "expert-pruning"]
    if facts.scheme is not None:
        tags += ["compressed-tensors", facts.scheme]
    if facts.graph is not None:
        tags.append("onnx")
    more = licence(base, facts.folder, repository, plan.source.revision)
    if repository is not None:
        # "quantized" is for what was only rounded; unsaid, the Hub would guess that where it sees
        # ONNX files
        only_rounded = {step.name for step in plan.steps} == {QUANTIZE}
        more["base_model_relation"] = "quantized" if only_rounded else "finetune"
    results = [] if outcome.gate is None else card_metrics(outcome.gate)
    if results:
        more |= {"model_name": repo_id.rpartition("/")[2], "eval_results": results}
    data_sets = dict[str | None, None]()
    for text in filter(None, [plan.calibration, *(step.text for step in plan.steps)]):
        for entry in text.get("sources", [text]):
            data_sets[hub_id(entry["source"])] = None
    data_sets.pop(None, None)
    languages = base.get("language") or []
    if not isinstance(languages, list):
        languages = [languages]
    library = "vllm" if outcome.expert_plan.has_constants else "transformers"
    return ModelCardData(
        # YAML makes False of Norwegian
        language=["no" if entry is False else entry for entry in languages] or None,
        base_model=repository,
        datasets=list(data_sets) or None,
        library_name=library if facts.dtypes else "onnx",
        pipeline_tag=base.get("pipeline_tag") or TASK,
        tags=tags,
        **more,
    )
