"""The gate's result as blocks, as card metrics and as files.

A result belongs to a folder of weights if the files that it lists are those of the folder.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal
from xml.etree import ElementTree as Xml

import yaml
from huggingface_hub import EvalResult, EvalResultEntry, eval_result_entries_to_yaml
from huggingface_hub.repocard_data import eval_results_to_model_index

from compressor.answers.scores import REPORT
from compressor.document.blocks import (
    Block,
    Details,
    Facts,
    Heading,
    Items,
    Strong,
    Table,
    Text,
    Toned,
    Words,
)
from compressor.document.markdown import markdown
from compressor.errors import CompressionError
from compressor.files import file_digest, write_files
from compressor.formatting import counted, joined, one_line, readable, setting
from compressor.quality_gate.domain_divergence import divergence_blocks
from compressor.quality_gate.statistics import MANY_CUT, POWER, advise, overall
from compressor.quality_gate.verdict import (
    EXIT_STATUS,
    SIGNS,
    Asked,
    GateResult,
    TaskGate,
    conditions_table,
    gate_content,
    gate_from_content,
)
from compressor.records import Json, plain_json, read_json, report_json, value_as
from compressor.run_record import cache_folder, request_key, write_cached

if TYPE_CHECKING:
    from compressor.quality_gate.run import PowerAnalysis

NAMES = (REPORT, "gate.xml", "gate.md")
SUITE = "moe-compress gate"
CLASS = "moe-compress.gate"  # of JUnit's test cases
# JUnit's counts by verdict, or error
COUNTS = {"fail": "failures", "error": "errors", "inconclusive": "skipped"}
METHOD = (
    "Both models answered the same items, and the differences were tested item by item (Miller, "
    "arXiv:2411.00640): flips of right and wrong answers exactly, other scores and likelihoods by "
    "Student's t. A drop passes if its upper confidence bound is within the drop allowed, fails if "
    "the lower bound is beyond it, and is inconclusive otherwise. The items of all tasks that are "
    "answered right or wrong have to pass together; each of these tasks has a drop of its own "
    "allowed, and only fails the gate beyond that, corrected for the number of tasks (Holm). "
    "Perplexities and other scores have to pass by themselves.",
    "Drop: base less compressed, of a perplexity its rise. At least and at most: its one-sided "
    "bounds. Detectable: the smallest true drop that so many items show with probability "
    f"{POWER:g}. Lost and gained: items answered worse and better than by the base.",
)


def level(value: float) -> str:
    """Return a score or a perplexity as text."""
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.4g}"


def change(value: float, kind: Literal["score", "likelihood"]) -> str:
    """Return a drop of a score, or a rise of a perplexity in percent, with its sign."""
    decimals, unit = (2, "%") if kind == "likelihood" else (4, "")
    scaled = 100 * value if kind == "likelihood" else value
    if not abs(scaled) < 1e4:
        return f"{scaled:+.4g}{unit}"
    rounded = round(scaled, decimals) + 0.0  # of two zeros the one without a minus
    return f"{rounded:+.{decimals}f}{unit}"


def margin(row: TaskGate) -> str:
    """Return the drop allowed, of a perplexity in percent."""
    if row.kind == "likelihood":
        return f"{100 * row.max_drop:g}% of perplexity"
    return f"{row.max_drop:g}"


COLUMNS = (
    "task",
    "metric",
    "items",
    "base",
    "compressed",
    "allowed",
    "drop",
    "at least",
    "at most",
    "detectable",
    "lost / gained",
)


def cells(row: TaskGate) -> tuple[str, ...]:
    """Return the figures of a row as they are shown, one for each of `COLUMNS`."""
    return (
        row.task,
        row.metric,
        f"{row.items:,}",
        level(row.base),
        level(row.compressed),
        margin(row),
        change(row.drop, row.kind),
        change(row.lower, row.kind),
        change(row.upper, row.kind),
        change(row.detectable, row.kind),
        f"{row.lost:,} / {row.gained:,}",
    )


TEXTS = {"task", "metric", "verdict"}
# columns, the least important first
OPTIONAL = ("metric", "detectable", "lost / gained", "at least", "items")


def verdict_line(result: GateResult) -> str:
    """Return the verdict and its reasons as a sentence, and the tasks with anomalies in another."""
    tasks = joined([*dict.fromkeys(anomaly.task for anomaly in result.anomalies)])
    if tasks and overall(result.rows, result.conditions) == "pass":
        return (
            f"Inconclusive: ANOMALOUS scores on {tasks}, so that the pass they lead to shows "
            "nothing."
        )
    anomalous = f" ANOMALOUS: scores on {tasks}." if tasks else ""
    passes = result.verdict == "pass"
    lost = "no more than" if passes else "more than"
    reasons = []
    for row in result.rows:
        if row.verdict == result.verdict and (row.decides or row.verdict == "fail"):
            where = f"on {row.task}"
            if row is result.pooled:
                where = f"over all {counted(row.items, 'item')}"
            reasons.append(f"{lost} {margin(row)} was lost {where}")
    than = "at most" if passes else "more than"
    for condition in result.conditions:
        if condition.verdict == result.verdict:
            reasons.append(f"the {condition.name} is {than} {condition.limit:g}")
    due = joined(reasons) or "anything was lost on any task"
    sure = f"with confidence {100 * result.confidence:g}%"
    if result.verdict == "inconclusive":
        return f"Inconclusive: {sure}, it cannot be said whether {due}.{anomalous}"
    return f"{result.verdict.capitalize()}: {sure}, {due}.{anomalous}"


def advice(result: GateResult) -> list[str]:
    """Return a sentence on each inconclusive row or condition that decides: the items that it would
    take."""
    sentences = [
        f"{task.task}: {advise(task, result.confidence)}."
        for task in result.rows
        if task.decides and task.verdict == "inconclusive"
    ]
    needs_items = bool(sentences)
    for condition in result.conditions:
        if condition.verdict == "inconclusive" and condition.advice:
            name = f"{condition.name[0].upper()}{condition.name[1:]}"
            sentences.append(f"{name}: {condition.advice}.")
    limit = result.options.get("limit")
    if needs_items and limit is not None:
        sentences.append(f"Raise --limit, which is {limit}, or leave it out; or name more tasks.")
    elif needs_items:
        sentences.append("Name more tasks, or say with --inconclusive what that counts as.")
    return sentences


def asked_sentences(asked: Asked) -> list[str]:
    """Return a sentence on each form in which tasks were asked; none for recorded results."""
    if not asked:
        return []
    from compressor.answers.forms import form_sentences  # which loads torch

    return form_sentences(asked)


def power_blocks(power: "PowerAnalysis") -> list[Block]:
    """Return a table of items, drops allowed and margins that the items can show; without tasks a
    sentence."""
    rows = [*power.tasks, *([] if power.pooled is None else [power.pooled])]
    forms = map(Text, asked_sentences(power.asked))
    if not rows:
        text = (
            "Margins that text can show of loss and flips depend on their variance, and are "
            "known from the bounds."
        )
        return [Text(text)]
    cells = []
    for row in rows:
        shown = [f"{drop:.4f}" for drop in row.shown or ()] or ["-"] * len(power.flips)
        cells.append((row.task, f"{row.items:,}", f"{row.max_drop:g}", *shown))
    shares = [f"shown at {flips:.0%} flips" for flips in power.flips]
    columns = ("task", "items", "allowed", *shares)
    caption = f"What the gate can show, with confidence {100 * power.confidence:g}%"
    text = (
        "Shown: the smallest drop allowed that a model passes which lost nothing and answers this "
        f"share of items differently, at 0% for certain, else with probability {POWER:g}."
    )
    if power.pooled is not None:
        text += (
            " All together have to pass; a task alone only refuses a clear loss, of about the "
            "drop allowed and the one shown."
        )
    return [*forms, Table(caption, columns, cells, ruled={len(power.tasks) - 1}), Text(text)]


def gate_blocks(result: GateResult) -> list[Block]:
    """Return the verdict, advice, tasks with the pool, conditions, and the exact method.

    Terminal, gate.md, report page and model card show the same blocks.
    """
    tone, sign = SIGNS[result.verdict]
    blocks: list[Block] = [Text(Strong(Toned(verdict_line(result), tone, sign)), tone)]
    sentences = [anomaly.sentence for anomaly in result.anomalies]
    for task in result.tasks:
        if task.cut is not None:
            base, compressed = task.cut
            cause = ""
            if max(task.cut) >= MANY_CUT:
                cause = (
                    ", the likely cause of wrong ones; raise --max-gen-toks, or the limit of the "
                    "tool that asked"
                )
            sentences.append(
                f"{task.task}: {base:.1%} of the base's and {compressed:.1%} of the compressed "
                f"model's answers reached the token limit{cause}."
            )
    sentences += [*advice(result), *result.notes, *asked_sentences(result.asked)]
    if sentences:
        blocks.append(Items(sentences))
    rows: list[tuple[Words, ...]] = [
        (*cells(row), Toned(row.verdict, *SIGNS[row.verdict])) for row in result.rows
    ]
    if rows or not result.conditions:
        caption = (
            f"{result.compressed} compared with {result.base}, bounds one-sided, each with "
            f"confidence {100 * result.confidence:g}%"
        )
        columns = (*COLUMNS, "verdict")
        blocks.append(Table(caption, columns, rows, TEXTS, OPTIONAL, {len(result.tasks) - 1}))
    for row in result.rows:
        if row.decides:
            sentence = "equivalent" if row.equivalent else "not shown to be equivalent"
            changed = f"{row.lost:,} items got worse, {row.gained:,} better"
            blocks.append(Text(f"{row.task}: {sentence} within {margin(row)}; {changed}."))
    if result.conditions:
        blocks.append(conditions_table(result.conditions))
    if result.text:
        blocks += divergence_blocks(result.text, "Text, read by both")
    if result.answers:
        blocks += divergence_blocks(result.answers, "The base's answers, read by both")
    if result.streamed:
        names = {"base": "the base", "compressed": "the compressed model"}
        streamed = joined([names[name] for name in result.streamed])
        blocks.append(Text(f"With one layer in memory at a time: {streamed}."))
    if result.reused_base:
        blocks.append(Text("The base's results are of an earlier run."))
    facts = {
        "Base": _named(result.base, result.base_identity),
        "Compressed": _named(result.compressed, result.compressed_identity),
        "Tasks": {task.task: f"version {task.version}" for task in result.tasks},
        "Options": result.options,
        "Versions": result.versions,
        "Seconds": result.seconds,
        "Items per second": result.items_per_second,
    }
    known = Facts([(name, setting(fact)) for name, fact in facts.items() if fact])
    blocks.append(Details("How it was tested", (*map(Text, METHOD), known)))
    return blocks


def _named(model: str, identity: Json) -> str:
    """Return a model with its commit, as far as that is known."""
    if "commit" in identity:
        return f"{model}, commit {identity['commit']}"
    return f"{model}, files as in gate.json" if identity else model


def write_gate(result: GateResult, folder: Path, overwrite: bool = False) -> list[Path]:
    """Write JSON, JUnit XML and Markdown into a new folder."""
    reports = (gate_json(result), junit(result), gate_page(result))
    return write_files(folder, dict(zip(NAMES, reports, strict=True)), NAMES, overwrite)


def write_error(message: str, folder: Path) -> None:
    """Write gate.xml alone into a new folder, for a gate that ended with an error."""
    report = _junit(SUITE, [("gate", "error", message, "")])
    write_files(folder, {NAMES[1]: report}, NAMES)


def clear_error(folder: Path) -> None:
    """Remove the report of an earlier run's error, which stands alone in its folder."""
    report = folder / NAMES[1]
    is_alone = folder.is_dir() and list(folder.iterdir()) == [report]
    if is_alone and report.is_file() and SUITE.encode() in report.read_bytes():
        report.unlink()


