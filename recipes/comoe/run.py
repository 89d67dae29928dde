"""Tune a model once for each row of a table and each seed, and write the table: what all recipes of CoMoE share.

Rows come from the standard input: a name, a colon and options of `moe-compress comoe train`. `--peft lora` or
`--peft dora` tunes one adapter of peft instead. The first argument says how: `single` tunes on one task at a time,
`multi` on all tasks at once, `both` does either. A second one is the model. Environment:

MODEL    checkpoint folder or Hub id (default: the demo model)
TASKS    lm-eval tasks with training splits, separated by commas (default: two skills of the demo, answered
         backwards, which its model has to learn)
SEEDS    separated by blanks; the median counts (default: 0; the paper: 0 1 2 3 4)
OPTIONS  options of `comoe train` for all rows (default: those of the paper's table 5; 40 short steps for the demo)
LIMIT    items of each task (default: all; 40 of the demo's)
DEVICE, DTYPE as the options of those names
OUT      folder for adapters, reports and tables (default: recipe-output)
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from peft_baseline import tune_by_peft

import compressor
from compressor.answers.items import Item, item_lines
from compressor.comoe.cost import Cost
from compressor.comoe.evaluating import ComoeEvaluation
from compressor.comoe.options import ComoeConfig, TuningOptions
from compressor.comoe.report import write_evaluation
from compressor.data.demo import load_documents, load_items

DEMO = Path(compressor.__file__).parent / "demo" / "checkpoint"
MODEL = sys.argv[2] if len(sys.argv) > 2 else os.environ.get("MODEL", str(DEMO))
IS_DEMO = str(DEMO) == MODEL
TASKS = os.environ.get("TASKS", "arithmetic,sorting").split(",")
SEEDS = os.environ.get("SEEDS", "0").split()
TABLE_5 = "--batch-size 2 --accumulation 8 --cutoff 512"
OPTIONS = os.environ.get(
    "OPTIONS", "--rank 8 --steps 40 --learning-rate 2e-3" if IS_DEMO else TABLE_5
).split()
LIMIT = int(os.environ.get("LIMIT", "40" if IS_DEMO else "0")) or None
OUT = Path(os.environ.get("OUT", "recipe-output"))
RUNNING = {"device": os.environ.get("DEVICE", "auto"), "dtype": os.environ.get("DTYPE", "auto")}
TIMED_TOKENS = int(os.environ.get("TIMED_TOKENS", "0"))
PROJECTION: Any = os.environ.get("PROJECTION")  # pca or tsne: reports with pictures are written
MIB = 2**20


@dataclass(frozen=True)
class Result:
    """The outcome of one row: accuracies by task, and costs."""

    accuracy: dict[str, float]
    share: float  # of trained parameters
    training: Cost
    answering: Cost | None


def options_of(words: Sequence[str]) -> TuningOptions:
    """Read options of `comoe train`, each followed by its value but for `--dora`; later ones
    win."""
    experts = ComoeConfig.model_fields
    config = dict[str, Any]()
    training = dict[str, Any]()
    remaining = [*words]
    while remaining:
        name = remaining.pop(0).removeprefix("--").replace("-", "_")
        value: Any = True if name == "dora" else read_value(name, remaining.pop(0))
        if name in experts:
            config[name] = value
        if name not in experts or name == "seed":
            training[name] = value
    return TuningOptions(config=ComoeConfig(**config), **training)


def read_value(name: str, word: str) -> Any:
    """Return an option's value: names, a number or text."""
    if name == "targets":
        return tuple(word.split(","))
    try:
        return int(word) if word.isdigit() and name != "layers" else float(word)
    except ValueError:
        return word


def demo_items(skill: str, heldout: bool) -> list[Item]:
    """Return questions of one skill of the demo's data, with choices where they are held out.

    Answers are written backwards, so that there is something to learn.
    """
    items = []
    if heldout:
        for entry in load_items():
            if entry.skill == skill:
                choices = tuple(f" {choice.strip()[::-1]}" for choice in entry.choices)
                items.append(
                    Item(f"<|end|>{entry.question}", choices[entry.answer], choices, skill)
                )
        return items
    for text, of_skill in load_documents("calibration"):
        for line in text.splitlines() if of_skill == skill else ():
            prompt, _, answer = line.rpartition(" ")
            items.append(Item(f"<|end|>{prompt}", f" {answer[::-1]}", task=skill))
    return items


def questions(tasks: Sequence[str], heldout: bool) -> dict[str, Any]:
    """Return the arguments that name items to train on or to ask: lm-eval's tasks, or a file of the demo's."""
    if not IS_DEMO:
        return {
            "tasks": tuple(tasks),
            "limit": LIMIT,
            "include_path": os.environ.get("INCLUDE_PATH"),
        }
    name = "heldout" if heldout else "calibration"
    path = OUT / f"{name}-{'-'.join(tasks)}.jsonl"
    lines = [item_lines(demo_items(task, heldout)[:LIMIT]) for task in tasks]
    path.write_text("".join(lines), encoding="utf-8")
    return {name: str(path)}


