"""Results that any tool has recorded of two models, paired by item and judged: no model is loaded, nor torch.

Forms: lm-eval's samples, EvalPlus's results, inspect's logs, and CSV. Of several answers to an item the mean counts.
"""

import csv
import hashlib
import json
import logging
import math
import zipfile
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from compressor.answers.scores import HASH_DIGITS, AnsweredItem, ItemScores, Kind
from compressor.errors import CompressionError, wrap_faults
from compressor.files import json_object
from compressor.formatting import joined
from compressor.quality_gate.anomalies import find_anomalies
from compressor.quality_gate.options import GateOptions
from compressor.quality_gate.statistics import judge, overall
from compressor.quality_gate.verdict import GateResult, TaskGate
from compressor.run_record import versions

logger = logging.getLogger(__name__)

MOST_UNPAIRED = 0.05  # share of all items that only one model may have answered
PATTERNS = ("samples_*.jsonl", "*.eval", "*eval_results.json", "*.csv", "*.json")  # of files in a folder
KNOWN = (
    "name lm-eval's samples_*.jsonl (of --log_samples), EvalPlus's *eval_results.json, inspect's .eval or JSON log, or "
    "CSV with the columns item and score"
)
LIKELIHOODS = {"perplexity", "weighted_perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte"}
LOWER_IS_BETTER = ("brier_score", "ter")  # of lm-eval's metrics, where no results_*.json tells
TASK_SETTINGS = ("generation_kwargs", "filter_list", "repeats")
RUN_SETTINGS = ("chat_template_sha", "system_instruction_sha", "fewshot_as_multiturn")
SAMPLING = ("system_message", "temperature", "top_p", "top_k", "max_tokens", "reasoning_effort")
UNNAMED = "items"  # a task whose file does not name it
WORDS = {"c": 1.0, "p": 0.5, "i": 0.0, "n": 0.0, "pass": 1.0, "fail": 0.0, "timeout": 0.0, "true": 1.0, "false": 0.0}

Settings = dict[str, Any]  # under which a model was evaluated, as far as they are recorded
Key = tuple[str, str, Kind]  # a task with its metric


class Answer(NamedTuple):
    """An answer as it was recorded."""

    task: str
    metric: str
    item: AnsweredItem
    kind: Kind = "score"


def gate_results(
    base: Path, compressed: Path, options: GateOptions, tasks: Sequence[str] = (), metric: str | None = None
) -> GateResult:
    """Judge two models by results in files or folders: all, or those on some tasks.

    `metric` names another than the first, or a scorer.

    Raises `CompressionError` for files of no known form, and where items, prompts or settings are not the same.
    """
    before, settings = read_results(base, tasks, metric)
    after, other_settings = read_results(compressed, tasks, metric)
    for name, value in settings.items():
        other = other_settings.get(name, value)
        if other != value:
            raise CompressionError(
                f"{name} is {value} in {base} and {other} in {compressed}; evaluate both models alike"
            )
    pairs = {}
    for key, scores in before.items():
        if key in after:
            refuse_others(scores, after[key], f"{key[0]}, {base} and {compressed}")
            ids = {item.id for item in scores.items} & {item.id for item in after[key].items}
            if ids:
                pairs[key] = scores.only(ids), after[key].only(ids)
    paired = sum(len(scores.items) for scores, _ in pairs.values())
    lone = _count_unpaired(paired, {str(base): before, str(compressed): after})

    def judged(chosen: Collection[tuple[ItemScores, ItemScores]]) -> tuple[tuple[TaskGate, ...], TaskGate | None]:
        sides = [first for first, _ in chosen], [second for _, second in chosen]
        return judge(*sides, options.max_drop, options.task_drop, options.confidence)

    rows, _ = judged(pairs.values())
    # a problem of EvalPlus counts once in the pool, by all of its tests
    _, pooled = judged([pair for (task, *more), pair in pairs.items() if (f"{task}+", *more) not in pairs])
    anomalies = find_anomalies(rows, [first for first, _ in pairs.values()], {}, {})
    return GateResult(
        verdict=overall([*rows, *([] if pooled is None else [pooled])], anomalies=anomalies),
        base=str(base),
        compressed=str(compressed),
        max_drop=options.max_drop,
        max_task_drop=options.task_drop,
        confidence=options.confidence,
        pooled=pooled,
        tasks=rows,
        options={"paired": paired, "unpaired": lone},
        versions=versions(("moe-compressor",)),
        anomalies=anomalies,
    )


