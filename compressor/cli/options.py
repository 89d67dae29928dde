"""Options of the command line, from the fields of dataclasses and steps: named, documented and given a default once."""

import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel

from compressor.errors import CompressionError
from compressor.gates.verdict import Verdict
from compressor.pathways.options import KERNELS, METHOD, OPTIMIZERS, OWN, PathwayOptions, Routing
from compressor.progress import Progress
from compressor.recipe.step import TextOptions

if TYPE_CHECKING:
    from compressor.gates.run import GateRequest

logger = logging.getLogger(__name__)

Parameter = inspect.Parameter
BY_FILE = ("calibration",)  # fields that a recipe alone gives, or that have options of their own
KEEP, STRATEGY, CALIBRATION, STEPS = "What to keep", "Strategy", "Calibration", "Steps"
EXPERTS, TRAINING = "Experts", "Training"
GATE, ROUTING, PUBLISHING, RUNNING = "Gate", "Routing", "Publishing", "Running"
PANELS = (KEEP, STRATEGY, CALIBRATION, STEPS, EXPERTS, TRAINING, GATE, ROUTING, PUBLISHING, RUNNING)  # in this order


def described(default: Any, panel: str | None, text: str, **more: Any) -> Any:
    """A field with the help of its option and the panel it is shown in; `more` is what `typer.Option` takes.

    `name` calls the option otherwise than the field, `kind` is what the command line gives where that is less.
    """
    return field(default=default, metadata={"help": text, "panel": panel, **more})


@dataclass(frozen=True, slots=True)
class Flags:
    """Annotates a parameter of a command, a dict: it gets these options by name."""

    options: Callable[[], list[Parameter]]


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """A command that takes, for each parameter annotated with a dataclass, an option for each described field.

    `Annotated[Shape, NAMES]` takes the options of these fields alone. The function gets an instance of the dataclass.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters: list[Parameter] = []
    shapes: dict[str, tuple[Any, list[str]]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if isinstance(flags := next(iter(getattr(hints[name], "__metadata__", ())), None), Flags):
            shapes[name] = (dict, [option.name for option in flags.options()])
            parameters += flags.options()
            continue
        shape, *more = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        if not is_dataclass(shape):
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        options = dataclass_options(shape, *more)  # type: ignore[arg-type]
        shapes[name] = (shape, [option.name for option in options])
        parameters += options
    parameters.sort(key=_place)

    def command(**given: Any) -> None:
        built = {
            name: shape(**{option: value for option in options if (value := given.pop(option)) != []})
            for name, (shape, options) in shapes.items()
        }
        function(**given, **built)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def step_options(
    step: type[BaseModel], panel: str, only: Mapping[str, str] | None = None, bare: bool = False
) -> list[Parameter]:
    """The options of the command line that a step's fields are; `only` names fields, by the option's name.

    With `bare` an option that is not given is None, whatever the field's default.
    """
    wanted = only or {name: name for name in step.model_fields if name not in BY_FILE}
    found = []
    for name, own in wanted.items():
        entry = step.model_fields[own]
        kind, default = plain_kind(entry.annotation), None if bare else entry.default
        flag, shown = f"--{name.replace('_', '-')}", default is not None
        option = typer.Option(flag, rich_help_panel=panel, help=entry.description, show_default=shown)
        hint: Any = kind if shown and not bare else kind | None
        annotation: Any = Annotated[hint, option]
        found.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    return found


def plain_kind(annotation: Any) -> Any:
    """What the command line gives for a field: one of bool, int, float and str; the field itself checks it."""
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    if get_origin(annotation) is Literal or len(kinds) > 1:
        return str
    return kinds[0] if kinds[0] in (bool, int, float, str) else str


def dataclass_options(shape: type, only: Collection[str] = (), panel: str | None = None) -> list[Parameter]:
    """The options that a dataclass's described fields are, or those of these names; a `panel` for fields without."""
    hints, found = get_type_hints(shape), []
    for entry in fields(shape):
        if "help" not in entry.metadata or (only and entry.name not in only):
            continue
        more = {"panel": panel, **entry.metadata}
        name = more.pop("name", None)
        kind: Any = more.pop("kind", hints[entry.name])
        more.pop("choices", None)  # the dataclass checks them
        option = typer.Option(*([name] if name else []), rich_help_panel=more.pop("panel"), **more)
        annotation: Any = Annotated[kind, option]
        found.append(Parameter(entry.name, Parameter.KEYWORD_ONLY, default=entry.default, annotation=annotation))
    return found


