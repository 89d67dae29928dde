"""A report's sections about layers and experts: fates, similarity and groups, visits, errors, hubs and protection."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

from compressor.attribution.figures import expert_label
from compressor.document.blocks import Block, Code, Details, Facts, Heading, Link, Note, Strong, Table, Text, Words
from compressor.report.data import LayerReport, ReportData
from compressor.report.layers import fates, listed, mean, merged, named, share, shown, within
from compressor.words import counted, short

MOST_CELLS = 20_000  # of all layers' matrices as tables
MOST_OPEN = 8  # layers whose tables are not folded away together
HUB_COLUMNS = ("expert", "what became of it", "influence", "its score", "AARV", "its score", "tokens")
ERROR_COLUMNS = {
    "error": "error of the block",
    "cosine": "cosine",
    "stream_error": "error of the stream",
    "stream_cosine": "cosine of the stream",
    "heldout_error_before": "held-out, before correction",
    "heldout_error_after": "held-out, after correction",
}


def experts(data: ReportData) -> list[Block]:
    """What became of each expert: a row for each layer."""
    columns: dict[str, Callable[[LayerReport], str]] = {
        "kept": lambda layer: listed(set(chain(*layer.groups)) - set(chain(layer.rescaled, *merged(layer)))),
        "merged": lambda layer: ", ".join("+".join(map(str, sorted(group))) for group in merged(layer)) or "none",
        "rescaled": lambda layer: listed(layer.rescaled),
        "dropped": lambda layer: listed(layer.dropped),
        "protected": lambda layer: listed(layer.protected),
    }
    found = {what: [cell(layer) for layer in data.layers] for what, cell in columns.items()}
    found = {what: cells for what, cells in found.items() if set(cells) != {"none"}}
    rows = tuple(zip((name for _, name in named(data.layers)), *found.values(), strict=True))
    said = "The numbers are those of the source's experts; those joined by + became one."
    return [Table("What became of each expert", ("", *found), rows, frozenset(found)), Text(said, "note")]


def similarity(data: ReportData) -> list[Block]:
    """The groups of each layer, with the similarities in and between them."""
    with_matrices = sum(layer.experts**2 for layer in data.layers if layer.similarity) <= MOST_CELLS
    folds = []
    for layer, name in named(data.layers):
        said = (
            f"{layer.experts} experts in {counted(layer.kept, 'slot')}, {counted(len(merged(layer)), 'merged group')}, "
            f"{len(layer.dropped)} dropped"
        )
        matrix = _matrix(layer, name) if with_matrices else []
        folds.append(Details(_headed(name, said), (*_layer(layer, name), *matrix)))
    too_large = "The matrices have too many numbers for tables; those of the groups are below."
    is_told = with_matrices or not any(layer.similarity for layer in data.layers)
    return [
        *_unseen(data, "similarity", "similarity of experts"),
        *([] if is_told else [Text(too_large, "note")]),
        *_together(folds, "groups of each layer"),
    ]


def _headed(name: str, said: str) -> Words:
    return Strong(name), " ", Note(said)


def _together(folds: Sequence[Details], what: str) -> Sequence[Block]:
    """The folds of layers, in one of their own if they are many."""
    return folds if len(folds) <= MOST_OPEN else [Details(f"All {len(folds)} layers: {what}", tuple(folds))]


def _unseen(data: ReportData, field: str, what: str) -> list[Block]:
    """A sentence where layers were not measured."""
    lacking = [name for layer, name in named(data.layers) if not getattr(layer, field)]
    if not lacking:
        return []
    if len(lacking) == len(data.layers):
        return [Text((f"The {what} was not measured", *_remedy(data)))]
    return [Text(f"Without a measured {what}: {', '.join(lacking)}.")]


def _remedy(data: ReportData) -> tuple[Words, ...]:
    return ("; ", Link("what is missing", "#done"), " says what it takes.") if data.missing else (".",)


def _layer(layer: LayerReport, name: str) -> list[Block]:
    """What decided a layer, and its groups."""
    rows: list[tuple[str, str, str, str]] = []
    for slot, group in enumerate(layer.groups):
        if len(group) > 1:
            found = within(layer, group)
            rows.append((f"merged, slot {slot}", listed(group), short(mean(found)), short(min(found, default=None))))
    alone, protected = [group[0] for group in layer.groups if len(group) == 1], set(layer.protected)
    others = {
        "protected": [expert for expert in alone if expert in protected],
        "kept alone": [expert for expert in alone if expert not in protected],
        "dropped": layer.dropped,
    }
    rows += [(what, listed(numbers), "-", "-") for what, numbers in others.items() if numbers]
    columns = ("", "experts", "mean similarity", "least similarity")
    told: list[tuple[str, Words]] = [("Module", Code(layer.module)), ("Decided by", layer.decided_by)]
    told += [(str(name).replace("_", " ").capitalize(), shown(value)) for name, value in layer.figures.items()]
    return [Facts(tuple(told)), Table(f"{name}: groups", columns, tuple(rows), frozenset({"experts"}))]


def _matrix(layer: LayerReport, name: str) -> list[Block]:
    if layer.similarity is None:
        return []
    columns = ("expert", *map(str, range(len(layer.similarity))))
    rows = tuple((str(row), *(f"{value:.2f}" for value in line)) for row, line in enumerate(layer.similarity))
    return [Table(f"{name}: {layer.similarity_label or 'similarity'}", columns, rows)]


def visits(data: ReportData) -> list[Block]:
    """How evenly tokens spread, and each expert's share."""
    counted_layers = [each for each in named(data.layers) if each[0].visits_before or each[0].visits_after]
    if not counted_layers:
        return _unseen(data, "visits_before", "share of tokens")
    columns = ("", "maximum to mean, before", "after", "entropy, before", "after")
    rows = tuple(
        (
            name,
            *(
                short(getattr(load, field, None))
                for field in ("maximum_to_mean", "entropy")
                for load in (layer.load_before, layer.load_after)
            ),
        )
        for layer, name in counted_layers
    )
    what = "shares of experts and slots"
    folds = [Details(_headed(name, what), (_shares(layer, name),)) for layer, name in counted_layers]
    spread = "Maximum to mean is 1 where all are visited alike; so is the entropy, which is 0 where one takes all."
    return [
        *_unseen(data, "visits_before", "share of tokens"),
        Table("How evenly the visits spread", columns, rows),
        Text(spread, "note"),
        *_together(folds, what),
    ]


