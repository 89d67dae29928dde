"""Suites: YAML files of tasks with their settings, of this package or of a user, also as vLLM
writes them."""

import logging
from collections.abc import Collection
from importlib.resources import files
from pathlib import Path
from typing import Any, TypeVar

from pydantic import Field

from compressor.errors import CompressionError
from compressor.formatting import joined, known_names
from compressor.options import Options, separated, validated
from compressor.plain_yaml import read_yaml
from compressor.records import Json, Share, value_as

logger = logging.getLogger(__name__)

# settings of a generated answer that a file may name; stock transformers has some that load code
SAMPLING = (
    "do_sample",
    "early_stopping",
    "frequency_penalty",
    "length_penalty",
    "max_completion_tokens",
    "max_gen_toks",
    "max_new_tokens",
    "max_tokens",
    "min_p",
    "no_repeat_ngram_size",
    "num_beams",
    "presence_penalty",
    "repetition_penalty",
    "stop",
    "temperature",
    "top_k",
    "top_p",
    "typical_p",
    "until",
)
VLLM_FIELD = "model_name"  # of vLLM's task files alone
# where vLLM's files name none
VLLM_FORM = {"apply_chat_template": False, "fewshot_as_multiturn": False}
RUNS_CODE = (
    "runs code that the model writes; pass --confirm-run-unsafe-code where that is safe, "
    "as in a container"
)
VLLM_TOLERANCE = 0.08  # of vLLM's own check, relative

Asked = TypeVar("Asked", bound=Options)


class TaskSettings(Options):
    """Settings of one task, which override those of all tasks."""

    num_fewshot: int | None = Field(None, ge=0)
    limit: int | None = Field(None, ge=1)
    # in lm-eval's spelling, if need be with its filter: exact_match,strict-match
    metric: str | None = None


class SuiteMetric(Options):
    """A metric of a task, and the base's score."""

    name: str
    value: float | None = None


class SuiteTask(TaskSettings):
    """A task of a suite; the first of its metrics is compared."""

    name: str
    metrics: tuple[SuiteMetric, ...] = ()


def asked_by(kind: type[Asked], content: Json, name: str) -> Asked:
    """Return what a file of this name says of how tasks are asked; refuse anything else, also among
    gen_kwargs."""
    try:
        asked = validated(kind, content, name, f"{name} has no setting")
    except CompressionError as error:
        raise CompressionError(str(error) if name in str(error) else f"{name}: {error}") from error
    for setting in getattr(asked, "gen_kwargs", None) or ():
        if setting not in SAMPLING:
            raise CompressionError(
                f"{name}: gen_kwargs has {setting!r}; {known_names(setting, SAMPLING)}"
            )
    return asked


def with_suite(values: Json, kind: type[Options], asked: type[Options]) -> Json:
    """Return values of options with those of the suite that they name, as `asked` has them; given
    ones override it."""
    name = str(values["suite"])
    folder = files("compressor.answers") / "suites"
    source = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not source.is_file():
        known = sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir())
        raise CompressionError(
            f"there is no suite {name!r}; name {joined(known, 'or')}, or a YAML file of your own"
        )
    content = read_yaml(source, name)
    tasks = content.get("tasks") if isinstance(content, dict) else None
    if not (
        isinstance(tasks, list) and tasks and all(isinstance(task, str | dict) for task in tasks)
    ):
        raise CompressionError(
            f"{name} is no suite; give it a list of tasks, such as 'tasks: [{{name: gsm8k}}]'"
        )
    if content.pop("unsafe_code", False) and not values.get("confirm_run_unsafe_code"):
        raise CompressionError(f"the suite {name} {RUNS_CODE}")
    expect, suite = _options(
        name, content, [key for key in asked.model_fields if key not in ("tasks", "settings")]
    )
    asked_by(asked, suite, name)
    if "expect" in kind.model_fields:
        suite["expect"] = expect
    given = {}
    if "settings" not in values:  # else all are given, by a recipe whose suite is changed
        for key, value in values.items():
            if key in kind.model_fields and value != kind.model_fields[key].default:
                given[key] = value
    merged = {**values, **suite, **given, "suite": None}
    for settings in suite["settings"].values():
        for key in settings.keys() & given:
            del settings[key]
    if "expect" in suite:
        chosen = separated(merged["tasks"])
        expected = [text for text in suite["expect"] if text.partition("=")[0] in chosen]
        merged["expect"] = [*expected, *separated(given.get("expect", ()))]
    return merged


def _options(
    name: str, content: dict[str, Any], known: Collection[str]
) -> tuple[list[str], dict[str, Any]]:
    """Return the expectations of a suite's tasks, and its options by name with the settings of its
    tasks.

    Unknown keys are noted in a file of vLLM's, which has some for its server, and refused in
    others."""
    is_vllm = content.pop(VLLM_FIELD, None) is not None
    tolerance = None
    if is_vllm:
        tolerance = value_as(content.pop("rtol", VLLM_TOLERANCE), Share, f"{name}: rtol")
    tasks = {}
    expect = []
    for position, entry in enumerate(content.pop("tasks")):
        row = {"name": entry} if isinstance(entry, str) else entry
        task = validated(
            SuiteTask,
            row,
            f"{name}: tasks[{position}]",
            f"{name} has no key",
            f" in tasks[{position}]",
        )
        if task.name in tasks:
            raise CompressionError(f"{name} names the task {task.name} twice; name it once")
        tasks[task.name] = task.model_dump(exclude={"name", "metrics"}, exclude_none=True)
        for metric in task.metrics[:1]:
            tasks[task.name].setdefault("metric", metric.name)
            if metric.value is not None:
                within = "" if tolerance is None else f"±{abs(tolerance * metric.value)}"
                expect.append(f"{task.name}={metric.value}{within}")
    options: dict[str, Any] = {"tasks": tuple(tasks), "settings": tasks}
    if is_vllm:
        options |= VLLM_FORM
    unknown = [str(key) for key in content if key not in known]
    if unknown and not is_vllm:
        raise CompressionError(
            f"{name} has no key {unknown[0]!r}; {known_names(unknown[0], ['tasks', *known])}"
        )
    if unknown:
        logger.warning("%s: not used here: %s", name, ", ".join(unknown))
    return expect, options | {key: content[key] for key in known if key in content}