def _place(parameter: Parameter) -> int:
    """Panels in their order, after what is in none."""
    panels = [getattr(each, "rich_help_panel", None) for each in getattr(parameter.annotation, "__metadata__", ())]
    return max((PANELS.index(panel) + 1 for panel in panels if panel in PANELS), default=0)


def given(context: typer.Context) -> set[str]:
    """The parameters that stand on the command line, by name."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


Model = Annotated[str, typer.Argument(help="A local checkpoint folder or a Hub id such as org/model.")]
Out = Annotated[Path, typer.Option("--output", "-o", help="Where to write.")]


@dataclass(frozen=True, slots=True)
class Running:
    """What commands that read a model and write have in common."""

    revision: str | None = described(None, RUNNING, "Branch, tag or commit of a Hub id.")
    overwrite: bool = described(
        False, RUNNING, "Replace an existing output once the new one is complete.", name="--overwrite"
    )
    as_json: bool = described(False, RUNNING, "Print JSON instead of a table.", name="--json")


@dataclass(frozen=True, slots=True)
class Computing:
    """Where and in which dtype a model computes."""

    device: str = described("auto", RUNNING, "auto, cpu, cuda, cuda:1 ...")
    dtype: str = described("auto", RUNNING, "For computing: auto (the checkpoint's), float32, bfloat16 or float16.")

    def arguments(self, running: Running, progress: Progress) -> dict[str, Any]:
        """What commands that compute and write pass on."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "revision": running.revision,
            "overwrite": running.overwrite,
            "progress": progress,
        }


