"""CoMoE: LoRA experts tuned with a contrastive loss (Feng et al., 2025).

    python recipes/comoe.py table1                     # the demo model on two skills, offline, on a CPU, in minutes
    python recipes/comoe.py table1 meta-llama/Llama-2-7b-hf --tasks arc_easy,arc_challenge,boolq,openbookqa,piqa \\
        --seeds 0,1,2,3,4                              # the paper: a GPU of 48 GB, some 4 hours a row and seed

A recipe tunes a model once for each of its rows and each seed, and writes table.md, accuracy.json and the adapters into
OUT. Rows are options of `moe-compress comoe train`, behind those of --options; `--peft lora` or `--peft dora` tunes one
adapter of peft instead. "single" tunes on one task at a time, "multi" on all tasks at once. Medians over seeds count.
"8 experts" is what is nearest to MixLoRA here; MOELoRA, MiLoRA and OMoE are left out. table7 is for another base model,
the paper's google/gemma-2b. Of figures4-7, each row's report OUT/*-report has workload.png (figure 4) and scatter.png
(figures 5 to 7: one drawing a task). In table8, memory is that beside the model's weights: the device's peak, or on
the CPU that of the process.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import peft
from running import DEMO, parser
from transformers import PrinterCallback, Trainer

import compressor
from compressor.answers.asking import ask, pad_token, with_rows
from compressor.answers.items import Item, item_lines
from compressor.answers.tasks import items_of
from compressor.checkpoint.source import locate
from compressor.comoe.cost import Cost, answering_cost, measured
from compressor.comoe.evaluating import ComoeEvaluation, collate, examples, load
from compressor.comoe.options import ComoeConfig, TuningOptions
from compressor.comoe.report import write_evaluation
from compressor.comoe.training import training_arguments
from compressor.data.demo import load_documents, load_items
from compressor.devices import pick_device
from compressor.progress import quiet_transformers

PEFT = {"LoRA": "--peft lora --rank 80", "DoRA": "--peft dora --rank 80"}
EXPERTS = {"8 experts": "--experts 8 --contrastive 0", "CoMoE-LoRA": "--experts 4"}
# Name: how tasks are tuned on, and the options of each row.
RECIPES: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {
    "table1": (("single", "multi"), {**PEFT, **EXPERTS}),
    "table2": (("single",), {**PEFT, **EXPERTS, "CoMoE-DoRA": "--experts 4 --dora"}),
    "table3": (
        ("multi",),
        {
            name: f"--layers {name.replace(' and ', ',')}"
            for name in ("low", "high", "middle", "low and high")
        },
    ),
    "table6": (("multi",), {f"n = {count}": f"--experts {count}" for count in range(4, 9)}),
    "table7": (("multi",), EXPERTS),
    "table8": (("multi",), {**PEFT, **EXPERTS}),
    "figure3": (
        ("single", "multi"),
        {weight: f"--contrastive {weight}" for weight in ("0", "0.001", "0.01", "0.1", "1")},
    ),
    "figures4-7": (("multi",), {"without": "--contrastive 0", "with": "--contrastive 0.01"}),
}
ON_DEMO = "--rank 8 --steps 40 --learning-rate 2e-3"
TABLE_5 = "--batch-size 2 --accumulation 8 --cutoff 512"  # of the paper
MIB = 2**20


@dataclass(frozen=True)
class Result:
    """The outcome of one row: accuracies by task, and costs."""

    accuracy: dict[str, float]
    share: float  # of trained parameters
    training: Cost
    answering: Cost | None


def options_of(words: Sequence[str]) -> TuningOptions:
    """Read options of `comoe train`, each followed by its value but for `--dora`; later ones win."""
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
                prompt = f"<|end|>{entry.question}"
                items.append(Item(prompt, choices[entry.answer], choices, skill))
        return items
    for text, of_skill in load_documents("calibration"):
        for line in text.splitlines() if of_skill == skill else ():
            prompt, _, answer = line.rpartition(" ")
            items.append(Item(f"<|end|>{prompt}", f" {answer[::-1]}", task=skill))
    return items


def questions(given: argparse.Namespace, tasks: Sequence[str], heldout: bool) -> dict[str, Any]:
    """Return the arguments that name items to train on or to ask: lm-eval's tasks, or a file of the demo's."""
    if given.model != str(DEMO):
        return {"tasks": tuple(tasks), "limit": given.limit, "include_path": given.include_path}
    name = "heldout" if heldout else "calibration"
    path = given.out / f"{name}-{'-'.join(tasks)}.jsonl"
    lines = [item_lines(demo_items(task, heldout)[: given.limit]) for task in tasks]
    path.write_text("".join(lines), encoding="utf-8")
    return {name: str(path)}


def run(given: argparse.Namespace, name: str, words: Sequence[str], tasks: Sequence[str]) -> Result:
    """Train and ask one row, on these tasks together."""
    method = words[words.index("--peft") + 1] if "--peft" in words else None
    training = questions(given, tasks, heldout=False)
    asked = questions(given, tasks, heldout=True)
    if method is not None:
        place = words.index("--peft")
        options = options_of([*words[:place], *words[place + 2 :]])
        return tune_by_peft(given, method, options, training, asked)
    options = options_of(words)
    running = {"device": given.device, "dtype": given.dtype}
    folder = given.out / "-".join((name.replace(" ", "_"), *tasks, str(options.seed)))
    trained = compressor.train_comoe(
        given.model, folder, **training, options=options, overwrite=True, **running
    )
    shown = {"timed_tokens": given.timed_tokens, "projection": given.projection, **running}
    evaluation: ComoeEvaluation = compressor.evaluate_comoe(given.model, folder, **asked, **shown)
    if given.name == "figures4-7":
        write_evaluation(evaluation, folder.with_name(f"{folder.name}-report"), overwrite=True)
    accuracy = {result.task: result.accuracy for result in evaluation.tasks}
    return Result(accuracy, trained.share, trained.cost, evaluation.answering)


def tune_by_peft(
    given: argparse.Namespace,
    method: str,
    options: TuningOptions,
    training: dict[str, Any],
    asked: dict[str, Any],
) -> Result:
    """Train and ask one LoRA or DoRA of peft as CoMoE's experts are."""
    tokenizer, base = load(locate(given.model), given.dtype)
    config = options.config
    lora = peft.LoraConfig(
        r=config.rank,
        lora_alpha=2.0 * config.rank if config.alpha is None else config.alpha,
        lora_dropout=config.dropout,
        target_modules=[*config.targets],
        use_dora=method == "dora",
    )
    adapted = peft.get_peft_model(base, lora)
    trained, whole = adapted.get_nb_trainable_parameters()
    rows = with_rows(items(training, True), adapted, tokenizer, cutoff=options.cutoff)
    data: Any = examples(rows)
    target = pick_device(given.device)
    arguments = training_arguments(options, len(data), given.out / "peft", target.type == "cpu")
    arguments.save_strategy = "no"
    pad = pad_token(tokenizer)
    trainer = Trainer(
        adapted, arguments, train_dataset=data, data_collator=lambda batch: collate(batch, pad)
    )
    trainer.remove_callback(PrinterCallback)
    with quiet_transformers(), measured(target) as costs:
        trainer.train()
    heldout = items(asked, False)
    accuracy = {score.task: score.accuracy for score in ask(adapted, tokenizer, heldout)}
    answering = None
    if given.timed_tokens:
        answering = answering_cost(adapted, tokenizer, heldout, 16, given.timed_tokens)
    return Result(accuracy, trained / (whole - trained), costs[0], answering)