def gate_page(result: GateResult) -> str:
    """Return the result as Markdown; by its first line, which is not shown, a job finds its comment
    again."""
    models = one_line(f"{result.base}, {result.compressed}", None).replace(">", " ")
    page = markdown((Heading(f"Accuracy gate: {result.verdict}", level=1), *gate_blocks(result)))
    return f"<!-- {SUITE}: {models} -->\n{page}"


def junit(result: GateResult) -> bytes:
    """Return JUnit XML for CI servers: rows and conditions are test cases; inconclusive ones are
    skipped."""
    cases = []
    for task in result.rows:
        shown = dict(zip(COLUMNS, cells(task), strict=True))
        message = (
            f"{task.metric} dropped by {shown['drop']} (at least {shown['at least']}, at most "
            f"{shown['at most']}); {shown['allowed']} is allowed"
        )
        shown |= {"verdict": task.verdict, "version": task.version}
        shown |= {"p of pass": f"{task.p_pass:.4g}", "p of fail": f"{task.p_fail:.4g}"}
        output = "\n".join(f"{name}: {value}" for name, value in shown.items())
        cases.append((task.task, task.verdict, message, output))
    for condition in result.conditions:
        sentence = condition.sentence
        cases.append((condition.name, condition.verdict, sentence, sentence))
    for anomaly in result.anomalies:
        sentence = anomaly.sentence
        cases.append((f"{anomaly.task}, anomalous", "inconclusive", sentence, sentence))
    properties = {"exit-status": str(EXIT_STATUS[result.verdict])}
    for name, value in gate_content(result).items():
        if isinstance(value, str | float):
            properties[name.replace("_", "-")] = str(value)
    return _junit(
        f"{SUITE}: {result.base}, {result.compressed}",
        cases,
        {"time": f"{sum(result.seconds.values()):.3f}"},
        properties,
        "\n".join([verdict_line(result), *advice(result)]),
    )


