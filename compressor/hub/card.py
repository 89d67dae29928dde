"""The model card of a compressed checkpoint, made of what was measured or recorded and of nothing
else; its text is the template card.md."""

import logging
import math
import re
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.checkpoint.reader import (
    INDEX_NAME,
    SINGLE_NAME,
    Checkpoint,
    Size,
    quantization_of,
)
from compressor.data.sources import hub_id, read_blend, short_names
from compressor.document.blocks import Block, Details, Link, Words
from compressor.document.markdown import filled
from compressor.document.picture import png
from compressor.errors import CompressionError, without_tokens
from compressor.formatting import joined, label, one_line, without_paths
from compressor.frozen import frozen
from compressor.model.serving import advise
from compressor.pipeline.formats import exports_in, wrap_exporter
from compressor.pipeline.outcome import read_plan
from compressor.quality_gate.report import card_metrics
from compressor.quality_gate.verdict import GateResult
from compressor.recipe.plan import Source
from compressor.recipe.recipe import RECIPE, recipe_of_plan, recipe_yaml
from compressor.recipe.steps_plan import PRUNE, QUANTIZE, Plan
from compressor.records import Json, read_object
from compressor.report import page
from compressor.report.data import Report, report_data
from compressor.report.facts import facts as outcome_facts
from compressor.report.figures import figures
from compressor.run_record import COMPRESSION, read_record
from compressor.steps.quantize.options import FORMATS

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

logger = logging.getLogger(__name__)

CARD = "README.md"
TASK = "text-generation"
CAUSAL = "AutoModelForCausalLM"
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


