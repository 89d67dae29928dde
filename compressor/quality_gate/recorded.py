"""Results that any tool has recorded of two models, paired by item and judged: no model is loaded,
nor torch.

Forms: lm-eval's samples, EvalPlus's results, inspect's logs, and CSV. Of several answers to an item
the mean counts. An answer that one model lacks is the worst for the smaller model in a condition of
its own."""

import csv
import hashlib
import json
import logging
import math
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from compressor.answers.scores import HASH_DIGITS, AnsweredItem, ItemScores, Kind
from compressor.errors import CompressionError, wrap_faults
from compressor.extras import require
from compressor.files import json_object
from compressor.formatting import human_bytes, joined
from compressor.quality_gate.anomalies import find_anomalies
from compressor.quality_gate.options import GateOptions
from compressor.quality_gate.statistics import POOLED, judge, overall
from compressor.quality_gate.verdict import GateCondition, GateResult, TaskGate
from compressor.records import read_as, value_as
from compressor.run_record import versions

logger = logging.getLogger(__name__)

MOST_UNPAIRED = 0.05  # share of all items that only one model may have answered
MOST_BYTES = 2**32  # that the members of an archive may unpack to
NAMED = 20  # items without an answer that a sentence names
ZSTANDARD = 93  # zipfile's number of it, which Python reads from 3.14 on
# of files in a folder
PATTERNS = ("samples_*.jsonl", "*.eval", "*eval_results.json", "*.csv", "*.json")
KNOWN = (
    "name lm-eval's samples_*.jsonl (of --log_samples), EvalPlus's *eval_results.json, inspect's "
    ".eval or JSON log, or "
    "CSV with the columns item and score"
)
LIKELIHOODS = {
    "perplexity",
    "weighted_perplexity",
    "word_perplexity",
    "byte_perplexity",
    "bits_per_byte",
}
LOWER_IS_BETTER = ("brier_score", "ter")  # of lm-eval's metrics, where no results_*.json tells
TASK_SETTINGS = ("generation_kwargs", "filter_list", "repeats", "target_delimiter", "doc_to_choice")
RUN_SETTINGS = ("chat_template_sha", "system_instruction_sha", "fewshot_as_multiturn")
SAMPLING = (
    "system_message",
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "stop_seqs",
    "reasoning_effort",
)
LIMITS = ("epochs", "message_limit", "token_limit")
CUT = ("max_tokens", "model_length")  # inspect's reasons to stop
UNNAMED = "items"  # a task whose file does not name it
NOT_HELD = "not held"  # among settings: what a file does not tell of how a model was asked
UNANSWERED = "items without an answer"  # of which some have one of another epoch
WORDS = {
    "c": 1.0,
    "p": 0.5,
    "i": 0.0,
    "n": 0.0,
    "pass": 1.0,
    "fail": 0.0,
    "timeout": 0.0,
    "error": 0.0,
}
WORDS |= {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}

Settings = dict[str, Any]  # under which a model was evaluated, as far as they are recorded
Key = tuple[str, str, Kind]  # a task with its metric
Answers = Mapping[str, Sequence[AnsweredItem]]  # to one task, by item
Pairs = Mapping[Key, tuple[ItemScores, ItemScores]]


class Answer(NamedTuple):
    """An answer as it was recorded."""

    task: str
    metric: str
    item: AnsweredItem
    kind: Kind = "score"


@dataclass(frozen=True, slots=True)
class InspectScore:
    """A scorer's value of a sample."""

    value: Any


@dataclass(frozen=True, slots=True)
class InspectMessage:
    """A message between user, tools and model."""

    role: str
    content: Any = None


@dataclass(frozen=True, slots=True)
class InspectChoice:
    """An answer's end."""

    stop_reason: str = "unknown"


@dataclass(frozen=True, slots=True)
class InspectOutput:
    """The answers to the last message."""

    choices: tuple[InspectChoice, ...] = ()