def _shares(layer: LayerReport, name: str) -> Block:
    slots = {expert: slot for slot, group in enumerate(layer.groups) for expert in group}
    fate, before, after = fates(layer), layer.visits_before or (), layer.visits_after or ()
    rows = tuple(
        (str(expert), _at(before, expert), fate.get(expert, "-"), _at(after, slots.get(expert)))
        for expert in range(max(layer.experts, len(before)))
    )
    columns = ("expert", "visits before", "what became of it", "visits of its slot after")
    return Table(f"{name}: visits", columns, rows, frozenset({"what became of it"}))


def _at(shares: Sequence[float], place: int | None) -> str:
    return share(shares[place]) if place is not None and place < len(shares) else "-"


def errors(data: ReportData) -> list[Block]:
    """Each layer's errors as numbers."""
    heads = {
        field: head
        for field, head in ERROR_COLUMNS.items()
        if any(getattr(layer, field) is not None for layer in data.layers)
    }
    if not heads:
        return [Text(("The reconstruction error was not measured", *_remedy(data)))]
    rows = tuple((name, *(short(getattr(layer, field), 4) for field in heads)) for layer, name in named(data.layers))
    alone = "Only the held-out errors of the correction are known; the block's error was not measured"
    own = "The stream is the decoder layer's output when each model runs on its own, so its error adds up over layers."
    return [
        *([] if "error" in heads else [Text((alone, *_remedy(data)))]),
        Table("Errors by layer", ("", *heads.values()), rows),
        *([Text(own, "note")] if "stream_error" in heads else []),
    ]


def hubs(data: ReportData) -> list[Block]:
    """Named hubs with what became of them, and protected experts by layer."""
    protected = tuple((name, listed(layer.protected)) for layer, name in named(data.layers) if layer.protected)
    layers = {layer.module: (layer.layer, fates(layer)) for layer in data.layers} if data.hubs else {}
    rows = tuple(_hub(hub, *layers.get(str(hub.get("module")), (None, None))) for hub in data.hubs)
    return [
        Heading("Hubs", 3),
        Table("Routing hubs", HUB_COLUMNS, rows, frozenset({"what became of it"}))
        if rows
        else Text("None: no hubs were named to this report."),
        Heading("Protected experts", 3),
        Table("Protected experts", ("", "experts"), protected, frozenset({"experts"}))
        if protected
        else Text("None: the plan protects no expert."),
    ]


def _hub(hub: Any, layer: int | None, fates: Mapping[int, str] | None) -> tuple[str, ...]:
    expert, place = hub.get("expert"), hub.get("layer", layer)
    label = expert_label(place, expert) if isinstance(place, int) and isinstance(expert, int) else shown(expert)
    fate = fates.get(expert, "-") if fates is not None and isinstance(expert, int) else "not in the plan"
    figures = [hub.get(field) for field in ("influence", "influence_score", "aarv", "aarv_score")]
    return (label, fate, *map(short, figures), share(hub.get("share")))
