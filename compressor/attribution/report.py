"""A routing attribution as blocks, and as files: JSON, hubs.json to protect, a text, a graph and
pictures."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compressor.attribution.figures import (
    UNRANKED,
    ZEROED,
    Attribution,
    Output,
    Sender,
    kind_shares,
    pairs,
    rank_correlation,
    sender_labels,
    strongest,
)
from compressor.attribution.graph import (
    MEASURES,
    RELATIVE,
    TOP,
    Centrality,
    measured_graph,
    ranking,
)
from compressor.attribution.hubs import THRESHOLD, find_hubs, super_experts
from compressor.attribution.pictures import NAMES as PICTURES
from compressor.attribution.pictures import graph_figure, pictures
from compressor.data.sources import without_folders
from compressor.document.blocks import Block, Code, Heading, Table, Text
from compressor.document.markdown import markdown
from compressor.document.picture import png
from compressor.files import write_files
from compressor.formatting import percent, short
from compressor.frozen import frozen
from compressor.recipe.hubs import Hub, RoutedExpert
from compressor.records import Json, plain_json, report_json

GRAPH = ("graph.graphml", "graph.json", "graph.png")
NAMES = (
    "attribution.json",
    "attribution.md",
    "hubs.json",
    *(f"{name}.png" for name in PICTURES),
    *GRAPH,
)
STRONGEST_KEYS = 3  # key tokens named for each head
DIGITS = 6  # significant ones of a number in JSON

Blocks = tuple[Block, ...]


@frozen
class Findings:
    """An attribution with its hubs above a threshold and its super experts; `top` senders are
    shown."""

    attribution: Attribution
    hubs: Sequence[Hub]
    supers: Sequence[Output]
    threshold: float
    top: int
    before: Attribution | None = None  # the same model's, if experts are blocked: with all of them

    @property
    def overlap(self) -> dict[str, list[RoutedExpert]]:
        """Experts that are hub and super expert, and those that are one of them alone; the
        strongest first."""
        massive = {output.sort_key for output in self.supers}
        steering = {hub.sort_key for hub in self.hubs}
        return {
            "both": [hub for hub in self.hubs if hub.sort_key in massive],
            "only_hubs": [hub for hub in self.hubs if hub.sort_key not in massive],
            "only_super_experts": [
                output for output in self.supers if output.sort_key not in steering
            ],
        }

    @property
    def compared(self) -> list[tuple[Sender, Sender]]:
        """The `top` strongest experts with all experts, those blocked here apart, and the same ones
        without."""
        if self.before is None:
            return []
        without = self.attribution.without
        others = [
            sender
            for sender in self.before.of_kind("expert")
            if sender.label.replace(" ", "") not in without
        ]
        now = {sender.name: sender for sender in self.attribution.senders}
        return [(sender, now[sender.name]) for sender in strongest(others, self.top)]

    @property
    def jaccard(self) -> float | None:
        """Experts that are both over experts that are either; None where there are none."""
        either = sum(map(len, self.overlap.values()))
        return len(self.overlap["both"]) / either if either else None

    @property
    def correlations(self) -> dict[str, float | None]:
        """Rank correlation of influence and AARV, of components and of single experts."""
        return {
            "components": rank_correlation([*pairs(self.attribution, *ZEROED)]),
            "experts": rank_correlation([*pairs(self.attribution, "expert")]),
        }


def findings(
    attribution: Attribution,
    threshold: float = THRESHOLD,
    top: int = 10,
    before: Attribution | None = None,
) -> Findings:
    """Find hubs and super experts; `before` is the attribution with the experts that are blocked
    here."""
    hubs = find_hubs(attribution, threshold)
    return Findings(attribution, hubs, super_experts(attribution), threshold, top, before)


# --- files
# ------------------------------------------------------------------------------------------------


def rounded(content: Any) -> Any:
    """Numbers to 6 significant digits, None for what JSON cannot write, dataclasses and mappings as
    plain objects."""
    plain = json.dumps(plain_json(content, named=False))
    return json.loads(plain, parse_float=lambda number: float(f"{float(number):.{DIGITS}g}"))


def brief_content(findings: Findings) -> Json:
    """The facts that can be read at a glance, as plain JSON types."""
    attribution = findings.attribution
    content: dict[str, Any] = {
        "model": attribution.model,
        "tokens": attribution.tokens,
        "hubs": findings.hubs,
        "super_experts": [
            _content(output, "max_entry", "max_norm", "mean_norm") for output in findings.supers
        ],
        "overlap": {name: [*map(_content, experts)] for name, experts in findings.overlap.items()},
        "receivers": attribution.receivers,
        "kinds": kind_shares(attribution),
        "seconds": attribution.seconds,
    }
    content["overlap"]["jaccard"] = findings.jaccard
    if findings.before is not None:
        content["without"] = {
            "experts": attribution.without,
            "before": [before for before, _ in findings.compared],
        }
    plain: dict[str, Any] = rounded(content)
    return plain


def _content(expert: RoutedExpert, *figures: str) -> Json:
    return {name: getattr(expert, name) for name in ("module", "layer", "expert", *figures)}


def write_attribution(findings: Findings, folder: Path, overwrite: bool) -> list[Path]:
    """Write JSON, Markdown, graph and pictures into a new folder.

    The graph is GraphML and node-link JSON, without rounding, which networkx and Gephi open. The
    calibration's sources are named without their folders.
    """
    import networkx as nx

    attribution = findings.attribution
    senders = []
    for sender in attribution.senders:
        # totals are not rounded
        change = None if sender.kind in UNRANKED else float(sender.total_rank_change)
        totals = {"total_influence": float(sender.total_influence), "total_rank_change": change}
        senders.append({**rounded(sender), **totals})
    more = {
        "threshold": findings.threshold,
        "rank_correlation": findings.correlations,
        "senders": senders,
        "outputs": attribution.outputs,
        "calibration": without_folders(attribution.calibration),
        "versions": attribution.versions,
        "per_key": attribution.per_key,
    }
    graph, centrality = measured_graph(attribution)
    graph_content = {
        "nodes": graph.number_of_nodes(),
        "edges": graph.number_of_edges(),
        "first": {measure: ranking(centrality, measure)[:TOP] for measure in MEASURES},
    }
    content = {**brief_content(findings), **rounded(more), "graph": graph_content}
    contents: dict[str, Any] = {
        NAMES[0]: report_json(content, 0),
        NAMES[1]: markdown(whole_blocks(findings, centrality)),
        NAMES[2]: report_json(rounded(findings.hubs)),
    }
    for figure in pictures(attribution, findings.hubs, findings.top, findings.compared):
        contents[f"{figure.name}.png"] = png(figure.title, figure.drawings)
    figure = graph_figure(graph, centrality)
    contents[GRAPH[0]] = "\n".join([*nx.generate_graphml(graph, named_key_ids=True), ""])
    contents[GRAPH[1]] = report_json(nx.node_link_data(graph, edges="edges"), 0)
    contents[GRAPH[2]] = png(figure.title, figure.drawings)
    return write_files(folder, contents, NAMES, overwrite)


# --- blocks
# ------------------------------------------------------------------------------------------------


def whole_blocks(findings: Findings, centrality: Centrality) -> Blocks:
    """The method, hubs, kinds, the strongest senders, super experts, key tokens and the graph."""
    attribution = findings.attribution
    layers = ", ".join(str(receiver.layer) for receiver in attribution.receivers)
    method = (
        f"The logits of the routers of layers {layers} are sums of sub-scores, one for each "
        "earlier component. Influence is the variance of a component's sub-scores over the "
        "experts, averaged over tokens; AARV is how far the ranks of the top-k experts change, on "
        "average, without the component. Both are summed over routers. Method: Understanding "
        "Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs, ICLR 2026."
    )
    components, experts = map(short, findings.correlations.values())
    correlation = (
        f"Spearman rank correlation of influence and AARV: {components} for components, "
        f"{experts} for routed experts."
    )
    versions = ", ".join(f"{name} {version}" for name, version in attribution.versions.items())
    massive = []
    for output in findings.supers:
        figures = map(short, (output.max_entry, output.max_norm, output.mean_norm))
        massive.append((output.label, *figures))
    columns = ("expert", "largest entry", "largest norm", "mean norm")
    supers = Table("Super experts", columns, massive) if massive else Text("None were found.")
    graph: Blocks = ()
    if any(centrality.values()):  # else no expert comes before a router
        central = []
        for expert in ranking(centrality, RELATIVE)[:TOP]:
            central.append((expert, *(f"{centrality[name][expert]:.3g}" for name in MEASURES)))
        note = (
            " hold the whole graph: who steers which router, how strongly, and which experts go "
            "together."
        )
        title = (
            "The most central experts, by relative PageRank: PageRank over the mean of their "
            "layer's experts"
        )
        graph = (
            Heading("The routing graph"),
            Text((Code(GRAPH[0]), " and ", Code(GRAPH[1]), note)),
            Table(title, ("expert", *MEASURES), central),
        )
    return (
        Heading(f"{attribution.model}: routing attribution", 1),
        Text(method),
        Text(exactness(attribution)),
        *_blocked_blocks(findings),
        *_hub_blocks(findings),
        *_kind_blocks(attribution),
        *_sender_blocks(findings),
        Heading("Super experts"),
        Text("Experts with massive activations (Su et al. 2025, arXiv:2507.23279)."),
        supers,
        Text(_overlap_line(findings)),
        *_key_blocks(attribution),
        *graph,
        Heading("Does influence change the choice?"),
        Text(correlation),
        Text(f"Made with {versions}."),
    )


def brief_blocks(findings: Findings) -> Blocks:
    """The blocks that a terminal shows: hubs, the strongest senders, the kinds, and how exact it
    all is."""
    return (
        *_blocked_blocks(findings),
        *_hub_blocks(findings),
        *_sender_blocks(findings),
        *_kind_blocks(findings.attribution),
        Text(_overlap_line(findings)),
        Text(exactness(findings.attribution)),
    )


def exactness(attribution: Attribution) -> str:
    """Return a sentence on the error of the sub-scores and the number of tokens."""
    worst = max(attribution.receivers, key=lambda receiver: receiver.unexplained)
    source = without_folders(attribution.calibration)["source"]
    return (
        f"Sub-scores add up to the router's logits within {short(worst.unexplained)} of the "
        f"largest logit (layer {worst.layer}), on {attribution.tokens:,} tokens of {source}."
    )


def _overlap_line(findings: Findings) -> str:
    if findings.jaccard is None:
        return "Neither hubs nor super experts were found."
    both, hubs, supers = findings.overlap.values()
    return (
        f"Both hub and super expert: {', '.join(expert.label for expert in both) or 'none'}; "
        f"hubs alone: {len(hubs)}, super experts alone: {len(supers)} (Jaccard index "
        f"{findings.jaccard:.2f})."
    )


def _hub_blocks(findings: Findings) -> Blocks:
    rule = (
        "modified z-scores of influence and of AARV among its layer's experts both above "
        f"{findings.threshold:g}"
    )
    if not findings.hubs:
        return Heading("Hubs"), Text(f"No expert is a hub: {rule}.")
    rows = []
    for hub in findings.hubs:
        figures = map(short, (hub.influence, hub.influence_score, hub.aarv, hub.aarv_score))
        is_super = "yes" if hub in findings.overlap["both"] else "no"
        rows.append((hub.label, *figures, percent(hub.share), is_super))
    columns = ("expert", "influence", "its score", "AARV", "its score", "tokens", "super expert")
    keep = (
        "Keep them when the model is made smaller: ",
        Code("moe-compress compress ... --protect hubs.json"),
    )
    return (
        Heading("Hubs"),
        Text(f"An expert is a hub with {rule}."),
        Table(f"{findings.attribution.model}: routing hubs", columns, rows, {"super expert"}),
        Text(keep),
    )


def _blocked_blocks(findings: Findings) -> Blocks:
    """What becomes of the strongest experts' influence where routers may not choose some
    experts."""
    if findings.before is None:
        return ()
    rows = []
    for pair in findings.compared:
        row = [pair[0].label]
        row += [short(sender.total_influence) for sender in pair]
        row += [short(sender.total_rank_change) for sender in pair]
        row += [percent(sender.share) for sender in pair]
        rows.append(row)
    title = f"Without {', '.join(findings.attribution.without)}"
    note = (
        "No router chooses these experts. All other figures here are without them; tokens are "
        "those routed."
    )
    columns = (
        "expert",
        "influence before",
        "without",
        "AARV before",
        "without",
        "tokens before",
        "without",
    )
    return Heading(title), Text(note), Table(title, columns, rows)


def _kind_blocks(attribution: Attribution) -> Blocks:
    title = "What shapes routing"
    columns = ("kind", "senders", "influence", "share of all")
    rows = [
        (kind.kind, str(kind.senders), short(kind.influence), percent(kind.share))
        for kind in kind_shares(attribution)
    ]
    return Heading(title), Table(title, columns, rows)


def _sender_blocks(findings: Findings) -> Blocks:
    senders = strongest(findings.attribution.senders, findings.top)
    rows = []
    for label, sender in zip(sender_labels(senders), senders, strict=True):
        change = "-" if sender.kind in UNRANKED else short(sender.total_rank_change)
        rows.append(
            (label, sender.kind, short(sender.total_influence), change, percent(sender.share))
        )
    title = "Strongest senders"
    columns = ("sender", "kind", "influence", "AARV", "tokens")
    note = "Heads are parts of their attention, routed and shared experts of their MoE layer."
    return Heading(title), Table(title, columns, rows, {"kind"}), Text(note)


def _key_blocks(attribution: Attribution) -> Blocks:
    """The key tokens by which the strongest heads influence routers, for the sequences that were
    split by key."""
    rows = []
    for split in attribution.per_key:
        order = sorted(range(len(split.influence)), key=lambda key: -split.influence[key])[
            :STRONGEST_KEYS
        ]
        names = split.texts or tuple(map(str, split.tokens))
        keys = ", ".join(f"{json.dumps(names[key], ensure_ascii=False)} at {key}" for key in order)
        shares = map(percent, (split.first, split.own, split.previous))
        rows.append((f"L{split.layer} head {split.head}", str(split.sequence), *shares, keys))
    if not rows:
        return ()
    note = (
        "Shares of a head's influence on one sequence; a key may be the first token and the "
        "query's own."
    )
    columns = ("head", "sequence", "first token", "own token", "token before", "strongest keys")
    title = "By key token"
    return Heading(title), Table(title, columns, rows, {columns[-1]}), Text(note)
