"""A report as one HTML page, whose text alternatives and tables say in numbers what its figures
show.

The page and a folder of its figures as PNG each appear complete or not at all.
"""

import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from compressor.document import html
from compressor.document.blocks import (
    Block,
    Code,
    Details,
    Facts,
    Figure,
    Heading,
    Items,
    Link,
    Listing,
    Note,
    Strong,
    Table,
    Text,
    Toned,
    Words,
)
from compressor.document.picture import png
from compressor.errors import CompressionError
from compressor.files import check_folder, check_parent, is_page, write_file, write_files
from compressor.formatting import (
    counted,
    human_bytes,
    joined,
    listed,
    percent,
    setting,
    share,
    short,
)
from compressor.pipeline.outcome import size_table
from compressor.quality_gate.domain_divergence import heldout_blocks, overall_words
from compressor.quality_gate.report import gate_blocks
from compressor.quality_gate.verdict import SIGNS
from compressor.recipe.plan import ExpertPlan, correction_of
from compressor.report.data import ERRORS, Report, mean, within
from compressor.report.facts import facts
from compressor.report.figures import NAMES, figures
from compressor.steps.dispositions import dispositions, experts_table, gone

MADE_BY = "Made by moe-compress report from"  # by which a page is known again
MOST_CELLS = 20_000  # of all layers' matrices as tables
BECAME = "what became of it"
HUB_COLUMNS = ("expert", BECAME, "influence", "its score", "AARV", "its score", "tokens")
SHARE_COLUMNS = (
    "expert",
    "routed tokens before",
    BECAME,
    "routed tokens of its slot after",
)


def done(data: Report) -> Iterator[Block]:
    """Yield what was done, with what, and what this page cannot show."""
    yield facts(data, "page")
    if data.measured_tokens:
        yield Facts((("Measured for this report", data.measured_on),))
    yield Heading("Command", 3)
    yield (
        Listing(shlex.join(data.command)) if data.command else Text("The command was not recorded.")
    )
    if data.missing:
        yield Heading("What is missing here", 3)
        yield Items(data.missing)


def steps(data: Report) -> Iterator[Block]:
    """Yield what each step did, in order."""
    for section in data.sections:
        yield Heading(section.name.capitalize(), 3)
        yield from section.shown()


def sizes(data: Report) -> Iterator[Block]:
    """Yield experts, parameters and bytes, exactly."""
    yield size_table("Sizes before and after", data.sizes(), exactly=True)
    note = "Parameters are weights, in whatever format, without the scales of quantised ones."
    if data.active is not None:
        note += " Active parameters are all but the experts that a token is not routed to."
    yield Text(note)


def heldout(data: Report) -> Sequence[Block]:
    """Return loss, KL and flips on held-out text, of each source where there are several."""
    if data.heldout is not None:
        return heldout_blocks(data.heldout)
    why = "the run read too little text, or was told not to"
    return [Text(f"Output and base were not compared: {why}.")]


def gate(data: Report) -> Sequence[Block]:
    """Return the verdict in words, its tasks, and how it came about; or how to come by one."""
    if data.gate is not None:
        return gate_blocks(data.gate)
    name = data.title
    source = data.plan.source
    command = ["moe-compress", "gate", source.model, name, "-o", f"{name}.gate"]
    if source.revision:
        command += ["--revision", source.revision]
    return [
        Text("The accuracy gate was not run on this model, so nothing is known of its accuracy."),
        Listing(shlex.join(command)),
        Text(f"Then make this report again with --gate {name}.gate."),
    ]


def cost(data: Report) -> list[Block]:
    """Return seconds by phase, and the memory that the run held at its peak."""
    peak = "The peak memory was not recorded."
    if data.peak_memory:
        peak = f"Peak memory: {human_bytes(data.peak_memory)}."
    phases = dict(data.seconds)
    phases.pop("total", None)
    if not phases:
        return [Text("No times were recorded."), Text(peak)]
    phases["all phases"] = total = sum(phases.values())
    rows = [(name, f"{seconds:.2f}", share(seconds, total)) for name, seconds in phases.items()]
    return [Text(peak), Table("Seconds by phase", ("phase", "seconds", "share"), rows)]


def speed(data: Report) -> list[Block]:
    """Return how fast base and output run on this machine; or how to measure it."""
    if data.speed is not None:
        return [data.speed.table()]
    command = Code("moe-compress report --speed")
    return [Text(("Not measured: ", command, " runs both models side by side."))]


def experts(plan: ExpertPlan) -> tuple[Block, ...]:
    """Return what became of each expert: a row for each layer, and how to read it."""
    if not plan.layers:
        return (Text("All experts stay."),)
    legend = (
        "Numbers are those of the base's experts. Kept: as they were, apart from reconstruction "
        "and distillation. "
        "Merged: the experts joined by + became one; one that stands there alone was rescaled."
    )
    if any(map(correction_of, plan.layers)):
        legend += (
            " Held-out error: the share of the layer's output energy that is missed on held-out "
            "calibration tokens, to which neither plan nor reconstruction was fitted, before and "
            "after the reconstruction."
        )
    return experts_table(plan, "What became of each expert"), Text(legend, "note")


