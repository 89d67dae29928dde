"""Options of the command line, from annotations and from the fields of steps: named, documented and defaulted once."""

import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel

from compressor.cli.terminal import PROGRAM
from compressor.errors import CompressionError
from compressor.pathways.options import METHOD, OWN, PathwayOptions, Routing
from compressor.progress import Progress
from compressor.recipe.recipe import GateOptions, Recipe
from compressor.recipe.step import TextOptions

if TYPE_CHECKING:
    from compressor.evaluation.gate import GateRequest

logger = logging.getLogger(__name__)

Parameter = inspect.Parameter
Number = TypeVar("Number", int, float)
KEEP, STRATEGY, CALIBRATION, STEPS = "What to keep", "Strategy", "Calibration", "Steps"
EXPERTS, TRAINING = "Experts", "Training"
GATE, ROUTING, PUBLISHING, RUNNING = "Gate", "Routing", "Publishing", "Running"
PANELS = (KEEP, STRATEGY, CALIBRATION, STEPS, EXPERTS, TRAINING, GATE, ROUTING, PUBLISHING, RUNNING)  # in this order


def flag(text: str, panel: str | None = None, *names: str, **more: Any) -> Any:
    """Describe an option: its help, its panel, and its names where they are not the parameter's."""
    return typer.Option(*names, help=text, rich_help_panel=panel, **more)


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """Return the command with an option for each field of its dataclass parameters.

    `Annotated[Shape, NAMES]` takes these fields alone, and `Annotated[dict[str, Any], OPTIONS]` the listed options.
    The function gets an instance of the dataclass, or the dict.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters: list[Parameter] = []
    shapes: dict[str, tuple[Any, list[str]]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        shape, *more = get_args(hints[name]) if get_origin(hints[name]) is Annotated else (hints[name],)
        if issubclass(get_origin(shape) or shape, dict):
            options = more[0]
        elif is_dataclass(shape):
            annotations, chosen = get_type_hints(shape, include_extras=True), more[0] if more else ()
            options = [
                Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=annotations[each.name])
                for each in fields(shape)
                if not chosen or each.name in chosen
            ]
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        shapes[name] = (shape, [option.name for option in options])
        parameters += options
    for parameter in parameters:  # no `--no-` beside a switch, `-o` for an output
        kind, *more = get_args(parameter.annotation) or (None,)
        if kind is bool and more[0].default is ...:  # where typer keeps an explicit name
            more[0].param_decls = (f"--{parameter.name.replace('_', '-')}",)
        elif parameter.name == "output":
            more[0].param_decls = ("--output", "-o")

    def place(parameter: Parameter) -> int:
        """Panels in their order, after what is in none."""
        panels = [getattr(each, "rich_help_panel", None) for each in getattr(parameter.annotation, "__metadata__", ())]
        return max((PANELS.index(panel) + 1 for panel in panels if panel in PANELS), default=0)

    parameters.sort(key=place)

    def command(**values: Any) -> None:
        built = {
            name: shape(**{option: value for option in options if (value := values.pop(option)) != []})
            for name, (shape, options) in shapes.items()
        }
        function(**values, **built)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def field_options(
    model: Any,
    panel: str | None = None,
    only: Mapping[str, str] | None = None,
    bare: bool = False,
    mention: bool = False,
) -> list[Parameter]:
    """Make options of the described fields of a pydantic model or a dataclass; `only` maps options to fields.

    With `bare` an option that is not given is None, whatever the field's default; with `mention` its help names that.
    """
    described: dict[str, tuple[Any, Any, str | None]]
    if issubclass(model, BaseModel):
        described = {
            name: (each.annotation, each.default, each.description) for name, each in model.model_fields.items()
        }
    else:
        hints = get_type_hints(model)
        described = {each.name: (hints[each.name], each.default, each.metadata.get("help")) for each in fields(model)}
    wanted = only or {name: name for name, (_, _, text) in described.items() if text and name != "calibration"}
    options = []
    for name, field in wanted.items():
        annotation, default, text = described[field]
        kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
        kind: Any = kinds[0] if kinds in ([bool], [int], [float]) else str  # what else it is, the field itself checks
        kind = list[str] if get_origin(kinds[0]) is tuple else kind
        if mention and default is not None:
            text = f"{str(text).rstrip('.')} (default: {default})."
        default = None if bare else default
        described_flag = flag(str(text), panel, f"--{name.replace('_', '-')}", show_default=default is not None)
        annotated: Any = Annotated[kind | None if default is None else kind, described_flag]
        options.append(Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotated))
    return options


def given(context: typer.Context) -> set[str]:
    """The parameters that stand on the command line, by name."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those options that were given."""
    return {name: value for name, value in values.items() if value is not None}