def refuse_others(base: ItemScores, compressed: ItemScores, where: str) -> None:
    """Refuse results on other items, or on items that were asked otherwise."""
    contents = base.differing(compressed, "content")
    if contents:
        raise CompressionError(
            f"{where}: {contents:,} items of the same name differ, so these are results of two benchmarks, or of two "
            "versions of one; evaluate both models on the same"
        )
    prompts = base.differing(compressed, "prompt")
    if prompts:
        raise CompressionError(
            f"{where}: {prompts:,} items were asked by other prompts; evaluate both models with the same chat "
            "template, few-shot examples and instructions"
        )


def _count_unpaired(paired: int, models: Mapping[str, Mapping[Key, ItemScores]]) -> list[int]:
    """Return the number of items that only one model has answered, by model; refuse too many of them."""
    lone = []
    parts = []
    for path, tasks in models.items():
        total = sum(len(scores.items) for scores in tasks.values())
        lone.append(total - paired)
        names = joined([f"{task} ({metric})" for task, metric, _ in tasks])
        parts.append(f"{total - paired:,} of {total:,} items of {path}, {names},")
    message = f"{joined(parts)} have no partner in the other results"
    if sum(lone) > MOST_UNPAIRED * (sum(lone) + paired):
        raise CompressionError(
            f"{message}, more than {MOST_UNPAIRED:.0%} of all; evaluate both models on the same items, or name the "
            "tasks to compare as --tasks"
        )
    if any(lone):
        logger.warning("%s; the %s that have one are compared", message, f"{paired:,}")
    return lone


def read_results(path: Path, wanted: Sequence[str], metric: str | None) -> tuple[dict[Key, ItemScores], Settings]:
    """Return the results in a file or folder, of all tasks or of those that are wanted, and the settings."""
    files = [path]
    if path.is_dir():
        files = next(filter(None, (sorted(path.rglob(pattern)) for pattern in PATTERNS)), [])
    folders = sorted({str(file.parent) for file in files})
    if len(folders) != 1:
        message = f"is no single result, but has {joined(folders)}" if folders else "has no results"
        raise CompressionError(f"{path} {message}; {KNOWN}")
    if files[0].suffix == ".jsonl":
        # the newest of each task, by the time at the end of the name
        files = [*{file.stem.rpartition("_")[0]: file for file in files}.values()]
    settings = Settings()
    answers = defaultdict[Key, dict[str, list[AnsweredItem]]](dict)
    files_of = dict[tuple[Key, str], Path]()
    with wrap_faults(f"{path} cannot be read as results", KNOWN, KNOWN):
        for file in files:
            for task, name, item, kind in _answers(file, wanted, metric, settings):
                key = task, name, kind
                if files_of.setdefault((key, item.id), file) is not file:
                    raise CompressionError(f"{path} has two results on {task}; name one file")
                answers[key].setdefault(item.id, []).append(item)
    tasks = [task for task, *_ in answers]
    for task in wanted or tasks[:1] or ["any task"]:
        if task not in tasks:
            raise CompressionError(
                f"{path} has no score of {task}, only of {joined(tasks) or 'none'}; evaluate it again"
            )
    results = {}
    for key, items in answers.items():
        task, name, kind = key
        means = []
        for same in items.values():
            mean = sum(item.score for item in same) / len(same)
            means.append(replace(same[0], score=mean))
        if task in (wanted or tasks):
            results[key] = ItemScores(task, name, str(settings.get(f"version of {task}") or ""), kind, tuple(means))
    return results, settings


