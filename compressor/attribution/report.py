"""A routing attribution as files: all numbers as JSON, hubs.json to protect, a text, a graph and pictures."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from compressor.attribution.figures import UNRANKED, Attribution, KeyInfluence
from compressor.attribution.graph_files import NAMES as GRAPH
from compressor.attribution.graph_files import Measured, graph_content, graph_tables, measured_graph, write_graph
from compressor.attribution.hubs import Hub, SuperExpert, overlap
from compressor.attribution.plots import NAMES as PICTURES
from compressor.attribution.plots import plot_attribution
from compressor.attribution.summary import (
    ZEROED,
    expert_label,
    full_content,
    kind_shares,
    pairs,
    rank_correlation,
    rounded,
    sender_labels,
    strongest,
)
from compressor.calibration.sources import without_folders
from compressor.files import whole_folder
from compressor.words import plain, table_line

HUB_COLUMNS = ("expert", "influence", "its score", "AARV", "its score", "tokens")
KIND_COLUMNS = ("kind", "senders", "influence", "share of all")
SENDER_COLUMNS = ("sender", "kind", "influence", "AARV", "tokens")
STRONGEST_KEYS = 3  # key tokens named for each head

NAMES = ("attribution.json", "attribution.md", "hubs.json", *PICTURES, *GRAPH)


def number(value: float | None) -> str:
    """Three significant digits, all before the point; '-' for none."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """0.125 -> '12.5%'; '-' for none."""
    return "-" if value is None or not math.isfinite(value) else f"{100 * value:.1f}%"


def exactness(attribution: Attribution) -> str:
    """How far the sub-scores miss the logits, and on how many tokens, as a sentence."""
    worst = max(attribution.receivers, key=lambda receiver: receiver.unexplained, default=None)
    source = without_folders(attribution.calibration)["source"] if attribution.calibration else "unknown data"
    tokens = f"{attribution.tokens:,} tokens of {source}"
    if worst is None:
        return f"No router was read; {tokens}."
    return (
        f"Sub-scores add up to the router's logits within {number(worst.unexplained)} of the largest logit "
        f"(layer {worst.layer}), on {tokens}."
    )


def overlap_line(hubs: Sequence[Hub], supers: Sequence[SuperExpert]) -> str:
    """Which hubs are super experts, as a sentence."""
    shared = overlap(hubs, supers)
    if shared.jaccard is None:
        return "Neither hubs nor super experts were found."
    both = ", ".join(expert_label(hub.layer, hub.expert) for hub in shared.both) or "none"
    return (
        f"Both hub and super expert: {both}; hubs alone: {len(shared.only_hubs)}, "
        f"super experts alone: {len(shared.only_supers)} (Jaccard index {shared.jaccard:.2f})."
    )


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The first column holds text, the others numbers."""
    return [table_line(columns), table_line([":---", *["---:"] * (len(columns) - 1)]), *map(table_line, rows), ""]


def hub_cells(hub: Hub) -> tuple[str, ...]:
    """A hub's row under `HUB_COLUMNS`."""
    return (
        expert_label(hub.layer, hub.expert),
        number(hub.influence),
        number(hub.influence_score),
        number(hub.aarv),
        number(hub.aarv_score),
        percent(hub.share),
    )


def _hub_part(hubs: Sequence[Hub], threshold: float) -> list[str]:
    rule = f"modified z-scores of influence and of AARV among its layer's experts both above {threshold:g}"
    if not hubs:
        return ["## Hubs", "", f"No expert is a hub: {rule}.", ""]
    return [
        "## Hubs", "", f"An expert is a hub with {rule}.", "", *_table(HUB_COLUMNS, [*map(hub_cells, hubs)]),
        "Keep them when the model is made smaller: `moe-compress compress ... --protect hubs.json`", "",
    ]  # fmt: skip


def kind_rows(attribution: Attribution) -> list[tuple[str, ...]]:
    """The kinds' rows under `KIND_COLUMNS`."""
    found = kind_shares(attribution)
    return [(each.kind, str(each.senders), number(each.influence), percent(each.share)) for each in found]


def sender_rows(attribution: Attribution, top: int, shown: Callable[[str], str]) -> list[tuple[str, ...]]:
    """The strongest senders' rows under `SENDER_COLUMNS`; `shown` escapes the label."""
    chosen = strongest(attribution.senders, top)
    return [
        (
            shown(label),
            sender.kind,
            number(sender.total_influence),
            "-" if sender.kind in UNRANKED else number(sender.total_rank_change),
            percent(sender.share),
        )
        for label, sender in zip(sender_labels(chosen), chosen, strict=True)
    ]


def _sender_part(attribution: Attribution, top: int) -> list[str]:
    rows = sender_rows(attribution, top, plain)
    if not rows:
        return []
    note = "Heads are parts of their attention, routed and shared experts of their MoE layer."
    return ["## Strongest senders", "", *_table(SENDER_COLUMNS, rows), note, ""]


