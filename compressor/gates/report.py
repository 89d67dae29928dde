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
from xml.etree import ElementTree as Xml

from huggingface_hub import EvalResult
from huggingface_hub.repocard_data import eval_results_to_model_index

from compressor.document.markdown import markdown
from compressor.errors import CompressionError
from compressor.evaluation.scores import REPORT
from compressor.files import file_digest, whole_folder
from compressor.gates.document import advice, cells, change, gate_blocks, level, margin, verdict_line
from compressor.gates.verdict import EXIT_STATUS, GateResult, TaskGate, gate_content, gate_from_content
from compressor.records import read_json
from compressor.words import readable

logger = logging.getLogger(__name__)

NAMES = (REPORT, "gate.xml", "gate.md")
SUITE = "moe-compress gate"
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


def junit(result: GateResult) -> bytes:
    """JUnit XML for CI servers: each task is a test case; failed ones are failures, inconclusive ones are skipped."""
    verdicts, routing = [task.verdict for task in result.tasks], result.routing
    counts = {
        "tests": str(len(verdicts)),
        "failures": str(verdicts.count("fail")),
        "errors": "0",
        "skipped": str(verdicts.count("inconclusive")),
        "time": f"{sum(result.seconds.values()):.3f}",
    }
    root = Xml.Element("testsuites", {"name": SUITE, **counts})
    suite = _add(root, "testsuite", {"name": f"{SUITE}: {result.base}, {result.compressed}", **counts})
    properties, routed = _add(suite, "properties", {}), dict[str, object]()
    if routing is not None:
        routed = {"method": routing.method, "reference": routing.reference, "cost": f"{routing.cost:.3f}"}
        routed |= {"left-plain": routing.left_plain, **_given("option.", routing.options)}
    facts = {
        "verdict": result.verdict,
        "exit-status": EXIT_STATUS[result.verdict],
        "base": result.base,
        "compressed": result.compressed,
        "max-drop": result.max_drop,
        "confidence": result.confidence,
        "reused-base": str(result.reused_base).lower(),
        **_given("option.", result.options),
        **_given("routing.", routed),
        **_given("version.", result.versions),
        **_given("seconds.", result.seconds),
    }
    for name, value in facts.items():
        _add(properties, "property", {"name": name, "value": str(value)})
    for task in result.tasks:
        _add_case(suite, result, task)
    _add(suite, "system-out", {}, "\n".join([verdict_line(result), *advice(result)]))
    Xml.indent(root)
    found: bytes = Xml.tostring(root, encoding="utf-8", xml_declaration=True)
    return found


def _given(prefix: str, entries: Mapping[str, object]) -> dict[str, object]:
    return {f"{prefix}{name}": value for name, value in entries.items() if value is not None}


def _add_case(suite: Xml.Element, result: GateResult, task: TaskGate) -> None:
    timed = {"time": f"{result.seconds[task.task]:.3f}"} if task.task in result.seconds else {}
    case = _add(suite, "testcase", {"classname": "moe-compress.gate", "name": task.task, **timed})
    shown = cells(task)
    message = (
        f"{task.metric} dropped by {shown['drop']} (at least {shown['at least']}, at most {shown['at most']}); "
        f"{margin(result, task)} is allowed"
    )
    if task.verdict == "fail":
        _add(case, "failure", {"message": message, "type": "fail"}, message)
    elif task.verdict == "inconclusive":
        status = EXIT_STATUS[task.verdict]
        _add(case, "skipped", {"message": f"inconclusive: {message}; alone this ends the gate with status {status}"})
    figures = "\n".join(f"{name}: {value}" for name, value in shown.items())
    _add(
        case,
        "system-out",
        {},
        f"{figures}\nversion: {task.version}\np of pass: {task.p_pass:.4g}\np of fail: {task.p_fail:.4g}",
    )


def _add(parent: Xml.Element, tag: str, attributes: Mapping[str, str], text: str | None = None) -> Xml.Element:
    made = Xml.SubElement(parent, tag, {name: readable(value) for name, value in attributes.items()})
    made.text = None if text is None else readable(text)
    return made


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
    found, sure = list[EvalResult](), f"with confidence {100 * result.confidence:g}%"
    routed = f", routed by {result.routing.method}" if result.routing is not None else ""
    for task in result.tasks:
        if not math.isfinite(task.compressed):
            continue
        drop, most = change(task.drop, task.kind), change(task.upper, task.kind)
        beside = f"base {level(task.base)}, drop {drop}, at most {most} {sure}{routed}"
        result_of_task = EvalResult(
            task_type="text-generation",
            dataset_name=task.task,
            dataset_type=task.task,
            dataset_args={"version": task.version, "items": task.items},
            metric_type=task.metric,
            metric_name=f"{task.metric} ({beside})",
            metric_value=float(f"{task.compressed:.6g}"),
            verified=False,
        )
        found.append(result_of_task)
    return found


def model_index(result: GateResult) -> list[dict[str, Any]]:
    """The metrics as the metadata of a model card have them, under the model's name without its folders."""
    name = Path(result.compressed).name or result.compressed
    found: list[dict[str, Any]] = eval_results_to_model_index(name, card_metrics(result))
    return found