def similarity(data: Report) -> Iterator[Block]:
    """Yield the groups of each layer, with the similarities in and between them."""
    yield from _unmeasured(data, "similarity", "similarity of experts")
    numbers = sum(layer.plan.experts**2 for layer in data.layers if layer.similarity)
    if numbers > MOST_CELLS:
        yield Text(
            "The matrices have too many numbers for tables; those of the groups are below.", "note"
        )
    for layer in data.layers:
        plan = layer.plan
        decided: dict[str, Words] = {"Module": Code(layer.module), "Decided by": plan.decided_by}
        for name, value in plan.figures.items():
            decided[name.replace("_", " ").capitalize()] = setting(value)
        rows = []
        for slot, group in enumerate(plan.groups):
            if len(group.members) > 1:
                pairs = within(layer, group.members)
                means = short(mean(pairs)), short(min(pairs, default=None))
                rows.append((f"merged, slot {slot}", listed(group.members), *means))
        below: list[Block] = [Facts(decided.items())]
        if rows:
            columns = ("", "experts", "mean similarity", "least similarity")
            below.append(Table(f"{layer.name}: groups", columns, rows, {"experts"}))
        if numbers <= MOST_CELLS and layer.similarity is not None:
            caption = f"{layer.name}: {layer.similarity_label or 'similarity'}"
            matrix = [
                (str(number), *map("{:.2f}".format, values))
                for number, values in enumerate(layer.similarity)
            ]
            below.append(Table(caption, ("expert", *map(str, range(plan.experts))), matrix))
        note = (
            f"{plan.experts} experts in {counted(len(plan.groups), 'slot')}, "
            f"{counted(len(plan.merged), 'merged group')}, {len(plan.dropped)} {gone([plan])}"
        )
        yield Details((Strong(layer.name), " ", Note(note)), below)


def _unmeasured(data: Report, field: str, what: str) -> list[Block]:
    """Return where the page says what it takes to measure what no layer has; nothing if a layer has
    it."""
    if not data.layers or any(getattr(layer, field) is not None for layer in data.layers):
        return []
    remedy: Words = "."
    if data.missing:
        remedy = "; ", Link("what is missing", "#done"), " says what it takes."
    return [Text((f"The {what} was not measured", remedy))]


def visits(data: Report) -> Iterator[Block]:
    """Yield how evenly tokens spread; then each expert's share of the routed tokens, what became of
    it, and the share of its slot."""
    yield from _unmeasured(data, "visits_before", "share of tokens")
    rows = []
    details = []
    for layer in data.layers:
        before, after = layer.visits_before or (), layer.visits_after or ()
        if not (before or after):
            continue
        busiest = [short(len(shares) * max(shares, default=0)) for shares in (before, after)]
        rows.append((layer.name, *busiest))
        experts = []
        became = dispositions(layer.plan, layer.protected)
        for expert, slot in enumerate(layer.plan.remap()):
            share_before = percent(before[expert] if before else None)
            share_after = percent(after[slot] if after and slot >= 0 else None)
            experts.append((str(expert), share_before, became[expert], share_after))
        table = Table(f"{layer.name}: routed tokens", SHARE_COLUMNS, experts, SHARE_COLUMNS[2:3])
        summary = (Strong(layer.name), " ", Note("shares of experts and slots"))
        details.append(Details(summary, [table]))
    if rows:
        yield Table("Tokens of the busiest expert by the mean", ("", "before", "after"), rows)
    yield from details


def errors(data: Report) -> Iterator[Block]:
    """Yield each layer's errors as numbers."""
    yield from _unmeasured(data, "error", "reconstruction error")
    columns = {"": [layer.name for layer in data.layers]}
    for field, label in ERRORS.items():
        values = [getattr(layer, field) for layer in data.layers]
        if any(value is not None for value in values):
            columns[label] = [short(value, 4) for value in values]
    if len(columns) > 1:
        rows = list(zip(*columns.values(), strict=True))
        yield Table("Errors by layer", tuple(columns), rows)


def hubs(data: Report) -> list[Block]:
    """Return named hubs with what became of them."""
    became = dict[tuple[str, int], str]()
    for layer in data.layers:
        for expert, words in enumerate(dispositions(layer.plan, layer.protected)):
            became[layer.module, expert] = words
    rows = []
    for hub in data.hubs:
        disposition = became.get((hub.module, hub.expert), "not in the plan")
        figures = (hub.influence, hub.influence_score, hub.aarv, hub.aarv_score)
        rows.append((hub.label, disposition, *map(short, figures), percent(hub.share)))
    if not rows:
        return [Text("None: no hubs were named to this report.")]
    return [Table("Routing hubs", HUB_COLUMNS, rows, {BECAME})]


