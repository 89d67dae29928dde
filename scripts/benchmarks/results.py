"""Measure the figures of docs/results.md with today's defaults, and write its tables and its plot.

    python -m scripts.benchmarks.results measure ./mixtral --name mixtral --title "small Mixtral" --work work \\
        --text train.jsonl --heldout valid.jsonl --length 256 [--only sizes strategies] [--seeds 0 1]
    python -m scripts.benchmarks.results write

`measure` runs `moe-compress compare` once for each table and seed (and `moe-compress demo` for --name demo), and keeps
what the tables need in docs/assets/results/NAME.json. A run whose output is in the work folder isn't repeated. `write`
reads these files; it puts each table between its two markers in the page, and draws docs/assets/loss-over-bytes.svg.
"""

import argparse
import datetime
import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from compressor.errors import CompressionError
from scripts.benchmarks.frame import COMMAND, losses, run_child

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).resolve().parents[2] / "docs"
DATA = DOCS / "assets" / "results"
PAGE = DOCS / "results.md"
DEMO_HELDOUT = str(DOCS.parent / "compressor" / "demo" / "data" / "heldout.jsonl")
PLOT = DOCS / "assets" / "loss-over-bytes.svg"
CRITERIA = (
    "auto",
    "reap",
    "count-guided",
    "enumerate",
    "gated-mass",
    "leave-one-out",
    "hope:interaction=norms",
    "razor",
    "router-guided",
    "ream",
    "hc-smoe",
    "model-centric:merge=learned",
    "data-centric:merge=learned",
)
FORMATS = ("none", "int8", "nvfp4", "int4", "int3", "int2")
PRUNED_FORMATS = (
    "none",
    "int4",
    "int3",
    "int2",
)  # the formats that the page shows of fewer experts
EXPERIMENTS: Mapping[str, str] = {
    "sizes": f"--sizes --correct tune --schemes {','.join(FORMATS)}",
    "strategies": f"--ratio 0.25,0.5,0.75 --strategies {','.join(CRITERIA)} --correct none --random-seeds 2",
    "corrections": "--ratio 0.5 --strategies auto,reap,hc-smoe --correct none,ridge --random-seeds 1",
    "sub-experts": "--split 1,2,4 --ratio 0.25,0.5 --strategies auto --correct none,ridge --random-seeds 1",
}
DEMO, POINTS = "demo", "points"
PRESETS = {"`--fast`": ["--fast"], "default": [], "`--best`": ["--best"]}
PLOTTED = {  # published criteria, and the colours of their lines
    "reap": "#CC6677",
    "count-guided": "#AA4499",
    "enumerate": "#88CCEE",
    "leave-one-out": "#999933",
}
WIDTH = 118  # columns of a command in the page


@dataclass(frozen=True, slots=True)
class Subject:
    """A model that was measured, with what `measure` kept of it."""

    name: str
    title: str
    experiments: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path) -> "Subject":
        content = json.loads(file.read_text(encoding="utf-8"))
        return cls(file.stem, content["title"], content["experiments"])

    def write(self) -> None:
        content = {"title": self.title, "experiments": self.experiments}
        DATA.mkdir(parents=True, exist_ok=True)
        file = DATA / f"{self.name}.json"
        file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def rows(self, experiment: str, **wanted: Any) -> list[dict[str, Any]]:
        """Return the rows of an experiment that have these values."""
        rows = self.experiments.get(experiment, {}).get("rows", [])
        return [row for row in rows if all(row[key] == value for key, value in wanted.items())]

    def increase(self, experiment: str, **wanted: Any) -> str:
        """Return the mean increase of the loss over seeds for a cell; empty if it was not measured."""
        increases = [row["increase"] for row in self.rows(experiment, **wanted)]
        return f"{fmean(increases):.3f}" if increases else ""


