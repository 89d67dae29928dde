"""The gate's result as files: gate.json, gate.xml for CI servers and gate.md for people; and as card metrics.

A result that lies beside the weights it judged, or was handed in for them, is known by what it says of their files.
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index

from compressor.document.markdown import markdown
from compressor.errors import CompressionError
from compressor.evaluation.scores import REPORT
from compressor.files import file_digest, whole_folder
from compressor.gates.document import change, gate_blocks, level
from compressor.gates.junit import junit
from compressor.gates.verdict import GateResult, TaskGate, gate_content, gate_from_content
from compressor.records import read_json

logger = logging.getLogger(__name__)

NAMES = (REPORT, "gate.xml", "gate.md")
LONE_HALVES = "backslashreplace"  # names of files may hold what UTF-8 cannot; this is what JSON writes for it


def write_gate(result: GateResult, folder: Path, overwrite: bool = False) -> list[Path]:
    """Write JSON, JUnit XML and Markdown into a new folder, all of them or, when anything fails, nothing.

    With `overwrite` an earlier gate is replaced once the new one is complete, and stays when anything fails.
    """
    with whole_folder(folder, NAMES, overwrite) as made:
        (made / NAMES[0]).write_text(gate_json(result), encoding="utf-8", errors=LONE_HALVES)
        (made / NAMES[1]).write_bytes(junit(result))
        (made / NAMES[2]).write_text(markdown(gate_blocks(result)), encoding="utf-8", errors=LONE_HALVES)
    return [folder / name for name in NAMES]


def full_content(result: GateResult) -> dict[str, Any]:
    """What gate.json says: the result, and its metrics as a model card has them."""
    return {**gate_content(result), "model_index": model_index(result)}


def gate_json(result: GateResult) -> str:
    """The text of gate.json."""
    return json.dumps(full_content(result), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_gate(path: Path) -> GateResult:
    """A result from its gate.json, or the folder that holds it."""
    file = path / NAMES[0] if path.is_dir() else path
    remedy = "name a gate.json that moe-compress gate has written"
    content = read_json(file, remedy, remedy)
    try:
        return gate_from_content(content)
    except CompressionError as error:
        raise CompressionError(f"{file}: {error}; {remedy}") from error


def find_gate(folder: Path) -> GateResult | None:
    """The gate's result beside the weights, if it is about these very files."""
    if not (folder / REPORT).is_file():
        return None
    result = read_gate(folder / REPORT)
    identity = result.compressed_identity
    known = isinstance(identity.get("weights"), list) and isinstance(identity.get("files"), Mapping)
    return result if known and differing(folder, identity) is None else None


def read_gate_of(folder: Path, path: Path | None) -> GateResult | None:
    """The gate in a file, refused if it names other files than these; without a path, the one beside the weights."""
    return find_gate(folder) if path is None else belonging(folder, read_gate(path))


def belonging(folder: Path, gate: GateResult) -> GateResult:
    """A result that was handed in; refused if it names other files than these."""
    if (name := differing(folder, gate.compressed_identity)) is not None:
        raise CompressionError(
            f"the gate's result is of another model than {folder}: {name} is not the same; run the gate again on this "
            "folder"
        )
    return gate


def differing(folder: Path, identity: Mapping[str, Any]) -> str | None:
    """The first file that is not what the identity says; None if all are, or it names none.

    Times of change are left aside: a copied or downloaded model is the same model.
    """
    weights, files = identity.get("weights"), identity.get("files")
    for entry in weights if isinstance(weights, list) else []:
        name, size = (str(entry[0]), entry[1]) if isinstance(entry, list) and len(entry) > 1 else (str(entry), None)
        if not _inside(folder, name) or (folder / name).stat().st_size != size:
            return name
    for name, digest in files.items() if isinstance(files, Mapping) else ():
        if not _inside(folder, name) or file_digest(folder / name) != digest:
            return str(name)
    return None


def _inside(folder: Path, name: str) -> bool:
    return Path(name).name == name and os.path.isfile(folder / name)  # False, too, where it is too long for a name


def append_summary(result: GateResult, path: Path) -> None:
    """Append the Markdown to the summary of a CI job; a file that cannot be written is a warning, no failed gate."""
    try:
        # Without O_CREAT: CI servers make the file, so one that is not there is a mistaken path.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        with open(descriptor, "a", encoding="utf-8", errors=LONE_HALVES) as stream:
            stream.write(f"\n{markdown(gate_blocks(result))}\n")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        logger.warning("the gate's summary could not be appended to %s: %s", path, reason)


def card_metrics(result: GateResult) -> list[EvalResult]:
    """The compressed model's figures for its model card, the base's beside them; none where a figure is not finite."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_name=task.task,
            dataset_type=task.task,
            dataset_args={"version": task.version, "items": task.items},
            metric_type=task.metric,
            metric_name=f"{task.metric} ({_beside(result, task)})",
            metric_value=float(f"{task.compressed:.6g}"),
            verified=False,
        )
        for task in result.tasks
        if math.isfinite(task.compressed)
    ]


def _beside(result: GateResult, task: TaskGate) -> str:
    most = f"at most {change(task.upper, task.kind)} with confidence {100 * result.confidence:g}%"
    routed = f", routed by {result.routing.method}" if result.routing is not None else ""
    return f"base {level(task.base)}, drop {change(task.drop, task.kind)}, {most}{routed}"


def model_index(result: GateResult) -> list[dict[str, Any]]:
    """The metrics as the metadata of a model card have them, under the model's name without its folders."""
    name = Path(result.compressed).name or result.compressed
    found: list[dict[str, Any]] = eval_results_to_model_index(name, card_metrics(result))
    return found
