"""lm-eval's tasks and their items, with a version that changes when they do."""

import hashlib
import inspect
import json
import logging
import os
import random
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import asdict, field, is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import as_file, files
from itertools import groupby
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

from pydantic import model_validator

from compressor.answers.items import Item, read_items
from compressor.answers.options import TaskOptions
from compressor.answers.task_suites import RUNS_CODE, TaskSettings
from compressor.data.sources import hub_id
from compressor.devices import pick_device
from compressor.distributed import unseen_launcher
from compressor.errors import CompressionError, ItemError, LeftOut, reason_of, wrap_faults
from compressor.extras import TASKS, require
from compressor.formatting import joined
from compressor.frozen import frozen
from compressor.options import validated
from compressor.progress import quiet_transformers

logger = logging.getLogger(__name__)

VERSION_DIGITS = 12
# how lm-eval aggregates log-likelihoods
PERPLEXITIES = ("perplexity", "weighted_perplexity", "bits_per_byte")


class EvaluationOptions(TaskOptions):
    """Tasks, and where and how one model answers them."""

    device: str = "auto"
    dtype: str = "auto"

    @model_validator(mode="after")
    def _check(self) -> Self:
        for name in self.tasks:
            if self.tasks.count(name) > 1:
                raise CompressionError(f"task {name!r} is named twice; name each task once")
        if self.include_path is not None and not self.include_path.is_dir():
            raise CompressionError(
                f"{self.include_path} is not a folder; give --include-path a folder of task files"
            )
        return self

    @classmethod
    def of(cls, options: TaskOptions, device: str, dtype: str) -> Self:
        """Return the options of a model's evaluation on a device."""
        return cls(
            **options.model_dump(include=set(TaskOptions.model_fields)), device=device, dtype=dtype
        )

    def facts(self) -> dict[str, Any]:
        """Return the options that decide results, beside model and tasks, without the place of
        definitions.

        Nor does streaming, which changes nothing but the order of sums.
        """
        names = ("limit", "batch_size", "device", "dtype", "num_fewshot", "seed")
        facts = {name: getattr(self, name) for name in names}
        facts["device"] = pick_device(self.device).type
        if self.cut_counts_as_wrong:
            facts["cut_counts_as_wrong"] = True
        return facts


class _Relay(logging.Handler):
    """Repeats lm-eval's warnings on models once each, numbers aside; logs the rest as debugging."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self._relayed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        message = " ".join(record.getMessage().split())
        shape = re.sub(r"\d+", "#", message)
        least = logging.WARNING if record.name.startswith("lm_eval.models") else logging.ERROR
        level = logging.DEBUG
        if record.levelno >= least and shape not in self._relayed:
            self._relayed.add(shape)
            level = logging.WARNING
        logger.log(level, "lm-eval: %s", message)


@contextmanager
def quiet_lm_eval() -> Iterator[None]:
    """Silence lm-eval, and keep it from starting other programs to collect facts on the machine.

    A launcher is hidden from it, since it would split the items and give the results to one rank
    alone."""
    import datasets
    from lm_eval import evaluator
    from lm_eval.api import task

    source = logging.getLogger("lm_eval")
    with open(os.devnull, "w", encoding="utf-8") as nowhere, ExitStack() as stack:
        silent = warnings.catch_warnings(action="ignore")
        for manager in (redirect_stdout(nowhere), silent, quiet_transformers(), unseen_launcher()):
            stack.enter_context(manager)
        if not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            stack.callback(datasets.enable_progress_bars)
        stack.enter_context(patch.object(source, "handlers", [_Relay()]))
        stack.enter_context(patch.object(source, "propagate", False))
        stack.enter_context(patch.object(task, "tqdm", lambda items, **_: items))
        stack.enter_context(patch.object(evaluator, "get_git_commit_hash", lambda: None))
        stack.enter_context(patch.object(evaluator, "add_env_info", lambda storage: None))
        yield


@frozen
class EvaluationTask:
    """A requested task or group of tasks, with its data loaded."""

    name: str
    version: str  # the definition's own number, and a hash of definition and data
    # lm-eval's task objects by name; one of the same name unless it is a group
    parts: Mapping[str, Any]
    grouped: bool
    loaded: Any  # what lm-eval evaluates: a task or a group
    counts: tuple[int, ...]  # items of each part
    # its own, which override those of all tasks
    settings: TaskSettings = field(default_factory=TaskSettings)

    def items(self, limit: int | None) -> int:
        """Return the number of items that a model answers, at most `limit` of each part unless it
        has its own."""
        limit = self.settings.limit or limit
        return sum(count if limit is None else min(count, limit) for count in self.counts)

    @property
    def kinds(self) -> set[str]:
        """Kinds of its items in lm-eval: loglikelihood, generate_until and so on."""
        return {str(getattr(part, "OUTPUT_TYPE", None)) for part in self.parts.values()}

    @property
    def generates(self) -> bool:
        """True if the model writes all answers."""
        return self.kinds == {"generate_until"}

    @property
    def benchmark(self) -> tuple[str, str] | None:
        """Id of its data set on the Hub, with the configuration, or the task's name for several;
        None of other data."""
        paths = {str(part.get_config("dataset_path")) for part in self.parts.values()}
        names = {str(part.get_config("dataset_name") or "default") for part in self.parts.values()}
        path = paths.pop()
        if paths or hub_id(path) is None:
            return None
        return path, self.name if len(names) > 1 else names.pop()

    @property
    def likelihood(self) -> bool:
        """True if the first metric, which counts, is a perplexity."""
        first = next(iter(self.parts.values()))
        return aggregates_perplexity(first, next(iter(first.aggregation()), None))


def aggregates_perplexity(task: Any, metric: str | None) -> bool:
    """Return True if lm-eval aggregates a task's metric as a perplexity."""
    return getattr(task.aggregation().get(metric), "__name__", "") in PERPLEXITIES