def rows_of(content: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """Return the fields that the tables need of the rows of a comparison.json, without the base of strategies."""
    sizes = size_rows(content)
    if sizes:
        return [_size_row(row, seed) for row in sizes]
    base, *others = content["rows"]
    return [_strategy_row(row, base["experts"], seed) for row in others]


def size_rows(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a comparison by size, the base among them; none of a comparison of strategies."""
    rows = content["pairs"] if "pairs" in content else content["rows"]
    return [row for row in rows if row.get("share") is not None]


def _size_row(pair: Mapping[str, Any], seed: int) -> dict[str, Any]:
    fields = ("share", "scheme", "split", "bytes", "bits")
    increases = {"increase": round(pair["loss_increase"], 5), "error": round(pair["loss_error"], 5)}
    return {"seed": seed, **{field: pair[field] for field in fields}, **increases}


def _strategy_row(row: Mapping[str, Any], experts: int, seed: int) -> dict[str, Any]:
    fields = ("correction", "split", "bytes", "undone")
    name = "random" if row["strategy"] == "random" else row["name"]
    share = row["experts"] / row["split"] / experts
    return {
        "seed": seed,
        "name": name,
        "share": round(share, 4),
        **{field: row[field] for field in fields},
        "increase": round(row["loss_increase"], 5),
    }


def run_command(command: Sequence[str]) -> str:
    """Run a command of the package and return what it printed."""
    child = run_child([*COMMAND, *command])
    if child.status:
        raise CompressionError(
            f"moe-compress {shlex.join(command)} ended with status {child.status}"
        )
    return child.output


def measure_comparison(args: argparse.Namespace, experiment: str) -> dict[str, Any]:
    """Compare once for each seed, unless the work folder has the result."""
    flags = EXPERIMENTS[experiment].split()
    text = ["--calibration", args.text, "--heldout", args.heldout, "--samples", str(args.samples)]
    text += [
        "--sequence-length",
        str(args.length),
        "--evaluation-samples",
        str(args.evaluation_samples),
    ]
    rows = list[dict[str, Any]]()
    for seed in args.seeds:
        output = args.work / args.name / f"{experiment}-{seed}"
        result = output / "comparison.json"
        if not result.exists():
            output.parent.mkdir(parents=True, exist_ok=True)
            run_command(
                ["compare", args.model, "-o", str(output), *flags, *text, "--seed", str(seed)]
            )
        content = json.loads(result.read_text(encoding="utf-8"))
        rows += rows_of(content, seed)
    shown_text = [Path(word).name if word in (args.text, args.heldout) else word for word in text]
    shown = ["moe-compress", "compare", shown_model(args), *flags, *shown_text]
    return {
        "command": " ".join(shown),
        "date": datetime.date.fromtimestamp(result.stat().st_mtime).isoformat(),
        "seeds": args.seeds,
        "base_loss": base_loss(content),
        "tokens": {
            "calibration": content["calibration"]["tokens"],
            "evaluation": sum(content["evaluation"].values()),
        },
        "versions": content["versions"],
        "rows": rows,
    }


def base_loss(content: Mapping[str, Any]) -> float:
    """Return the loss of the unchanged model."""
    whole = [row for row in size_rows(content) if row["share"] == 1 and row["scheme"] == "none"]
    base = whole[0] if whole else content["rows"][0]
    return float(base["loss"])


def shown_model(args: argparse.Namespace) -> str:
    """Return how the page names the model: a folder of the clone as it is, any other without its parents."""
    return str(args.model) if args.name == DEMO else f"./{args.name}"


def measure_demo(args: argparse.Namespace) -> dict[str, Any]:
    """Run the demo, unless the work folder has what it printed."""
    result = args.work / args.name / "demo.json"
    if not result.exists():
        result.parent.mkdir(parents=True, exist_ok=True)
        result.write_text(run_command(["demo", "--json"]), encoding="utf-8")
    date = datetime.date.fromtimestamp(result.stat().st_mtime).isoformat()
    return {
        "command": "make demo",
        "date": date,
        "rows": json.loads(result.read_text(encoding="utf-8")),
    }


def measure_points(args: argparse.Namespace) -> dict[str, Any]:
    """Compress to half of the experts at each point between seconds and loss, one after the other."""
    heldout = DEMO_HELDOUT if args.heldout == DEMO else args.heldout
    sizes = heldout, args.evaluation_samples, args.length
    base = losses(args.model, *sizes).mean()
    rows = list[dict[str, Any]]()
    shown = ["--ratio", "0.5", "--calibration", args.text, "--sequence-length", str(args.length)]
    for name, flags in PRESETS.items():
        output = args.work / args.name / f"points{len(rows)}"
        output.parent.mkdir(parents=True, exist_ok=True)
        command = [
            "compress",
            args.model,
            "-o",
            str(output),
            *flags,
            *shown,
            "--device",
            args.device,
            "--overwrite",
        ]
        child = run_child([*COMMAND, *command])
        if child.status:
            raise CompressionError(
                f"moe-compress {shlex.join(command)} ended with status {child.status}"
            )
        increase = float(losses(output, *sizes).mean() - base)
        spent = {"seconds": round(child.seconds, 1), "cpu": round(child.cpu, 1)}
        rows.append({"name": name, **spent, "increase": round(increase, 5)})
        print(rows[-1], flush=True)
    words = ["moe-compress", "compress", shown_model(args), "-o", "out", "--best", *shown]
    command = " ".join(Path(word).name if word == args.text else word for word in words)
    return {"command": command, "date": datetime.date.today().isoformat(), "rows": rows}


def measure(args: argparse.Namespace) -> None:
    """Measure what was asked for and keep it, beside what was measured before."""
    known = [*EXPERIMENTS, POINTS, *[DEMO] * (args.name == DEMO)]
    unknown = sorted(set(args.only or known) - set(known))
    if unknown:
        raise CompressionError(f"--only {' '.join(unknown)}: {args.name} has {', '.join(known)}")
    file = DATA / f"{args.name}.json"
    experiments = dict(Subject.read(file).experiments) if file.exists() else {}
    for experiment in args.only or known:
        if experiment == DEMO:
            experiments[experiment] = measure_demo(args)
        elif experiment == POINTS:
            experiments[experiment] = measure_points(args)
        else:
            experiments[experiment] = measure_comparison(args, experiment)
        Subject(args.name, args.title, experiments).write()


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def shown_share(share: float) -> str:
    """Return a share of the experts as a fraction; 'all' for 1."""
    return "all" if share == 1 else str(Fraction(share).limit_denominator(16))


def wrapped(command: str) -> str:
    """Return a command in lines of the page, broken between options."""
    lines, line = list[str](), ""
    for part in re.split(r" (?=--)", command):
        if line and len(line) + len(part) + 3 > WIDTH:
            lines.append(f"{line} \\")
            line = f"    {part}"
        else:
            line = f"{line} {part}" if line else part
    return "\n".join([*lines, line])


def strategies_table(subjects: Sequence[Subject]) -> str:
    """Return a row for each criterion, below the default with its reconstruction; the best published are bold."""
    shares = (0.75, 0.5, 0.25)
    columns = [
        "strategy",
        *(f"{subject.title}, {shown_share(share)}" for subject in subjects for share in shares),
    ]
    names = list(
        dict.fromkeys(row["name"] for subject in subjects for row in subject.rows("strategies"))
    )
    default, rows = ["**auto + tune (the default)**"], list[list[str]]()
    for subject in subjects:
        for share in shares:
            increase = subject.increase("sizes", share=share, scheme="none")
            default.append(f"**{increase}**" if increase else "")
    for name in names:
        cells = ["auto, not refitted" if name == "auto" else name]
        for subject in subjects:
            cells += [subject.increase("strategies", name=name, share=share) for share in shares]
        rows.append(cells)
    rows.sort(key=lambda row: float(row[1] or "inf"))
    return table(columns, [default, *rows])


def sizes_table(subjects: Sequence[Subject]) -> str:
    """Return a row for each share and format; bold increases are those that no smaller model undercuts."""
    columns, cells = ["experts", "format"], dict[tuple[str, str], list[str]]()
    pairs = {(row["share"], row["scheme"]) for subject in subjects for row in subject.rows("sizes")}
    pairs = sorted(pairs, key=lambda pair: (-pair[0], FORMATS.index(pair[1])))
    pairs = [(share, scheme) for share, scheme in pairs if share == 1 or scheme in PRUNED_FORMATS]
    for subject in subjects:
        columns += [f"{subject.title}, MB", "increase"]
        frontier = size_frontier(subject)
        for share, scheme in pairs:
            rows = subject.rows("sizes", share=share, scheme=scheme)
            row_cells = cells.setdefault(
                (shown_share(share), "as stored" if scheme == "none" else scheme), []
            )
            if not rows:
                row_cells += ["", ""]
                continue
            increase = f"{fmean(row['increase'] for row in rows):.3f}"
            row_cells.append(f"{rows[0]['bytes'] / 1e6:.2f}")
            row_cells.append(f"**{increase}**" if (share, scheme) in frontier else increase)
    return table(columns, [[*names, *row_cells] for names, row_cells in cells.items()])


def size_frontier(subject: Subject) -> set[tuple[float, str]]:
    """Return share and format of the models that no smaller or equal one beats."""
    increases = dict[tuple[float, str, int], list[float]]()
    for row in subject.rows("sizes"):
        increases.setdefault((row["share"], row["scheme"], row["bytes"]), []).append(
            row["increase"]
        )
    best, frontier = float("inf"), set[tuple[float, str]]()
    for (share, scheme, _), values in sorted(
        increases.items(), key=lambda item: (item[0][2], fmean(item[1]))
    ):
        if fmean(values) < best:
            best = fmean(values)
            frontier.add((share, scheme))
    return frontier


def points_table(subjects: Sequence[Subject]) -> str:
    """Return a row for each point between seconds of the processor and loss."""
    columns, rows = ["half of the experts"], [[name] for name in PRESETS]
    for subject in (subject for subject in subjects if POINTS in subject.experiments):
        columns += [f"{subject.title}, CPU seconds", "increase"]
        for cells in rows:
            points = subject.rows(POINTS, name=cells[0])
            cells += (
                [f"{points[0]['cpu']:.0f}", f"{points[0]['increase']:.3f}"] if points else ["", ""]
            )
    return table(columns, rows)


def demo_table(subjects: Sequence[Subject]) -> str:
    """Return the table that `make demo` prints."""
    from compressor.formatting import human_bytes, human_count

    (subject,) = (subject for subject in subjects if DEMO in subject.experiments)
    measured = subject.experiments[DEMO]["rows"]
    skills = list(measured[0]["accuracy"])
    columns = ["model", "experts", "parameters", "bytes", "held-out loss", "accuracy", *skills]
    rows = list[list[str]]()
    for model in measured:
        size = [
            str(model["experts"]),
            human_count(model["parameters"]),
            human_bytes(model["bytes"]),
        ]
        accuracies = [fmean(model["accuracy"].values()), *model["accuracy"].values()]
        name = "auto (the default)" if model["name"] == "auto" else model["name"]
        rows.append(
            [name, *size, f"{model['loss']:.3f}", *(f"{share:.1%}" for share in accuracies)]
        )
    return table(columns, rows)


TABLES = {
    "strategies": strategies_table,
    "sizes": sizes_table,
    POINTS: points_table,
    DEMO: demo_table,
}


def section(name: str, subjects: Sequence[Subject]) -> str:
    """Return a table with its command and date; nothing where no model has been measured so."""
    measured = [subject.experiments[name] for subject in subjects if name in subject.experiments]
    if not measured:
        return ""
    first, dates = measured[0], sorted({experiment["date"] for experiment in measured})
    said = f"Measured on {' and '.join(dates)}"
    if "seeds" in first:
        said += f" with seed{'s' if len(first['seeds']) > 1 else ''} {', '.join(map(str, first['seeds']))}"
    return f"{TABLES[name](subjects)}\n\n```bash\n{wrapped(first['command'])}\n```\n\n{said}."


def written_page(page: str, subjects: Sequence[Subject]) -> str:
    """Return the page with every table between its markers made anew; a table without markers isn't shown."""
    for name in TABLES:
        start, end = f"<!-- table: {name} -->", "<!-- end of table -->"
        before, marker, rest = page.partition(start)
        if not marker:
            continue
        _, _, after = rest.partition(end)
        page = f"{before}{start}\n{section(name, subjects)}\n{end}{after}"
    return page


def read_subjects() -> list[Subject]:
    """Return the models that were measured, the demo last."""
    subjects = [Subject.read(file) for file in sorted(DATA.glob("*.json"))]
    return sorted(subjects, key=lambda subject: subject.name == DEMO)


def draw_plot(subjects: Sequence[Subject]) -> None:
    """Draw the loss over bytes, a panel for each model that has sizes."""
    from matplotlib.figure import Figure

    from compressor.document.picture import drawing_settings

    subjects = [subject for subject in subjects if subject.rows("sizes")]
    with drawing_settings():
        canvas = Figure(figsize=(4.6 * len(subjects), 3.9), layout="constrained", facecolor="white")
        panels = canvas.subplots(1, len(subjects), sharey=True, squeeze=False)[0]
        for axes, subject in zip(panels, subjects, strict=True):
            draw_panel(axes, subject)
        panels[0].set_ylabel("increase of the held-out loss (nats per token)")
        handles, labels = panels[0].get_legend_handles_labels()
        canvas.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=3 if len(subjects) > 1 else 2,
            frameon=False,
        )
        canvas.savefig(PLOT, format="svg", metadata={"Date": None})


def draw_panel(axes: "Axes", subject: Subject) -> None:
    """Draw the lines of one model: the default, quantising alone, both, published criteria and random drops."""
    base = max(row["bytes"] for row in subject.rows("sizes"))
    for name, colour in PLOTTED.items():
        draw_line(
            axes,
            subject.rows("strategies", name=name),
            base,
            f"{name}, whole experts",
            color=colour,
        )
    drops = subject.rows("strategies", name="random")
    draw_line(axes, drops, base, "random drop", color="#8a8a8a", linestyle="dotted")
    quantised = [row for row in subject.rows("sizes", share=1.0) if row["scheme"] != "none"]
    draw_line(axes, quantised, base, "quantising alone (rounding)", color="#DDAA33", marker="s")
    stored = [row for row in subject.rows("sizes", scheme="none") if row["share"] < 1]
    draw_line(
        axes, stored, base, "default: auto + tune", color="#332288", marker="o", linewidth=2.2
    )
    both = [row for row in subject.rows("sizes", scheme="int4") if row["share"] < 1]
    draw_line(axes, both, None, "default, then int4", color="#117733", marker="D", linewidth=1.6)
    axes.set_title(f"{subject.title} ({base / 1e6:.2f} MB)")
    axes.set_xlabel("MB of all tensors")
    axes.set_yscale("symlog", linthresh=0.01, linscale=0.6)
    axes.set_yticks([0, 0.01, 0.03, 0.1, 0.3, 1, 3], ["0", "0.01", "0.03", "0.1", "0.3", "1", "3"])
    axes.grid(axis="y")
    axes.invert_xaxis()


def draw_line(
    axes: "Axes", rows: Sequence[Mapping[str, Any]], base: int | None, label: str, **style: Any
) -> None:
    """Draw mean increases over bytes, from the base on where it has bytes."""
    points = dict[float, list[float]]()
    for row in rows:
        points.setdefault(row["bytes"], []).append(row["increase"])
    if base is not None:
        points[base] = [0.0]
    sizes = sorted(points, reverse=True)
    style = {"linewidth": 1.2, "marker": "o", "markersize": 3.5, **style}
    axes.plot(
        [size / 1e6 for size in sizes],
        [max(0.0, fmean(points[size])) for size in sizes],
        label=label,
        **style,
    )


def write(_: argparse.Namespace) -> None:
    """Write the page's tables and the plot."""
    subjects = read_subjects()
    PAGE.write_text(written_page(PAGE.read_text(encoding="utf-8"), subjects), encoding="utf-8")
    draw_plot(subjects)


def main() -> None:
    """Measure, or write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    measuring = commands.add_parser("measure", help="measure a model")
    measuring.set_defaults(work=Path("work"), function=measure)
    measuring.add_argument("model", help="folder or Hub id")
    measuring.add_argument("--name", required=True, help="of the file that keeps the figures")
    measuring.add_argument("--title", required=True, help="of its columns in the tables")
    measuring.add_argument("--work", type=Path, help="folder for the outputs of the commands")
    measuring.add_argument("--text", default="demo", help="text to calibrate with")
    measuring.add_argument("--heldout", default="demo", help="text to measure on")
    measuring.add_argument("--length", type=int, default=128, help="tokens in each sequence")
    measuring.add_argument("--samples", type=int, default=256, help="calibration sequences")
    measuring.add_argument(
        "--evaluation-samples", type=int, default=64, help="sequences to measure on"
    )
    measuring.add_argument(
        "--seeds", type=int, nargs="+", default=[0], help="draws of the calibration text"
    )
    measuring.add_argument(
        "--only",
        nargs="+",
        help=f"some of {', '.join(EXPERIMENTS)}, {POINTS}, and {DEMO} for --name {DEMO}",
    )
    measuring.add_argument("--device", default="auto", help="where the points are computed")
    writing = commands.add_parser("write", help="write the page and the plot")
    writing.set_defaults(function=write)
    args = parser.parse_args()
    args.function(args)


if __name__ == "__main__":
    try:
        main()
    except CompressionError as error:
        sys.exit(str(error))
