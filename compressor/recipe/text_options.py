"""The options of calibration text, and what all options of recipes have in common."""

from collections.abc import Sequence
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

DEFAULT_LENGTH = 512
MOST_SOURCES = 100  # as many as a plan may have


class Options(BaseModel):
    """Options of which none is unknown, and none is changed; a switch is no number."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _no_switch(cls, value: Any, info: ValidationInfo) -> Any:
        annotation = cls.model_fields[str(info.field_name)].annotation
        kinds = {*(get_args(annotation) or (annotation,))}
        if isinstance(value, bool) and {int, float} & kinds and bool not in kinds:
            raise ValueError(f"{info.field_name} is {value}, it should be a number")
        return value


class TextOptions(Options):
    """Which text is read, and how much of it."""

    data: tuple[str, ...] | None = Field(
        None,
        max_length=MOST_SOURCES,
        description="A text or JSONL file, a data set id (default: C4), or 'demo'; repeat it for several sources, each "
        "with =WEIGHT if they should not count alike.",
    )
    samples: int = Field(128, ge=1, description="Calibration sequences.")
    sequence_length: int = Field(DEFAULT_LENGTH, ge=2, description="Tokens in each of them.")

    @field_validator("data", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else value
