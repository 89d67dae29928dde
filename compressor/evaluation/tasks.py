"""What is asked of models: the options, lm-eval's tasks and their items, and a version that changes when those do."""

import hashlib
import inspect
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from difflib import get_close_matches
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from compressor.errors import CompressionError, reason_of
from compressor.evaluation.quiet import quiet_lm_eval, require_lm_eval
from compressor.model.opened import DTYPES, pick_device

SEED = 1234  # lm-eval's own for drawing few-shot examples
VERSION_DIGITS = 12


@dataclass(frozen=True, slots=True)
class EvaluationOptions:
    """What is asked of a model, and how."""

    tasks: tuple[str, ...]  # names of lm-eval tasks, groups or tags
    limit: int | None = None  # the first items of each task, and of each part of a group
    include_path: Path | None = None  # a folder with the user's own task definitions
    batch_size: int | str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    num_fewshot: int | None = None  # None leaves it to each task
    seed: int = SEED
    stream: bool | None = None  # one layer in memory at a time; None: where the model does not fit

    def __post_init__(self) -> None:
        """Refuses what cannot be meant."""
        if not self.tasks or not all(name.strip() for name in self.tasks):
            raise CompressionError("no task is named; give --tasks a list such as boolq,rte")
        if repeated := [name for name in self.tasks if self.tasks.count(name) > 1]:
            raise CompressionError(f"task {repeated[0]!r} is named twice; name each task once")
        if self.limit is not None and self.limit < 1:
            raise CompressionError(f"--limit {self.limit} leaves no items; give at least 1")
        if self.batch_size != "auto" and (not isinstance(self.batch_size, int) or self.batch_size < 1):
            raise CompressionError(f"--batch-size {self.batch_size} is neither auto nor a number of at least 1")
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise CompressionError(f"there is no dtype {self.dtype!r}; known are auto, {', '.join(DTYPES)}")
        if self.num_fewshot is not None and self.num_fewshot < 0:
            raise CompressionError(f"{self.num_fewshot} few-shot examples cannot be given; ask for 0 or more")
        if self.include_path is not None and not self.include_path.is_dir():
            raise CompressionError(f"{self.include_path} is not a folder; give --include-path a folder of task files")

    def facts(self) -> dict[str, Any]:
        """What decides the results beside model and tasks; where definitions lie does not, what they say does.

        Nor does streaming, which changes nothing but the order of sums.
        """
        names = ("limit", "batch_size", "device", "dtype", "num_fewshot", "seed")
        return {name: getattr(self, name) for name in names} | {"device": pick_device(self.device).type}


def read_batch_size(text: str) -> int | str:
    """'auto' or a number, as the command line gives it."""
    return int(text) if text.strip().isdecimal() else text.strip()


@dataclass(frozen=True, slots=True)
class EvaluationTask:
    """A task or a group of tasks as it was asked for, with its data loaded."""

    name: str
    version: str  # the definition's own number, and a hash of definition and data
    parts: Mapping[str, Any]  # lm-eval's task objects by name; one of the same name unless it is a group
    grouped: bool
    loaded: Any  # what lm-eval evaluates: a task or a group


def resolve_tasks(options: EvaluationOptions) -> tuple[EvaluationTask, ...]:
    """Find and load the tasks; a tag stands for its tasks, a group stays one with several parts."""
    require_lm_eval()
    with quiet_lm_eval(), as_file(files("compressor.demo") / "tasks") as demo:
        manager = _manager(options, demo)
        loaded = [made for name in options.tasks for made in _load(manager, name, options)]
    _refuse_repeats(loaded)
    with quiet_lm_eval():
        return tuple(_resolved(made, options) for made in loaded)


def _manager(options: EvaluationOptions, demo: Path) -> Any:
    """lm-eval's index of definitions; its own thousands are read only where they are needed."""
    from lm_eval.tasks import TaskManager

    folders = [str(demo), *([str(options.include_path)] if options.include_path else [])]
    manager = TaskManager(include_path=folders, include_defaults=False)
    if all(_complete(manager.task_index, name) for name in options.tasks):
        return manager
    manager = TaskManager(include_path=folders, include_defaults=True)
    for name in options.tasks:
        if name not in manager.task_index:
            near = get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists those that there are"
            raise CompressionError(
                f"there is no task {name!r}: neither lm-eval nor --include-path has a readable definition of it; {hint}"
            )
    return manager


def _complete(index: Mapping[str, Any], name: str, above: tuple[str, ...] = ()) -> bool:
    """Whether a definition and all that a group names are in the index."""
    entry = index.get(name)
    if entry is None or name in above:
        return False
    members = (entry.cfg or {}).get("task") if (entry.cfg or {}).get("group") else None
    if not isinstance(members, list):
        return True
    named = [member if isinstance(member, str) else str(member.get("task", member.get("group"))) for member in members]
    return all(_complete(index, member, (*above, name)) for member in named)


