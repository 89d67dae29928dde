"""What a routing attribution found, as blocks: hubs, what shapes routing, super experts, key tokens, the graph."""

import json
import math
from collections.abc import Sequence

from compressor.attribution.figures import UNRANKED, Attribution, KeyInfluence
from compressor.attribution.graph_files import NAMES as GRAPH
from compressor.attribution.graph_files import Measured, graph_tables
from compressor.attribution.hubs import Hub, SuperExpert, overlap
from compressor.attribution.summary import (
    ZEROED,
    expert_label,
    kind_shares,
    pairs,
    rank_correlation,
    sender_labels,
    strongest,
)
from compressor.data.sources import without_folders
from compressor.document.blocks import Block, Code, Heading, Table, Text
from compressor.words import short

HUB_COLUMNS = ("expert", "influence", "its score", "AARV", "its score", "tokens")
STRONGEST_KEYS = 3  # key tokens named for each head

Blocks = tuple[Block, ...]


def percent(value: float | None) -> str:
    """0.125 -> '12.5%'; '-' for none."""
    return "-" if value is None or not math.isfinite(value) else f"{100 * value:.1f}%"


def whole_blocks(
    attribution: Attribution,
    hubs: Sequence[Hub],
    supers: Sequence[SuperExpert],
    threshold: float,
    top: int,
    graph: Measured,
) -> Blocks:
    """What was measured, hubs, kinds, the strongest senders, super experts, key tokens and the graph."""
    layers = ", ".join(str(receiver.layer) for receiver in attribution.receivers)
    made_with = ", ".join(f"{name} {version}" for name, version in attribution.versions.items())
    method = (
        f"The logits of the routers of layers {layers or 'none'} are sums of sub-scores, one for each earlier "
        "component. Influence is the variance of a component's sub-scores over the experts, averaged over tokens; "
        "AARV is how far the ranks of the top-k experts change, on average, without the component. Both are summed "
        "over routers. Method: Understanding Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs, "
        "ICLR 2026."
    )
    return (
        Heading(f"{attribution.model}: routing attribution", 1),
        Text(method),
        Text(exactness(attribution)),
        *hub_blocks(attribution, hubs, supers, threshold),
        *kind_blocks(attribution),
        *sender_blocks(attribution, top),
        *_super_blocks(hubs, supers),
        *_key_blocks(attribution),
        *_graph_blocks(graph),
        Heading("Does influence change the choice?"),
        Text(_correlation_line(attribution)),
        *([Text(f"Made with {made_with}.")] if made_with else []),
    )


def brief_blocks(
    attribution: Attribution, hubs: Sequence[Hub], supers: Sequence[SuperExpert], threshold: float, top: int
) -> Blocks:
    """What a terminal shows: hubs, the strongest senders, the kinds, and how exact it all is."""
    return (
        *hub_blocks(attribution, hubs, supers, threshold),
        *sender_blocks(attribution, top),
        *kind_blocks(attribution),
        Text(overlap_line(hubs, supers)),
        Text(exactness(attribution)),
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


def hub_blocks(
    attribution: Attribution, hubs: Sequence[Hub], supers: Sequence[SuperExpert], threshold: float
) -> Blocks:
    """The hubs by the rule that makes them so."""
    rule = f"modified z-scores of influence and of AARV among its layer's experts both above {threshold:g}"
    if not hubs:
        return Heading("Hubs"), Text(f"No expert is a hub: {rule}.")
    massive = {(each.module, each.expert) for each in supers}
    rows = tuple((*hub_cells(hub), "yes" if (hub.module, hub.expert) in massive else "no") for hub in hubs)
    keep = ("Keep them when the model is made smaller: ", Code("moe-compress compress ... --protect hubs.json"))
    return (
        Heading("Hubs"),
        Text(f"An expert is a hub with {rule}."),
        Table(f"{attribution.model}: routing hubs", (*HUB_COLUMNS, "super expert"), rows, frozenset({"super expert"})),
        Text(keep),
    )


def hub_cells(hub: Hub) -> tuple[str, ...]:
    """A hub's row under `HUB_COLUMNS`."""
    figures = (hub.influence, hub.influence_score, hub.aarv, hub.aarv_score)
    return expert_label(hub.layer, hub.expert), *map(short, figures), percent(hub.share)


def kind_blocks(attribution: Attribution) -> Blocks:
    """How much of the influence comes from each kind of component."""
    rows = tuple(
        (each.kind, str(each.senders), short(each.influence), percent(each.share)) for each in kind_shares(attribution)
    )
    title = "What shapes routing"
    return Heading(title), Table(title, ("kind", "senders", "influence", "share of all"), rows)


def sender_blocks(attribution: Attribution, top: int) -> Blocks:
    """The `top` strongest senders."""
    chosen = strongest(attribution.senders, top)
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


def _super_blocks(hubs: Sequence[Hub], supers: Sequence[SuperExpert]) -> Blocks:
    columns, title = ("expert", "largest entry", "largest norm", "mean norm"), "Super experts"
    rows = tuple(
        (expert_label(each.layer, each.expert), short(each.max_entry), short(each.max_norm), short(each.mean_norm))
        for each in supers
    )
    return (
        Heading(title),
        Text("Experts with massive activations (Su et al. 2025, arXiv:2507.23279)."),
        Table(title, columns, rows) if rows else Text("None were found."),
        Text(overlap_line(hubs, supers)),
    )


def _key_blocks(attribution: Attribution) -> Blocks:
    """Where the strongest heads read what they carry to the routers, for the sequences that were split by key."""
    rows = tuple(
        (
            f"L{each.layer} head {each.head}",
            str(each.sequence),
            percent(each.first),
            percent(each.own),
            percent(each.previous),
            ", ".join(_strongest_keys(each)),
        )
        for each in attribution.per_key
    )
    note = "Shares of a head's influence on one sequence; a key may be the first token and the query's own."
    columns = ("head", "sequence", "first token", "own token", "token before", "strongest keys")
    title = "By key token"
    return (Heading(title), Table(title, columns, rows, frozenset({columns[-1]})), Text(note)) if rows else ()


def _strongest_keys(found: KeyInfluence) -> list[str]:
    """The key tokens with the greatest influence, as text where it is known, with their positions."""
    order = sorted(range(len(found.influence)), key=lambda key: -found.influence[key])[:STRONGEST_KEYS]
    names = found.texts or tuple(map(str, found.tokens))
    return [f"{json.dumps(names[key], ensure_ascii=False)} at {key}" for key in order]


def _graph_blocks(made: Measured) -> Blocks:
    """The central experts, whether the measures agree, and the communities; nothing without a central expert."""
    if not any(made.centrality.values()):
        return ()
    holds = (Code(GRAPH[0]), " and ", Code(GRAPH[1]), " hold the whole graph: who steers which router, how strongly.")
    tables = [table for table in graph_tables(made) if table.rows]
    return Heading("The routing graph"), Text(holds), *tables


def _correlation_line(attribution: Attribution) -> str:
    found = [rank_correlation([*pairs(attribution, *kinds)]) for kinds in (ZEROED, ("expert",))]
    return (
        "Spearman rank correlation of influence and AARV: "
        f"{short(found[0])} for components, {short(found[1])} for routed experts."
    )
