"""Options of the command line, made of the fields of option classes: named, documented and
defaulted once."""

import inspect
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from functools import cache
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from typer.models import OptionInfo

from compressor.answers.options import ServerOptions
from compressor.cli.terminal import PROGRAM
from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.options import separated, validated
from compressor.progress import Progress
from compressor.quality_gate.options import BehaviourOptions, GateOptions
from compressor.recipe.recipe import (
    RESIDENT,
    ModelOptions,
    OutputOptions,
    Resident,
)
from compressor.recipe.step import TextOptions
from compressor.records import Json

Parameter = inspect.Parameter
Choices = list[tuple[str, Parameter]]  # a field, and the option that sets it
KEEP, CALIBRATION, STEP, EXPERTS, TRAINING = (
    "What to keep",
    "Calibration",
    "Step",
    "Experts",
    "Training",
)
GATE, SERVERS, RUNNING, SIZES = "Gate", "Servers", "Running", "Prune or quantise"
# in this order
PANELS = (KEEP, SIZES, CALIBRATION, STEP, EXPERTS, TRAINING, GATE, SERVERS, RUNNING)
HELP_ALL = "help_all"
TYPE_NAMES = {bool: "yes | no", str: "text", Path: "path", int: "int", float: "float"}


@frozen
class Described:
    """A field of a class of options."""

    annotation: Any
    default: Any
    text: str

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types that a value may have, None apart."""
        union = get_origin(self.annotation) in (Union, UnionType)
        kinds = get_args(self.annotation) if union else (self.annotation,)
        plain = (get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds)
        return tuple(kind for kind in plain if kind is not type(None))

    @property
    def type_name(self) -> str:
        """The values in words: `int`, `auto | cpu`, `yes | no`."""
        names = list[Any]()
        for kind in self.kinds:
            literals = get_args(kind) if get_origin(kind) is Literal else ()
            names += literals or [TYPE_NAMES.get(kind, "list or mapping")]
        return " | ".join(map(str, dict.fromkeys(names)))


def described(model: type[BaseModel]) -> dict[str, Described]:
    """Return the fields of a class of options; those without a text are not for users."""
    fields = dict[str, Described]()
    for name, field in model.model_fields.items():
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if isinstance(default, BaseModel):
            default = default.model_dump(exclude_defaults=True)
        text = " ".join((field.description or "").split())
        fields[name] = Described(field.annotation, default, text)
    return fields


def flag(text: str, panel: str | None = None, *names: str, **more: Any) -> Any:
    """Describe an option: its help, its panel, and its names where they are not the parameter's."""
    option = typer.Option(help=text, rich_help_panel=panel, **more)
    option.param_decls = names or None
    return option


def options_of(
    model: Any,
    panel: str | Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
    without: Collection[str] = ("calibration",),
    names: Mapping[str, str] = MappingProxyType({"as_json": "json"}),
    mention: bool = True,
) -> Choices:
    """Make an option of each described field of a class of options; its value is None where it is
    not given.

    The panel in the help may depend on the field. `names` are those of options that are not called
    like their field. The help mentions defaults, or does not."""
    options = Choices()
    for field, entry in described(model).items():
        if not entry.text or field in without or (only is not None and field not in only):
            continue
        kind: Any = str  # what else it is, the field itself checks
        if len(entry.kinds) == 1 and entry.kinds[0] in (bool, int, float, Path):
            kind = entry.kinds[0]
        elif entry.kinds and get_origin(entry.kinds[0]) is tuple:
            kind = list[str]
        text = entry.text
        name = names.get(field, field)
        shown = entry.default
        if mention and shown is not False and shown not in (None, {}, ()):
            if isinstance(shown, tuple):
                shown = ",".join(map(str, shown))
            elif shown is True:
                shown = "yes"
            first, dot, more = text.rstrip(".").partition(". ")
            text = f"{first} (default: {shown}){dot}{more}."
        spelling = f"--{name.replace('_', '-')}"
        if entry.annotation == bool | None or entry.default is True:
            spelling = f"{spelling}/--no-{spelling[2:]}"
        several = {"metavar": "<str>"} if kind == list[str] else {}
        place = panel.get(field) if isinstance(panel, Mapping) else panel
        option: Any = Annotated[kind | None, flag(text, place, spelling, **several)]
        options.append(
            (field, Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=option))
        )
    return options