def _junit(
    name: str,
    cases: Sequence[tuple[str, str, str, str]],
    time: Mapping[str, str] = MappingProxyType({}),
    properties: Mapping[str, str] = MappingProxyType({}),
    output: str = "",
) -> bytes:
    """Return JUnit XML of cases: name, verdict or error, its message, and the output."""
    verdicts = [verdict for _, verdict, *_ in cases]
    counts = {"tests": str(len(cases))}
    for verdict, count in COUNTS.items():
        counts[count] = str(verdicts.count(verdict))
    root = Xml.Element("testsuites", {"name": SUITE, **counts, **time})
    suite = Xml.SubElement(root, "testsuite", {"name": name, **counts, **time})
    if properties:
        listed = Xml.SubElement(suite, "properties")
        for key, value in properties.items():
            Xml.SubElement(listed, "property", name=key, value=value)
    for title, verdict, message, text in cases:
        case = Xml.SubElement(suite, "testcase", classname=CLASS, name=title)
        if verdict == "inconclusive":
            Xml.SubElement(case, "skipped", message=f"inconclusive: {message}")
        elif verdict != "pass":
            tag = COUNTS[verdict].removesuffix("s")
            Xml.SubElement(case, tag, message=message, type=verdict).text = message
        if text:
            Xml.SubElement(case, "system-out").text = text
    if output:
        Xml.SubElement(suite, "system-out").text = output
    for element in root.iter():
        element.text = element.text and readable(element.text)
        for key, value in element.items():
            element.set(key, readable(value))
    Xml.indent(root)
    return bytes(Xml.tostring(root, encoding="utf-8", xml_declaration=True))