@cache
def _all_tasks(*folders: str) -> Any:
    """Return a manager of lm-eval's own tasks and those in folders that never change, read once."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=[*folders])


def resolve_tasks(options: EvaluationOptions) -> tuple[EvaluationTask, ...]:
    """Load the tasks; a tag stands for its tasks, a group stays one task with several parts."""
    if not options.tasks:  # a gate of conditions on behaviour alone
        return ()
    if options.enable_thinking and options.think_end_token is None:
        raise CompressionError(
            "--enable-thinking needs the token that ends thinking; add --think-end-token, such as "
            "</think>"
        )
    require(*TASKS)
    if options.confirm_run_unsafe_code:
        os.environ["HF_ALLOW_CODE_EVAL"] = "1"
    owners = dict[str, str]()
    tasks = []
    with quiet_lm_eval(), as_file(files("compressor") / "demo" / "tasks") as demo:
        from lm_eval.tasks import TaskManager

        folders = [str(folder) for folder in (demo, options.include_path) if folder is not None]
        manager = TaskManager(include_path=folders, include_defaults=False)
        if not all(_complete(manager.task_index, name) for name in options.tasks):
            if options.include_path is None:
                manager = _all_tasks(*folders)
            else:
                manager = TaskManager(include_path=folders)
        for name in options.tasks:
            if name not in manager.task_index:
                near = get_close_matches(name, manager.all_tasks, n=3)
                hint = "`lm-eval ls tasks` lists those that there are"
                if near:
                    hint = f"did you mean {' or '.join(near)}?"
                raise CompressionError(
                    f"there is no task {name!r}: neither lm-eval nor --include-path has a readable "
                    f"definition of it; {hint}"
                )
        for name in options.tasks:
            own = options.settings.get(name, TaskSettings())
            for loaded in _load(manager, name, options):
                task = _evaluation_task(loaded, options, own)
                for part in task.parts.keys() & owners:  # no item may count twice
                    raise CompressionError(
                        f"task {part!r} is asked for twice, by {owners[part]!r} and by "
                        f"{task.name!r}; name one of the two"
                    )
                if options.enable_thinking and not task.generates:
                    raise CompressionError(
                        f"task {task.name!r} is scored by likelihood, and --enable-thinking is of "
                        "answers that are generated; leave it out, or name other tasks"
                    )
                owners |= dict.fromkeys(task.parts, task.name)
                tasks.append(task)
    if options.cut_counts_as_wrong and not any(task.generates for task in tasks):
        raise CompressionError(
            "--cut-counts-as-wrong is of written answers, and no task has any; leave it out"
        )
    return tuple(tasks)


def _evaluation_task(loaded: Any, options: EvaluationOptions, own: TaskSettings) -> EvaluationTask:
    """Return a task or group that lm-eval has loaded, with the settings of its `own`.

    As in lm-eval, a task that sets its number of few-shot examples to 0 keeps it. All that decides
    the items is part of the version: definitions without their paths, items and few-shot items.
    """
    count = options.num_fewshot if own.num_fewshot is None else own.num_fewshot
    grouped = hasattr(loaded, "get_all_tasks")
    name = str(loaded.name if grouped else loaded.task_name)
    tasks = loaded.get_all_tasks() if grouped else [loaded]
    parts = {str(task.task_name): task for task in tasks}
    if not parts:
        raise CompressionError(f"the group {name!r} has no tasks; check its definition")
    digest = hashlib.sha256()
    for part, task in parts.items():
        if count is not None and task.get_config("num_fewshot") != 0:
            task.set_config("num_fewshot", count)
        if getattr(task, "UNSAFE_CODE", False) and not options.confirm_run_unsafe_code:
            raise CompressionError(f"task {part!r} {RUNS_CODE}")
        config = {key: value for key, value in vars(task.config).items() if value is not None}
        metadata = config.pop("metadata", None) or {}
        metadata = {key: value for key, value in metadata.items() if key != "config_source"}
        kind = type(task) if type(task).__module__ != "lm_eval.api.task" else None
        try:
            content = [[part, {**config, "class": kind, "metadata": metadata}]]
            content += task.doc_iterator(limit=own.limit or options.limit)
            if task.get_config("num_fewshot"):
                content += (["few-shot", doc] for doc in task.fewshot_docs())
            for entry in content:
                line = json.dumps(entry, sort_keys=True, default=_plain) + "\n"
                digest.update(line.encode())
        except Exception as error:
            raise CompressionError(
                f"the items of task {part!r} could not be read: {reason_of(error)}"
            ) from error
    numbers = {str(getattr(task, "VERSION", None)) for task in parts.values()}
    number = numbers.pop() if len(numbers) == 1 else "mixed"
    version = f"{number}+{digest.hexdigest()[:VERSION_DIGITS]}"
    counts = tuple(len(task.eval_docs) for task in parts.values())
    if not any(counts):
        raise CompressionError(f"task {name!r} has no items; check its definition")
    metric, _, filter_name = (own.metric or "").partition(",")
    for part, task in parts.items() if own.metric else ():
        metrics = list(task.aggregation())
        filters = [entry.name for entry in task._filters]
        listed = [entry.get("metric") for entry in task.get_config("metric_list") or ()]
        # those that are functions name their metrics only once they have run
        if metric and metric not in metrics and not any(map(callable, listed)):
            message = f"has no metric {metric!r}; it has {joined(metrics)}"
            raise CompressionError(f"task {part!r} {message}")
        if filter_name and filter_name not in filters:
            message = f"has no filter {filter_name!r}; it has {joined(filters)}"
            raise CompressionError(f"task {part!r} {message}")
    return EvaluationTask(name, version, parts, grouped, loaded, counts, own)


def _complete(index: Mapping[str, Any], name: str, above: tuple[str, ...] = ()) -> bool:
    """Return True if a definition and all that a group names are in the index."""
    entry = index.get(name)
    if entry is None or name in above:
        return False
    config = entry.cfg or {}
    members = config.get("task") if config.get("group") else None
    for member in members if isinstance(members, list) else ():
        named = member if isinstance(member, str) else member.get("task", member.get("group"))
        if not _complete(index, str(named), (*above, name)):
            return False
    return True


def _load(manager: Any, name: str, options: EvaluationOptions) -> list[Any]:
    """Load the task, the group, or the tasks of a tag; raises `CompressionError` if its data cannot
    be loaded."""
    import numpy
    from lm_eval.tasks._yaml_loader import load_yaml

    seeds = options.random_seeds
    random.seed(seeds["random_seed"])  # some definitions shuffle their data
    numpy.random.seed(seeds["numpy_random_seed"])
    path = getattr(manager.task_index.get(name), "yaml_path", None)
    try:
        content = {} if path is None else load_yaml(path, resolve_func=False)
        is_refused = bool(content.get("unsafe_code")) and not options.confirm_run_unsafe_code
        if not is_refused:  # else its module is not even imported
            loaded = manager.load([name])
    except ModuleNotFoundError as error:
        raise CompressionError(
            f"task {name!r} needs the package {error.name}; install it with pip"
        ) from error
    except Exception as error:
        raise CompressionError(
            f"task {name!r} could not be loaded ({reason_of(error)}); check its definition, and "
            "the network if its data set is not on this machine yet"
        ) from error
    if is_refused:
        raise CompressionError(f"task {name!r} {RUNS_CODE}")
    if name in loaded["groups"]:
        return [loaded["groups"][name]]
    return list(loaded["tasks"].values())


def generation_settings(task: EvaluationTask, options: EvaluationOptions) -> dict[str, Any] | None:
    """Return how answers are generated: the first part's settings, below those of the options; None
    if none are."""
    for part in task.parts.values():
        if str(part.OUTPUT_TYPE) == "generate_until":
            return {**(part.get_config("generation_kwargs") or {}), **options.generation_settings}
    return None


def _plain(value: Any) -> Any:
    """Return what JSON has no type for as plainer values; a function as the file that defines it.

    It may call others there.
    """
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, set):
        return sorted(value, key=str)
    if not callable(value):
        from lm_eval.utils import handle_non_serializable

        return handle_non_serializable(value)
    inner = getattr(value, "func", value)  # of functools.partial
    named = inner if hasattr(inner, "__qualname__") else type(inner)
    content = b""
    with suppress(OSError, TypeError):
        content = Path(str(inspect.getsourcefile(named))).read_bytes()
    bound = [getattr(value, "args", ()), getattr(value, "keywords", {})]
    return [named.__qualname__, hashlib.sha256(content).hexdigest(), bound]


def items_of(
    tasks: Sequence[str],
    file: str | Path | None,
    limit: int | None,
    include_path: str | Path | None,
    strict: bool,
    option: str = "--calibration",
    training: bool = False,
) -> list[Item]:
    """Return the items of lm-eval `tasks`, or the first ones of the JSONL `file` that `option`
    names."""
    if bool(tasks) == (file is not None):
        raise CompressionError(
            f"say what to ask: either --tasks with lm-eval tasks, or {option} with a JSONL file"
        )
    if file is not None:
        return read_items(Path(file), strict)[:limit]
    fields = {"tasks": tuple(tasks), "limit": limit, "include_path": include_path}
    options = validated(EvaluationOptions, fields, "the reference set")
    return task_items(options, training, strict)


def task_items(
    options: EvaluationOptions, training: bool = False, strict: bool = False
) -> list[Item]:
    """Return the items of all tasks, in order; those of their `training` splits without few-shot
    examples.

    Items without one right choice are left out with one warning, or refused if `strict`. Raises
    `CompressionError` for a task that is not multiple choice, or has no training split where that
    is wanted."""
    items = []
    left_out = LeftOut("items of tasks", strict)
    parts = dict[str, Any]()
    for resolved in resolve_tasks(options):
        parts |= resolved.parts
    for name, task in parts.items():
        if task.OUTPUT_TYPE != "multiple_choice":
            raise CompressionError(
                f"task {name!r} is not multiple choice, so no answer of it is right; name another"
            )
        if training:
            if not task.has_training_docs() or not hasattr(task.config, "training_split"):
                raise CompressionError(
                    f"task {name!r} has no training split; name another, or give its items as "
                    "--calibration"
                )
            task.config.test_split = task.config.training_split
        if training or task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        message = f"the items of task {name!r} could not be read"
        with (
            quiet_lm_eval(),
            wrap_faults(message, "shorten them", "see whether lm-eval alone can do it"),
        ):
            # few-shot examples are drawn as an evaluation draws them
            task.set_fewshot_seed(seed=options.random_seeds["fewshot_random_seed"])
            task.build_all_requests(limit=options.limit, rank=0, world_size=1)
            docs = dict(task.doc_iterator(limit=options.limit, rank=0, world_size=1))
            for number, group in groupby(task.instances, key=lambda request: request.doc_id):
                requests = list(group)
                with left_out.each():
                    where = f"task {name}, item {number}"
                    doc = docs[number]
                    choices = task.doc_to_choice(doc)
                    has_inputs = getattr(task, "multiple_input", 0)  # each choice its own
                    right = task.doc_to_text(doc) if has_inputs else task.doc_to_target(doc)
                    if isinstance(right, str) and right in choices:
                        right = choices.index(right)
                    arguments = [request.args for request in requests[: len(choices)]]
                    contexts, continuations = zip(*arguments, strict=True)
                    if type(right) is not int or not 0 <= right < len(continuations):
                        raise ItemError(f"{where} has not one right choice")
                    own = contexts if len(set(contexts)) > 1 else ()
                    texts = contexts[right], continuations[right], continuations
                    try:
                        items.append(Item(*texts, name, where, own))
                    except ItemError as error:
                        raise ItemError(f"{where}: {error}") from error
    left_out.report()
    return items