@dataclass(frozen=True, slots=True)
class InspectSample:
    """The fields of a sample in inspect's log that are read."""

    id: int | str
    input: Any = ""
    choices: Any = None
    target: Any = None
    scores: Mapping[str, InspectScore] | None = None
    error: Any = None
    messages: tuple[InspectMessage, ...] = ()
    output: InspectOutput | None = None

    @property
    def content(self) -> str:
        """Hash of question, choices and target, without the random names of messages."""
        question = self.input
        if isinstance(question, list):
            question = [message.get("content") for message in question if isinstance(message, dict)]
        return _hash([question, self.choices, self.target])

    @property
    def prompt(self) -> str:
        """Hash of the messages before the first answer; empty if there are none."""
        asked = []
        for message in self.messages:
            if message.role == "assistant":
                break
            asked.append([message.role, message.content])
        return _hash(asked) if asked else ""

    @property
    def cut(self) -> float | None:
        """1 if the answer reached the token limit, 0 if not, None if the log does not say."""
        if self.output is None or not self.output.choices:
            return None
        return float(self.output.choices[0].stop_reason in CUT)


@dataclass(frozen=True, slots=True)
class EvalPlusSample:
    """What the tests of EvalPlus say of one answer."""

    base_status: str
    plus_status: str | None = None


def gate_results(
    base: Path,
    compressed: Path,
    options: GateOptions,
    tasks: Sequence[str] = (),
    metric: str | None = None,
) -> GateResult:
    """Judge two models by results in files or folders: all, or those on some tasks.

    `metric` names another than the first, or a scorer.

    Raises `CompressionError` for files of no known form, and where items, prompts or settings are
    not the same."""
    before, settings = read_results(base, tasks, metric)
    after, other_settings = read_results(compressed, tasks, metric)
    unheld = sorted(settings.pop(NOT_HELD) | other_settings.pop(NOT_HELD))
    neither = sorted(settings.pop(UNANSWERED) & other_settings.pop(UNANSWERED))
    for name, value in settings.items():
        other = other_settings.get(name, value)
        if other != value:
            raise CompressionError(
                f"{name} is {value} in {base} and {other} in {compressed}; evaluate both models "
                "alike"
            )
    pairs = dict[Key, tuple[ItemScores, ItemScores]]()
    worst = dict[Key, tuple[ItemScores, ItemScores]]()
    for key in {**before, **after}:
        task, name, kind = key
        first, second = before.get(key, {}), after.get(key, {})
        scores = ItemScores(task, name, str(settings.get(f"version of {task}") or ""), kind, ())
        ids = first.keys() & second.keys()
        pair = replace(scores, items=_means(first, ids)), replace(scores, items=_means(second, ids))
        refuse_others(*pair, f"{task}, {base} and {compressed}")
        if ids:
            pairs[key] = pair
        completed = worst_case(first, second)
        worst[key] = replace(scores, items=completed[0]), replace(scores, items=completed[1])
    paired = sum(len(scores.items) for scores, _ in pairs.values())
    lacking = _find_unanswered([(base, before), (compressed, after)], paired)
    rows, pooled = _judge(pairs, options)
    conditions = (
        _worst_conditions(_judge(worst, options), rows, pooled, lacking) if any(lacking) else ()
    )
    anomalies = find_anomalies(rows, [first for first, _ in pairs.values()], {}, {})
    notes = [f"Not compared, since the files do not hold it: {joined(unheld)}."] if unheld else []
    if neither:
        more = f" and {len(neither) - NAMED:,} more" if len(neither) > NAMED else ""
        notes.append(
            f"Left out, since neither model has an answer: {', '.join(neither[:NAMED])}{more}."
        )
    return GateResult(
        verdict=overall([*rows, *([] if pooled is None else [pooled])], conditions, anomalies),
        base=str(base),
        compressed=str(compressed),
        max_drop=options.max_drop,
        max_task_drop=options.task_drop,
        confidence=options.confidence,
        pooled=pooled,
        tasks=rows,
        options={
            "paired": paired,
            "unanswered": dict(zip(("base", "compressed"), lacking, strict=True)),
        },
        versions=versions(("moe-compressor",)),
        conditions=conditions,
        anomalies=anomalies,
        notes=tuple(notes),
    )


