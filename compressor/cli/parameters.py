"""Options of the command line from the fields of dataclasses: each is named, documented and given its default once."""

import inspect
from collections.abc import Callable, Collection
from dataclasses import Field, fields, is_dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from compressor.planning.request import PANELS

Parameter = inspect.Parameter


def spread(function: Callable[..., None]) -> Callable[..., None]:
    """A command that takes, for each parameter annotated with a dataclass, an option for each described field.

    `Annotated[Shape, NAMES]` takes the options of these fields alone. The function gets an instance of the dataclass.
    """
    hints = get_type_hints(function, include_extras=True)
    parameters: list[Parameter] = []
    shapes: dict[str, tuple[type, list[str]]] = {}
    for name, parameter in inspect.signature(function).parameters.items():
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