SECTIONS: Sequence[tuple[str, str, str | None, Callable[[Report], Iterable[Block]]]] = (
    # anchor, heading, figure, and what it says beside it
    ("done", "What was done", None, done),
    ("sizes", "Sizes", None, sizes),
    ("experts", "Experts", "experts", lambda data: experts(data.expert_plan)),
    ("similarity", "Similarity and groups", "similarity", similarity),
    ("visits", "Routed tokens before and after", "visits", visits),
    ("errors", "Reconstruction error", "errors", errors),
    ("steps", "Steps", "distillation", steps),
    ("heldout", "Held-out text", None, heldout),
    ("hubs", "Hubs", None, hubs),
    ("gate", "Accuracy gate", None, gate),
    ("speed", "Inference speed", None, speed),
    ("cost", "Time and memory", None, cost),
)


def page(data: Report, drawn: Sequence[Figure]) -> str:
    """Return the whole page; `drawn` are the figures of `figures`, or some of them."""
    by_name = {figure.name: figure for figure in drawn}
    blocks: list[Block] = []
    for anchor, heading, name, body in SECTIONS:
        blocks.append(Heading(heading, 2, anchor))
        if name in by_name:
            blocks.append(by_name[name])
        blocks += body(data)
    made_by = f"{MADE_BY} {data.title}; plan {data.plan.digest()[:12]}."
    ways = dict.fromkeys(chain.from_iterable(section.ways for section in data.sections))
    lead = (
        f"{data.plan.source.model} with {data.experts_after} instead of "
        f"{counted(data.experts_before, 'expert')} in each MoE layer"
        f"{', by ' if ways else ''}{joined([*ways])}."
    )
    # the facts that one looks for first, each with a note
    _, parameters, nbytes = data.sizes()[:3]
    errors = [layer.error for layer in data.layers if layer.error is not None]
    verdict: Words = "not run"
    if data.gate is not None:
        verdict = Toned(data.gate.verdict, *SIGNS[data.gate.verdict])
    loss, compared = "not compared", "with the base"
    if data.heldout is not None:
        loss, rise, kl, flips = overall_words(data.heldout.overall)
        compared = f"{rise} nats per token; KL {kl}; flips {flips}"
        if data.heldout.together is not None:
            worst = data.heldout.domains[0]
            compared += f"; worst source: {worst.domain}, {worst.loss.change:+.4f}"
    top = f"top {data.top_k}" if data.layers else ""
    shown: list[tuple[str, Words, str]] = [
        ("Experts per layer", f"{data.experts_before} → {data.experts_after}", top),
        *(
            (name, row.show(row.after), f"{row.left} of {row.show(row.before)}")
            for name, row in (("Parameters", parameters), ("Size on disk", nbytes))
        ),
        ("Held-out loss", loss, compared),
        ("Layer error", short(mean(errors)), "mean over layers" if errors else "not measured"),
        ("Accuracy gate", verdict, "see below"),
    ]
    tiles = Facts([(name, (value, " ", Note(note))) for name, value, note in shown])
    return html.page(data.title, "Compression report", lead, tiles, blocks, made_by)


def check_report(
    page_file: Path, folder: Path | None, overwrite: bool, names: Collection[str] = NAMES
) -> None:
    """Refuse places that cannot be written, or exist and are not to be replaced; `folder` is for
    figures of `names`."""
    check_parent(page_file, "place for the report")
    if page_file.is_dir() or page_file == folder:
        raise CompressionError(f"{page_file} is a folder; name a file, such as report.html")
    if page_file.exists() and not overwrite:
        raise CompressionError(f"{page_file} exists already; name another file or pass --overwrite")
    if page_file.exists() and not is_page(page_file, MADE_BY):
        what = f"{page_file} is not a report's page"
        raise CompressionError(f"{what}, so --overwrite will not replace it; name another file")
    if folder is not None:
        check_folder(folder, [f"{name}.png" for name in names], overwrite)


def write_report(
    data: Report, page_file: Path, folder: Path | None = None, overwrite: bool = False
) -> list[Path]:
    """Write the page and, into a new folder, its figures; returns the figures' files."""
    drawn = figures(data)
    return write_page(page(data, drawn), drawn, NAMES, page_file, folder, overwrite)


def write_page(
    text: str,
    drawn: Sequence[Figure],
    names: Collection[str],
    page_file: Path,
    folder: Path | None,
    overwrite: bool,
) -> list[Path]:
    """Write a page, and into a new folder its figures, of which there may be `names`; returns the
    figures' files."""
    # Measuring takes a while.
    check_report(page_file, folder, overwrite, names)
    written = []
    if folder is not None:
        contents = {f"{figure.name}.png": png(figure.title, figure.drawings) for figure in drawn}
        written = write_files(folder, contents, [f"{name}.png" for name in names], overwrite)
    write_file(page_file, text, partial(check_report, page_file, None, overwrite))
    return written