def _judge(pairs: Pairs, options: GateOptions) -> tuple[tuple[TaskGate, ...], TaskGate | None]:
    """Judge tasks and their pool, in which a problem of EvalPlus counts once, by all of its
    tests."""
    margins = options.max_drop, options.task_drop, options.confidence
    pool = [pair for (task, *more), pair in pairs.items() if (f"{task}+", *more) not in pairs]
    base, compressed = zip(*pairs.values(), strict=True)
    rows, _ = judge(base, compressed, *margins)
    base, compressed = zip(*pool, strict=True)
    _, pooled = judge(base, compressed, *margins)
    return rows, pooled


def _means(answers: Answers, ids: Iterable[str]) -> tuple[AnsweredItem, ...]:
    """Return some of the items, each with the means over its answers."""
    items = []
    for name in sorted(ids):
        same = answers[name]
        cut = [item.cut for item in same if item.cut is not None]
        mean = math.fsum(item.score for item in same) / len(same)
        items.append(replace(same[0], score=mean, cut=sum(cut) / len(cut) if cut else None))
    return tuple(items)


def worst_case(
    base: Answers, compressed: Answers
) -> tuple[tuple[AnsweredItem, ...], tuple[AnsweredItem, ...]]:
    """Return all items of a task, with the best score where the base and the worst where the other
    lacks an answer.

    Scores range from 0 to 1, or as far as the known ones do.
    """
    known = [item for answers in (base, compressed) for same in answers.values() for item in same]
    low = min(0.0, *(item.score for item in known))
    high = max(1.0 if low == 0 else 0.0, *(item.score for item in known))
    completed = []
    for answers, others, score in ((base, compressed, high), (compressed, base, low)):
        full = dict[str, list[AnsweredItem]]()
        for name in {**answers, **others}:
            same = [*answers.get(name, ())]
            model = (same or others[name])[0]
            missing = len(others.get(name, ())) - len(same)
            full[name] = same + [replace(model, score=score)] * missing
        completed.append(_means(full, full))
    return completed[0], completed[1]


def _worst_conditions(
    worst: tuple[Sequence[TaskGate], TaskGate | None],
    rows: Sequence[TaskGate],
    pooled: TaskGate | None,
    lacking: tuple[Sequence[str], Sequence[str]],
) -> tuple[GateCondition, ...]:
    """Return the drops that decide with every missing answer at its worst; nothing is the worst of
    a likelihood."""
    known = {
        (row.task, row.metric): (row.items, row.drop) for row in [*rows, *filter(None, [pooled])]
    }
    named = []
    for model, names in zip(("base", "compressed model"), lacking, strict=True):
        more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
        named += [f"of the {model} {', '.join(names[:NAMED])}{more}"] if names else []
    conditions = []
    for row in [*worst[0], *filter(None, [worst[1]])]:
        if not row.decides or known.get((row.task, row.metric)) == (row.items, row.drop):
            continue
        where = "over all items" if row.task == POOLED else f"on {row.task}"
        passes = row.verdict == "pass" and row.kind == "score"
        condition = GateCondition(
            name=f"drop {where} with missing answers at their worst",
            option="--max-drop",
            limit=row.max_drop,
            observed=row.drop,
            lower=row.lower,
            upper=row.upper if row.kind == "score" else math.inf,
            items=row.items,
            unit="items",
            verdict="pass" if passes else "inconclusive",
            base=row.base,
            compressed=row.compressed,
            advice=f"these items lack an answer: {joined(named)}; have them answered",
        )
        conditions.append(condition)
    return tuple(conditions)


