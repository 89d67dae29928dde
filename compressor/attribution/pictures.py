"""The pictures of a routing attribution: what steers which router, which way, and whether it
changes the choice.

After "Understanding Cross-Layer Contributions to Mixture-of-Experts Routing in LLMs" (ICLR 2026).
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.attribution.figures import (
    Attribution,
    Pair,
    Sender,
    is_measured,
    kind_shares,
    pairs,
    rank_correlation,
    sender_labels,
    strongest,
)
from compressor.attribution.graph import RELATIVE, STEERS, Centrality, edges_of, ranking
from compressor.document.blocks import Figure
from compressor.document.drawing import (
    HEAT,
    LETTER,
    LINE,
    MARKERS,
    colour,
    draw_heat,
    label_axes,
    log_limits,
    log_locator,
    scale_axis,
)
from compressor.document.picture import FONT, Drawing
from compressor.formatting import counted, readable
from compressor.frozen import frozen
from compressor.recipe.hubs import Hub

if TYPE_CHECKING:
    import networkx as nx
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase

NAMES = ("influence", "scores", "experts", "causal")
TITLES = {
    "token": "token embedding",
    "attention": "attention",
    "mlp": "dense MLP",
    "moe": "MoE",
    "other": "other",
}
GROUPS = {**TITLES, "shared": "shared experts"}
VARIANCE = {"variance of sub-scores": HEAT}
PROMOTING, INHIBITING = "YlOrRd", "YlGnBu"
HUB = "★"
HUBS_NAMED = 8  # in a legend
# of the graph
EDGES_DRAWN = 60
EXPERTS_NAMED = 8
NODE = 49  # square points
# within a layer, which is 1 wide
PLACES = {
    "token": 0.4,
    "router": 0.4,
    "expert": 0.75,
    "shared": 0.75,
    "mlp": 0.6,
}

# of heat maps, in inches
PANEL, LEAST_PANEL = 4.8, 2.6
LEAST_CELL, MOST_CELL = 0.1, 0.5
HEIGHT, LEAST_ROW, MOST_ROW = 5.6, 0.09, 0.24
LEAST_BODY = 2.6  # of height that a colour bar needs
BESIDE = 0.75  # above and below a panel
BAR = 1.05  # a colour bar with its label

# of points: label, pairs, and how they are drawn
Group = tuple[str, Sequence[Pair], dict[str, Any]]


@frozen
class Panel:
    """One heat map of a figure with several."""

    title: str
    rows: Sequence[str]
    values: Sequence[Sequence[float | None]]  # [rows, receivers]; None leaves its cell blank
    colours: str = HEAT


def _panels(
    attribution: Attribution, kinds: Iterable[str], name: str, score: str = "", colours: str = HEAT
) -> list[Panel]:
    """A heat map for each kind of component, with a row for each sender that has a value."""
    panels = []
    for kind in kinds:
        senders = [
            sender for sender in attribution.of_kind(kind) if set(getattr(sender, name)) - {None}
        ]
        labels = sender_labels(senders)
        layers = {sender.layer for sender in senders}
        # layers alone, where each sender has another
        if None not in layers and len(layers) == len(senders):
            labels = [f"L{sender.layer}" for sender in senders]
        if senders:
            values = []
            for sender in senders:
                figures = getattr(sender, name)
                values.append([None if figure is None else abs(figure) for figure in figures])
            panels.append(Panel(f"{TITLES[kind]}{score}", labels, values, colours))
    return panels


def _heat(
    name: str,
    title: str,
    alt: str,
    attribution: Attribution,
    columns: Sequence[Sequence[Panel]],
    scales: Mapping[str, str] = VARIANCE,
) -> Figure:
    """Return columns of heat maps on one scale; `scales` has the colours of each colour bar by its
    label."""
    title = f"{attribution.model}: {title}"
    columns = [column for column in columns if column]
    if not columns:
        empty = Drawing(
            title,
            "Nothing to show.",
            (5.0, 1.2),
            lambda canvas: canvas.text(0.03, 0.5, "nothing to show"),
        )
        return Figure(name, title, "", (empty,))
    layers = [str(receiver.layer) for receiver in attribution.receivers]
    width = max(LEAST_PANEL, len(layers) * min(max(PANEL / len(layers), LEAST_CELL), MOST_CELL))
    tallest = max(len(panel.rows) for column in columns for panel in column)
    row_height = min(
        max(HEIGHT / tallest, 1.2 * LINE if name == "experts" else LEAST_ROW), MOST_ROW
    )
    widths = []
    height = LEAST_BODY
    values = list[float]()
    for column in columns:
        longest = max(len(label) for panel in column for label in panel.rows)
        widths.append(0.4 + width + LETTER * longest)
        height = max(height, sum(BESIDE + row_height * len(panel.rows) for panel in column))
        for panel in column:
            values += filter(is_measured, chain.from_iterable(panel.values))
    widths += [BAR] * len(scales)
    low, high = log_limits(values) or (0.1, 1.0)
    low = low if low < high else high / 10
    extend = "min" if values and min(values) < low else "neither"

    def draw(canvas: "FigureBase") -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import LogNorm

        norm = LogNorm(low, high)
        parts = canvas.subfigures(1, len(widths), squeeze=False, width_ratios=widths)[0]
        for part, column in zip(parts, columns, strict=False):
            heights = [len(panel.rows) * row_height for panel in column]
            grid = part.subplots(
                len(column), 1, squeeze=False, gridspec_kw={"height_ratios": heights}
            )[:, 0]
            for axes, panel, panel_height in zip(grid, column, heights, strict=True):
                # smaller numbers share the first colour, and blank cells stay NaN
                shown = np.maximum(np.array(panel.values, dtype=float), low)
                draw_heat(axes, shown, None, None, norm=norm, cmap=panel.colours)
                label_axes(axes, panel.rows, layers, width, panel_height)
                lines = textwrap.wrap(readable(panel.title), max(12, int(width / 0.075)))
                axes.set_title("\n".join(lines), loc="left", fontsize=FONT)
                axes.set_xlabel("layer of the receiving router", fontsize=FONT - 1)
        for part, (label, colours) in zip(parts[len(columns) :], scales.items(), strict=True):
            axes = part.add_axes((0.1, 0.12, 0.15, 0.76))
            scale = ScalarMappable(norm, colours)
            bar = part.colorbar(
                scale, cax=axes, extend=extend, ticks=log_locator(low, high), format="%.2g"
            )
            bar.minorticks_off()
            bar.set_label(label, fontsize=FONT - 1)

    return Figure(name, title, "", (Drawing(title, alt, (sum(widths), height), draw),))


def pictures(
    attribution: Attribution,
    hubs: Sequence[Hub],
    top: int,
    compared: Sequence[tuple[Sender, Sender]] = (),
) -> tuple[Figure, ...]:
    """Return the four figures by their `NAMES`.

    - Each component's influence on each router.
    - How each component promotes experts (APS, left) and inhibits them (ANS, right).
    - A strip for each of the `top` strongest routed experts, hubs with a star, and of the strongest
      heads. Experts that are `compared` come first, before others were blocked and without those.
    - The change of the chosen experts over the variance: components, and single experts.
    """
    columns = [
        _panels(attribution, ("token", "attention", "other"), "influence"),
        _panels(attribution, ("mlp", "moe"), "influence"),
    ]
    shares = [
        f"{TITLES[kind.kind]} {100 * kind.share:.1f}%"
        for kind in kind_shares(attribution)
        if kind.share
    ]
    alt = f"Shares of all influence: {', '.join(shares) or 'none'}."
    title = "influence on routing, by the layer of the sender (rows)"
    influence = _heat("influence", title, alt, attribution, columns)

    columns = [
        _panels(attribution, TITLES, "positive", ": APS", PROMOTING),
        _panels(attribution, TITLES, "negative", ": ANS", INHIBITING),
    ]
    scales = {"APS: mean positive score": PROMOTING, "-ANS: mean negative score": INHIBITING}
    alt = "Mean positive and mean negative sub-scores; attribution.json has the numbers."
    title = "promoting (APS) and inhibiting (ANS) sub-scores, by the layer of the sender (rows)"
    scores = _heat("scores", title, alt, attribution, columns, scales)

    starred = {(hub.module, hub.expert) for hub in hubs}
    panels = []
    without = ", ".join(attribution.without)
    for index, name in enumerate(("with all experts", f"without {without}") if compared else ()):
        senders = tuple(pair[index] for pair in compared)
        rows = [sender.influence for sender in senders]
        panels.append(Panel(name, sender_labels(senders), rows))
    described = []
    for kind, name in (("expert", "routed experts (★ hub)"), ("head", "attention heads")):
        senders = strongest(attribution.of_kind(kind), top)
        labels = []
        for sender, label in zip(senders, sender_labels(senders), strict=True):
            is_hub = kind == "expert" and (sender.module, sender.number) in starred
            labels.append(f"{HUB} {label}" if is_hub else label)
        if senders:
            rows = [sender.influence for sender in senders]
            panels.append(Panel(f"strongest {name}", labels, rows))
            described.append(f"Strongest {name}: {', '.join(labels)}.")
    title = "influence of single experts and heads"
    experts = _heat("experts", title, " ".join(described), attribution, [panels])

    components = [
        (title, [*pairs(attribution, kind)], _style(number))
        for number, (kind, title) in enumerate(GROUPS.items())
    ]
    # experts that are no hubs, the strongest hubs by name, and the others
    named: dict[tuple[str, int | None], str] = {
        (hub.module, hub.expert): f"hub {hub.label}" if number < HUBS_NAMED else "more hubs"
        for number, hub in enumerate(hubs)
    }
    members: dict[str, list[Pair]] = {
        label: [] for label in ("no hub", "more hubs", *named.values())
    }
    for pair in pairs(attribution, "expert"):
        members[named.get((pair.sender.module, pair.sender.number), "no hub")].append(pair)
    plain = {"marker": ".", "markersize": 3 if len(members["no hub"]) < 2000 else 1.5}
    styles = [{"color": "#aaaaaa", **plain}, {"color": "black", **plain}]
    styles += map(_style, range(len(members) - 2))
    groups = list(zip(members, members.values(), styles, strict=True))
    drawings = (
        _scatter("components on each router", components),
        _scatter("routed experts on each router", groups),
    )
    title = f"{attribution.model}: influence and causal effect"
    return influence, scores, experts, Figure("causal", title, "", drawings)


def _scatter(title: str, groups: Sequence[Group]) -> Drawing:
    """AARV over influence, one colour for each group that has points; later groups on top."""
    groups = [group for group in groups if group[1]]
    points = [pair for _, members, _ in groups for pair in members]
    influences = [pair.influence for pair in points]
    changes = [pair.rank_change for pair in points]
    value = rank_correlation(points)
    correlation = (
        "no rank correlation" if value is None else f"Spearman rank correlation {value:.2f}"
    )
    correlation = f"{correlation} ({len(points):,} pairs)"

    def draw(figure: "FigureBase") -> None:
        axes: Axes = figure.subplots()
        for label, members, style in groups:
            _, x, y = zip(*members, strict=True)
            axes.plot(x, y, linestyle="none", label=label, markeredgewidth=0.4, **style)
        x_scale = scale_axis(axes, "x", influences, 10)
        y_scale = scale_axis(axes, "y", changes, 10)
        axes.set_title(f"{title}\n{correlation}")
        axes.set_xlabel(f"influence: variance of the sub-scores\n{x_scale}".strip())
        axes.set_ylabel(f"AARV: mean change of the top-k experts' ranks\n{y_scale}".strip())
        axes.grid()
        if groups:
            figure.legend(loc="outside right upper", fontsize=FONT - 1, handletextpad=0.2)

    return Drawing(title, f"{correlation}.", (5.3, 4.2), draw)


def _style(number: int) -> dict[str, Any]:
    return {
        "color": colour(number),
        "marker": MARKERS[number],
        "markersize": 5,
        "markeredgecolor": "white",
    }


def graph_figure(graph: "nx.DiGraph", centrality: Centrality) -> Figure:
    """Layers from left to right, the heaviest edges between senders and routers, the most central
    experts by name."""
    nodes = graph.nodes
    named = ranking(centrality, RELATIVE)[:EXPERTS_NAMED]
    steering = [edge for edge in edges_of(graph, STEERS).edges(data="weight") if edge[2] > 0]
    edges = sorted(steering, key=lambda edge: -edge[2])[:EDGES_DRAWN]
    shown = set(named).union(*(edge[:2] for edge in edges))
    # a layer's nodes from left to right by kind, routers in the middle, others over the height
    columns: dict[float, list[str]] = {}
    for node, data in nodes(data=True):
        if node in shown:
            x = data["layer"] + PLACES.get(data["kind"], 0.1)
            columns.setdefault(x, []).append(node)
    at = {}
    for x, column in columns.items():
        for number, node in enumerate(column, start=1):
            y = 2 * number / (len(column) + 1) - 1
            at[node] = x, 0.0 if nodes[node]["kind"] == "router" else y
    layers = sorted({nodes[node]["layer"] for node in at})
    title = f"{counted(len(edges), 'heaviest edge')} into routers, experts first by {RELATIVE}"
    title = f"{graph.graph['model']}: {title}"
    paths = ", ".join(f"{start} to {end}" for start, end, _ in edges[:EXPERTS_NAMED]) or "none"
    alt = f"Heaviest edges: {paths}. Experts first by {RELATIVE}: {', '.join(named) or 'none'}."

    def draw(figure: "FigureBase") -> None:
        import networkx as nx

        axes = figure.subplots()
        strengths = [(weight / edges[0][2]) ** 0.5 for *_, weight in edges]
        nx.draw_networkx_edges(
            graph,
            at,
            [edge[:2] for edge in edges],
            ax=axes,
            arrows=True,
            arrowstyle="-",
            connectionstyle="arc3,rad=-0.15",
            edge_color="#444444",
            width=[0.3 + 3 * strength for strength in strengths],
            alpha=[0.3 + 0.6 * strength for strength in strengths],
            node_size=NODE,
        )
        for number, kind in enumerate(dict.fromkeys(kind for _, kind in nodes(data="kind"))):
            nx.draw_networkx_nodes(
                graph,
                at,
                [node for node in at if nodes[node]["kind"] == kind],
                ax=axes,
                node_size=NODE,
                node_color=colour(number),
                node_shape=MARKERS[number],
                edgecolors="#222222",
                label=kind,
            )
        labels = {node: readable(node) for node in named}
        nx.draw_networkx_labels(
            graph, at, labels, font_size=8, font_weight="bold", verticalalignment="bottom", ax=axes
        )
        axes.tick_params(bottom=True, labelbottom=True)
        axes.set_xticks(
            [layer + 0.4 for layer in layers],
            labels=["token" if x < 0 else f"L{x}" for x in layers],
        )
        axes.set(yticks=[], ylim=(-1.3, 1.3))
        axes.spines["left"].set_visible(False)
        if at:
            figure.legend(loc="outside right upper")

    return Figure(
        "graph", title, "", (Drawing(title, alt, (min(16, 4 + 1.1 * len(layers)), 5), draw),)
    )