def spread(function: Callable[..., None], shown: Sequence[str] = ()) -> Callable[..., None]:
    """Return the command with an option for each field of the option classes among its parameters.

    `Annotated[Shape, options]` takes the listed options alone; a dict gets those that are given, by
    field. Only options in `shown`, if there are any, are not hidden, in that order and with one
    sentence of help each; `--help-all` shows all of them as they are."""
    hints = get_type_hints(function, include_extras=True)
    parameters: list[Parameter] = []
    shapes: dict[str, tuple[Any, Choices]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        shape, options = (*get_args(hints[name]), None, None)[:2]
        if isinstance(options, list):
            shapes[name] = shape, options
            parameters += [option for _, option in options]
        else:
            parameters.append(
                parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])
            )

    def show(context: typer.Context, requested: bool) -> None:
        if requested:
            with_all_options(function).get_help(context)
            raise typer.Exit()

    if shown:
        help_all = flag("Show all options and exit.", is_eager=True, callback=show)
        annotation = Annotated[bool, help_all]
        parameters.append(
            Parameter(HELP_ALL, Parameter.KEYWORD_ONLY, default=False, annotation=annotation)
        )
    placed = list[tuple[int, Parameter]]()
    for parameter in parameters:
        kind, option = (*get_args(parameter.annotation), None, None)[:2]
        # by its place in `shown`, or by its panel; what is in none comes before all others
        panel = getattr(option, "rich_help_panel", None)
        order, key = (shown, parameter.name) if shown else (PANELS, panel)
        place = order.index(key) + 1 if key in order else 0
        if isinstance(option, OptionInfo):
            option = copy(option)
            if parameter.name == "output":
                option.param_decls = ("--output", "-o")
            elif kind is bool and option.param_decls is None:  # no --no- beside a switch
                option.param_decls = (f"--{parameter.name.replace('_', '-')}",)
            if shown:
                option.rich_help_panel = None
                option.hidden = parameter.name not in shown
                option.help = f"{str(option.help).partition('. ')[0].rstrip('.')}."
            parameter = parameter.replace(annotation=Annotated[kind, option])
        placed.append((place, parameter))
    parameters = [parameter for _, parameter in sorted(placed, key=lambda entry: entry[0])]

    def command(**values: Any) -> None:
        values.pop(HELP_ALL, None)
        built = {}
        for name, (shape, options) in shapes.items():
            given = [(field, values.pop(option.name)) for field, option in options]
            chosen = {field: value for field, value in given if value is not None and value != []}
            is_dict = get_origin(shape) is dict
            built[name] = chosen if is_dict else validated(shape, chosen, "the command line")
        function(**values, **built)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def with_all_options(function: Callable[..., None]) -> Any:
    """Return the command as one of click's, with every option shown."""
    app = typer.Typer(add_completion=False)
    app.command()(spread(function))
    return click_command(app)


@cache
def click_command(app: typer.Typer) -> Any:
    """Return an app as click's command, whose help shows no type for switches, which take no
    value."""
    command: Any = typer.main.get_command(app)
    for each in (command, *getattr(command, "commands", {}).values()):
        for inner in (each, *getattr(each, "commands", {}).values()):
            for parameter in inner.get_params(typer.Context(inner)):
                if getattr(parameter, "is_flag", False):
                    parameter.metavar = ""
    return command


class Running(ModelOptions):
    """Options on where and in which dtype a model computes, and how a command writes and prints."""

    device: str = "auto"
    """cpu, cuda, cuda:1 or another device."""
    resident: Resident = RESIDENT
    overwrite: bool = False
    """Replace an existing output. It goes once the new one is complete."""
    as_json: bool = False
    """Print JSON instead of a table."""

    def reading(self, progress: Progress) -> Json:
        """Return the arguments of a function that reads a model and computes."""
        return {
            "device": self.device,
            "dtype": self.dtype,
            "revision": self.revision,
            "progress": progress,
        }

    def making(self, progress: Progress) -> Json:
        """Return the arguments of a function that makes a model, whose record names the command."""
        called = Path(sys.argv[0])  # by another program's code, it may be
        ours = called.stem == PROGRAM or called.parts[-2:] == ("compressor", "__main__.py")
        shared = {"device": self.device, "overwrite": self.overwrite, "progress": progress}
        return {**shared, "command": (PROGRAM, *sys.argv[1:]) if ours else None}


Computing = Annotated[Running, options_of(Running, RUNNING)]
# of what runs no passes
Reading = Annotated[Running, options_of(Running, RUNNING, without=("resident",))]
Printing = Annotated[Running, options_of(Running, RUNNING, ("as_json",))]
Writing = Annotated[Running, options_of(Running, RUNNING, ("overwrite", "as_json"))]
Making = Annotated[Running, options_of(Running, RUNNING, ("device", "overwrite", "as_json"))]
Fetching = Annotated[Running, options_of(Running, RUNNING, ("revision", "overwrite", "as_json"))]
Comparing = Annotated[dict[str, Any], options_of(OutputOptions, RUNNING, ("evaluate",))]
Model = Annotated[
    str, typer.Argument(help="A local checkpoint folder or a Hub id such as org/model.")
]
Out = Annotated[Path, flag("Where to write.")]
Seed = Annotated[
    int,
    flag(
        "Seed of everything that is drawn, such as calibration text.",
        CALIBRATION,
        min=0,
        max=2**63 - 1,
    ),
]
TEXT = options_of(TextOptions, CALIBRATION, names={"data": "calibration"})
Text = Annotated[TextOptions, TEXT]
# of what fits nothing
Unweighted = Annotated[TextOptions, [option for option in TEXT if option[0] != "emphasis"]]
GATE_OPTIONS = options_of(GateOptions, GATE, without=("tasks", "keep_failed", "search"))
BEHAVIOUR_OPTIONS = options_of(BehaviourOptions)
SERVER_OPTIONS = options_of(ServerOptions, SERVERS)


def listed(text: str | None, option: str) -> tuple[str, ...] | None:
    """'a, b' -> ('a', 'b'); None stays."""
    if text is None:
        return None
    names: tuple[str, ...] = separated(text)
    if not names:
        raise CompressionError(f"{option} names none; name some, or leave it out for the default")
    return names