def refuse_others(base: ItemScores, compressed: ItemScores, where: str) -> None:
    """Refuse results on other items, or on items that were asked otherwise."""
    contents = base.differing(compressed, "content")
    if contents:
        raise CompressionError(
            f"{where}: {contents:,} items of the same name differ, so these are results of two "
            "benchmarks, or of two "
            "versions of one; evaluate both models on the same"
        )
    prompts = base.differing(compressed, "prompt")
    if prompts:
        raise CompressionError(
            f"{where}: {prompts:,} items were asked by other prompts; evaluate both models with "
            "the same chat "
            "template, few-shot examples and instructions"
        )


def _find_unanswered(
    models: Sequence[tuple[Path, Mapping[Key, Answers]]], paired: int
) -> tuple[list[str], list[str]]:
    """Return the items that lack an answer of base and compressed model; refuse too many."""
    lacking: tuple[list[str], list[str]] = ([], [])
    parts = []
    lone = 0
    for names, (path, tasks), (_, others) in zip(lacking, models, reversed(models), strict=True):
        total = sum(map(len, tasks.values()))
        lone += total - paired
        tasks_named = joined([f"{task} ({metric})" for task, metric, _ in tasks])
        parts.append(f"{total - paired:,} of {total:,} items of {path}, {tasks_named},")
        for key, answers in others.items():
            known = tasks.get(key, {})
            names += [
                f"{key[0]} {name}"
                for name in answers
                if len(answers[name]) > len(known.get(name, ()))
            ]
    message = f"{joined(parts)} have no partner in the other results"
    if lone > MOST_UNPAIRED * (lone + paired):
        raise CompressionError(
            f"{message}, more than {MOST_UNPAIRED:.0%} of all; evaluate both models on the same "
            "items, or name the "
            "tasks to compare as --tasks"
        )
    if lone:
        logger.warning("%s; the %s that have one are compared", message, f"{paired:,}")
    return lacking


def read_results(
    path: Path, wanted: Sequence[str], metric: str | None
) -> tuple[dict[Key, Answers], Settings]:
    """Return the answers in a file or folder, to all tasks or those that are wanted, and the
    settings."""
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
    settings = Settings({NOT_HELD: set(), UNANSWERED: set()})
    results = defaultdict[Key, dict[str, list[AnsweredItem]]](dict)
    files_of = dict[tuple[Key, str], Path]()
    with wrap_faults(f"{path} cannot be read as results", KNOWN, KNOWN):
        for file in files:
            for task, name, item, kind in _answers(file, wanted, metric, settings):
                key = task, name, kind
                if math.isnan(item.score):
                    settings[UNANSWERED].add(f"{task} {item.id}")
                    continue
                if files_of.setdefault((key, item.id), file) is not file:
                    raise CompressionError(f"{path} has two results on {task}; name one file")
                results[key].setdefault(item.id, []).append(item)
    tasks = [task for task, *_ in results]
    for task in wanted or tasks[:1] or ["any task"]:
        if task not in tasks:
            raise CompressionError(
                f"{path} has no score of {task}, only of {joined(tasks) or 'none'}; evaluate it "
                "again"
            )
    return {
        key: answers for key, answers in results.items() if key[0] in (wanted or tasks)
    }, settings


def _answers(
    file: Path, wanted: Sequence[str], metric: str | None, settings: Settings
) -> Iterable[Answer]:
    """Yield the answers in a file, and add its settings."""
    if file.suffix == ".jsonl":
        return _read_samples(file, wanted, metric, settings)
    if file.suffix == ".csv":
        return _read_csv(file, settings)
    if file.suffix == ".eval":
        return _read_inspect(_unpack(file), file, metric, settings)
    content = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(content, dict) and isinstance(content.get("samples"), list):
        samples = (
            (f"samples[{number}]", sample) for number, sample in enumerate(content["samples"])
        )
        return _read_inspect(iter([("log", content), *samples]), file, metric, settings)
    if isinstance(content, dict) and "eval" in content and "status" not in content:
        return _read_evalplus(content, file, settings)
    raise CompressionError(f"{file} has no answers to single items in a known form; {KNOWN}")


