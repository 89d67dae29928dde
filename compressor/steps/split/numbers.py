"""Whole numbers of a config, and lists of them, by dotted path."""

from collections.abc import Callable, Iterator
from typing import Any


def numbers(config: Any) -> Iterator[tuple[str, Any]]:
    """Dotted paths of all whole numbers and lists of them in a config."""

    def walk(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
        for key, value in vars(node).items():
            if hasattr(value, "to_dict") and hasattr(value, "model_type"):
                yield from walk(value, f"{prefix}{key}.")
            elif type(value) is int or (isinstance(value, list) and value and all(type(each) is int for each in value)):
                yield f"{prefix}{key}", value

    return walk(config, "")


def each_number(value: Any, change: Callable[[int], int]) -> Any:
    """A whole number changed, or each one of a list."""
    return [change(each) for each in value] if isinstance(value, list) else change(value)