def _load(manager: Any, name: str, options: EvaluationOptions) -> list[Any]:
    """The task, the group, or the tasks of a tag; raises `CompressionError` where its data cannot be had."""
    import numpy

    random.seed(options.seed)  # some definitions shuffle their data
    numpy.random.seed(options.seed % 2**32)
    try:
        found = manager.load([name])
    except ModuleNotFoundError as error:
        raise CompressionError(f"task {name!r} needs the package {error.name}; install it with pip") from error
    except Exception as error:
        raise CompressionError(
            f"task {name!r} could not be loaded ({reason_of(error)}); check its definition, and the network if its "
            "data set is not on this machine yet"
        ) from error
    if name in found.get("groups", {}):
        return [found["groups"][name]]
    return list(found["tasks"].values())


def _parts(made: Any) -> tuple[str, dict[str, Any], bool]:
    if hasattr(made, "get_all_tasks"):
        return str(made.name), {str(task.task_name): task for task in made.get_all_tasks()}, True
    return str(made.task_name), {str(made.task_name): made}, False


def _refuse_repeats(loaded: Sequence[Any]) -> None:
    """No item may count twice."""
    owners: dict[str, str] = {}
    for made in loaded:
        name, parts, _ = _parts(made)
        for part in parts:
            if part in owners:
                raise CompressionError(
                    f"task {part!r} is asked for twice, by {owners[part]!r} and by {name!r}; name one of the two"
                )
            owners[part] = name


def _resolved(made: Any, options: EvaluationOptions) -> EvaluationTask:
    name, parts, grouped = _parts(made)
    if not parts:
        raise CompressionError(f"the group {name!r} has no tasks; check its definition")
    digest = hashlib.sha256()
    for part, task in parts.items():
        if getattr(task, "UNSAFE_CODE", False):
            raise CompressionError(f"task {part!r} would run code that the model writes; name another task")
        try:
            for line in _content(part, task, options):
                digest.update(line.encode())
        except Exception as error:
            raise CompressionError(f"the items of task {part!r} could not be read: {reason_of(error)}") from error
    numbers = {str(getattr(task, "VERSION", None)) for task in parts.values()}
    number = numbers.pop() if len(numbers) == 1 else "mixed"
    return EvaluationTask(name, f"{number}+{digest.hexdigest()[:VERSION_DIGITS]}", parts, grouped, made)


def _content(part: str, task: Any, options: EvaluationOptions) -> Iterator[str]:
    """All that decides a task's items, as lines of JSON: its definition, the items asked for, the few-shot items."""
    yield _line([part, _plain(_definition(task))])
    for number, doc in task.doc_iterator(limit=options.limit):
        yield _line([number, doc])
    if _shots(task, options):
        yield from (_line(["few-shot", doc]) for doc in task.fewshot_docs())


def _line(value: Any) -> str:
    from lm_eval.utils import handle_non_serializable

    return json.dumps(value, sort_keys=True, default=handle_non_serializable) + "\n"


def _shots(task: Any, options: EvaluationOptions) -> int:
    """Few-shot examples of a task; as in lm-eval, one that sets 0 keeps it."""
    own = task.get_config("num_fewshot")
    return int(own or 0) if options.num_fewshot is None or own == 0 else options.num_fewshot


def _definition(task: Any) -> dict[str, Any]:
    """A task's settings without the places where they were found."""
    config = {key: value for key, value in vars(task.config).items() if value is not None}
    metadata = config.pop("metadata", None) or {}
    return config | {
        "class": type(task) if type(task).__module__ != "lm_eval.api.task" else None,
        "metadata": {key: value for key, value in metadata.items() if key != "config_source"},
    }


def _plain(value: Any) -> Any:
    """Settings as JSON knows them; of a function the file that defines it, for it may call others there."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(entry) for entry in (sorted(value, key=str) if isinstance(value, set) else value)]
    if is_dataclass(value) and not isinstance(value, type):
        return _plain(asdict(value))
    if callable(value):
        return _source(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _source(function: Callable[..., Any]) -> list[Any]:
    inner = getattr(function, "func", function)  # of functools.partial
    bound = _plain([getattr(function, "args", ()), getattr(function, "keywords", {})])
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    try:
        file = inspect.getsourcefile(inner if hasattr(inner, "__qualname__") else type(inner))
        content = Path(file).read_bytes() if file else b""
    except (OSError, TypeError):
        content = b""
    return [name, hashlib.sha256(content).hexdigest(), bound]