def _unpack(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the header and the samples of inspect's log, with the names of their members."""
    opener: Any = zipfile.ZipFile
    with zipfile.ZipFile(file) as archive:
        members = {member.filename: member for member in archive.infolist()}
    if "header.json" not in members:
        raise CompressionError(
            f"{file} has no header.json, so its evaluation has not ended; try inspect eval-retry"
        )
    names = ["header.json", *sorted(name for name in members if name.startswith("samples/"))]
    nbytes = sum(members[name].file_size for name in names)
    if nbytes > MOST_BYTES:
        raise CompressionError(
            f"{file} unpacks to {human_bytes(nbytes)}, more than the {human_bytes(MOST_BYTES)} "
            "that are read; write "
            "its scores as CSV with the columns item and score"
        )
    if sys.version_info < (3, 14) and any(
        members[name].compress_type == ZSTANDARD for name in names
    ):
        require("backports.zstd")
        from backports.zstd.zipfile import ZipFile

        opener = ZipFile
    with opener(file) as archive:
        for name in names:
            with archive.open(name) as stream:
                # no more than stated, whatever the member unpacks to
                yield name, json.loads(stream.read(members[name].file_size))


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:HASH_DIGITS]


def _score(value: Any, where: str) -> float:
    """Return a number, or a word for right or wrong, as a score."""
    if isinstance(value, dict):
        raise CompressionError(
            f"{where}: the score has the parts {joined(list(map(str, value)))}; name one as "
            "--metric SCORER.PART"
        )
    text = str(value).strip()
    try:
        score = WORDS.get(text.lower())
        score = float(text) if score is None else score
    except ValueError:
        raise CompressionError(
            f"{where}: the score is {text[:80]!r}, no number; if the file was cut, copy it again"
        ) from None
    if math.isnan(score):
        raise CompressionError(
            f"{where}: the answer is unscored, its score is NaN; score it, or name another --metric"
        )
    if math.isinf(score):
        raise CompressionError(
            f"{where}: the score is {text[:80]}, which is not finite; evaluate the model again"
        )
    return score


