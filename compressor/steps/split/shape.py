"""The config of a split model: which of its fields set the experts' width and top-k, found by comparing meta builds."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from compressor.errors import CompressionError
from compressor.model.architecture import MOST_CANDIDATES, Architecture, build_meta, experts_modules, with_fields
from compressor.model.experts import width_of
from compressor.steps.split.numbers import each_number, numbers
from compressor.steps.split.top_k import top_k_fields

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class SplitShape:
    """The split model as its config alone decides it. `fields` are the changed ones by dotted path, in order."""

    parts: int
    width: int  # of a part, of the narrowest experts
    width_field: str
    fields: Mapping[str, Any]
    architecture: Architecture


def widths(model: nn.Module) -> dict[str, int]:
    """Neurons of each expert, by experts module."""
    return {name: width_of(module) for name, module in experts_modules(model)}


def split_shape(architecture: Architecture, parts: int) -> SplitShape:
    """How a config asks for each expert in `parts` parts.

    Raises `CompressionError` for a number of parts that the width cannot be divided by, and where no field of the
    config sets the width, or the top-k, alone.
    """
    config, family = architecture.config, architecture.family
    model = build_meta(config)
    before = widths(model)
    _check_parts(before, parts)
    fields = _width_fields(config, model, before, parts, family)
    fields |= {architecture.count_field: architecture.experts * parts}
    wanted = {layer.name: layer.top_k * parts for layer in architecture.layers}
    top_k, found = top_k_fields(with_fields(config, fields), architecture, wanted, lambda each: each * parts)
    return SplitShape(parts, min(before.values()) // parts, next(iter(fields)), fields | top_k, found)


def _check_parts(before: Mapping[str, int], parts: int) -> None:
    if parts < 2:
        raise CompressionError(f"--split {parts} leaves every expert whole; give at least 2 parts")
    for name, width in before.items():
        if width % parts:
            divisors = [str(number) for number in range(2, min(width, 64) + 1) if width % number == 0]
            raise CompressionError(
                f"{name}: its experts' {width} neurons do not divide into {parts} equal parts; give one of "
                f"{', '.join(divisors)}"
            )


def _outside(model: nn.Module) -> Shapes:
    """Shapes of all tensors but the experts'."""
    inside = tuple(f"{name}." for name, _ in experts_modules(model))
    return {key: tuple(value.shape) for key, value in model.state_dict().items() if not key.startswith(inside)}


def _width_fields(config: Any, model: nn.Module, before: Mapping[str, int], parts: int, family: str) -> dict[str, Any]:
    """The field that sets the experts' width, and one that keeps shared experts whole where it counts them by it."""
    wanted, others = {name: width // parts for name, width in before.items()}, _outside(model)
    sizes = set(before.values())
    named = [(path, value) for path, value in numbers(config) if sizes & set(value if type(value) is list else [value])]
    named.sort(key=lambda entry: ("intermediate" not in entry[0], "vision" in entry[0], entry[0].count("."), entry[0]))
    reason = "no field of the config sets the width of its experts"
    for path, value in named[:MOST_CANDIDATES]:
        fields = {path: each_number(value, lambda each: each // parts)}
        with suppress(CompressionError, ValueError, TypeError):
            built = build_meta(with_fields(config, fields))
            if widths(built) != wanted:
                continue
            changed = _differing(others, _outside(built))
            if changed is None:
                return fields
            for shared, count in numbers(config):
                if "shared" in shared and each_number(count, lambda each: each * parts) != count:
                    more = fields | {shared: each_number(count, lambda each: each * parts)}
                    with suppress(CompressionError, ValueError, TypeError):
                        whole = build_meta(with_fields(config, more))
                        if widths(whole) == wanted and _differing(others, _outside(whole)) is None:
                            return more
            reason = f"{path} sets the width of {changed.rpartition('.')[0]} as well as that of the experts"
    raise CompressionError(f"{family} cannot be split: {reason}")


def _differing(first: Shapes, second: Shapes) -> str | None:
    """A tensor that is not the same in both."""
    return next((key for key in (*first, *second) if first.get(key) != second.get(key)), None)


def value_at(config: Any, path: str) -> Any:
    """A config's value at a dotted path."""
    return attrgetter(path)(config)
