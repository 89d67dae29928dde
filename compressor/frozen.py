"""Records that stay what they are: dataclasses that cannot be changed, nor given further fields."""

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

Class = TypeVar("Class")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(kind: type[Class]) -> type[Class]:
    """Make a class a frozen dataclass with slots."""
    return dataclass(frozen=True, slots=True)(kind)
