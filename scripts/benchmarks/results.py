"""Measure the figures of README and docs/results.md with today's defaults, and write their tables and the plot.

    python -m scripts.benchmarks.results measure ./mixtral --name mixtral --title "small Mixtral" \\
        --text train.jsonl --heldout valid.jsonl --length 256 [--only sizes strategies] [--seeds 0 1]
    python -m scripts.benchmarks.results write

`measure` runs `moe-compress compare` for each table and seed (and the demo for --name demo) in the folder `work`, whose
comparisons it doesn't repeat, and keeps what the tables need in docs/assets/results/NAME.json. `write` puts each table
between its two markers in the pages, and draws docs/assets/loss-over-bytes.svg. `--only real` is in real.py,
`--only formats` in formats.py.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any

from scripts.benchmarks import formats, frame, real

DOCS = Path(__file__).resolve().parents[2] / "docs"
DATA = DOCS / "assets" / "results"
PAGES = (DOCS / "results.md", DOCS.parent / "README.md")
PLOT = DOCS / "assets" / "loss-over-bytes.svg"
WORK = Path("work")
CRITERIA = (
    "auto,reap,count-guided,enumerate,gated-mass,leave-one-out,hope:interaction=norms,razor"
    ",router-guided,ream,hc-smoe,model-centric:merge=learned,data-centric:merge=learned"
)
FORMATS = ("none", "int8", "nvfp4", "int4", "int3", "int2")
PRUNED_FORMATS = ("none", "int4", "int3", "int2")  # that the page shows of fewer experts
EVALUATED = 64  # sequences
EXPERIMENTS: Mapping[str, str] = {
    "sizes": f"--sizes --correct tune --schemes {','.join(FORMATS)}",
    "strategies": f"--ratio 0.25,0.5,0.75 --strategies {CRITERIA} --correct none --random-seeds 2",
    "corrections": "--ratio 0.5 --strategies auto,reap,hc-smoe --correct none,ridge --random-seeds 1",
    "sub-experts": "--split 1,2,4 --ratio 0.25,0.5 --strategies auto --correct none,ridge --random-seeds 1",
}
DEMO = "demo"
# Published criteria, and the colours of their lines.
PLOTTED = {"reap": "#CC6677", "count-guided": "#AA4499", "enumerate": "#88CCEE", "leave-one-out": "#999933"}


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that was measured, with what `measure` kept of it."""

    name: str
    title: str
    experiments: Mapping[str, Any]

    def rows(self, experiment: str, **wanted: Any) -> list[dict[str, Any]]:
        """Return the rows of an experiment that have these values."""
        rows = self.experiments.get(experiment, {}).get("rows", [])
        return [row for row in rows if all(row[key] == value for key, value in wanted.items())]

    def increase(self, experiment: str, **wanted: Any) -> str:
        """Return the mean increase of the loss over seeds for a cell; empty if it was not measured."""
        increases = [row["increase"] for row in self.rows(experiment, **wanted)]
        return f"{fmean(increases):.3f}" if increases else ""