@dataclass(frozen=True, slots=True)
class TextFlags:
    """Calibration text."""

    calibration: list[str] | None = described(None, CALIBRATION, str(TextOptions.model_fields["data"].description))
    samples: int | None = described(
        None, CALIBRATION, f"{TextOptions.model_fields['samples'].description} (default: 128)", min=1
    )
    sequence_length: int | None = described(
        None, CALIBRATION, f"{TextOptions.model_fields['sequence_length'].description} (default: 512)", min=2
    )
    seed: int | None = described(
        None, CALIBRATION, "For the choice of calibration text and everything else that is drawn (default: 0)."
    )

    def given(self) -> dict[str, Any]:
        """Sources and sizes, as far as they were given."""
        found = {"data": self.calibration, "samples": self.samples, "sequence_length": self.sequence_length}
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class StrategyOptions:
    """Options of the strategy: any by --option, some by a flag of their own."""

    merge: str | None = described(None, STRATEGY, "How grouped experts become one: uniform, max, frequency or learned.")
    no_merge_routers: bool = described(
        False, STRATEGY, "Keep one member's router row instead of merging rows.", name="--no-merge-routers"
    )
    representation: str | None = described(None, STRATEGY, "model-centric: compare surrogate or vectorized weights.")
    similarity: str | None = described(None, STRATEGY, "data-centric: linear-cka, rbf-cka or mean-output.")
    option: list[str] | None = described(
        None, STRATEGY, "name=value for an option of any strategy; may be repeated.", name="--option"
    )

    def given(self, strategy: str) -> dict[str, Any]:
        """The options that were given; the strategy refuses what it does not have."""
        from compressor.grouping.choose import METHODS
        from compressor.recipe.plugins import read_option
        from compressor.recipe.registry import option_fields

        if all(getattr(self, name) in (None, False) for name in self.__slots__):
            return {}
        known = option_fields(strategy)
        found: dict[str, Any] = {"representation": self.representation, "similarity": self.similarity}
        if self.merge is not None and self.merge not in METHODS:
            raise CompressionError(f"there is no merge {self.merge!r}; known are {', '.join(METHODS)}")
        if "merge" in known:
            found |= {"merge": self.merge, "merge_routers": False if self.no_merge_routers else None}
        elif self.merge is not None or self.no_merge_routers:
            logger.warning("strategy %s drops experts and merges none: --merge has no effect", strategy)
        found |= dict(read_option(text, f"--option {text!r} should be name=value") for text in self.option or ())
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class GateOptions:
    """What a gate is asked for, apart from its tasks."""

    max_drop: float | None = described(
        None,
        GATE,
        "The largest drop of a score to put up with (of a perplexity: its relative rise); by default 0.01, and 0.05 "
        "with --demo.",
    )
    confidence: float | None = described(None, GATE, "Of the gate's verdict, between 0.5 and 1 (default: 0.95).")
    limit: int | None = described(None, GATE, "Items of each task, the first ones (default: all).")
    include_path: Path | None = described(None, GATE, "A folder with lm-eval task files of your own.")
    batch_size: str | None = described(None, GATE, "Of the evaluation: auto or a number (default: auto).")
    stream: bool | None = described(
        None,
        GATE,
        "Evaluate with one layer in memory at a time, or with the whole model (default: streamed where the model does "
        "not fit into memory).",
        name="--stream/--no-stream",
    )
    inconclusive: str | None = described(
        None, GATE, "Let a gate that decides nothing count as pass or fail (default: exit status 3)."
    )

    @property
    def decided(self) -> Verdict:
        """What an inconclusive gate counts as."""
        if self.inconclusive not in (None, "pass", "fail"):
            raise CompressionError(
                f"--inconclusive {self.inconclusive!r} should be pass or fail; leave it out for exit status 3"
            )
        return cast(Verdict, self.inconclusive or "inconclusive")

    def given(self) -> dict[str, Any]:
        """What was given of it that a recipe has, too."""
        names = ("max_drop", "confidence", "limit", "batch_size")
        found = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return found | ({} if self.include_path is None else {"include_path": str(self.include_path)})

    def request(
        self,
        tasks: Sequence[str],
        device: str,
        dtype: str = "auto",
        cache_dir: Path | None = None,
        max_drop: float = 0.01,
    ) -> "GateRequest":
        """What a gate is asked for, checked; `max_drop` is the margin where none is given."""
        from compressor.evaluation.tasks import EvaluationOptions, read_batch_size
        from compressor.files import default_folder
        from compressor.gates.run import GateRequest

        options = EvaluationOptions(
            tasks=tuple(tasks),
            limit=self.limit,
            include_path=self.include_path,
            batch_size=read_batch_size(self.batch_size or "auto"),
            device=device,
            dtype=dtype,
            stream=self.stream,
        )
        margin = max_drop if self.max_drop is None else self.max_drop
        return GateRequest(options, margin, self.confidence or 0.95, cache_dir or default_folder())


@dataclass(frozen=True, slots=True)
class UnderGate:
    """How `compress` goes through a gate."""

    gate: str | None = described(
        None, GATE, "lm-eval tasks, separated by commas: leave the output in place only if it passes them."
    )
    keep_failed: bool = described(
        False, GATE, "With --gate: leave the output in place also if it fails.", name="--keep-failed"
    )
    search: bool = described(
        False, GATE, "With --gate: find the smallest number of experts that passes.", name="--search"
    )


@dataclass(frozen=True, slots=True)
class Publishing:
    """Where `compress` publishes what it has made."""

    push_to_hub: str | None = described(
        None, PUBLISHING, "Publish the output there; with --gate only if it passes.", metavar="REPO_ID"
    )
    private: bool = described(False, PUBLISHING, "With --push-to-hub: to a private repository.", name="--private")

    def __post_init__(self) -> None:
        if self.push_to_hub is None and self.private:
            raise CompressionError("--private goes with --push-to-hub; name the repository")


