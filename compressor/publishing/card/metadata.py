"""The metadata of a model card, which the Hub reads: what it inherits from the base's card, and what was measured."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.gates.report import card_metrics
from compressor.gates.verdict import GateResult
from compressor.publishing.card.facts import Facts
from compressor.recipe.plan import CompressionPlan
from compressor.words import one_line

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

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


def base_id(plan: CompressionPlan) -> str | None:
    """The base's repository on the Hub; None for a local folder, whose name may be somebody else's there."""
    return plan.source.model if plan.source.revision is not None and is_hub_id(plan.source.model) else None


def base_metadata(plan: CompressionPlan, base: Path | None = None) -> Mapping[str, Any]:
    """The metadata of the base's card, in its folder `base` or on the Hub; empty where it cannot be had or read."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.repocard import metadata_load

    try:
        if base is not None:
            path = base / CARD
        elif (name := base_id(plan)) is not None:
            path = Path(hf_hub_download(name, CARD, revision=plan.source.revision))
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
    name = base.get("license_name") if known else given
    if isinstance(name, str) and name.strip():
        found["license_name"] = one_line(name)
    link = base.get("license_link")
    if isinstance(link, str) and (placed := _link(one_line(link), folder, repository, revision)):
        found["license_link"] = placed
    return found


def _link(link: str, folder: Path, repository: str | None, revision: str | None) -> str | None:
    """Where the licence lies as seen from the new repository; None where that cannot be said."""
    if re.match(r"https?://", link) or (Path(link).name == link and (folder / link).is_file()):
        return link
    if repository is None or link.startswith("/") or ".." in Path(link).parts:
        return None
    return f"https://huggingface.co/{repository}/blob/{revision}/{link}"


def _matches(pattern: re.Pattern[str], value: Any) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def languages(base: Mapping[str, Any]) -> list[str] | None:
    """The base's languages, without what is no language's code."""
    given = base.get("language")
    entries = given if isinstance(given, list) else [given]
    codes = ["no" if entry is False else entry for entry in entries]  # which is what YAML makes of Norwegian
    return [str(code) for code in codes if _matches(LANGUAGE, code)] or None


def tags(facts: Facts) -> list[str]:
    """What the Hub's search finds it by."""
    merged = any(len(group.members) > 1 for layer in facts.plan.layers for group in layer.groups)
    dropped = any(layer.dropped for layer in facts.plan.layers)
    return [
        "moe",
        "moe-compressor",
        one_line(facts.plan.strategy),
        *(["merged", "expert-merging"] if merged else []),
        *(["pruned", "expert-pruning"] if dropped else []),
        *(["onnx"] if facts.graph is not None else []),
    ]


def printable(gate: GateResult) -> GateResult:
    """The result with names that YAML and a web page can hold."""
    named = [
        replace(task, task=one_line(task.task), metric=one_line(task.metric), version=one_line(task.version))
        for task in gate.tasks
    ]
    return replace(gate, tasks=tuple(named))


def metadata(facts: Facts, repo_id: str, base: Mapping[str, Any]) -> "ModelCardData":
    """The card's metadata; `base` is that of the base's card."""
    from huggingface_hub import ModelCardData

    repository, revision = base_id(facts.plan), facts.plan.source.revision
    results = card_metrics(printable(facts.gate)) if facts.gate is not None else []
    pipeline = base.get("pipeline_tag")
    return ModelCardData(
        **licence(base, facts.folder, repository, revision),
        language=languages(base),
        base_model=repository,
        **({"base_model_relation": RELATION} if repository is not None else {}),
        library_name="onnx" if facts.only_graph else "transformers" if facts.plan.constants is None else "vllm",
        pipeline_tag=pipeline if _matches(IDENTIFIER, pipeline) else TASK,
        tags=tags(facts),
        **({"model_name": repo_id.rpartition("/")[2], "eval_results": results} if results else {}),
    )