def _read_samples(
    file: Path, wanted: Sequence[str], metric: str | None, settings: Settings
) -> Iterator[Answer]:
    """Yield lm-eval's samples of a task; those of a group are one task, unless its parts are
    wanted."""
    rows = _json_lines(file)
    # samples_TASK_TIME.jsonl, and of the same time results_TIME.json
    part, _, date = file.stem.removeprefix("samples_").rpartition("_")
    summary = next(file.parent.glob(f"*_{date}.json"), file)
    run = json_object(summary)

    def section(name: str) -> Mapping[str, Any]:
        value: Mapping[str, Any] = value_as(
            run.get(name, {}), Mapping[str, Any], f"{summary}: {name}"
        )
        return value

    parents = dict[str, str]()
    for group, members in section("group_subtasks").items():
        parents |= dict.fromkeys(members, group)
    names = [part or UNNAMED]
    while names[-1] in parents:
        if parents[names[-1]] in names:
            raise CompressionError(
                f"{summary}: group_subtasks of {names[-1]} is a circle; evaluate the model again"
            )
        names.append(parents[names[-1]])
    task = next((name for name in names if name in wanted), names[-1])

    def of_part(name: str, default: Any = None) -> Any:
        return section(name).get(part, default)

    config = value_as(of_part("configs", {}), Mapping[str, Any], f"{summary}: configs.{part}")
    if run and task in (wanted or names):
        stated = {"version": of_part("versions"), "n-shot": of_part("n-shot")}
        stated |= {name: config.get(name) for name in TASK_SETTINGS}
        stated |= {name: run.get(name) for name in RUN_SETTINGS}
        settings |= {f"{name} of {part}": value for name, value in stated.items()}
        settings[f"version of {task}"] = section("versions").get(task)
    if not run:
        settings[NOT_HELD].add("lm-eval's settings (in results_*.json)")
    name, _, chosen_filter = (metric or "").partition(",")
    chosen_filter = chosen_filter or rows[0]["filter"]
    rows = [row for row in rows if row["filter"] == chosen_filter]
    count = of_part("n-samples", {}).get("effective", 1)
    if len(rows) < count:
        raise CompressionError(
            f"{file} has {len(rows):,} of {count:,} items with the filter {chosen_filter}; copy "
            "it again if it was "
            "cut, or name another --metric"
        )
    aggregations = {
        str(entry["metric"]): str(entry.get("aggregation"))
        for entry in config.get("metric_list") or ()
    }
    # old samples do not list their metrics
    recorded = rows[0].get("metrics") or [field for field in rows[0] if field != "doc_id"]
    name, kind = _choose_metric(
        file, rows, [name] if name else [*aggregations, *recorded], aggregations
    )
    sign = 1
    if kind == "score" and not of_part("higher_is_better", {}).get(
        name, name not in LOWER_IS_BETTER
    ):
        sign = -1
    for row in rows:
        number = str(row["doc_id"])
        value, weight = row[name] if isinstance(row[name], list) else (row[name], 1)
        where = f"{file}, item {number}"
        score = sign * _score(value, where)
        content = _hash([row.get("doc_hash"), row.get("target_hash")])
        # the hash of the prompt leaves out choices, their delimiter and how answers are generated
        prompt = row.get("arguments") or row.get("prompt_hash")
        if not row.get("arguments"):
            settings[NOT_HELD].add("choices and settings of generation (lm-eval's arguments)")
        name_of_item = number if task == part else f"{part}/{number}"
        item = AnsweredItem(
            name_of_item, score, _score(weight, where), content, _hash(prompt) if prompt else ""
        )
        yield Answer(task, f"negated {name}" if sign < 0 else name, item, kind)


