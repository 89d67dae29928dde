"""Options of the command line from the fields of dataclasses: each is named, documented and given its default once."""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass, field, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo

Parameter = inspect.Parameter
BY_FILE = ("calibration",)  # fields that a recipe alone gives, or that have options of their own
KEEP, STRATEGY, CALIBRATION, STEPS = "What to keep", "Strategy", "Calibration", "Steps"
GATE, ROUTING, PUBLISHING, RUNNING = "Gate", "Routing", "Publishing", "Running"
PANELS = (KEEP, STRATEGY, CALIBRATION, STEPS, GATE, ROUTING, PUBLISHING, RUNNING)  # in this order


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
    shapes: dict[str, tuple[Callable[..., Any], list[str]]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if isinstance(flags := next(iter(getattr(hints[name], "__metadata__", ())), None), Flags):
            shapes[name] = (dict, [option.name for option in flags.options()])
            parameters += flags.options()
            continue
        shape, only = _shape(hints[name])
        if shape is None:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))
            continue
        options = _options(shape, only)
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
    return [_field_option(name, step.model_fields[entry], panel, bare) for name, entry in wanted.items()]


def _field_option(name: str, entry: FieldInfo, panel: str, bare: bool) -> Parameter:
    kind, default = plain_kind(entry.annotation), None if bare else entry.default
    flag = f"--{name.replace('_', '-')}"
    option = typer.Option(flag, rich_help_panel=panel, help=entry.description, show_default=default is not None)
    hint = kind if default is not None and not bare else kind | None
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[hint, option])


def plain_kind(annotation: Any) -> Any:
    """What the command line gives for a field: one of bool, int, float and str; the field itself checks it."""
    kinds = [kind for kind in get_args(annotation) or (annotation,) if kind is not type(None)]
    if get_origin(annotation) is Literal or len(kinds) > 1:
        return str
    return kinds[0] if kinds[0] in (bool, int, float, str) else str


def _shape(hint: Any) -> tuple[type | None, Collection[str]]:
    """The dataclass that an annotation names, and the fields of it that are wanted (none: all)."""
    base, *more = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    return (base, more[0] if more else ()) if is_dataclass(base) else (None, ())  # type: ignore[return-value]


def _options(shape: type, only: Collection[str]) -> list[Parameter]:
    hints = get_type_hints(shape)
    wanted = [entry for entry in fields(shape) if "help" in entry.metadata and (not only or entry.name in only)]
    return [_option(entry, hints[entry.name]) for entry in wanted]


def _place(parameter: Parameter) -> int:
    """Panels in their order, after what is in none."""
    panels = [getattr(each, "rich_help_panel", None) for each in getattr(parameter.annotation, "__metadata__", ())]
    return max((PANELS.index(panel) + 1 for panel in panels if panel in PANELS), default=0)


def _option(entry: Field[Any], hint: Any) -> Parameter:
    more = dict(entry.metadata)
    name, panel, kind = more.pop("name", None), more.pop("panel"), more.pop("kind", hint)
    option = typer.Option(*([name] if name else []), rich_help_panel=panel, **more)
    return Parameter(entry.name, Parameter.KEYWORD_ONLY, default=entry.default, annotation=Annotated[kind, option])


def given(context: typer.Context) -> set[str]:
    """The parameters that stand on the command line, by name."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}