def _answers(file: Path, wanted: Sequence[str], metric: str | None, settings: Settings) -> Iterable[Answer]:
    """Yield the answers in a file, and add its settings."""
    if file.suffix == ".jsonl":
        return _read_samples(file, wanted, metric, settings)
    if file.suffix == ".csv":
        return _read_csv(file)
    if file.suffix == ".eval":
        with zipfile.ZipFile(file) as log:
            names = sorted(name for name in log.namelist() if name.startswith("samples/"))
            content = json.loads(log.read("header.json"))
            content["samples"] = [json.loads(log.read(name)) for name in names]
    else:
        content = json.loads(file.read_text(encoding="utf-8"))
    if "samples" in content:
        return _read_inspect(content, file, metric, settings)
    if "eval" in content and "status" not in content:
        return _read_evalplus(content, settings)
    raise CompressionError(f"{file} has no answers to single items in a known form; {KNOWN}")


def _score(value: Any, where: str) -> float:
    """Return a number, or a word for right or wrong, as a score."""
    text = str(value).strip()
    try:
        score = WORDS.get(text.lower())
        score = float(text) if score is None else score
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise CompressionError(f"{where}: the score is {text[:80]!r}, no number; if the file was cut, copy it again")
    return score


def _read_samples(file: Path, wanted: Sequence[str], metric: str | None, settings: Settings) -> Iterator[Answer]:
    """Yield lm-eval's samples of a task; those of a group are one task, unless its parts are wanted."""
    rows = _json_lines(file)
    # samples_TASK_TIME.jsonl, and of the same time results_TIME.json
    part, _, date = file.stem.removeprefix("samples_").rpartition("_")
    run = json_object(next(file.parent.glob(f"*_{date}.json"), file))
    parents = dict[str, str]()
    for group, members in run.get("group_subtasks", {}).items():
        parents |= dict.fromkeys(members, group)
    names = [part or UNNAMED]
    while names[-1] in parents:
        names.append(parents[names[-1]])
        if names[-1] in names[:-1]:
            raise CompressionError(f"{file}: the group {names[-1]} is a part of itself in group_subtasks; mend that")
    task = next((name for name in names if name in wanted), names[-1])

    def of_part(section: str, default: Any = None) -> Any:
        return run.get(section, {}).get(part, default)

    config = of_part("configs", {})
    if run and task in (wanted or names):
        stated = {"version": of_part("versions"), "n-shot": of_part("n-shot")}
        stated |= {name: config.get(name) for name in TASK_SETTINGS}
        stated |= {name: run.get(name) for name in RUN_SETTINGS}
        settings |= {f"{name} of {part}": value for name, value in stated.items()}
        settings[f"version of {task}"] = run.get("versions", {}).get(task)
    name, _, chosen_filter = (metric or "").partition(",")
    chosen_filter = chosen_filter or rows[0]["filter"]
    rows = [row for row in rows if row["filter"] == chosen_filter]
    count = of_part("n-samples", {}).get("effective", 1)
    if len(rows) < count:
        raise CompressionError(
            f"{file} has {len(rows):,} of {count:,} items with the filter {chosen_filter}; copy it again if it was "
            "cut, or name another --metric"
        )
    aggregations = {str(entry["metric"]): str(entry.get("aggregation")) for entry in config.get("metric_list") or ()}
    # old samples do not list their metrics
    recorded = rows[0].get("metrics") or [field for field in rows[0] if field != "doc_id"]
    name, kind = _choose_metric(file, rows, [name] if name else [*aggregations, *recorded], aggregations)
    sign = 1
    if kind == "score" and not of_part("higher_is_better", {}).get(name, name not in LOWER_IS_BETTER):
        sign = -1
    for row in rows:
        number = str(row["doc_id"])
        value, weight = row[name] if isinstance(row[name], list) else (row[name], 1)
        score = sign * _score(value, f"{file}, item {number}")
        hashes = [str(row.get(field, ""))[:HASH_DIGITS] for field in ("doc_hash", "prompt_hash")]
        item = AnsweredItem(number if task == part else f"{part}/{number}", score, float(weight), *hashes)
        yield Answer(task, f"negated {name}" if sign < 0 else name, item, kind)