USUAL = PathwayOptions()
JUDGED = ", ".join(name for name in OPTIMIZERS if name != "oracle")
FIELDS = {"pathway_layers": "layers", "pathway_experts": "experts", "pathway_tokens": "tokens"}  # called otherwise


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """How the compressed model is routed; what is not given is as `PathwayOptions` has it."""

    routing: str | None = described(
        None, ROUTING, "c3po: the compressed model answers on pathways optimised by those of a reference set."
    )
    reference: Path | None = described(
        None, ROUTING, "The compressed model's own reference set, a folder of `moe-compress reference`."
    )
    optimizer: str | None = described(None, ROUTING, f"{JUDGED} (default: {USUAL.optimizer}).")
    neighbours: int | None = described(
        None, ROUTING, f"Nearest items of the reference set (default: {USUAL.neighbours})."
    )
    radius: float | None = described(None, ROUTING, "Instead: all items within this distance, from 0 to 2.")
    pathway_layers: int | None = described(None, ROUTING, f"The last MoE layers (default: {USUAL.layers}).")
    pathway_experts: int | None = described(
        None, ROUTING, f"Of each layer, the experts of largest weight that are moved (default: {USUAL.experts})."
    )
    pathway_tokens: str | None = described(
        None, ROUTING, f"last (of the prompt), or scored: all that an answer hangs on (default: {USUAL.tokens})."
    )
    kernel: str | None = described(None, ROUTING, f"{', '.join(KERNELS)} (default: {USUAL.kernel}).")
    bandwidth: float | None = described(None, ROUTING, "Of the kernel (default: the neighbours' mean distance).")
    share: float | None = described(
        None, ROUTING, "Of the way to the neighbours, 0 to 1 (default: a line search for kernel, a half for mode)."
    )
    steps: int | None = described(None, ROUTING, f"Of mode and ngd (default: {USUAL.steps}).")
    rate: float | None = described(
        None, ROUTING, f"Of the first step of ngd, in logits for a nat (default: {USUAL.rate:g})."
    )
    embedding: str | None = described(
        None, ROUTING, f"How prompts are compared, as the reference set was told (default: {OWN})."
    )

    def routing_of(self, of_two: bool) -> Routing | None:
        """What is asked for, checked; None if both models are to answer as they are. `of_two`: models that exist."""
        given = {entry.name: value for entry in fields(self) if (value := getattr(self, entry.name)) is not None}
        method = given.pop("routing", None)
        if method is None:
            if given:
                name = f"--{next(iter(given)).replace('_', '-')}"
                raise CompressionError(f"{name} goes with --routing {METHOD}; add that, or leave {name} out")
            return None
        if method != METHOD:
            raise CompressionError(f"there is no routing {method!r}; known is {METHOD}")
        if (reference := given.pop("reference", None)) is None:
            raise CompressionError(
                f"--routing {METHOD} takes a reference set of the compressed model; make one with `moe-compress "
                "reference` and name it with --reference"
            )
        if not of_two:
            raise CompressionError(f"--routing {METHOD} judges a model that has a reference set; name two models")
        embedding = given.pop("embedding", OWN)
        options = PathwayOptions(**{FIELDS.get(name, name): value for name, value in given.items()})
        return Routing(reference, options, embedding)


def listed(text: str | None, option: str) -> list[str] | None:
    """'a, b' -> ['a', 'b']; None stays."""
    if text is None:
        return None
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise CompressionError(f"{option} names none; name some, or leave it out for the default")
    return found


def counts(text: str | None, option: str) -> list[int]:
    """'6,4' -> [6, 4]; of nothing, none."""
    return [int(value) for value in _numbers(text, option, int, "whole numbers separated by commas, as 6,4")]


def shares(text: str | None, option: str) -> list[float]:
    """'0.25,0.5' -> [0.25, 0.5]; of nothing, none."""
    return _numbers(text, option, float, "shares separated by commas, as 0.25,0.5")


def _numbers(text: str | None, option: str, kind: type[int] | type[float], wanted: str) -> list[Any]:
    try:
        return [kind(part) for part in listed(text, option) or ()]
    except ValueError as error:
        raise CompressionError(f"{option} {text!r} should be {wanted}") from error