def items(named: dict[str, Any], training: bool) -> Any:
    """Return the items that a recipe trains on or asks."""
    file = named.get("calibration", named.get("heldout"))
    options = (named.get("tasks", ()), file, named.get("limit"), named.get("include_path"), False)
    return items_of(*options, training=training)


def cells(results: Sequence[Result]) -> list[str]:
    """Return the row of a table: medians over seeds."""
    shown = [f"{100 * median(result.share for result in results):.2f}%"]
    accuracies = []
    for task in results[0].accuracy:
        accuracies.append(100 * median(result.accuracy[task] for result in results))
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


def draw_chart(record: dict[str, Any], path: Path) -> None:
    """Write a picture of each row's mean accuracy over tasks, the median over seeds."""
    from matplotlib.figure import Figure

    canvas = Figure(figsize=(5, 0.4 + 0.3 * len(record)), layout="constrained")
    axes = canvas.add_subplot()
    means = [100 * median(fmean(tasks.values()) for tasks in seeds) for seeds in record.values()]
    axes.barh(list(record), means)
    axes.invert_yaxis()
    axes.set_xlabel("answered right (%)")
    canvas.savefig(path, dpi=150)


def main() -> None:
    """Run all rows, and print and write the table."""
    texts = {"tasks": "arithmetic,sorting", "seeds": "0", "device": "auto", "dtype": "auto"}
    made = parser(__doc__, RECIPES, **texts, projection="tsne", options=None)
    made.add_argument("--limit", type=int, help="items of each task (default: all; 40 of demo's)")
    made.add_argument("--include-path", type=Path, help="a folder with lm-eval task files")
    made.add_argument("--timed-tokens", type=int, help="of timed answers (default: table8 32)")
    given = made.parse_args()
    on_demo = given.model == str(DEMO)
    given.out = given.out or Path(f"comoe-{given.name}")
    given.out.mkdir(parents=True, exist_ok=True)
    if on_demo and given.limit is None:
        given.limit = 40
    if given.timed_tokens is None:
        given.timed_tokens = 32 if given.name == "table8" else 0
    if given.name != "figures4-7":
        given.projection = "pca"
    common = (given.options or (ON_DEMO if on_demo else TABLE_5)).split()
    tasks, lines, record = given.tasks.split(","), list[str](), dict[str, Any]()
    settings, rows = RECIPES[given.name]
    for name, words in rows.items():
        for setting in settings:
            results = []
            for seed in given.seeds.split(","):
                options = [*common, *words.split(), "--seed", seed]
                if setting == "multi":
                    results.append(run(given, name, options, tasks))
                else:
                    apart = [run(given, name, options, (task,)) for task in tasks]
                    results.append(joined(apart))
            lines.append(" | ".join(("", name, setting, *cells(results), "")).strip())
            record[f"{name}, {setting}"] = [result.accuracy for result in results]
            print(lines[-1], file=sys.stderr)
    head = ["row", "tasks", "trained", *results[0].accuracy, "mean"]
    head += ["training (s)", "training (MiB)"]
    head += ["answers (ms)", "answers (MiB)"] if given.timed_tokens else []
    table = "\n".join((" | ".join(("", *head, "")).strip(), "|---" * len(head) + "|", *lines, ""))
    (given.out / "table.md").write_text(table, encoding="utf-8")
    record_text = json.dumps(record, indent=2) + "\n"
    (given.out / "accuracy.json").write_text(record_text, encoding="utf-8")
    if given.name == "figure3":
        draw_chart(record, given.out / "chart.png")
    print(table, end="")


if __name__ == "__main__":
    main()
