"""A model before compression: how alike its experts are, over depth and by several measures, and in
which groups.

Figures 2, A1 and A2 of Zhang et al. 2024, arXiv:2407.09590, show such matrices. Each measure is
that of a strategy, whose groups are outlined. The map of a layer is the principal component
analysis whose kernel is linear CKA: experts as far apart as sqrt(2 - 2 CKA), on the plane that
keeps most of it. E experts."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from compressor.checkpoint.source import locate
from compressor.data.sources import short_names
from compressor.document import html
from compressor.document.blocks import Block, Facts, Figure, Heading, Table, Text
from compressor.document.drawing import colour
from compressor.document.picture import FONT, Drawing
from compressor.formatting import short
from compressor.frozen import frozen
from compressor.model.moe_layer import resolve_count
from compressor.model.opened import open_model
from compressor.progress import Progress
from compressor.recipe.registry import load_strategy
from compressor.report.data import LayerReport, mean, named, within
from compressor.report.figures import MOST_NUMBERED, WIDTH, cells, similarity_figure
from compressor.report.measuring import VISITS, Similarity, compared_tokens, read_part, shares
from compressor.report.page import MADE_BY, write_page
from compressor.statistics.statistics import collect

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

# a strategy with options that compare experts so
MEASURES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "linear CKA": ("data-centric", {"similarity": "linear-cka", "mix_tokens": False}),
    "RBF CKA": ("data-centric", {"similarity": "rbf-cka", "mix_tokens": False}),
    "mean outputs": ("data-centric", {"similarity": "mean-output", "mix_tokens": False}),
    "surrogate weights": ("model-centric", {"representation": "surrogate"}),
}
MEASURE_FIGURES = {name: name.lower().replace(" ", "-") for name in MEASURES}
FIGURE_NAMES = ("depth", "map", *MEASURE_FIGURES.values())
MAPPED = "linear CKA"
RATIO = 0.25  # of the experts that groups save, where no number is named
SIDE = 2.4  # inches of a map
ROUNDING = 1e-9  # a spread below this


@frozen
class ExpertMap:
    """Places of a layer's experts on the two largest principal components of their linear CKA."""

    places: Sequence[tuple[float, float]]  # [E, 2]; empty where no token reached the layer
    share: float  # of the experts' spread that the two components hold


@frozen
class BaseReport:
    """A model's experts compared on text; every tuple goes by MoE layer."""

    model: str
    text: str
    tokens: int
    compared_tokens: int  # of each layer
    groups: int
    measures: Mapping[str, tuple[LayerReport, ...]]  # with the groups that each measure makes
    # of these groups; None where they say nothing
    silhouettes: Mapping[str, tuple[float | None, ...]]
    maps: tuple[ExpertMap, ...]

    @property
    def layers(self) -> tuple[LayerReport, ...]:
        """The layers by linear CKA."""
        return self.measures[MAPPED]


def compare_experts(
    model: str,
    revision: str | None,
    calibration: Sequence[str],
    samples: int | None,
    sequence_length: int | None,
    experts: int | None,
    progress: Progress,
    device: str = "auto",
    dtype: str = "auto",
) -> BaseReport:
    """Compare the experts of every MoE layer in one pass over text, in groups of which there are
    `experts`."""
    from sklearn.decomposition import KernelPCA

    opened = open_model(locate(model, revision, progress), dtype, device)
    architecture = opened.architecture
    groups = resolve_count(architecture.layers, experts, RATIO if experts is None else None)
    text = read_part(opened, calibration, samples, sequence_length)
    sampled = compared_tokens(architecture.experts)
    strategies = {name: load_strategy(of, options) for name, (of, options) in MEASURES.items()}
    needs = VISITS.union(*(strategy.needs for strategy in strategies.values()))
    compared: dict[str, list[LayerReport]] = {name: [] for name in strategies}
    for stats in collect(opened, needs, replace(text, sample_tokens=sampled), progress):
        for name, strategy in strategies.items():
            assert strategy.similarity is not None
            measure = partial(strategy.similarity, options=strategy.options)
            matrix, label = Similarity(strategy.similarity_needs, measure).compare(stats)
            plan = strategy.plan_layer(stats, groups)
            report = LayerReport(
                stats.layer.name, matrix, label, shares(stats.routed_count), plan=plan
            )
            compared[name].append(report)
    measures = {name: named(reports) for name, reports in compared.items()}
    maps = []
    for report in measures[MAPPED]:
        if report.similarity is None:
            maps.append(ExpertMap((), 0.0))
            continue
        kernel = np.array(report.similarity)  # [E, E] with 1 on the diagonal
        # the trace of the centred kernel
        spread = max(len(kernel) - kernel.sum() / len(kernel), ROUNDING)
        analysis = KernelPCA(2, kernel="precomputed", eigen_solver="dense")
        places = analysis.fit_transform(kernel).round(6)
        maps.append(ExpertMap(places.tolist(), float(analysis.eigenvalues_.sum() / spread)))
    return BaseReport(
        model=opened.source.label,
        text=", ".join(short_names([entry["source"] for entry in text.identity["sources"]])),
        tokens=text.tokens,
        compared_tokens=sampled,
        groups=groups,
        measures=measures,
        silhouettes={name: tuple(map(silhouette, reports)) for name, reports in measures.items()},
        maps=tuple(maps),
    )


