"""How many experts a token visits, in the config: the field that sets it, found by comparing meta builds."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from compressor.errors import CompressionError
from compressor.model.architecture import MOST_CANDIDATES, Architecture, discover, with_fields
from compressor.steps.split.numbers import each_number, numbers


def top_k_fields(
    config: Any, architecture: Architecture, wanted: Mapping[str, int], change: Callable[[int], int]
) -> tuple[dict[str, Any], Architecture]:
    """The field that says how many experts a token visits, at its new value, and the architecture that comes of it.

    `config` may differ from the architecture's own in other fields. `change` makes of the present number in a field
    what it shall be, and `wanted` says by layer what must come of that. Raises `CompressionError` where no field does.
    """
    counts = {layer.top_k for layer in architecture.layers}
    found_numbers = ((path, value, value if isinstance(value, list) else [value]) for path, value in numbers(config))
    named = [(path, value) for path, value, each in found_numbers if counts & set(each)]
    named.sort(key=lambda entry: ("per_tok" not in entry[0] and "top" not in entry[0], entry[0].count("."), entry[0]))
    for path, value in named[:MOST_CANDIDATES]:
        fields = {path: each_number(value, change)}
        with suppress(CompressionError, ValueError, TypeError):
            found = discover(with_fields(config, fields))
            if {layer.name: layer.top_k for layer in found.layers} == dict(wanted):
                return fields, found
    raise CompressionError(
        f"{architecture.family}: no field of the config sets how many experts a token visits, so that cannot be changed"
    )