def _choose_metric(
    file: Path, rows: Sequence[Mapping[str, Any]], names: Sequence[str], aggregations: Mapping[str, str]
) -> tuple[str, Kind]:
    """Return the first metric with a number for each item, and its kind."""
    for name in names:
        values = [row.get(name) for row in rows]
        is_perplexity = not LIKELIHOODS.isdisjoint((name, aggregations.get(name, "")))
        numbers = all(isinstance(value, bool | int | float) for value in values)
        # a log-likelihood with its number of words or bytes
        pairs = all(isinstance(value, list) and len(value) == 2 for value in values)
        if numbers or (pairs and is_perplexity):
            return name, "likelihood" if is_perplexity else "score"
    raise CompressionError(f"{file} has no number for each item under {joined(names)}; name another --metric")


def _json_lines(file: Path) -> list[Mapping[str, Any]]:
    rows = []
    with file.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise CompressionError(
                    f"{file}, line {number} is no whole JSON ({error}); copy the file again if it was cut, or evaluate "
                    "the model again"
                ) from error
    if not rows:
        raise CompressionError(f"{file} is empty; evaluate the model again")
    return rows


def _read_evalplus(content: Mapping[str, Any], settings: Settings) -> Iterator[Answer]:
    """Yield EvalPlus's results: of the base tests, and under a name with a plus of these and all others."""
    settings["hash of the problems"] = content.get("hash")
    for problem, samples in content["eval"].items():
        name = problem.split("/")[0].lower()
        if isinstance(samples, dict):  # as older versions wrote
            base = [status for status, *_ in samples["base"]]
            plus = [status for status, *_ in samples["plus"] or ()]
        else:
            base = [sample["base_status"] for sample in samples]
            plus = [sample["plus_status"] for sample in samples if sample.get("plus_status")]
        passed = [_score(status, problem) for status in base]
        for score in passed:
            yield Answer(name, "pass@1", AnsweredItem(problem, score))
        for score, status in zip(passed, plus, strict=False):
            yield Answer(f"{name}+", "pass@1", AnsweredItem(problem, min(score, _score(status, problem))))


def _read_inspect(log: Mapping[str, Any], file: Path, scorer: str | None, settings: Settings) -> Iterator[Answer]:
    """Yield the samples in a log of inspect; its epochs are several answers to an item."""
    status = log.get("status", "success")
    if status != "success":
        raise CompressionError(f"{file} is of an evaluation with the status {status}; finish it by inspect eval-retry")
    evaluation = log.get("eval", {})
    task = evaluation.get("task", UNNAMED)
    if evaluation:
        config = log.get("plan", {}).get("config", {})
        stated = {name: config.get(name) for name in SAMPLING}
        stated |= {"version": evaluation.get("task_version"), "task_args": evaluation.get("task_args")}
        stated["epochs"] = evaluation.get("config", {}).get("epochs")
        settings |= {f"{name} of {task}": value for name, value in stated.items()}
    for sample in log["samples"]:
        scores = sample.get("scores") or {}
        scorer = scorer or next(iter(scores), "")
        if scorer in scores:
            name = str(sample["id"])
            score = _score(scores[scorer]["value"], f"{file}, sample {name}, scorer {scorer}")
            yield Answer(task, scorer, AnsweredItem(name, score, content=_content(sample)))


def _content(sample: Mapping[str, Any]) -> str:
    """Return the hash of a sample's input, without the random names of messages; empty if there is none."""
    question = sample.get("input", "")
    if isinstance(question, list):
        question = json.dumps([message.get("content") for message in question])
    return hashlib.sha256(question.encode()).hexdigest()[:HASH_DIGITS] if question else ""


def _read_csv(file: Path) -> Iterator[Answer]:
    with file.open(newline="", encoding="utf-8-sig") as stream:
        reader = csv.DictReader(stream, skipinitialspace=True)
        columns = [name.strip().lower() for name in reader.fieldnames or ()]
        if not {"item", "score"} <= {*columns}:
            raise CompressionError(f"{file} begins with {joined(columns)}; its first line should name item and score")
        reader.fieldnames = columns
        for row in reader:
            score = _score(row["score"], f"{file}, line {reader.line_num}")
            yield Answer(row.get("task") or UNNAMED, "score", AnsweredItem(row["item"], score))