def silhouette(report: LayerReport) -> float | None:
    """Return how much nearer experts are to their group than to the next, -1 to 1; None without
    several groups."""
    from sklearn.metrics import silhouette_score

    groups = len(report.plan.groups)
    if report.similarity is None or not 1 < groups < report.plan.experts:
        return None
    distances = 1 - np.array(report.similarity)
    return round(float(silhouette_score(distances, report.plan.remap(), metric="precomputed")), 6)


def base_blocks(data: BaseReport) -> Iterator[Block]:
    """Yield the redundancy of each layer in numbers."""
    rows = []
    for number, layer in enumerate(data.layers):
        means = [short(mean(within(reports[number]))) for reports in data.measures.values()]
        merged = ", ".join("+".join(map(str, members)) for members in layer.plan.merged)
        rows.append((layer.name, *means, merged or "none", short(data.silhouettes[MAPPED][number])))
    groups = f"{data.groups} groups by {MAPPED}"
    columns = ("", *MEASURES, groups, "silhouette")
    caption = "Mean similarity of two experts, 0 to 1, by layer"
    yield Table(caption, columns, rows, {groups}, optional=(groups,))
    note = (
        f"Outputs of all experts on {data.compared_tokens:,} of {data.tokens:,} tokens of "
        f"{data.text}. Silhouette: 1 where groups are tight and far apart, 0 where they overlap, "
        "below 0 where experts are closer to other groups."
    )
    yield Text(note, "note")


def _lines(
    title: str, values: Mapping[str, Sequence[float | None]], numbers: Sequence[int]
) -> Drawing:
    def draw(canvas: "FigureBase") -> None:
        axes = canvas.subplots()
        for number, (name, heights) in enumerate(values.items()):
            known = np.array(heights, dtype=float)  # None becomes NaN, which leaves a gap
            axes.plot(numbers, known, marker="o", markersize=3, color=colour(number), label=name)
        axes.locator_params(axis="x", integer=True)
        axes.set(xlabel="decoder layer", ylabel=title.lower())
        canvas.legend(loc="outside upper left", ncols=2, fontsize=FONT)

    parts = []
    for name, heights in values.items():
        known = [height for height in heights if height is not None]
        parts.append(
            f"{name} {short(min(known, default=None))} to {short(max(known, default=None))}"
        )
    return Drawing(title, f"{'; '.join(parts)}.", (WIDTH + 0.6, 2.6), draw)


def write_base_page(
    data: BaseReport, page_file: Path, folder: Path | None, overwrite: bool
) -> list[Path]:
    """Write a page with a section for each figure, and figures into a new folder; returns their
    files.

    They are redundancy over depth, a map of each layer's experts with the colour and mark of their
    group, and the matrices of each measure."""
    similarities = {}
    for name, reports in data.measures.items():
        similarities[name] = [mean(within(report)) for report in reports]
    numbers = [layer.plan.layer for layer in data.layers]
    depth = [
        _lines("Mean similarity", similarities, numbers),
        _lines("Silhouette of the groups", data.silhouettes, numbers),
    ]
    caption = "The higher the similarity of a layer's experts, the more of them it can spare."
    drawn: list[Figure | None] = [Figure("depth", "Redundancy over depth", caption, depth)]

    def draw(canvas: "FigureBase", layer: LayerReport, expert_map: ExpertMap) -> None:
        axes = canvas.subplots()
        for expert, (place, (tint, mark)) in enumerate(
            zip(expert_map.places, cells(layer), strict=True)
        ):
            axes.plot(*place, mark or "o", color=tint)
            if len(expert_map.places) <= MOST_NUMBERED:
                axes.annotate(
                    str(expert), place, xytext=(3, 3), textcoords="offset points", fontsize=FONT - 1
                )
        axes.set_title(f"{layer.name}: {expert_map.share:.0%} of the spread", loc="left")
        axes.set(xticks=[], yticks=[])
        axes.set_aspect("equal", adjustable="datalim")

    maps = []
    for layer, expert_map in zip(data.layers, data.maps, strict=True):
        if expert_map.places:
            merged = ", ".join("+".join(map(str, members)) for members in layer.plan.merged)
            alt = (
                f"Merged groups: {merged or 'none'}; {expert_map.share:.0%} of the spread is shown."
            )
            shown = partial(draw, layer=layer, expert_map=expert_map)
            maps.append(Drawing(layer.name, alt, (SIDE, SIDE), shown))
    caption = (
        "Experts by linear CKA of their outputs on the two largest principal components; those of "
        "a group have one colour and mark, grey ones are alone."
    )
    if maps:
        drawn.append(Figure("map", "Map of the experts, with their groups", caption, maps))
    for name, reports in data.measures.items():
        title = f"Similarity of the experts by {name}"
        drawn.append(similarity_figure(reports, MEASURE_FIGURES[name], title))
    figures = [figure for figure in drawn if figure is not None]
    blocks: list[Block] = [Heading("Redundancy by layer", 2, "layers"), *base_blocks(data)]
    for figure in figures:
        blocks += [Heading(figure.title, 2, figure.name), figure]
    tiles = Facts((("MoE layers", str(len(data.layers))), ("Groups in each", str(data.groups))))
    lead = f"How alike the experts of {data.model} are, before anything is compressed."
    made_by = f"{MADE_BY} {data.model}."
    text = html.page(data.model, "Redundancy report", lead, tiles, blocks, made_by)
    return write_page(text, figures, FIGURE_NAMES, page_file, folder, overwrite)