Model = Annotated[str, typer.Argument(help="A local checkpoint folder or a Hub id such as org/model.")]
Out = Annotated[Path, flag("Where to write.")]
GATE_OPTIONS = field_options(
    GateOptions,
    GATE,
    {name: name for name in ("max_drop", "max_task_drop", "confidence", "limit", "include_path", "batch_size")},
    bare=True,
    mention=True,
)
TEXT_FIELDS = {"calibration": "data", "samples": "samples", "sequence_length": "sequence_length"}
TEXT = [
    *field_options(TextOptions, CALIBRATION, TEXT_FIELDS, bare=True, mention=True),
    *field_options(Recipe, CALIBRATION, {"seed": "seed"}, bare=True, mention=True),
]
PATHWAY_OPTIONS = field_options(
    PathwayOptions,
    ROUTING,
    {
        f"pathway_{entry.name}" if entry.name in ("layers", "experts", "tokens") else entry.name: entry.name
        for entry in fields(PathwayOptions)
    },
    bare=True,
    mention=True,
)


@dataclass(frozen=True, slots=True)
class Running:
    """Where and in which dtype a model computes, and how a command writes and prints."""

    device: Annotated[str, flag("auto, cpu, cuda, cuda:1 ...", RUNNING)] = "auto"
    dtype: Annotated[str, flag("For computing: auto (the checkpoint's), float32, bfloat16 or float16.", RUNNING)] = (
        "auto"
    )
    revision: Annotated[str | None, flag("Branch, tag or commit of a Hub id.", RUNNING)] = None
    overwrite: Annotated[bool, flag("Replace an existing output once the new one is complete.", RUNNING)] = False
    as_json: Annotated[bool, flag("Print JSON instead of a table.", RUNNING, "--json")] = False

    def reading(self, progress: Progress) -> dict[str, Any]:
        """Arguments of a function that reads a model and computes."""
        return {"device": self.device, "dtype": self.dtype, "revision": self.revision, "progress": progress}

    def making(self, progress: Progress) -> dict[str, Any]:
        """Arguments of a function that makes a model, whose record names the command."""
        called = Path(sys.argv[0])  # by another program's code, it may be
        ours = called.stem == PROGRAM or called.parts[-2:] == ("compressor", "__main__.py")
        shared = {"device": self.device, "overwrite": self.overwrite, "progress": progress}
        return {**shared, "command": (PROGRAM, *sys.argv[1:]) if ours else None}


Writing = Annotated[Running, ("revision", "overwrite", "as_json")]  # of what computes nothing, or elsewhere
Printing = Annotated[Running, ("as_json",)]


class TextFlags(dict[str, Any]):
    """Calibration text: sources and sizes by the fields of their model, and the seed."""

    def given(self) -> dict[str, Any]:
        """Sources and sizes, as far as they were given."""
        return without_none({field: self.get(name) for name, field in TEXT_FIELDS.items()})

    def arguments(self) -> dict[str, Any]:
        """Arguments of a function that reads calibration text."""
        recipe = Recipe.of({"calibration": self.given(), "seed": self["seed"] or 0}, "the command line")
        return {"calibration": recipe.calibration, "seed": recipe.seed}


Text = Annotated[TextFlags, TEXT]


@dataclass(frozen=True, slots=True)
class RecipeFlags:
    """Options of the strategy (any by --option, some by a flag of their own), and of steps."""

    merge: Annotated[str | None, flag("How a group is merged: uniform, max, frequency or learned.", STRATEGY)] = None
    no_merge_routers: Annotated[bool, flag("Keep one member's router row instead of merging rows.", STRATEGY)] = False
    representation: Annotated[str | None, flag("model-centric: surrogate or vectorized weights.", STRATEGY)] = None
    similarity: Annotated[str | None, flag("data-centric: linear-cka, rbf-cka or mean-output.", STRATEGY)] = None
    option: Annotated[list[str] | None, flag("name=value of a strategy's option; may be repeated.", STRATEGY)] = None

    settings: Annotated[
        list[str] | None,
        flag("step.option=value for any option of a step, see `moe-compress steps`; may be repeated.", STEPS, "--set"),
    ] = None

    def strategy_options(self, strategy: str) -> dict[str, Any]:
        """The options that were given; the strategy refuses what it does not have."""
        from compressor.entry_points import read_option
        from compressor.recipe.registry import option_fields
        from compressor.steps.prune.choose import METHODS

        named: dict[str, Any] = {"representation": self.representation, "similarity": self.similarity}
        if self.merge is not None and self.merge not in METHODS:
            raise CompressionError(f"there is no merge {self.merge!r}; known are {', '.join(METHODS)}")
        if self.merge is not None or self.no_merge_routers:
            if "merge" in option_fields(strategy):
                named |= {"merge": self.merge, "merge_routers": False if self.no_merge_routers else None}
            else:
                logger.warning("strategy %s drops experts and merges none: --merge has no effect", strategy)
        named |= dict(read_option(text, f"--option {text!r} should be name=value") for text in self.option or ())
        return without_none(named)


