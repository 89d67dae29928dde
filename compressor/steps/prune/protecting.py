"""Protected experts, which no plan merges or drops: named in a file, or found by a protector."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from compressor.errors import CompressionError
from compressor.formatting import ranges
from compressor.model.architecture import MoeLayer
from compressor.records import read_json, value_as
from compressor.steps.prune.choose import competing
from compressor.steps.prune.step import protector_of

logger = logging.getLogger(__name__)

Protected = Mapping[str, frozenset[int]]  # experts by the full name of their experts module
ENTRY = ("layer", "expert", "part", "module")


def given_protected(
    protect: str | Sequence[Mapping[str, Any]] | None, layers: Sequence[MoeLayer], keep: int
) -> Protected:
    """The experts that a list, or a file with one, names, checked against the `keep` that stay; none without a list."""
    if protect is None or protector_of(protect) is not None:
        return {}
    protected = read_protected(protect, layers)
    check_protected(protected, layers, keep)
    return protected


def with_list(protect: str | Sequence[Mapping[str, Any]] | None) -> Any:
    """The same, a file's list in place of its name, so that the options of a run do not depend on the file."""
    if protector_of(protect) is not None:
        return protect
    entries = _read_list(Path(protect)) if isinstance(protect, str) else protect or ()
    plain = [{n: e[n] for n in ENTRY if e.get(n) is not None} if isinstance(e, dict) else e for e in entries]
    return tuple(plain) or None  # an empty list asks for nothing


def read_protected(protect: str | Path | Sequence[Mapping[str, Any]], layers: Sequence[MoeLayer]) -> Protected:
    """Read a list, or a JSON file of one, with `layer` and `expert`, and `module` where a decoder layer has several.

    `layer` is the decoder layer's number. Of a model whose experts are split, `expert` is the number before, and all
    its parts are meant unless `part` names one. Further fields, such as those that `moe-compress attribute` writes, are
    not looked at.
    """
    protected: dict[str, set[int]] = {}
    where = str(protect) if isinstance(protect, str | Path) else "protect"
    entries = _read_list(Path(protect)) if isinstance(protect, str | Path) else protect
    for number, entry in enumerate(entries, start=1):
        layer, experts = _read_entry(entry, layers, f"{where}, entry {number}")
        protected.setdefault(layer.name, set()).update(experts)
    return {layer.name: frozenset(protected[layer.name]) for layer in layers if layer.name in protected}


def _read_list(path: Path) -> list[Any]:
    if not path.is_file():
        raise CompressionError(
            f"--protect {path} is neither 'auto' nor a file; write auto or graph:N, or name a JSON list of experts "
            "such as the hubs.json of moe-compress attribute"
        )
    content = read_json(path, "mend it")
    if not isinstance(content, list):
        raise CompressionError(f'{path} should hold a JSON list of experts, such as [{{"layer": 3, "expert": 5}}]')
    return content


def _read_entry(entry: Any, layers: Sequence[MoeLayer], where: str) -> tuple[MoeLayer, Sequence[int]]:
    """The layer and the expert that an entry of the list means; of a split one its parts."""
    if not isinstance(entry, dict):
        raise CompressionError(f"{where}: {entry!r} stands where an object with layer and expert should")
    for name in ("layer", "expert"):
        if name not in entry:
            raise CompressionError(f"{where} has no {name!r}; give both layer and expert")
    number, expert = (value_as(entry[name], int, f"{where}: {name}") for name in ("layer", "expert"))
    if (module := entry.get("module")) is not None:
        layer = next((layer for layer in layers if layer.name == module), None)
        if layer is None:
            raise CompressionError(
                f"{where}: the model has no experts module {module!r}; they are called like {layers[0].name}"
            )
        if layer.index != number:
            raise CompressionError(f"{where}: {module} is in layer {layer.index}, not {number}; correct one of the two")
    else:
        inside = [layer for layer in layers if layer.index == number]
        if not inside:
            known = ranges(dict.fromkeys(layer.index for layer in layers), " to ", ", ")
            raise CompressionError(f"{where}: layer {number} has no experts; layers with experts are {known}")
        if len(inside) > 1:
            names = " and ".join(layer.name for layer in inside)
            raise CompressionError(f"{where}: layer {number} has several experts modules, {names}; add one as 'module'")
        layer = inside[0]
    count = layer.experts // layer.parts
    if not 0 <= expert < count:
        raise CompressionError(
            f"{where}: {layer.name} has no expert {expert}; its experts are numbered 0 to {count - 1}"
        )
    parts = range(expert * layer.parts, (expert + 1) * layer.parts)
    if layer.parts == 1 or entry.get("part") is None:
        return layer, parts
    if not 0 <= (part := value_as(entry["part"], int, f"{where}: part")) < layer.parts:
        raise CompressionError(f"{where}: an expert of {layer.name} has no part {part}, but 0 to {layer.parts - 1}")
    return layer, parts[part : part + 1]


def listed(protected: Protected | None) -> dict[str, tuple[int, ...]]:
    """As plans have it: the experts of each module in ascending order, without modules that have none."""
    return {name: tuple(sorted(experts)) for name, experts in (protected or {}).items() if experts}


def check_protected(protected: Protected, layers: Sequence[MoeLayer], keep: int) -> None:
    """Refuse more protected experts than stay in a layer, or in one of its routing groups."""
    for layer in layers:
        places = keep // layer.routing_groups  # of each group, or of the whole layer
        for number, block in enumerate(competing(layer)):
            count = len(protected.get(layer.name, frozenset()) & set(block))
            if count > places:
                group = f"routing group {number} of " if layer.routing_groups > 1 else ""
                raise CompressionError(
                    f"{count} experts are protected in {group}layer {layer.index} ({layer.name}), but only {places} "
                    f"stay there when {keep} are kept; protect fewer or keep more"
                )


def strongest_that_fit(
    experts: Sequence[tuple[str, int]], layers: Sequence[MoeLayer], keep: int, protect: str
) -> Protected:
    """Of (module, expert) that `protect` finds, the strongest first, as many in each layer and group as stay there."""
    protected: dict[str, frozenset[int]] = {}
    for layer in layers:
        own = [expert for module, expert in experts if module == layer.name]
        blocks = [[expert for expert in own if expert in block] for block in map(set, competing(layer))]
        if own:
            places = keep // layer.routing_groups
            protected[layer.name] = frozenset(expert for block in blocks for expert in block[:places])
    if gone := len(experts) - sum(map(len, protected.values())):
        logger.warning(
            "%d of %d experts of --protect %s do not fit where %d are kept in every layer, so the weakest are not "
            "protected",
            gone,
            len(experts),
            protect,
            keep,
        )
    return protected