def full_content(result: GateResult) -> Json:
    """Return the content of gate.json: the result, and its metrics in the form of a model card."""
    index = eval_results_to_model_index(
        Path(result.compressed).name or result.compressed, card_metrics(result)
    )
    return {**gate_content(result), "model_index": list(index)}


def gate_json(result: GateResult) -> str:
    return report_json(full_content(result))


def read_gate(path: Path) -> GateResult:
    """Read a result from its gate.json, or from the folder that holds it."""
    file = path / NAMES[0] if path.is_dir() else path
    remedy = "name a gate.json that moe-compress gate has written"
    content = read_json(file, remedy, remedy)
    try:
        return gate_from_content(content)
    except CompressionError as error:
        raise CompressionError(f"{file}: {error}; {remedy}") from error


def keep_result(result: GateResult) -> None:
    """Keep the result of a model's files in the user's cache, where `gate_of` finds it by their
    digests."""
    if "digests" in result.compressed_identity:
        key = request_key(
            plain_json(result.compressed_identity["digests"]), result.compressed_identity["files"]
        )
        write_cached(cache_folder("results") / f"{key}.json", gate_content(result))


def gate_of(folder: Path, gate: GateResult | None = None) -> GateResult | None:
    """Return the given result, refused if it is of other files, or else the newest one of these
    very files.

    It lies beside the weights, in a folder beside theirs, as `gate -o` and `compress --gate` write
    it, or in the cache."""
    if gate is not None:
        name = differing(folder, gate.compressed_identity)
        if name is not None:
            raise CompressionError(
                f"the gate's result is of another model than {folder}: {name} is not the same; "
                "run the gate again on this folder"
            )
        return gate
    places = [*folder.resolve().parent.glob(f"*/{REPORT}"), *cache_folder("results").glob("*.json")]
    if (folder / REPORT).is_file():
        read_gate(folder / REPORT)  # refused if it is none
    results = {}
    for path in places:
        with suppress(CompressionError, OSError):
            result = read_gate(path)
            identity = result.compressed_identity
            if "weights" in identity and differing(folder, identity) is None:
                results[path.stat().st_mtime_ns] = result
    return results[max(results)] if results else None


