"""What is known of a compressed checkpoint, each fact checked, and what of it the Hub indexes as metadata."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from compressor.checkpoint.reader import INDEX_NAME, SINGLE_NAME, Checkpoint, Size
from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError
from compressor.evaluation.gate_report import card_metrics
from compressor.evaluation.gate_verdict import GateResult
from compressor.formatting import label, one_line
from compressor.model.opened import open_model
from compressor.pipeline.outcome import Outcome
from compressor.recipe.plan import Source, parts_of
from compressor.records import read_object
from compressor.report.data import Measured, Report, report_data
from compressor.run_record import COMPRESSION

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

GRAPH, ONNX_RECORD = "model.onnx", "onnx_export.json"
ONNX_FOLDER = "onnx"
EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Graph:
    """An exported ONNX graph with the record of how it was verified."""

    place: str  # its folder in the repository, "" for the top
    record: Mapping[str, Any]
    nbytes: int  # of graph and weights


@dataclass(frozen=True, slots=True)
class Facts:
    """What a card may say of a checkpoint: the outcome in its folder, and what its files hold."""

    folder: Path
    outcome: Report
    config: Mapping[str, Any]
    active: tuple[int | None, int] | None  # parameters less the experts that a token isn't routed to, before and after
    dtypes: Mapping[str, int]  # stored elements by dtype; empty where only a graph lies
    graph: Graph | None

    @property
    def strategies(self) -> tuple[str, ...]:
        """How experts were chosen, in the order of the steps; empty where none were."""
        chosen = [step for step in self.outcome.plan.steps if "layers" in (step.plan or {})]
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
        tasks = tuple(
            replace(task, task=one_line(task.task), metric=one_line(task.metric), version=one_line(task.version))
            for task in result.tasks
        )
        base, compressed, options = label(result.base), label(result.compressed), without_folders(result.options)
        result = replace(result, base=base, compressed=compressed, tasks=tasks, options=options)
        outcome = replace(outcome, gate=result)
    graph, has_weights = _find_graph(folder), any((folder / name).is_file() for name in (SINGLE_NAME, INDEX_NAME))
    if not has_weights and (graph is None or graph.place):
        raise CompressionError(f"{folder} has neither {SINGLE_NAME} nor {GRAPH}; name an output of moe-compress")
    return Facts(
        folder=folder,
        outcome=outcome,
        config=read_object(folder / "config.json"),
        active=_active_parameters(folder, outcome) if has_weights else None,
        dtypes=_check_weights(folder, outcome.after) if has_weights else {},
        graph=graph,
    )


def _check_weights(folder: Path, recorded: Size) -> dict[str, int]:
    """Stored elements by dtype, which must be as many as the record says."""
    tensors = Checkpoint(folder).tensors.values()
    counted = Size.of(tensors)
    if counted != recorded:
        raise CompressionError(
            f"the weights in {folder} hold {counted.parameters} parameters in {counted.bytes} bytes, its "
            f"{COMPRESSION} says {recorded.parameters} in {recorded.bytes}; they do not belong together, compress again"
        )
    dtypes = Counter[str]()
    for tensor in tensors:
        dtypes[tensor.dtype] += tensor.parameters
    return dict(sorted(dtypes.items(), key=lambda entry: (-entry[1], entry[0])))


def _active_parameters(folder: Path, outcome: Outcome) -> tuple[int | None, int] | None:
    """Counted from headers by the stock model's layout; None where stored elements are not parameters of one expert.

    The base's alone are None where it stores its tensors in another way.
    """
    try:
        model = open_model(ModelSource(str(folder), None, folder), device="cpu")
    except CompressionError:
        return None
    layout, towers = model.layout, {layer.unit.rstrip("0123456789") for layer in model.architecture.layers}
    if layout.quantized or not layout.regular or len(towers) > 1:
        return None
    plan, before, after = outcome.stage, outcome.before.parameters, outcome.after.parameters
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
    parts = parts_of(plan.split)
    rows = sum((layer.experts // parts - plan.experts) * row[layer.module] for layer in plan.layers)
    same = plan.top_k is None and before - after == gone + rows
    return before - gone - idle if same else None, after - idle


def _find_graph(folder: Path) -> Graph | None:
    for place in ("", ONNX_FOLDER):
        where = folder / place
        if (where / GRAPH).is_file() and (where / ONNX_RECORD).is_file():
            files = [where / GRAPH, where / f"{GRAPH}.data"]
            return Graph(place, read_object(where / ONNX_RECORD), sum(f.stat().st_size for f in files if f.is_file()))
    return None


CARD = "README.md"
# Of the Hub's four relations (adapter, merge, quantized, finetune) this is the one for a single base whose weights
# were changed: "merge" is for several bases. Unsaid, the Hub would guess "quantized" where it sees ONNX files.
RELATION = "finetune"
TASK = "text-generation"
IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9.+-]*")  # of a licence
LANGUAGE = re.compile(r"[A-Za-z][A-Za-z0-9-]*")


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

    outcome, layers = facts.outcome, facts.outcome.stage.layers
    repository, revision = base_id(outcome.plan.source), outcome.plan.source.revision
    results = [] if outcome.gate is None else card_metrics(outcome.gate)
    pipeline = base.get("pipeline_tag")
    library = "transformers" if outcome.stage.constants is None else "vllm"
    return ModelCardData(
        **licence(base, facts.folder, repository, revision),
        language=languages(base),
        base_model=repository,
        **({"base_model_relation": RELATION} if repository is not None else {}),
        library_name=library if facts.dtypes else "onnx",
        pipeline_tag=pipeline if _matches(IDENTIFIER, pipeline) else TASK,
        tags=[
            "moe",
            "moe-compressor",
            *map(one_line, facts.strategies),
            *(["merged", "expert-merging"] if any(layer.merged for layer in layers) else []),
            *(["pruned", "expert-pruning"] if any(layer.dropped for layer in layers) else []),
            *(["onnx"] if facts.graph is not None else []),
        ],
        **({"model_name": repo_id.rpartition("/")[2], "eval_results": results} if results else {}),
    )
