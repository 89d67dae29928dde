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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

from compressor.answers.scores import HASH_DIGITS, AnsweredItem, ItemScores, Kind
from compressor.errors import CompressionError, wrap_faults
from compressor.extras import require
from compressor.files import json_object
from compressor.formatting import human_bytes, joined
from compressor.frozen import frozen
from compressor.quality_gate.options import GateOptions
from compressor.quality_gate.statistics import POOLED, conclude, judge
from compressor.quality_gate.verdict import GateCondition, GateResult
from compressor.records import Json, read_as, value_as
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
    ".eval or JSON log, or CSV with the columns item and score"
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
AGAIN = "evaluate the model again"  # a remedy
UNNAMED = "items"  # a task whose file does not name it
RIGHT = ("c", "pass", "true", "yes")
WRONG = ("i", "n", "fail", "timeout", "error", "false", "no")
WORDS = {"p": 0.5, **dict.fromkeys(RIGHT, 1.0), **dict.fromkeys(WRONG, 0.0)}

Key = tuple[str, str, Kind]  # a task with its metric
Answers = Mapping[str, Sequence[AnsweredItem]]  # to one task, by item
Sides = tuple[list[ItemScores], list[ItemScores]]  # the base's scores by task, and the other's


@frozen
class EvalPlusSample:
    """What the tests of EvalPlus say of one answer."""

    base_status: str
    plus_status: str | None = None


@frozen
class InspectSample:
    """The fields of a sample in inspect's log that are read."""

    id: int | str
    input: Any = ""
    choices: Any = None
    target: Any = None
    scores: Mapping[str, Json] | None = None
    error: Any = None
    messages: tuple[Json, ...] = ()
    output: Json | None = None

    def item(self, score: float) -> AnsweredItem:
        """Return the item, with hashes of its content and of the messages before an answer."""
        question = self.input
        if isinstance(question, list):  # without the random names of messages
            question = [message.get("content") for message in question if isinstance(message, dict)]
        content = _hash([question, self.choices, self.target])
        asked = []
        for message in self.messages:
            if message.get("role") == "assistant":
                break
            asked.append([message.get("role"), message.get("content")])
        prompt = _hash(asked) if asked else ""
        choices = (self.output or {}).get("choices")
        cut = float(choices[0].get("stop_reason") in CUT) if choices else None
        return AnsweredItem(str(self.id), score, 1.0, content, prompt, cut)


def gate_results(
    base: str | Path,
    compressed: str | Path,
    options: GateOptions | None = None,
    tasks: Sequence[str] = (),
    metric: str | None = None,
) -> GateResult:
    """Judge two models by recorded results in files or folders: all, or those on some `tasks`.

    `options` say which drops pass, with which confidence; their own tasks are not read. `metric`
    names another than the first, or a scorer. No model is loaded.

    Raises `CompressionError` for files of no known form, and where items, prompts or settings are
    not the same."""
    options = options or GateOptions(tasks=tuple(tasks) or ("all",))
    before = Results.read(Path(base), tasks, metric)
    after = Results.read(Path(compressed), tasks, metric)
    for name, value in before.settings.items():
        other = after.settings.get(name, value)
        if other != value:
            raise CompressionError(
                f"{name} is {value} in {base} and {other} in {compressed}; evaluate both models "
                "alike"
            )
    pairs, worst, lacking = _pair(before, after)
    paired = sum(len(scores.items) for scores in pairs[0])
    parts = []
    lone = 0
    for model in (before, after):
        total = sum(map(len, model.tasks.values()))
        lone += total - paired
        shown_tasks = joined([f"{task} ({metric})" for task, metric, _ in model.tasks])
        parts.append(f"{total - paired:,} of {total:,} items of {model.path}, {shown_tasks},")
    message = f"{joined(parts)} have no partner in the other results"
    if lone > MOST_UNPAIRED * (lone + paired):
        raise CompressionError(
            f"{message}, more than {MOST_UNPAIRED:.0%} of all; evaluate both models on the same "
            "items, or name the tasks to compare as --tasks"
        )
    if lone:
        logger.warning("%s; the %s that have one are compared", message, f"{paired:,}")
    judgement = judge(*pairs, options)
    conditions = []
    if any(lacking):
        named = [
            f"of the {side} {_listed(names)}"
            for side, names in zip(("base", "compressed model"), lacking, strict=True)
            if names
        ]
        advice = f"these items lack an answer: {joined(named)}; have them answered"
        compared = [(row.task, row.metric, row.items, row.drop) for row in judgement.rows]
        for row in judge(*worst, options).rows:
            if row.decides and (row.task, row.metric, row.items, row.drop) not in compared:
                where = "over all items" if row.task == POOLED else f"on {row.task}"
                is_score = row.kind == "score"  # nothing is the worst of a likelihood
                condition = GateCondition.of(
                    row,
                    name=f"drop {where} with missing answers at their worst",
                    option="--max-drop",
                    unit="items",
                    upper=row.upper if is_score else math.inf,
                    verdict="pass" if row.verdict == "pass" and is_score else "inconclusive",
                    advice=advice,
                )
                conditions.append(condition)
    notes = []
    unheld = sorted(before.unheld | after.unheld)
    if unheld:
        notes.append(f"Not compared, since the files do not hold it: {joined(unheld)}.")
    neither = sorted(before.unanswered & after.unanswered)
    if neither:
        notes.append(f"Left out, since neither model has an answer: {_listed(neither)}.")
    unanswered = dict(zip(("base", "compressed"), lacking, strict=True))
    return conclude(
        judgement,
        pairs[0],
        options,
        tuple(conditions),
        base=str(base),
        compressed=str(compressed),
        options={"paired": paired, "unanswered": unanswered},
        versions=versions(("moe-compressor",)),
        notes=tuple(notes),
    )


