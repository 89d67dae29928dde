"""The gate's result as JUnit XML: the suite is the whole, each task a test case."""

from collections.abc import Mapping
from xml.etree import ElementTree as Xml

from compressor.gates.document import advice, cells, margin, verdict_line
from compressor.gates.verdict import EXIT_STATUS, GateResult, RoutedBy, TaskGate
from compressor.words import readable

NAME = "moe-compress gate"


def junit(result: GateResult) -> bytes:
    """A document for CI servers; failed tasks are failures, inconclusive ones are skipped."""
    verdicts = [task.verdict for task in result.tasks]
    counts = {
        "tests": str(len(verdicts)),
        "failures": str(verdicts.count("fail")),
        "errors": "0",
        "skipped": str(verdicts.count("inconclusive")),
        "time": f"{sum(result.seconds.values()):.3f}",
    }
    root = Xml.Element("testsuites", {"name": NAME, **counts})
    suite = _add(root, "testsuite", {"name": f"{NAME}: {result.base}, {result.compressed}", **counts})
    properties = _add(suite, "properties", {})
    for name, value in _facts(result).items():
        _add(properties, "property", {"name": name, "value": str(value)})
    for task in result.tasks:
        _add_case(suite, result, task)
    _add(suite, "system-out", {}, "\n".join([verdict_line(result), *advice(result)]))
    Xml.indent(root)
    found: bytes = Xml.tostring(root, encoding="utf-8", xml_declaration=True)
    return found


def _facts(result: GateResult) -> dict[str, object]:
    return {
        "verdict": result.verdict,
        "exit-status": EXIT_STATUS[result.verdict],
        "base": result.base,
        "compressed": result.compressed,
        "max-drop": result.max_drop,
        "confidence": result.confidence,
        "reused-base": str(result.reused_base).lower(),
        **{f"option.{name}": value for name, value in result.options.items() if value is not None},
        **_routing(result.routing),
        **{f"version.{name}": value for name, value in result.versions.items()},
        **{f"seconds.{name}": value for name, value in result.seconds.items()},
    }


def _routing(routing: RoutedBy | None) -> dict[str, object]:
    if routing is None:
        return {}
    facts = {"method": routing.method, "reference": routing.reference, "cost": f"{routing.cost:.3f}"}
    facts |= {"left-plain": str(routing.left_plain)}
    options = {f"option.{name}": value for name, value in routing.options.items() if value is not None}
    return {f"routing.{name}": value for name, value in {**facts, **options}.items()}


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