def differing(folder: Path, identity: Json) -> str | None:
    """Return the first file that differs from the identity; None if none does.

    Times of change are ignored: a copied or downloaded model is the same model.
    """
    stamps: tuple[tuple[str, int, int], ...] = value_as(
        identity.get("weights", []), tuple[tuple[str, int, int], ...], "weights"
    )
    digests = dict[str, str]()
    for part in ("files", "digests"):
        digests |= value_as(identity.get(part, {}), Mapping[str, str], part)
    paths = folder.iterdir() if folder.is_dir() else ()
    known = {path.name: path for path in paths if path.is_file()}
    for name, size, _ in stamps:
        if name not in known or known[name].stat().st_size != size:
            return name
    for name, digest in digests.items():
        if name not in known or file_digest(known[name]) != digest:
            return name
    return None


def card_metrics(result: GateResult) -> list[EvalResult]:
    """Return the compressed model's finite figures for its model card, with the base's beside
    them."""
    sure = f"with confidence {100 * result.confidence:g}%"
    return [
        EvalResult(
            task_type="text-generation",
            dataset_name=task.task,
            dataset_type=result.benchmarks.get(task.task, (task.task,))[0],
            dataset_args={"version": task.version, "items": task.items},
            metric_type=task.metric,
            metric_name=(
                f"{task.metric} (base {level(task.base)}, drop {change(task.drop, task.kind)}, at "
                f"most {change(task.upper, task.kind)} {sure})"
            ),
            metric_value=float(f"{task.compressed:.6g}"),
            verified=False,
        )
        for task in result.tasks
        if math.isfinite(task.compressed)
    ]


def eval_results(result: GateResult) -> bytes:
    """Return the compressed model's finite scores on benchmarks of the Hub as YAML for
    `.eval_results`; maybe none."""
    entries = []
    for task in result.tasks:
        if task.task in result.benchmarks and math.isfinite(task.compressed):
            dataset_id, task_id = result.benchmarks[task.task]
            notes = (
                f"{task.metric} on {task.items:,} items, {task.task} {task.version} of lm-eval "
                f"{result.versions.get('lm-eval', '')}"
            )
            value = float(f"{task.compressed:.6g}")
            entries.append(EvalResultEntry(dataset_id, task_id, value, notes=notes.rstrip()))
    content = eval_result_entries_to_yaml(entries)
    return yaml.safe_dump(content, sort_keys=False).encode() if entries else b""