def size_rows(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a comparison by size, the base among them; none of a comparison of strategies."""
    rows = content["pairs"] if "pairs" in content else content["rows"]
    return [row for row in rows if row.get("share") is not None]


def rows_of(content: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """Return the fields that the tables need of the rows of a comparison.json, without the base of strategies."""
    rows = []
    for row in size_rows(content):
        fields = {name: row[name] for name in ("share", "scheme", "split", "bytes", "bits")}
        increases = {name: round(row[f"loss_{name}"], 5) for name in ("increase", "error")}
        rows.append({"seed": seed, **fields, **increases})
    if rows:
        return rows
    base, *others = content["rows"]
    for row in others:
        name = "random" if row["strategy"] == "random" else row["name"]
        share = round(row["experts"] / row["split"] / base["experts"], 4)
        fields = {name: row[name] for name in ("correction", "split", "bytes", "undone")}
        increase = round(row["loss_increase"], 5)
        rows.append({"seed": seed, "name": name, "share": share, **fields, "increase": increase})
    return rows


def measure_comparison(given: Any, experiment: str) -> dict[str, Any]:
    """Compare once for each seed, unless the work folder has the result."""
    flags = (
        f"{EXPERIMENTS[experiment]} --calibration {given.text} --heldout {given.heldout} --samples {given.samples}"
        f" --sequence-length {given.length} --evaluation-samples {EVALUATED}"
    ).split()
    rows = list[dict[str, Any]]()
    for seed in given.seeds:
        output = WORK / given.name / f"{experiment}-{seed}"
        result = output / "comparison.json"
        if not result.exists():
            words = ["compare", given.model, "-o", str(output), *flags, "--seed", str(seed)]
            frame.run_child([*frame.COMMAND, *words])
        content = json.loads(result.read_text(encoding="utf-8"))
        rows += rows_of(content, seed)
    unpruned = [row for row in size_rows(content) if (row["share"], row["scheme"]) == (1, "none")]
    base = unpruned[0] if unpruned else content["rows"][0]
    tokens = {"calibration": content["calibration"]["tokens"], "evaluation": sum(content["evaluation"].values())}
    facts = {"seeds": given.seeds, "base_loss": float(base["loss"]), "tokens": tokens, "versions": content["versions"]}
    date = datetime.date.fromtimestamp(result.stat().st_mtime).isoformat()
    return {"command": shown_command(given, "compare", flags), "date": date, **facts, "rows": rows}


def shown_command(given: Any, command: str, flags: Sequence[str]) -> str:
    """Return a command as the page shows it: files and models without their parents, the demo's as it is."""
    model = given.model if given.name == DEMO else f"./{given.name}"
    files = (given.text, given.heldout)
    words = [Path(word).name if word in files else word for word in flags]
    return " ".join(["moe-compress", command, model, *words])


def measure(given: Any) -> None:
    """Measure what was asked for and keep it, beside what was measured before."""
    file = DATA / f"{given.name}.json"
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    experiments = content.get("experiments", {})
    (WORK / given.name).mkdir(parents=True, exist_ok=True)
    known = [*EXPERIMENTS, formats.NAME, *[DEMO] * (given.name == DEMO)]
    for name in known if given.only == ["all"] else given.only:
        if name == DEMO:
            rows = json.loads(frame.run_child([*frame.COMMAND, "demo", "--json"]).output)
            experiments[name] = {"command": "make demo", "date": datetime.date.today().isoformat(), "rows": rows}
        elif name == formats.NAME:
            experiments[name] = formats.measure(given, WORK / given.name / name)
        elif name == real.NAME:
            experiments[name] = real.measure(given, WORK / given.name / name)
        else:
            experiments[name] = measure_comparison(given, name)
        lines = json.dumps({"title": given.title, "experiments": experiments}, indent=1)
        file.write_text(lines + "\n", encoding="utf-8")


def shown_share(share: float) -> str:
    """Return a share of the experts as a fraction; 'all' for 1."""
    return "all" if share == 1 else str(Fraction(share).limit_denominator(16))


def strategies_table(subjects: Sequence[Subject]) -> str:
    """Return a row for each criterion, below the default with its reconstruction."""
    cells = [(subject, share) for subject in subjects for share in (0.75, 0.5, 0.25)]
    columns = [f"{subject.title}, {shown_share(share)}" for subject, share in cells]
    default, names = ["**auto + tune (the default)**"], dict[str, None]()
    for subject, share in cells:
        increase = subject.increase("sizes", share=share, scheme="none")
        default.append(f"**{increase}**" if increase else "")
        names |= dict.fromkeys(row["name"] for row in subject.rows("strategies"))
    rows = []
    for name in names:
        shown = [subject.increase("strategies", name=name, share=share) for subject, share in cells]
        rows.append(["auto, not refitted" if name == "auto" else name, *shown])
    rows.sort(key=lambda row: float(row[1] or "inf"))
    return frame.table(["strategy", *columns], [default, *rows])


def sizes_table(subjects: Sequence[Subject]) -> str:
    """Return a row for each share and format; bold increases are those that no smaller model undercuts."""
    found = {(row["share"], row["scheme"]) for subject in subjects for row in subject.rows("sizes")}
    pairs = sorted(found, key=lambda pair: (-pair[0], FORMATS.index(pair[1])))
    pairs = [(share, scheme) for share, scheme in pairs if share == 1 or scheme in PRUNED_FORMATS]
    columns = ["experts", "format"]
    lines = [[shown_share(share), "as stored" if scheme == "none" else scheme] for share, scheme in pairs]
    for subject in subjects:
        columns += [f"{subject.title}, MB", "increase"]
        frontier = size_frontier(subject)
        for (share, scheme), line in zip(pairs, lines, strict=True):
            rows = subject.rows("sizes", share=share, scheme=scheme)
            increase = subject.increase("sizes", share=share, scheme=scheme)
            bold = f"**{increase}**" if (share, scheme) in frontier else increase
            line += [f"{rows[0]['bytes'] / 1e6:.2f}" if rows else "", bold]
    return frame.table(columns, lines)


def size_frontier(subject: Subject) -> set[tuple[float, str]]:
    """Return share and format of the models that no smaller or equal one beats."""
    increases = dict[tuple[int, float, str], list[float]]()
    for row in subject.rows("sizes"):
        increases.setdefault((row["bytes"], row["share"], row["scheme"]), []).append(row["increase"])
    means = [(key[0], fmean(values), key[1:]) for key, values in increases.items()]
    best, frontier = float("inf"), set[tuple[float, str]]()
    for _, mean, pair in sorted(means):
        if mean < best:
            best = mean
            frontier.add(pair)
    return frontier


def demo_table(subjects: Sequence[Subject]) -> str:
    """Return the table that `make demo` prints."""
    from compressor.formatting import human_bytes, human_count

    measured = [row for subject in subjects for row in subject.rows(DEMO)]
    rows = []
    for model in measured:
        name = "auto (the default)" if model["name"] == "auto" else model["name"]
        size = [human_count(model["parameters"]), human_bytes(model["bytes"]), f"{model['loss']:.3f}"]
        accuracies = [fmean(model["accuracy"].values()), *model["accuracy"].values()]
        rows.append([name, model["experts"], *size, *(f"{share:.1%}" for share in accuracies)])
    columns = ["model", "experts", "parameters", "bytes", "held-out loss", "accuracy", *measured[0]["accuracy"]]
    return frame.table(columns, rows)


TABLES = {"strategies": strategies_table, "sizes": sizes_table, formats.NAME: formats.formats_table, DEMO: demo_table}


def section(name: str, subjects: Sequence[Subject]) -> str:
    """Return a table with its command and date; nothing where no model has been measured so."""
    subjects = [subject for subject in subjects if name in subject.experiments]
    measured = [subject.experiments[name] for subject in subjects]
    if not measured:
        return ""
    first, dates = measured[0], sorted({experiment["date"] for experiment in measured})
    said = f"Measured on {' and '.join(dates)}"
    if "seeds" in first:
        said += f" with seed{'s' if len(first['seeds']) > 1 else ''} {', '.join(map(str, first['seeds']))}"
    return f"{TABLES[name](subjects)}\n\n```bash\n{frame.wrapped(first['command'])}\n```\n\n{said}."


def written_page(page: str, subjects: Sequence[Subject]) -> str:
    """Return the page with every table between its markers made anew; a table without markers isn't shown."""
    end = "<!-- end of table -->"
    sections = {name: section(name, subjects) for name in TABLES}
    for subject in subjects:
        if real.NAME in subject.experiments:
            sections |= real.sections(subject.name, subject.experiments[real.NAME])
    for name, content in sections.items():
        start = f"<!-- table: {name} -->"
        before, marker, rest = page.partition(start)
        if marker:
            page = f"{before}{start}\n{content}\n{end}{rest.partition(end)[2]}"
    return page


def read_subjects() -> list[Subject]:
    """Return the models that were measured, the demo last."""
    subjects = []
    for file in sorted(DATA.glob("*.json"), key=lambda file: (file.stem == DEMO, file)):
        subjects.append(Subject(name=file.stem, **json.loads(file.read_text(encoding="utf-8"))))
    return subjects


def draw_plot(subjects: Sequence[Subject]) -> None:
    """Draw the loss over bytes, a panel for each model that has sizes."""
    from matplotlib.figure import Figure

    from compressor.document.picture import drawing_settings

    plotted = list[Subject]()
    for subject in subjects:
        if subject.name == real.PLOTTED:
            plotted.insert(0, replace(subject, experiments=real.curves(subject.experiments[real.NAME])))
        elif subject.rows("sizes"):
            plotted.append(subject)
    with drawing_settings():
        canvas = Figure(figsize=(4.6 * len(plotted), 3.9), layout="constrained", facecolor="white")
        panels = canvas.subplots(1, len(plotted), sharey=True, squeeze=False)[0]
        for axes, subject in zip(panels, plotted, strict=True):
            draw_panel(axes, subject)
        panels[0].set_ylabel("increase of the held-out loss (nats per token)")
        handles, labels = panels[0].get_legend_handles_labels()
        columns = 3 if len(plotted) > 1 else 2
        canvas.legend(handles, labels, frameon=False, loc="outside lower center", ncols=columns)
        canvas.savefig(PLOT, format="svg", metadata={"Date": None})


def draw_panel(axes: Any, subject: Subject) -> None:
    """Draw the lines of one model: the default, quantising alone, both, published criteria and random drops."""
    sizes = subject.rows("sizes")
    base = max(row["bytes"] for row in sizes)

    def draw(rows: Sequence[Mapping[str, Any]], label: str, color: str, start: bool = True, **style: Any) -> None:
        """Draw mean increases over bytes, from the base on where `start` is set."""
        points = {base: [0.0]} if start else dict[float, list[float]]()
        for row in rows:
            points.setdefault(row["bytes"], []).append(row["increase"])
        bytes_of = sorted(points, reverse=True)
        increases = [max(0.0, fmean(points[size])) for size in bytes_of]
        style = {"linewidth": 1.2, "marker": "o", "markersize": 3.5, **style}
        axes.plot([size / 1e6 for size in bytes_of], increases, label=label, color=color, **style)

    for name, colour in PLOTTED.items():
        draw(subject.rows("strategies", name=name), f"{name}, whole experts", colour)
    draw(subject.rows("strategies", name="random"), "random drop", "#8a8a8a", linestyle="dotted")
    quantised = [row for row in sizes if row["share"] == 1 and row["scheme"] != "none"]
    draw(quantised, "quantising alone (rounding)", "#DDAA33", marker="s")
    pruned = [row for row in sizes if row["share"] < 1]
    stored = [row for row in pruned if row["scheme"] == "none"]
    draw(stored, "default: auto + tune", "#332288", linewidth=2.2)
    both = [row for row in pruned if row["scheme"] == "int4"]
    draw(both, "default, then int4", "#117733", start=False, marker="D", linewidth=1.6)
    axes.set_title(f"{subject.title} ({base / 1e6:.2f} MB)")
    axes.set_xlabel("MB of all tensors")
    axes.set_yscale("symlog", linthresh=0.01, linscale=0.6)
    axes.set_yticks([0, 0.01, 0.03, 0.1, 0.3, 1, 3], ["0", "0.01", "0.03", "0.1", "0.3", "1", "3"])
    axes.grid(axis="y")
    axes.invert_xaxis()


def main() -> None:
    """Measure, or write the page and the plot."""
    names = {"name": None, "title": None, "text": DEMO, "heldout": DEMO, "questions": None}
    of_real = {"chats": 200, "budget": "165MB", "rows": [real.USUAL], "llama": None, "llama_cpp": None}
    of_real["drops"] = [5.0, 3.5]  # bits of a parameter, into which experts and formats are fitted; 0 for none
    parser = frame.options(__doc__, **names, samples=256, length=128, seeds=[0], only=["all"], **of_real)
    parser.add_argument("what", choices=("measure", "write"))
    parser.add_argument("model", nargs="?", help="of measure: a folder or an id of the Hub")
    given = parser.parse_intermixed_args()
    if given.what == "measure":
        if not (given.model and given.name and given.title):
            parser.error("measure needs MODEL, --name and --title")
        measure(given)
        return
    subjects = read_subjects()
    for page in PAGES:
        page.write_text(written_page(page.read_text(encoding="utf-8"), subjects), encoding="utf-8")
    draw_plot(subjects)


if __name__ == "__main__":
    frame.run(main)
