"""Options as pydantic models, of which recipes, command line, plan and reference are made. Loads no torch."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from compressor.errors import CompressionError
from compressor.formatting import known_names
from compressor.records import WHOLE

Model = TypeVar("Model", bound=BaseModel)


class Options(BaseModel):
    """Frozen options, unknown ones refused; a switch is no number, nor is infinity. The text below one is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

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


def validated(
    kind: type[Model], content: Mapping[str, Any], where: str, unknown: str = "there is no option", at: str = ""
) -> Model:
    """An instance of these values; raises `CompressionError` naming the value that is unknown or impossible."""
    for name in content:
        if name not in kind.model_fields:
            raise CompressionError(f"{unknown} {reprlib.repr(name)}{at}; {known_names(str(name), kind.model_fields)}")
    try:
        return kind(**content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        message = first["msg"].removeprefix("Value error, ")
        cause = first.get("ctx", {}).get("error")
        inner = ("function-", "tuple", "constrained")
        place = ".".join(str(part) for part in first["loc"] if not str(part).startswith(inner))
        if first["type"] == "extra_forbidden":
            message = f"{place} is not known"
        elif first["type"] != "value_error":
            message = f"{place} is {reprlib.repr(first['input'])}; {message[0].lower()}{message[1:]}"
        raise CompressionError(f"{where}: {cause if isinstance(cause, CompressionError) else message}") from error
