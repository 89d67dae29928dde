"""Protected experts, which no plan merges or drops: named in a file, or found by a protector."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from compressor.errors import CompressionError
from compressor.formatting import ranges
from compressor.model.moe_layer import MoeLayer
from compressor.records import read_as, read_json
from compressor.steps.prune.options import protector_of
from compressor.steps.prune.selection import blocks_of, competing

logger = logging.getLogger(__name__)

Protected = Mapping[str, frozenset[int]]  # experts by the full name of their experts module


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a list. Of a model whose experts are split, all parts of the `expert` of the
    source, or one `part`.

    `module` is needed where the decoder `layer` has several experts modules.
    """

    layer: int
    expert: int
    part: int | None = None
    module: str | None = None


def _entries(protect: str | Path | Sequence[Mapping[str, Any]] | None) -> list[Entry]:
    """Return the entries of a list, or of a JSON file as `moe-compress attribute` writes it,
    without other fields.

    None of them for None, and for the name of a protector.
    """
    if protect is None or protector_of(protect) is not None:
        return []
    where = "protect"
    content = protect
    if isinstance(protect, str | Path):
        path = Path(protect)
        if not path.is_file():
            raise CompressionError(
                f"--protect {path} is neither 'auto' nor a file; write auto or graph:N, or name a "
                "JSON list of experts "
                "such as the hubs.json of moe-compress attribute"
            )
        where = str(path)
        content = read_json(path, "mend it")
    if not isinstance(content, list | tuple):
        raise CompressionError(
            f'{where} should hold a JSON list of experts, such as [{{"layer": 3, "expert": 5}}]'
        )
    numbered = enumerate(content, start=1)
    return [read_as(Entry, entry, f"{where}, entry {number}") for number, entry in numbered]


def with_list(protect: str | Sequence[Mapping[str, Any]] | None) -> Any:
    """Return the same, a file's list in place of its name, so that the options of a run do not
    depend on the file."""
    if protector_of(protect) is not None:
        return protect
    entries = []
    for entry in _entries(protect):
        entries.append({name: value for name, value in asdict(entry).items() if value is not None})
    return tuple(entries) or None


def given_protected(
    protect: str | Path | Sequence[Mapping[str, Any]] | None, layers: Sequence[MoeLayer], keep: int
) -> Protected:
    """Return the experts that a list, or a file with one, names; none without a list.

    Refuses entries that fit no expert, and more experts than the `keep` that stay leave places for.
    """
    protected: dict[str, frozenset[int]] = {layer.name: frozenset() for layer in layers}
    for number, entry in enumerate(_entries(protect), start=1):
        where = f"protect, entry {number}: "
        inside = [layer for layer in layers if layer.index == entry.layer]
        if entry.module is not None:
            inside = [layer for layer in inside if layer.name == entry.module]
        if not inside:
            known = ranges(dict.fromkeys(layer.index for layer in layers), " to ", ", ")
            named = "" if entry.module is None else f" called {entry.module!r}"
            raise CompressionError(
                f"{where}layer {entry.layer} has no experts module{named}; layers with experts are "
                f"{known}, modules are called like {layers[0].name}"
            )
        if len(inside) > 1:
            names = " and ".join(layer.name for layer in inside)
            raise CompressionError(
                f"{where}layer {entry.layer} has several experts modules, {names}; add one as "
                "'module'"
            )
        (layer,) = inside
        count = layer.experts // layer.parts
        parts = range(layer.parts) if entry.part is None or layer.parts == 1 else [entry.part]
        if not 0 <= entry.expert < count or parts[0] not in range(layer.parts):
            part = "" if entry.part is None else f", part {entry.part}"
            raise CompressionError(
                f"{where}{layer.name} has no expert {entry.expert}{part}; the experts that this "
                f"step gets are numbered 0 to {count - 1}, and their parts 0 to {layer.parts - 1}"
            )
        experts = [entry.expert * layer.parts + part for part in parts]
        protected[layer.name] |= frozenset(experts)
    for layer in layers:
        blocks_of(layer, keep, protected[layer.name])
    return {name: experts for name, experts in protected.items() if experts}


def listed(protected: Protected | None) -> dict[str, tuple[int, ...]]:
    """Return the experts of each module in ascending order, as plans hold them, without modules
    that have none."""
    return {name: tuple(sorted(experts)) for name, experts in (protected or {}).items() if experts}


def strongest_that_fit(
    experts: Sequence[tuple[str, int]], layers: Sequence[MoeLayer], keep: int, protect: str
) -> Protected:
    """Return the strongest (module, expert) that `protect` finds, as many in each layer and group
    as stay there."""
    protected: dict[str, frozenset[int]] = {}
    for layer in layers:
        capacity = keep // layer.routing_groups
        fitting = []
        for block in competing(layer):
            strongest = [
                expert for module, expert in experts if module == layer.name and expert in block
            ]
            fitting += strongest[:capacity]
        if fitting:
            protected[layer.name] = frozenset(fitting)
    gone = len(experts) - sum(map(len, protected.values()))
    if gone:
        logger.warning(
            f"{gone} of {len(experts)} experts of --protect {protect} do not fit where {keep} are "
            "kept in every layer, "
            "so the weakest are not protected"
        )
    return protected
