"""A routing attribution as blocks, and as files: all numbers as JSON, hubs.json to protect, a text, a graph, pictures.

The blocks tell of hubs, what shapes routing, super experts, key tokens and the graph.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.attribution.figures import (
    UNRANKED,
    ZEROED,
    Attribution,
    Output,
    expert_label,
    kind_shares,
    pairs,
    rank_correlation,
    sender_labels,
    strongest,
)
from compressor.attribution.graph import MEASURES, STANDING, TOP, Measured, agreements, measured_graph, ranking
from compressor.attribution.hubs import THRESHOLD, Hub, find_hubs, overlap, super_experts
from compressor.attribution.pictures import NAMES as PICTURES
from compressor.attribution.pictures import graph_figure, pictures
from compressor.data.sources import without_folders
from compressor.document.blocks import Block, Code, Heading, Table, Text
from compressor.document.markdown import markdown
from compressor.drawing.picture import png
from compressor.files import whole_folder
from compressor.records import finite, plain_json
from compressor.words import counted, short

GRAPH = ("graph.graphml", "graph.json", "graph.png")
NAMES = ("attribution.json", "attribution.md", "hubs.json", *(f"{name}.png" for name in PICTURES), *GRAPH)
HUB_COLUMNS = ("expert", "influence", "its score", "AARV", "its score", "tokens")
STRONGEST_KEYS = 3  # key tokens named for each head
GROUPS = 8  # communities that the report names
DIGITS = 6  # significant ones of a number in JSON

Blocks = tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Findings:
    """An attribution with its hubs above a threshold and its super experts; `top` senders are shown."""

    attribution: Attribution
    hubs: Sequence[Hub]
    supers: Sequence[Output]
    threshold: float
    top: int


def findings(attribution: Attribution, threshold: float = THRESHOLD, top: int = 10) -> Findings:
    """The hubs and super experts of an attribution."""
    return Findings(attribution, find_hubs(attribution, threshold), super_experts(attribution), threshold, top)


def rounded(content: Any) -> Any:
    """Numbers to 6 significant digits, None for what JSON cannot write, dataclasses and mappings as plain objects."""
    return plain_json(content, lambda value: finite(float(f"{value:.{DIGITS}g}")))


def percent(value: float | None) -> str:
    """0.125 -> '12.5%'; '-' for none."""
    return "-" if value is None or not math.isfinite(value) else f"{100 * value:.1f}%"


def brief_content(found: Findings) -> dict[str, Any]:
    """What can be read at a glance, as plain JSON types."""
    attribution, shared = found.attribution, overlap(found.hubs, found.supers)

    def places(experts: Sequence[Hub | Output]) -> list[dict[str, Any]]:
        return [{"module": each.module, "layer": each.layer, "expert": each.expert} for each in experts]

    sizes = ("module", "layer", "expert", "max_entry", "max_norm", "mean_norm")
    content: dict[str, Any] = rounded(
        {
            "model": attribution.model,
            "tokens": attribution.tokens,
            "hubs": tuple(found.hubs),
            "super_experts": [{name: getattr(each, name) for name in sizes} for each in found.supers],
            "overlap": {
                "both": places(shared.both),
                "only_hubs": places(shared.only_hubs),
                "only_super_experts": places(shared.only_supers),
                "jaccard": shared.jaccard,
            },
            "receivers": attribution.receivers,
            "kinds": kind_shares(attribution),
            "seconds": attribution.seconds,
        }
    )
    return content


def full_content(found: Findings) -> dict[str, Any]:
    """Everything but the graph, as plain JSON types; calibration sources without folders."""
    attribution = found.attribution
    more = {
        "threshold": found.threshold,
        "rank_correlation": {
            "components": rank_correlation([*pairs(attribution, *ZEROED)]),
            "experts": rank_correlation([*pairs(attribution, "expert")]),
        },
        "senders": [
            {
                **rounded(sender),
                "total_influence": float(sender.total_influence),
                "total_rank_change": None if sender.kind in UNRANKED else float(sender.total_rank_change),
            }
            for sender in attribution.senders
        ],
        "outputs": attribution.outputs,
        "calibration": without_folders(attribution.calibration) if attribution.calibration else {},
        "versions": attribution.versions,
        "per_key": attribution.per_key,
    }
    return {**brief_content(found), **rounded(more)}


def graph_content(made: Measured) -> dict[str, Any]:
    """What attribution.json says of the graph: its size, the first experts by each measure, where measures agree."""
    return {
        "nodes": made.graph.number_of_nodes(),
        "edges": made.graph.number_of_edges(),
        "first": {measure: ranking(made.centrality, measure)[:TOP] for measure in MEASURES},
        "agreement": [
            {"first": one, "second": other, "correlation": correlation, "shared": shared}
            for (one, other), (correlation, shared) in agreements(made.centrality).items()
        ],
    }


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


def write_graph(made: Measured, folder: Path) -> None:
    """Save the graph as GraphML and as node-link JSON, without rounding, which networkx and Gephi open."""
    import networkx as nx

    lines = "\n".join(nx.generate_graphml(made.graph, named_key_ids=True))
    (folder / GRAPH[0]).write_text(lines + "\n", encoding="utf-8")
    content = json.dumps(nx.node_link_data(made.graph, edges="edges"), ensure_ascii=False, allow_nan=False, indent=0)
    (folder / GRAPH[1]).write_text(content + "\n", encoding="utf-8")


def write_attribution(found: Findings, folder: Path, overwrite: bool) -> list[Path]:
    """Write JSON, Markdown, graph and pictures into a new folder, all of them or, when anything fails, nothing.

    With `overwrite` an earlier attribution is replaced once the new one is complete, and stays when anything fails.
    """
    with whole_folder(folder, NAMES, overwrite) as made:
        graph = measured_graph(found.attribution)
        texts = (
            _one_line_each({**full_content(found), "graph": rounded(graph_content(graph))}),
            markdown(whole_blocks(found, graph)),
            json.dumps(rounded(tuple(found.hubs)), indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        )
        for name, text in zip(NAMES, texts, strict=False):
            (made / name).write_text(text, encoding="utf-8")
        for figure in (*pictures(found.attribution, found.hubs, found.top), graph_figure(graph)):
            (made / f"{figure.name}.png").write_bytes(png(figure.title, figure.drawings))
        write_graph(graph, made)
    return [folder / name for name in NAMES]


def whole_blocks(found: Findings, graph: Measured) -> Blocks:
    """What was measured, hubs, kinds, the strongest senders, super experts, key tokens and the graph."""
    attribution = found.attribution
    layers = ", ".join(str(receiver.layer) for receiver in attribution.receivers)
    made_with = ", ".join(f"{name} {version}" for name, version in attribution.versions.items())
    method = (
        f"The logits of the routers of layers {layers or 'none'} are sums of sub-scores, one for each earlier "
        "component. Influence is the variance of a component's sub-scores over the experts, averaged over tokens; "
        "AARV is how far the ranks of the top-k experts change, on average, without the component. Both are summed "
        "over routers. Method: Understanding Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs, "
        "ICLR 2026."
    )
    agreed = [short(rank_correlation([*pairs(attribution, *kinds)])) for kinds in (ZEROED, ("expert",))]
    correlation = (
        f"Spearman rank correlation of influence and AARV: {agreed[0]} for components, {agreed[1]} for routed experts."
    )
    return (
        Heading(f"{attribution.model}: routing attribution", 1),
        Text(method),
        Text(exactness(attribution)),
        *_hub_blocks(found),
        *_kind_blocks(attribution),
        *_sender_blocks(found),
        *_super_blocks(found),
        *_key_blocks(attribution),
        *_graph_blocks(graph),
        Heading("Does influence change the choice?"),
        Text(correlation),
        *([Text(f"Made with {made_with}.")] if made_with else []),
    )


def brief_blocks(found: Findings) -> Blocks:
    """What a terminal shows: hubs, the strongest senders, the kinds, and how exact it all is."""
    return (
        *_hub_blocks(found),
        *_sender_blocks(found),
        *_kind_blocks(found.attribution),
        Text(_overlap_line(found)),
        Text(exactness(found.attribution)),
    )


def exactness(attribution: Attribution) -> str:
    """How far the sub-scores miss the logits, and on how many tokens, as a sentence."""
    worst = max(attribution.receivers, key=lambda receiver: receiver.unexplained, default=None)
    source = without_folders(attribution.calibration)["source"] if attribution.calibration else "unknown data"
    tokens = f"{attribution.tokens:,} tokens of {source}"
    if worst is None:
        return f"No router was read; {tokens}."
    return (
        f"Sub-scores add up to the router's logits within {short(worst.unexplained)} of the largest logit "
        f"(layer {worst.layer}), on {tokens}."
    )


def _overlap_line(found: Findings) -> str:
    """Which hubs are super experts, as a sentence."""
    shared = overlap(found.hubs, found.supers)
    if shared.jaccard is None:
        return "Neither hubs nor super experts were found."
    both = ", ".join(expert_label(hub.layer, hub.expert) for hub in shared.both) or "none"
    return (
        f"Both hub and super expert: {both}; hubs alone: {len(shared.only_hubs)}, "
        f"super experts alone: {len(shared.only_supers)} (Jaccard index {shared.jaccard:.2f})."
    )


def _hub_blocks(found: Findings) -> Blocks:
    """The hubs by the rule that makes them so."""
    rule = f"modified z-scores of influence and of AARV among its layer's experts both above {found.threshold:g}"
    if not found.hubs:
        return Heading("Hubs"), Text(f"No expert is a hub: {rule}.")
    massive = {(each.module, each.expert) for each in found.supers}
    rows = tuple(
        (
            expert_label(hub.layer, hub.expert),
            *map(short, (hub.influence, hub.influence_score, hub.aarv, hub.aarv_score)),
            percent(hub.share),
            "yes" if (hub.module, hub.expert) in massive else "no",
        )
        for hub in found.hubs
    )
    title, columns = f"{found.attribution.model}: routing hubs", (*HUB_COLUMNS, "super expert")
    keep = ("Keep them when the model is made smaller: ", Code("moe-compress compress ... --protect hubs.json"))
    return (
        Heading("Hubs"),
        Text(f"An expert is a hub with {rule}."),
        Table(title, columns, rows, frozenset({"super expert"})),
        Text(keep),
    )


def _kind_blocks(attribution: Attribution) -> Blocks:
    """How much of the influence comes from each kind of component."""
    rows = tuple(
        (each.kind, str(each.senders), short(each.influence), percent(each.share)) for each in kind_shares(attribution)
    )
    title = "What shapes routing"
    return Heading(title), Table(title, ("kind", "senders", "influence", "share of all"), rows)


def _sender_blocks(found: Findings) -> Blocks:
    chosen = strongest(found.attribution.senders, found.top)
    rows = tuple(
        (
            label,
            sender.kind,
            short(sender.total_influence),
            "-" if sender.kind in UNRANKED else short(sender.total_rank_change),
            percent(sender.share),
        )
        for label, sender in zip(sender_labels(chosen), chosen, strict=True)
    )
    title = "Strongest senders"
    note = "Heads are parts of their attention, routed and shared experts of their MoE layer."
    columns = ("sender", "kind", "influence", "AARV", "tokens")
    return (Heading(title), Table(title, columns, rows, frozenset({"kind"})), Text(note)) if rows else ()


def _super_blocks(found: Findings) -> Blocks:
    columns, title = ("expert", "largest entry", "largest norm", "mean norm"), "Super experts"
    rows = tuple(
        (expert_label(each.layer, each.expert), short(each.max_entry), short(each.max_norm), short(each.mean_norm))
        for each in found.supers
    )
    return (
        Heading(title),
        Text("Experts with massive activations (Su et al. 2025, arXiv:2507.23279)."),
        Table(title, columns, rows) if rows else Text("None were found."),
        Text(_overlap_line(found)),
    )


def _key_blocks(attribution: Attribution) -> Blocks:
    """Where the strongest heads read what they carry to the routers, for the sequences that were split by key."""
    rows = []
    for each in attribution.per_key:
        order = sorted(range(len(each.influence)), key=lambda key: -each.influence[key])[:STRONGEST_KEYS]
        names = each.texts or tuple(map(str, each.tokens))
        keys = ", ".join(f"{json.dumps(names[key], ensure_ascii=False)} at {key}" for key in order)
        shares = map(percent, (each.first, each.own, each.previous))
        rows.append((f"L{each.layer} head {each.head}", str(each.sequence), *shares, keys))
    note = "Shares of a head's influence on one sequence; a key may be the first token and the query's own."
    columns = ("head", "sequence", "first token", "own token", "token before", "strongest keys")
    title = "By key token"
    return (Heading(title), Table(title, columns, tuple(rows), frozenset({columns[-1]})), Text(note)) if rows else ()


def _graph_blocks(made: Measured) -> Blocks:
    """The central experts, whether the measures agree, and the communities; nothing without a central expert."""
    if not any(made.centrality.values()):
        return ()
    holds = (Code(GRAPH[0]), " and ", Code(GRAPH[1]), " hold the whole graph: who steers which router, how strongly.")
    return Heading("The routing graph"), Text(holds), *(table for table in graph_tables(made) if table.rows)


def graph_tables(made: Measured) -> tuple[Table, ...]:
    """The central experts, how the measures agree, and the groups of experts."""
    found, nodes = made.centrality, made.graph.nodes
    central = [
        (expert, *(f"{found[measure][expert]:.3g}" for measure in MEASURES))
        for expert in ranking(found, STANDING)[:TOP]
    ]
    cells: dict[tuple[str, str], str] = {}
    for (one, other), (value, shared) in agreements(found).items():
        cells[one, other] = cells[other, one] = f"{'-' if value is None else f'{value:.2f}'}, {shared}"
    agreed = [(one, *(cells.get((one, other), "") for other in MEASURES)) for one in MEASURES]
    members: dict[int, list[str]] = {}  # of each community, those that most tokens are routed to first
    for node, data in sorted(nodes(data=True), key=lambda entry: -entry[1].get("share", 0.0)):
        if "community" in data:
            members.setdefault(data["community"], []).append(node)
    several = [own for _, own in sorted(members.items()) if len(own) > 1]
    groups = [
        (str(number), str(len(own)), str(len({nodes[each]["layer"] for each in own})), ", ".join(own[:4]))
        for number, own in enumerate(several[:GROUPS])
    ]
    standing = "The most central experts, by standing: PageRank over the mean of their layer's experts"
    agreement = f"Spearman's rank correlation between measures, and how many experts are among the first {TOP} by both"
    together = f"Experts that are routed to together over layers: {counted(len(several), 'group')} of several"
    columns = ("community", "experts", "layers", "most visited")
    return (
        Table(standing, ("expert", *MEASURES), tuple(central)),
        Table(agreement, ("measure", *MEASURES), tuple(agreed)),
        Table(together, columns, tuple(groups), frozenset({columns[-1]})),
    )