def _listed(items: Sequence[str]) -> str:
    """Return the first names of items, and how many more there are."""
    more = f" and {len(items) - NAMED:,} more" if len(items) > NAMED else ""
    return f"{', '.join(items[:NAMED])}{more}"


def _means(answers: Answers, ids: Iterable[str]) -> tuple[AnsweredItem, ...]:
    """Return some of the items, each with the means over its answers."""
    items = []
    for name in sorted(ids):
        same = answers[name]
        cut = [item.cut for item in same if item.cut is not None]
        mean = math.fsum(item.score for item in same) / len(same)
        items.append(replace(same[0], score=mean, cut=sum(cut) / len(cut) if cut else None))
    return tuple(items)


def _pair(before: "Results", after: "Results") -> tuple[Sides, Sides, tuple[list[str], list[str]]]:
    """Pair two models' answers by item: scores of the items that both have answered, then of all
    items with a missing answer at its worst, and the names of items that lack one.

    The worst is the best score of the base and the least of the other model. Scores range from 0 to
    1, or as far as the known ones do. Raises `CompressionError` for other items or prompts."""
    pairs: Sides = ([], [])
    worst: Sides = ([], [])
    lacking: tuple[list[str], list[str]] = ([], [])
    for key in {**before.tasks, **after.tasks}:
        task, name, kind = key
        answers: list[Answers] = [before.tasks.get(key, {}), after.tasks.get(key, {})]
        version = str(before.settings.get(f"version of {task}") or "")
        scores = ItemScores(task, name, version, kind, ())
        ids = answers[0].keys() & answers[1].keys()
        first, second = (replace(scores, items=_means(side, ids)) for side in answers)
        refuse_others(first, second, f"{task}, {before.path} and {after.path}")
        if ids:
            pairs[0].append(first)
            pairs[1].append(second)
        known = [item.score for side in answers for same in side.values() for item in same]
        low = min(0.0, *known)
        high = max(1.0 if low == 0 else 0.0, *known)
        for index, score in enumerate((high, low)):
            others = answers[1 - index]
            full = dict[str, list[AnsweredItem]]()
            for item_name in {**answers[index], **others}:
                same = [*answers[index].get(item_name, ())]
                model = (same or others[item_name])[0]
                missing = len(others.get(item_name, ())) - len(same)
                full[item_name] = same + [replace(model, score=score)] * missing
                if missing > 0:
                    lacking[index].append(f"{task} {item_name}")
            worst[index].append(replace(scores, items=_means(full, full)))
    return pairs, worst, lacking


