"""Options as pydantic models, of which recipes, command line, plan and reference are made. Loads no
torch."""

import inspect
import reprlib
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)

from compressor.errors import CompressionError
from compressor.formatting import known_names, read_bytes
from compressor.records import WHOLE, Json, fault_of


def _in_bytes(value: object, info: ValidationInfo) -> object:
    return read_bytes(value, str(info.field_name)) if isinstance(value, str) else value


NBytes = Annotated[int, BeforeValidator(_in_bytes), Field(ge=1)]  # of 16GB, 500MB or a number
Model = TypeVar("Model", bound=BaseModel)
OPTIONS = "Options:"


def _without_options(schema: dict[str, Any]) -> None:
    """Leave the options, which the schema has, out of its description."""
    schema["description"] = schema.get("description", "").partition(OPTIONS)[0].rstrip()


class Options(BaseModel):
    """Frozen options, unknown ones refused; a switch is no number, nor is infinity. The text below
    one is its help."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        json_schema_extra=_without_options,
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Add the meaning of every option to the docstring, which help() shows."""
        lines = [inspect.cleandoc(cls.__doc__ or ""), "", OPTIONS]
        for name, field in cls.model_fields.items():
            default = (
                ""
                if field.is_required()
                else f" = {field.get_default(call_default_factory=True)!r}"
            )
            if field.description:
                lines.append(f"    {name}{default}: {' '.join(field.description.split())}")
        cls.__doc__ = "\n".join(lines)

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = {*(get_args(annotation) or (annotation,))}
        if isinstance(value, bool) and {int, float} & kinds and bool not in kinds:
            raise ValueError(f"{info.field_name} is {value}, it should be a number")
        if isinstance(value, int) and abs(value) > WHOLE:
            raise ValueError(f"{info.field_name} has too many digits")
        return value


class NamedOptions(Options):
    """Options that are made by name in Python, where what is wrong is one sentence, too."""

    def __init__(self, **named: Any) -> None:
        """Take options by name; raises `CompressionError` for one that is unknown or impossible."""
        kind = type(self)
        refuse_unknown(kind, named, f"{kind.__name__} has no option")
        try:
            super().__init__(**named)
        except ValidationError as error:
            raise CompressionError(fault_of(error, f"{kind.__name__}: ")) from error


def one_or_several(value: Any) -> Any:
    """Return a single text as a tuple of one; anything else as it is."""
    return (value,) if isinstance(value, str) else value


def pairs(value: Any) -> Any:
    """'a=1, b=2' -> values by name."""
    if not isinstance(value, str):
        return value
    return dict(pair.strip().partition("=")[::2] for pair in value.split(","))


def separated(value: Any) -> Any:
    """'a, b', or such texts in a list -> names."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        return value
    names = [name.strip() for text in texts for name in text.split(",")]
    return tuple(name for name in names if name)


def several(value: Any) -> Any:
    """'a, b' -> names; some text that names nothing is refused."""
    texts = [value] if isinstance(value, str) else value or ()
    for text in texts:
        if isinstance(text, str) and not separated(text):
            raise ValueError(f"{text!r} names none; name some, or leave it out for the default")
    return separated(value)


Names = Annotated[tuple[str, ...], BeforeValidator(several)]


def validated(
    kind: type[Model],
    content: Json,
    where: str,
    unknown: str = "there is no option",
    at: str = "",
) -> Model:
    """An instance of these values; raises `CompressionError` naming the value that is unknown or
    impossible."""
    refuse_unknown(kind, content, unknown, at)
    try:
        return kind(**content)
    except (ValidationError, CompressionError) as error:
        cause = error.__cause__ or error  # a step's own sentence names no place
        if not isinstance(cause, ValidationError) or cause.title != kind.__name__:
            raise
        raise CompressionError(fault_of(cause, f"{where}: ")) from cause


def refuse_unknown(kind: type[BaseModel], content: Json, unknown: str, at: str = "") -> None:
    """Refuse a name that is no field, with the one that may be meant."""
    for name in content:
        if name not in kind.model_fields:
            raise CompressionError(
                f"{unknown} {reprlib.repr(name)}{at}; {known_names(str(name), kind.model_fields)}"
            )