def without_folders(value: Any) -> Any:
    """Return a value of an option in which paths are names."""
    if isinstance(value, Mapping):
        return {name: without_folders(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [without_folders(inner) for inner in value]
    return label(value) if isinstance(value, str) else value


def read_report(folder: Path, gate: GateResult | None = None) -> Report:
    """Return what an output's record says, without folders of this machine; raises
    `CompressionError` where record and files disagree."""
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
    if outcome.gate is None:
        return outcome
    base, compressed = label(outcome.gate.base), label(outcome.gate.compressed)
    options = without_folders(outcome.gate.options)
    judged = replace(outcome.gate, base=base, compressed=compressed, options=options)
    return replace(outcome, gate=judged)


def stored_dtypes(folder: Path, outcome: Report) -> dict[str, int]:
    """Return stored elements by dtype, none where only an export lies; raises `CompressionError`
    where the weights are not those of the record."""
    if not any((folder / name).is_file() for name in (SINGLE_NAME, INDEX_NAME)):
        return {}
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
    return dict(dtypes.most_common())


@frozen
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
    outcome = read_report(folder, gate)
    dtypes = stored_dtypes(folder, outcome)
    exports = {}
    for place, (name, exporter) in exports_in(folder).items():
        if all((folder / place / file).is_file() for file in exporter.FILES):
            exports[place] = name, exporter
    if not dtypes and "" not in exports:
        raise CompressionError(
            f"{folder} has neither {SINGLE_NAME} nor an export; name an output of moe-compress"
        )
    source = outcome.plan.source
    recorded = base_id(source)
    if recorded is not None and base_model not in (None, recorded):
        raise CompressionError(
            f"{folder} was made from {recorded}, not {base_model}; leave --base-model out"
        )
    inherited = base_metadata(source, base, base_model)
    base_model = recorded or base_model
    base_words: Words = f'the local checkpoint "{label(source.model)}"'
    if base_model is not None:
        revision = "of a local copy" if source.revision is None else f"revision {source.revision}"
        base_words = Link(base_model, f"{HUGGING_FACE}/{base_model}"), f" ({revision})"
    formats = [name for name, _ in exports.values()]
    header = metadata(folder, outcome, repo_id, inherited, base_model, formats)
    if not dtypes:
        header.library_name = formats[0]
    exported = list[Block]()
    for place, (name, exporter) in exports.items():
        with wrap_exporter(name):
            exported += exporter.card_blocks(folder / place, place, repo_id)
    drawn = {figure.name: figure for figure in figures(outcome, ("experts", "distillation"))}
    images = {name: f"images/{name}.png" for name in drawn}
    became = page.experts(outcome.expert_plan)
    config = read_object(folder / "config.json")
    quantization = quantization_of(folder, config)
    model_class = (config.get("architectures") or [CAUSAL])[0]
    text = outcome.plan.text or {}
    # by domain where the default blend knows a source
    domains = {entry.source: entry.domain for entry in read_blend()}
    sources = [entry["source"] for entry in text.get("sources", [text] if text else [])]
    names = zip(sources, short_names(sources), strict=True)
    name = repo_id.rpartition("/")[2]
    scheme = scheme_of(outcome)
    body = filled(
        files("compressor.hub").joinpath("card.md").read_text(encoding="utf-8"),
        images,
        name=one_line(name),
        repo_id=repo_id,
        base=base_words,
        outcome=outcome,
        sizes=list(page.sizes(outcome)),
        heldout=list(page.heldout(outcome)),
        gate=list(page.gate(outcome)) if outcome.gate else [],
        figures={"distillation": None, "experts": None, **drawn},
        recipe=recipe_text(outcome.plan),
        run=shlex.join(["moe-compress", "compress", RECIPE, "-o", name]),
        command=without_paths(command or ""),
        facts=outcome_facts(outcome, "card"),
        experts=Details("Layer by layer", became) if outcome.layers else list(became),
        dtypes=joined([f"{name} ({count:,} elements)" for name, count in dtypes.items()]),
        model_class=CAUSAL if model_class.endswith("ForCausalLM") else model_class,
        has_tokenizer=(folder / "tokenizer_config.json").is_file(),
        breaches=advise(outcome.served).breaches if outcome.served else [],
        in_vllm=scheme is None or (scheme in FORMATS and "vllm" in FORMATS[scheme].servers),
        exports=exported,
        text=joined([domains.get(source, short) for source, short in names]),
        unread=text.get("left_out", ()),
        quantization=quantization and (quantization.get("quant_method") or "no method is named"),
        has_licence=header.get("license") is not None,
    )
    body = without_tokens(f"---\n{header.to_yaml()}\n---\n\n{body}")
    pictures = {images[name]: png(figure.title, figure.drawings) for name, figure in drawn.items()}
    return Card(body, pictures)


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


def base_metadata(source: Source, base: Path | None = None, base_model: str | None = None) -> Json:
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
    base: Json, folder: Path, repository: str | None, revision: str | None
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


def metadata(
    folder: Path,
    outcome: Report,
    repo_id: str,
    base: Json,
    repository: str | None,
    formats: Sequence[str],
) -> "ModelCardData":
    """Return the card's metadata; `base` is that of the card of the base, which is the Hub's
    `repository`, if any. `formats` are those of exports."""
    from huggingface_hub import ModelCardData

    plan = outcome.plan
    layers = outcome.expert_plan.layers
    chosen = [step for step in plan.steps if step.expert_plan is not None]
    strategies = [step.options.get("strategy", step.name) for step in chosen]
    tags = ["moe", "moe-compressor", *dict.fromkeys(strategies)]
    if any(layer.merged for layer in layers):
        tags += ["merged", "expert-merging"]
    if any(layer.dropped for layer in layers):
        tags += ["pruned", "expert-pruning"]
    if outcome.quantized is not None:
        tags += ["compressed-tensors", str(scheme_of(outcome))]
    tags += formats
    more = licence(base, folder, repository, plan.source.revision)
    if repository is not None:
        # "quantized" is for what was only rounded; unsaid, the Hub would guess that where it sees
        # ONNX files
        only_rounded = {step.name for step in plan.steps} == {QUANTIZE}
        more["base_model_relation"] = "quantized" if only_rounded else "finetune"
    results = [] if outcome.gate is None else card_metrics(outcome.gate)
    if results:
        more |= {"model_name": repo_id.rpartition("/")[2], "eval_results": results}
    data_sets = dict[str | None, None]()
    for text in filter(None, [plan.text, *(step.text for step in plan.steps)]):
        for entry in text.get("sources", [text]):
            data_sets[hub_id(entry["source"])] = None
    data_sets.pop(None, None)
    languages = base.get("language") or []
    if not isinstance(languages, list):
        languages = [languages]
    return ModelCardData(
        # YAML makes False of Norwegian
        language=["no" if entry is False else entry for entry in languages] or None,
        base_model=repository,
        datasets=list(data_sets) or None,
        library_name="vllm" if outcome.expert_plan.has_constants else "transformers",
        pipeline_tag=base.get("pipeline_tag") or TASK,
        tags=tags,
        **more,
    )


def scheme_of(outcome: Report) -> str | None:
    """Return the name of the numbers that weights were rounded to; None if none were."""
    step = outcome.quantized
    return None if step is None else str(step.options.get("scheme", "int4"))