@dataclass(frozen=True, slots=True)
class GateRun:
    """How a gate evaluates, and what it counts as where it decides nothing."""

    stream: Annotated[
        bool | None,
        flag(
            "Evaluate with one layer in memory at a time, or with the whole model (default: streamed where the model "
            "does not fit into memory).",
            GATE,
            "--stream/--no-stream",
        ),
    ] = None
    inconclusive: Annotated[
        str | None, flag("Take an undecided gate as pass or fail (default: exit status 3).", GATE)
    ] = None

    def __post_init__(self) -> None:
        if self.inconclusive not in (None, "pass", "fail"):
            raise CompressionError(
                f"--inconclusive {self.inconclusive!r} should be pass or fail; leave it out for exit status 3"
            )

    def request(
        self, gate: Mapping[str, Any], device: str, dtype: str = "auto", cache_dir: Path | None = None
    ) -> "GateRequest":
        """Check and return what a gate tests; `gate` holds fields of a recipe's gate, None where not given."""
        from compressor.evaluation.gate import GateRequest
        from compressor.evaluation.tasks import EvaluationOptions, read_batch_size

        include = gate.get("include_path")
        options = EvaluationOptions(
            tasks=tuple(gate["tasks"]),
            limit=gate.get("limit"),
            include_path=None if include is None else Path(include),
            batch_size=read_batch_size(str(gate.get("batch_size") or "auto")),
            device=device,
            dtype=dtype,
            stream=self.stream,
        )
        limits = {name: gate.get(name) for name in ("max_drop", "max_task_drop", "confidence")}
        return GateRequest(options, **without_none({**limits, "inconclusive": self.inconclusive, "cache": cache_dir}))


@dataclass(frozen=True, slots=True)
class UnderGate(GateRun):
    """How `compress` goes through a gate."""

    gate: Annotated[str | None, flag("Comma-separated lm-eval tasks that the output has to pass.", GATE)] = None
    keep_failed: Annotated[bool, flag("With --gate: leave the output in place also if it fails.", GATE)] = False
    search: Annotated[bool, flag("With --gate: find the smallest number of experts that passes.", GATE)] = False


@dataclass(frozen=True, slots=True)
class Publishing:
    """Where `compress` publishes its output."""

    push_to_hub: Annotated[
        str | None, flag("Publish the output; with --gate if it passes.", PUBLISHING, metavar="REPO_ID")
    ] = None
    private: Annotated[bool, flag("With --push-to-hub: to a private repository.", PUBLISHING)] = False

    def __post_init__(self) -> None:
        if self.push_to_hub is None and self.private:
            raise CompressionError("--private goes with --push-to-hub; name the repository")


@dataclass(frozen=True, slots=True)
class RoutingFlags:
    """How the compressed model is routed, apart from the options of pathways."""

    routing: Annotated[str | None, flag("c3po: the compressed model answers on optimised pathways.", ROUTING)] = None
    reference: Annotated[
        Path | None, flag("The compressed model's reference set, by `moe-compress reference`.", ROUTING)
    ] = None
    embedding: Annotated[str | None, flag(f"How the reference set embeds prompts (default: {OWN}).", ROUTING)] = None

    def read(self, pathways: Mapping[str, Any], of_two: bool) -> Routing | None:
        """Check and return the routing; None if both models answer as they are. `of_two`: two models are named."""
        if self.routing is None:
            if given := without_none({**asdict(self), **pathways}):
                name = f"--{next(iter(given)).replace('_', '-')}"
                raise CompressionError(f"{name} goes with --routing {METHOD}; add that, or leave {name} out")
            return None
        if self.routing != METHOD:
            raise CompressionError(f"there is no routing {self.routing!r}; known is {METHOD}")
        if self.reference is None:
            raise CompressionError(
                f"--routing {METHOD} takes a reference set of the compressed model; make one with `moe-compress "
                "reference` and name it with --reference"
            )
        if not of_two:
            raise CompressionError(f"--routing {METHOD} judges a model that has a reference set; name two models")
        options = {name.removeprefix("pathway_"): value for name, value in without_none(pathways).items()}
        return Routing(self.reference, PathwayOptions(**options), self.embedding or OWN)


def listed(text: str | None, option: str) -> list[str] | None:
    """'a, b' -> ['a', 'b']; None stays."""
    if text is None:
        return None
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise CompressionError(f"{option} names none; name some, or leave it out for the default")
    return names


def numbers(text: str | None, option: str, kind: type[Number]) -> list[Number]:
    """'6,4' -> [6, 4]; of nothing, none."""
    try:
        return [kind(part) for part in listed(text, option) or ()]
    except ValueError as error:
        wanted = (
            "whole numbers separated by commas, as 6,4" if kind is int else "shares separated by commas, as 0.25,0.5"
        )
        raise CompressionError(f"{option} {text!r} should be {wanted}") from error