def run(name: str, words: Sequence[str], tasks: Sequence[str]) -> Result:
    """Train and ask one row, on these tasks together."""
    peft = words[words.index("--peft") + 1] if "--peft" in words else None
    if peft:
        place = words.index("--peft")
        words = [*words[:place], *words[place + 2 :]]
    options = options_of(words)
    training = questions(tasks, heldout=False)
    asked = questions(tasks, heldout=True)
    if peft:
        outcome = tune_by_peft(
            MODEL, peft, options, training, asked, TIMED_TOKENS, OUT / "peft", **RUNNING
        )
        return Result(*outcome)
    folder = OUT / "-".join((name.replace(" ", "_").replace("/", "_"), *tasks, str(options.seed)))
    trained = compressor.train_comoe(
        MODEL, folder, **training, options=options, overwrite=True, **RUNNING
    )
    evaluation: ComoeEvaluation = compressor.evaluate_comoe(
        MODEL, folder, **asked, timed_tokens=TIMED_TOKENS, projection=PROJECTION or "pca", **RUNNING
    )
    if PROJECTION:
        write_evaluation(evaluation, folder.with_name(f"{folder.name}-report"), overwrite=True)
    accuracy = {result.task: result.accuracy for result in evaluation.tasks}
    return Result(accuracy, trained.share, trained.cost, evaluation.answering)


def cells(results: Sequence[Result]) -> list[str]:
    """Return the row of a table: medians over seeds."""
    shown = [f"{100 * median(result.share for result in results):.2f}%"]
    accuracies = [
        100 * median(result.accuracy[task] for result in results) for task in results[0].accuracy
    ]
    shown += [f"{accuracy:.1f}" for accuracy in (*accuracies, fmean(accuracies))]
    shown.append(f"{median(result.training.seconds for result in results):.1f}")
    shown.append(f"{median(result.training.peak_memory for result in results) / MIB:+,.0f}")
    answering = [result.answering for result in results if result.answering]
    if answering:
        shown.append(f"{1000 * median(cost.seconds for cost in answering):,.0f}")
        shown.append(f"{median(cost.peak_memory for cost in answering) / MIB:+,.0f}")
    return shown


def joined(results: Sequence[Result]) -> Result:
    """Return several tasks' own results as one row; its costs are sums, but the memory is the most."""
    accuracy = dict[str, float]()
    for result in results:
        accuracy |= result.accuracy
    costs = [result.training for result in results]
    training = Cost(sum(cost.seconds for cost in costs), max(cost.peak_memory for cost in costs))
    return Result(accuracy, results[0].share, training, results[0].answering)


def main() -> None:
    """Run all rows, and print and write the table."""
    OUT.mkdir(parents=True, exist_ok=True)
    settings = {"both": ("single", "multi")}.get(sys.argv[1], (sys.argv[1],))
    rows = [line.partition(":")[::2] for line in sys.stdin.read().splitlines() if line.strip()]
    lines = list[str]()
    record = dict[str, Any]()
    for name, words in rows:
        for setting in settings:
            results = []
            for seed in SEEDS:
                options = [*OPTIONS, *words.split(), "--seed", seed]
                if setting == "multi":
                    results.append(run(name, options, TASKS))
                else:
                    results.append(joined([run(name, options, (task,)) for task in TASKS]))
            lines.append(" | ".join(("", name, setting, *cells(results), "")).strip())
            record[f"{name}, {setting}"] = [result.accuracy for result in results]
            print(lines[-1], file=sys.stderr)
    head = [
        "row",
        "tasks",
        "trained",
        *results[0].accuracy,
        "mean",
        "training (s)",
        "training (MiB)",
    ]
    head += ["answers (ms)", "answers (MiB)"][: 2 * bool(TIMED_TOKENS)]
    table = "\n".join((" | ".join(("", *head, "")).strip(), "|---" * len(head) + "|", *lines, ""))
    (OUT / "table.md").write_text(table, encoding="utf-8")
    (OUT / "accuracy.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    if os.environ.get("CHART"):
        draw_chart(record)
    print(table, end="")


def draw_chart(record: dict[str, Any]) -> None:
    """Write a picture of each row's mean accuracy over tasks, the median over seeds."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(5, 0.4 + 0.3 * len(record)), layout="constrained")
    axes = canvas.add_subplot()
    means = [100 * median(fmean(tasks.values()) for tasks in seeds) for seeds in record.values()]
    axes.barh(list(record), means)
    axes.invert_yaxis()
    axes.set_xlabel("answered right (%)")
    canvas.savefig(OUT / "chart.png", dpi=150)


main()