def _super_part(hubs: Sequence[Hub], supers: Sequence[SuperExpert]) -> list[str]:
    columns = ("expert", "largest entry", "largest norm", "mean norm")
    rows = [
        (expert_label(each.layer, each.expert), number(each.max_entry), number(each.max_norm), number(each.mean_norm))
        for each in supers
    ]
    return [
        "## Super experts", "",
        "Experts with massive activations (Su et al. 2025, arXiv:2507.23279).", "",
        *(_table(columns, rows) if rows else ["None were found.", ""]),
        overlap_line(hubs, supers), "",
    ]  # fmt: skip


def _key_part(attribution: Attribution) -> list[str]:
    """Where the strongest heads read what they carry to the routers, for the sequences that were split by key."""
    rows = [
        (
            f"L{each.layer} head {each.head}", str(each.sequence), percent(each.first), percent(each.own),
            percent(each.previous), ", ".join(_strongest_keys(each)),
        )
        for each in attribution.per_key
    ]  # fmt: skip
    if not rows:
        return []
    note = "Shares of a head's influence on one sequence; a key may be the first token and the query's own."
    columns = ("head", "sequence", "first token", "own token", "token before", "strongest keys")
    return ["## By key token", "", *_table(columns, rows), note, ""]


def _strongest_keys(found: KeyInfluence) -> list[str]:
    """The key tokens with the greatest influence, as text where it is known, with their positions."""
    order = sorted(range(len(found.influence)), key=lambda key: -found.influence[key])[:STRONGEST_KEYS]
    names = found.texts or tuple(map(str, found.tokens))
    return [f"{plain(json.dumps(names[key], ensure_ascii=False))} at {key}" for key in order]


def _correlation_line(attribution: Attribution) -> str:
    found = [rank_correlation([*pairs(attribution, *kinds)]) for kinds in (ZEROED, ("expert",))]
    return (
        "Spearman rank correlation of influence and AARV: "
        f"{number(found[0])} for components, {number(found[1])} for routed experts."
    )


def _graph_part(made: Measured) -> list[str]:
    """The central experts, whether the measures agree, and the communities; nothing without a central expert."""
    if not any(made.centrality.values()):
        return []
    note = f"`{GRAPH[0]}` and `{GRAPH[1]}` hold the whole graph: who steers which router, and how strongly."
    tables = [[caption, "", *_table(columns, rows)] for caption, columns, rows in graph_tables(made) if rows]
    return ["## The routing graph", "", note, "", *chain.from_iterable(tables)]


def markdown(
    attribution: Attribution,
    hubs: Sequence[Hub],
    supers: Sequence[SuperExpert],
    threshold: float,
    top: int,
    graph: Measured,
) -> str:
    """What was measured, hubs, kinds, the strongest senders, super experts and the graph."""
    layers = ", ".join(str(receiver.layer) for receiver in attribution.receivers)
    made_with = ", ".join(f"{name} {version}" for name, version in attribution.versions.items())
    lines = [
        f"# {plain(attribution.model)}: routing attribution", "",
        f"The logits of the routers of layers {layers or 'none'} are sums of sub-scores, one for each earlier "
        "component. Influence is the variance of a component's sub-scores over the experts, averaged over tokens; "
        "AARV is how far the ranks of the top-k experts change, on average, without the component. Both are summed "
        "over routers. Method: Understanding Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs, "
        "ICLR 2026.", "",
        plain(exactness(attribution)), "",
        *_hub_part(hubs, threshold),
        "## What shapes routing", "", *_table(KIND_COLUMNS, kind_rows(attribution)),
        *_sender_part(attribution, top), *_super_part(hubs, supers), *_key_part(attribution),
        *_graph_part(graph),
        "## Does influence change the choice?", "", _correlation_line(attribution), "",
        *([f"Made with {plain(made_with)}.", ""] if made_with else []),
    ]  # fmt: skip
    return "\n".join(lines)


def _one_line_each(content: Mapping[str, Any]) -> str:
    """JSON with a line for each item of a list: tens of thousands of numbers would be as many lines otherwise."""
    parts = []
    for name, value in content.items():
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        if isinstance(value, list) and value:
            items = ",\n    ".join(json.dumps(item, ensure_ascii=False, allow_nan=False) for item in value)
            text = f"[\n    {items}\n  ]"
        parts.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def write_attribution(
    attribution: Attribution,
    hubs: Sequence[Hub],
    supers: Sequence[SuperExpert],
    folder: Path,
    overwrite: bool,
    threshold: float,
    top: int,
) -> list[Path]:
    """Write JSON, Markdown and pictures into a new folder, all of them or, when anything fails, nothing.

    With `overwrite` an earlier attribution is replaced once the new one is complete, and stays when anything fails.
    """
    with whole_folder(folder, NAMES, overwrite) as made:
        graph = measured_graph(attribution)
        content = {**full_content(attribution, hubs, supers, threshold), "graph": rounded(graph_content(graph))}
        (made / NAMES[0]).write_text(_one_line_each(content), encoding="utf-8")
        (made / NAMES[1]).write_text(markdown(attribution, hubs, supers, threshold, top, graph), encoding="utf-8")
        found = json.dumps(rounded(tuple(hubs)), indent=2, ensure_ascii=False, allow_nan=False)
        (made / NAMES[2]).write_text(found + "\n", encoding="utf-8")
        plot_attribution(attribution, hubs, top, made)
        write_graph(graph, made)
    return [folder / name for name in NAMES]
