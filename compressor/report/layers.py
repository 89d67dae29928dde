"""What the figures and tables of a report say of layers and experts. E experts, N kept."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from compressor.report.data import LayerReport
from compressor.words import joined, ranges


def named(layers: Sequence[LayerReport]) -> list[tuple[LayerReport, str]]:
    """Each layer with its name: 'Layer 3', or the module's where two have the same number."""
    often = Counter(layer.layer for layer in layers)
    return [(layer, f"Layer {layer.layer}" if often[layer.layer] == 1 else layer.module) for layer in layers]


def merged(layer: LayerReport) -> tuple[tuple[int, ...], ...]:
    """The groups of several experts."""
    return tuple(group for group in layer.groups if len(group) > 1)


def order(layer: LayerReport) -> tuple[int, ...]:
    """All experts [E]: merged groups first, the largest before the others, then those alone, then the dropped."""
    alone = [group for group in layer.groups if len(group) == 1]
    return tuple(chain(*sorted(merged(layer), key=lambda group: -len(group)), *alone, layer.dropped))


def fates(layer: LayerReport) -> Mapping[int, str]:
    """What became of each expert, in words."""
    found = dict.fromkeys(range(layer.experts), "dropped")
    protected, rescaled = set(layer.protected), set(layer.rescaled)
    for slot, (first, *others) in enumerate(layer.groups):
        alone = "protected" if first in protected else "rescaled" if first in rescaled else "kept"
        said = f"merged into slot {slot}" if others else f"{alone} as slot {slot}"
        found.update(dict.fromkeys((first, *others), said))
    return found


def roles(layer: LayerReport) -> list[str]:
    """Kept, merged or dropped: [E]."""
    return [fate.split()[0] if fate.startswith(("merged", "dropped")) else "kept" for fate in fates(layer).values()]


def all_fates(layers: Sequence[LayerReport]) -> str:
    """'40 kept, 24 merged into 8 and 8 dropped': the experts of all layers."""
    groups = [group for layer in layers for group in layer.groups]
    several = [group for group in groups if len(group) > 1]
    rescaled, dropped = sum(len(layer.rescaled) for layer in layers), sum(len(layer.dropped) for layer in layers)
    counts = {
        "kept": len(groups) - len(several) - rescaled,
        "rescaled": rescaled,
        f"merged into {len(several):,}": sum(map(len, several)),
        "dropped": dropped,
    }
    return joined([f"{count:,} {fate}" for fate, count in counts.items() if count])


def within(layer: LayerReport, group: Sequence[int]) -> list[float]:
    """Similarities of a group's pairs; none without a matrix."""
    if layer.similarity is None:
        return []
    return [layer.similarity[a][b] for place, a in enumerate(group) for b in group[place + 1 :]]


def mean(values: Sequence[float]) -> float | None:
    """Their mean, or None without any."""
    return fmean(values) if values else None


def listed(numbers: Iterable[int]) -> str:
    """0, 1, 2, 7 -> '0-2, 7'; 'none' for no number."""
    found = list(numbers)
    return ranges(found, comma=", ") if found else "none"


def brief_end(text: str, most: int = 24) -> str:
    """The end of a name that is too long for a drawing: what tells modules apart stands there."""
    return text if len(text) <= most else f"…{text[1 - most :]}"


def share(value: object) -> str:
    """0.125 -> '12.5%'; a dash for none."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "-"
    return f"{100 * value:.2f}%" if value < 0.1 else f"{100 * value:.1f}%"


def shown(value: object) -> str:
    """A setting in words: a mapping as 'name value, name value'."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_inner(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "none"}[value]
    if isinstance(value, list | tuple):
        return ", ".join(map(_inner, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _inner(value: Any) -> str:
    return f"({shown(value)})" if isinstance(value, Mapping) else shown(value)