def _choose_metric(
    file: Path,
    rows: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    aggregations: Mapping[str, str],
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
    raise CompressionError(
        f"{file} has no number for each item under {joined(names)}; name another --metric"
    )


def _json_lines(file: Path) -> list[Mapping[str, Any]]:
    rows = []
    with file.open(encoding="utf-8") as stream:
        for number, line in enumerate(stream, 1):
            where = f"{file}, line {number}"
            try:
                row = value_as(json.loads(line), Mapping[str, Any], where)
            except (ValueError, RecursionError) as error:
                raise CompressionError(
                    f"{where} is no whole JSON ({error}); copy it again if it was cut, or "
                    "evaluate the model again"
                ) from error
            if not {"doc_id", "filter"} <= row.keys():
                raise CompressionError(
                    f"{where} has no filter or doc_id; evaluate the model again with --log_samples"
                )
            rows.append(row)
    if not rows:
        raise CompressionError(f"{file} is empty; evaluate the model again")
    return rows


def _read_evalplus(content: Mapping[str, Any], file: Path, settings: Settings) -> Iterator[Answer]:
    """Yield EvalPlus's results: of the base tests, and under a name with a plus of these and all
    others."""
    settings["hash of the problems"] = content.get("hash")
    settings[NOT_HELD].add("prompts and settings of generation")
    for problem, samples in value_as(content["eval"], Mapping[str, Any], f"{file}: eval").items():
        name = problem.split("/")[0].lower()
        where = f"{file}: eval.{problem}"
        if isinstance(samples, dict):  # as older versions wrote
            pairs = zip_longest(samples["base"], samples["plus"] or (), fillvalue=[None])
            samples = [{"base_status": base[0], "plus_status": plus[0]} for base, plus in pairs]
        for sample in value_as(samples, tuple[EvalPlusSample, ...], where):
            score = _score(sample.base_status, where)
            yield Answer(name, "pass@1", AnsweredItem(problem, score))
            if sample.plus_status:
                yield Answer(
                    f"{name}+",
                    "pass@1",
                    AnsweredItem(problem, min(score, _score(sample.plus_status, where))),
                )


def _read_inspect(
    parts: Iterator[tuple[str, Any]], file: Path, metric: str | None, settings: Settings
) -> Iterator[Answer]:
    """Yield the samples in a log of inspect, after its header; its epochs are several answers to an
    item."""
    _, log = next(parts)
    log = value_as(log, Mapping[str, Any], f"{file}: header.json")
    status = log.get("status", "success")
    if status != "success":
        raise CompressionError(
            f"{file} is of an evaluation with the status {status}; finish it by inspect eval-retry"
        )

    def section(above: Mapping[str, Any], name: str) -> Mapping[str, Any]:
        value: Mapping[str, Any] = value_as(
            above.get(name) or {}, Mapping[str, Any], f"{file}: {name}"
        )
        return value

    evaluation = section(log, "eval")
    task = str(evaluation.get("task", UNNAMED))
    if evaluation:
        config = {
            **section(evaluation, "model_generate_config"),
            **section(section(log, "plan"), "config"),
        }
        stated = {name: config.get(name) for name in SAMPLING}
        stated |= {
            "version": evaluation.get("task_version"),
            "task_args": evaluation.get("task_args"),
        }
        stated |= {name: section(evaluation, "config").get(name) for name in LIMITS}
        settings |= {f"{name} of {task}": value for name, value in stated.items()}
    settings[NOT_HELD].add("the chat template")
    samples = [(name, read_as(InspectSample, sample, f"{file}: {name}")) for name, sample in parts]
    scorers = list(dict.fromkeys(scorer for _, sample in samples for scorer in sample.scores or ()))
    metric = metric or next(iter(scorers), "")
    scorer, part = (metric, "") if metric in scorers else metric.rpartition(".")[::2]
    if scorer not in scorers:
        known = joined(scorers) or "none"
        raise CompressionError(
            f"{file} has no scorer {metric!r}, only {known}; name one as --metric"
        )
    for name, sample in samples:
        where = f"{file}: {name}, scorer {scorer}"
        scores = sample.scores or {}
        if sample.error is not None:
            score = 0.0
        elif scorer not in scores:
            score = math.nan
        else:
            value = scores[scorer].value
            if part:
                parts_of = section({scorer: value}, scorer)
                if part not in parts_of:
                    raise CompressionError(
                        f"{where}: the score has no part {part!r}, only {joined([*parts_of])}"
                    )
                value = parts_of[part]
            score = _score(math.nan if value is None else value, where)
        if not sample.prompt:
            settings[NOT_HELD].add("prompts")
        yield Answer(
            task,
            metric,
            AnsweredItem(str(sample.id), score, 1.0, sample.content, sample.prompt, sample.cut),
        )


def _read_csv(file: Path, settings: Settings) -> Iterator[Answer]:
    """Yield the rows of a table; an empty score is no answer, and an error a wrong one."""
    with file.open(newline="", encoding="utf-8-sig") as stream:
        reader = csv.DictReader(stream, skipinitialspace=True)
        columns = [name.strip().lower() for name in reader.fieldnames or ()]
        if not {"item", "score"} <= {*columns}:
            raise CompressionError(
                f"{file} begins with {joined(columns)}; its first line should name item and score"
            )
        reader.fieldnames = columns
        settings[NOT_HELD].add(
            "settings" if "prompt" in columns else "prompts (a column prompt) and settings"
        )
        for row in reader:
            score = 0.0 if row.get("error") else math.nan
            if row["score"] != "" and not row.get("error"):
                score = _score(row["score"], f"{file}, line {reader.line_num}")
            prompt = _hash(row["prompt"]) if row.get("prompt") else ""
            yield Answer(
                row.get("task") or UNNAMED, "score", AnsweredItem(row["item"], score, prompt=prompt)
            )