def refuse_others(base: ItemScores, compressed: ItemScores, where: str) -> None:
    """Refuse results on other items, or on items that were asked otherwise."""
    contents = base.differing(compressed, "content")
    if contents:
        raise CompressionError(
            f"{where}: {contents:,} items of the same name differ, so these are results of two "
            "benchmarks, or of two versions of one; evaluate both models on the same"
        )
    prompts = base.differing(compressed, "prompt")
    if prompts:
        raise CompressionError(
            f"{where}: {prompts:,} items were asked by other prompts; evaluate both models with "
            "the same chat template, few-shot examples and instructions"
        )


@dataclass
class Results:
    """One model's answers in a file or folder, and how it was asked, as far as that is recorded."""

    path: Path
    wanted: Sequence[str]  # tasks; all of them if none is named
    metric: str | None
    tasks: dict[Key, dict[str, list[AnsweredItem]]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)  # under which the model was evaluated
    unheld: set[str] = field(default_factory=set)  # what the files do not tell of that
    unanswered: set[str] = field(default_factory=set)  # of which some have one of another epoch
    files: dict[tuple[Key, str], Path] = field(default_factory=dict)  # by item

    @classmethod
    def read(cls, path: Path, wanted: Sequence[str], metric: str | None) -> Self:
        """Read the answers to all tasks, or those that are wanted."""
        files = [path]
        if path.is_dir():
            files = next(filter(None, (sorted(path.rglob(pattern)) for pattern in PATTERNS)), [])
        folders = sorted({str(file.parent) for file in files})
        if len(folders) != 1:
            message = (
                f"is no single result, but has {joined(folders)}" if folders else "has no results"
            )
            raise CompressionError(f"{path} {message}; {KNOWN}")
        if files[0].suffix == ".jsonl":
            # the newest of each task, by the time at the end of the name
            files = [*{file.stem.rpartition("_")[0]: file for file in files}.values()]
        results = cls(path, wanted, metric)
        with wrap_faults(f"{path} cannot be read as results", KNOWN, KNOWN):
            for file in files:
                if file.suffix == ".jsonl":
                    results._read_samples(file)
                elif file.suffix == ".csv":
                    results._read_csv(file)
                elif file.suffix == ".eval":
                    results._read_inspect(_unpack(file), file)
                else:
                    content = json.loads(file.read_text(encoding="utf-8"))
                    known = content if isinstance(content, dict) else {}
                    samples = known.get("samples")
                    if isinstance(samples, list):
                        named = [(f"samples[{number}]", row) for number, row in enumerate(samples)]
                        results._read_inspect(iter([("log", content), *named]), file)
                    elif "eval" in known and "status" not in known:
                        results._read_evalplus(content, file)
                    else:
                        raise CompressionError(
                            f"{file} has no answers to single items in a known form; {KNOWN}"
                        )
        tasks = [task for task, *_ in results.tasks]
        for task in wanted or tasks[:1] or ["any task"]:
            if task not in tasks:
                raise CompressionError(
                    f"{path} has no score of {task}, only of {joined(tasks) or 'none'}; evaluate "
                    "it again"
                )
        for key in [*results.tasks]:
            if wanted and key[0] not in wanted:
                del results.tasks[key]
        return results

    def _add(
        self, file: Path, task: str, metric: str, item: AnsweredItem, kind: Kind = "score"
    ) -> None:
        """Add one of an item's answers; a score that is NaN is none."""
        if math.isnan(item.score):
            self.unanswered.add(f"{task} {item.id}")
            return
        key = task, metric, kind
        if self.files.setdefault((key, item.id), file) is not file:
            raise CompressionError(f"{self.path} has two results on {task}; name one file")
        self.tasks.setdefault(key, {}).setdefault(item.id, []).append(item)

    def _read_samples(self, file: Path) -> None:
        """Read lm-eval's samples of a task; those of a group are one task, unless its parts are
        wanted."""
        rows = []
        with file.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, 1):
                where = f"{file}, line {number}"
                with wrap_faults(f"{where} is no whole JSON", AGAIN, f"copy it again, or {AGAIN}"):
                    row = value_as(json.loads(line), Json, where)
                if not {"doc_id", "filter"} <= row.keys():
                    raise CompressionError(
                        f"{where} has no filter or doc_id; {AGAIN} with --log_samples"
                    )
                rows.append(row)
        if not rows:
            raise CompressionError(f"{file} is empty; {AGAIN}")
        # samples_TASK_TIME.jsonl, and of the same time results_TIME.json
        part, _, date = file.stem.removeprefix("samples_").rpartition("_")
        run = json_object(next(file.parent.glob(f"*_{date}.json"), file))
        parents = dict[str, str]()
        for group, members in run.get("group_subtasks", {}).items():
            parents |= dict.fromkeys(members, group)
        names = [part or UNNAMED]
        while names[-1] in parents and parents[names[-1]] not in names:
            names.append(parents[names[-1]])
        task = next((name for name in names if name in self.wanted), names[-1])
        of_part = {
            name: of_all.get(part) for name, of_all in run.items() if isinstance(of_all, dict)
        }
        config = of_part.get("configs") or {}
        if not run:
            self.unheld.add("lm-eval's settings (in results_*.json)")
        elif task in (self.wanted or names):
            stated = {"version": of_part.get("versions"), "n-shot": of_part.get("n-shot")}
            stated |= {name: config.get(name) for name in TASK_SETTINGS}
            stated |= {name: run.get(name) for name in RUN_SETTINGS}
            self.settings |= {f"{name} of {part}": value for name, value in stated.items()}
            self.settings[f"version of {task}"] = run.get("versions", {}).get(task)
        name, _, chosen_filter = (self.metric or "").partition(",")
        chosen_filter = chosen_filter or rows[0]["filter"]
        rows = [row for row in rows if row["filter"] == chosen_filter]
        count = (of_part.get("n-samples") or {}).get("effective", 1)
        if len(rows) < count:
            raise CompressionError(
                f"{file} has {len(rows):,} of {count:,} items with the filter {chosen_filter}; "
                "copy it again if it was cut, or name another --metric"
            )
        aggregations = {
            str(entry["metric"]): str(entry.get("aggregation"))
            for entry in config.get("metric_list") or ()
        }
        # old samples do not list their metrics
        recorded = rows[0].get("metrics") or [field for field in rows[0] if field != "doc_id"]
        metrics = [name] if name else [*aggregations, *recorded]
        for name in metrics:
            values = [row.get(name) for row in rows]
            is_perplexity = not LIKELIHOODS.isdisjoint((name, aggregations.get(name, "")))
            # a log-likelihood with its number of words or bytes
            pairs = all(isinstance(value, list) and len(value) == 2 for value in values)
            if all(isinstance(value, bool | int | float) for value in values):
                break
            if pairs and is_perplexity:
                break
        else:
            raise CompressionError(
                f"{file} has no number for each item under {joined(metrics)}; name another --metric"
            )
        kind: Kind = "likelihood" if is_perplexity else "score"
        is_better = (of_part.get("higher_is_better") or {}).get(name, name not in LOWER_IS_BETTER)
        sign = 1 if kind == "likelihood" or is_better else -1
        shown_name = f"negated {name}" if sign < 0 else name
        for row in rows:
            name_of_item = str(row["doc_id"])
            value, weight = row[name] if isinstance(row[name], list) else (row[name], 1)
            where = f"{file}, item {name_of_item}"
            # the hash of the prompt leaves out choices, their delimiter and settings of generation
            prompt = row.get("arguments") or row.get("prompt_hash")
            if not row.get("arguments"):
                self.unheld.add("choices and settings of generation (lm-eval's arguments)")
            item = AnsweredItem(
                name_of_item if task == part else f"{part}/{name_of_item}",
                sign * _score(value, where),
                _score(weight, where),
                _hash([row.get("doc_hash"), row.get("target_hash")]),
                _hash(prompt) if prompt else "",
            )
            self._add(file, task, shown_name, item, kind)

    def _read_evalplus(self, content: Json, file: Path) -> None:
        """Read EvalPlus's results: of the base tests, and under a name with a plus of these and all
        others."""
        self.settings["hash of the problems"] = content.get("hash")
        self.unheld.add("prompts and settings of generation")
        for problem, samples in value_as(content["eval"], Json, f"{file}: eval").items():
            name = problem.split("/")[0].lower()
            where = f"{file}: eval.{problem}"
            if isinstance(samples, dict):  # as older versions wrote
                pairs = zip_longest(samples["base"], samples["plus"] or (), fillvalue=[None])
                samples = [{"base_status": base[0], "plus_status": plus[0]} for base, plus in pairs]
            for sample in value_as(samples, tuple[EvalPlusSample, ...], where):
                score = _score(sample.base_status, where)
                self._add(file, name, "pass@1", AnsweredItem(problem, score))
                if sample.plus_status:
                    score = min(score, _score(sample.plus_status, where))
                    self._add(file, f"{name}+", "pass@1", AnsweredItem(problem, score))

    def _read_inspect(self, parts: Iterator[tuple[str, Any]], file: Path) -> None:
        """Read the samples in a log of inspect, after its header; its epochs are several answers to
        an item."""
        log = value_as(next(parts)[1], Json, f"{file}: header.json")
        status = log.get("status", "success")
        if status != "success":
            raise CompressionError(
                f"{file} is of an evaluation with the status {status}; finish it by inspect "
                "eval-retry"
            )
        evaluation = value_as(log.get("eval") or {}, Json, f"{file}: eval")
        task = str(evaluation.get("task", UNNAMED))
        if evaluation:
            generation = evaluation.get("model_generate_config") or {}
            generation = {**generation, **((log.get("plan") or {}).get("config") or {})}
            stated = {name: generation.get(name) for name in SAMPLING}
            stated["version"] = evaluation.get("task_version")
            stated["task_args"] = evaluation.get("task_args")
            stated |= {name: (evaluation.get("config") or {}).get(name) for name in LIMITS}
            self.settings |= {f"{name} of {task}": value for name, value in stated.items()}
        self.unheld.add("the chat template")
        samples = [
            (name, read_as(InspectSample, sample, f"{file}: {name}")) for name, sample in parts
        ]
        scorers = dict.fromkeys(scorer for _, sample in samples for scorer in sample.scores or ())
        metric = self.metric or next(iter(scorers), "")
        scorer, part = (metric, "") if metric in scorers else metric.rpartition(".")[::2]
        if scorer not in scorers:
            known = joined([*scorers]) or "none"
            raise CompressionError(
                f"{file} has no scorer {metric!r}, only {known}; name one as --metric"
            )
        for name, sample in samples:
            where = f"{file}: {name}, scorer {scorer}"
            scores = sample.scores or {}
            score = 0.0 if sample.error is not None else math.nan
            if sample.error is None and scorer in scores:
                value = scores[scorer].get("value")
                if part:
                    parts_of = value_as(value, Json, f"{file}: {scorer}")
                    if part not in parts_of:
                        raise CompressionError(
                            f"{where}: the score has no part {part!r}, only {joined([*parts_of])}"
                        )
                    value = parts_of[part]
                score = _score(math.nan if value is None else value, where)
            item = sample.item(score)
            if not item.prompt:
                self.unheld.add("prompts")
            self._add(file, task, metric, item)

    def _read_csv(self, file: Path) -> None:
        """Read the rows of a table; an empty score is no answer, and an error a wrong one."""
        with file.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream, skipinitialspace=True)
            columns = [name.strip().lower() for name in reader.fieldnames or ()]
            if not {"item", "score"} <= {*columns}:
                raise CompressionError(
                    f"{file} begins with {joined(columns)}; its first line should name item and "
                    "score"
                )
            reader.fieldnames = columns
            self.unheld.add(
                "settings" if "prompt" in columns else "prompts (a column prompt) and settings"
            )
            for row in reader:
                score = 0.0 if row.get("error") else math.nan
                if row["score"] != "" and not row.get("error"):
                    score = _score(row["score"], f"{file}, line {reader.line_num}")
                prompt = _hash(row["prompt"]) if row.get("prompt") else ""
                item = AnsweredItem(row["item"], score, prompt=prompt)
                self._add(file, row.get("task") or UNNAMED, "score", item)


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
            "that are read; write its scores as CSV with the columns item and score"
        )
    kinds = {members[name].compress_type for name in names}
    if sys.version_info < (3, 14) and ZSTANDARD in kinds:
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
    if not math.isfinite(score):
        raise CompressionError(
            f"{where}: the answer is unscored, its score {text[:80]} is not finite; score it, or "
            "name another --metric"
        )
    return score
