"""Ask a model items, plain and with each combination of C3PO's settings, and tabulate them: what all recipes share.

    python run.py MODEL --reference FOLDER --tasks arc_easy --set optimizer=kernel,ngd,oracle --set layers=5,all

Reference sets are folders that `moe-compress reference` has written. The optimizer "oracle" knows each item's answer,
and bounds what the others can gain. Coverage is the share of the top-k experts after optimisation that are among the n
of largest weight before.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from compressor.answers.items import Item, likelihoods, positions, tokenised
from compressor.answers.tasks import items_of
from compressor.checkpoint.source import locate
from compressor.cli.terminal import print_report
from compressor.document.blocks import Block, Table, Text
from compressor.entry_points import read_option
from compressor.errors import CompressionError
from compressor.formatting import counted, percent, short
from compressor.model.opened import open_model
from compressor.pathways.answering import PathwayAnswerer, load_answering
from compressor.pathways.engine import PathwayModel
from compressor.pathways.options import OWN, PathwayOptions, selected
from compressor.pathways.reference import ReferenceSet, answers_right, read_reference
from compressor.records import plain_json, read_as

SHOWN = 8  # numbers of experts whose coverage the table shows


@dataclass(frozen=True)
class Score:
    """How a model answers with certain settings; gain and standard error are of the share of right answers."""

    settings: Mapping[str, Any]  # none for the plain model
    accuracy: Mapping[str, float]  # by task
    gain: float  # over the plain model, over all items
    standard_error: float  # of the gain, paired by item
    likelihood: float  # mean log likelihood of the right answers, in nats
    forwards: float  # cost in plain forwards
    seconds: float  # for an item
    coverage: Sequence[float] = ()  # for 1 expert, 2 experts and so on

    def cells(self, varied: Collection[str]) -> tuple[str, ...]:
        """Return a row of the table."""
        name = ", ".join(
            f"{setting} {self.settings[setting]}" for setting in varied if setting in self.settings
        )
        by_task = [percent(accuracy) for accuracy in self.accuracy.values()]
        gain = [percent(self.gain), percent(self.standard_error)] if self.settings else ["-", "-"]
        cost = [f"{self.likelihood:.3f}", short(self.forwards), short(self.seconds)]
        return (name or ("C3PO" if self.settings else "plain model"), *by_task, *gain, *cost)


def blocks(scores: Sequence[Score], items: int, top_k: int) -> tuple[Block, ...]:
    """Return a table of accuracy, gain and cost, and one of coverage."""
    plain, first, *_ = scores
    varied = []
    for name, value in first.settings.items():
        if any(score.settings[name] != value for score in scores[1:]):
            varied.append(name)
    columns = (
        "settings",
        *plain.accuracy,
        "gain",
        "± standard error",
        "nats",
        "forwards",
        "seconds",
    )
    tables: list[Block] = [
        Table("Items answered right", columns, tuple(score.cells(varied) for score in scores))
    ]
    numbers = range(top_k, len(first.coverage) + 1, top_k)
    shown = numbers[:: math.ceil(len(numbers) / SHOWN) or 1]
    if shown:
        rows = []
        for score in scores[1:]:
            covered = [percent(score.coverage[number - 1]) for number in shown]
            rows.append((score.cells(varied)[0], *covered))
        caption = f"Top-{top_k} afterwards that are among the experts of largest weight before"
        tables.append(
            Table(caption, ("settings", *(f"{number} experts" for number in shown)), tuple(rows))
        )
    note = "nats: mean log likelihood of the right answers; forwards: cost in plain forwards; seconds: for an item"
    return (*tables, Text(f"{counted(items, 'item')}; {note}."))


def ask(
    questions: Sequence[Item], grade: Callable[[Item], tuple[bool, float]]
) -> tuple[Tensor, float]:
    """Return which questions are answered right and the right answers' log likelihoods, [n, 2]; and seconds for one."""
    grades = torch.zeros(len(questions), 2, dtype=torch.float64)
    start = perf_counter()
    for number, item in enumerate(questions):
        grades[number] = torch.tensor(grade(item))
    return grades, (perf_counter() - start) / len(questions)


def by_task(questions: Sequence[Item], right: Tensor) -> dict[str, float]:
    """Return the share of right answers of each task, and of all items if there are several tasks."""
    results: dict[str, list[float]] = {}
    for item, is_right in zip(questions, right.tolist(), strict=True):
        results.setdefault(item.task or "items", []).append(is_right)
    accuracy = {task: sum(of_task) / len(of_task) for task, of_task in results.items()}
    return {**accuracy, "all": float(right.mean())} if len(accuracy) > 1 else accuracy


def with_options(
    answering: PathwayAnswerer, options: PathwayOptions, reference: ReferenceSet
) -> PathwayAnswerer:
    """Return an answerer of the same loaded model."""
    opened = answering.model.opened
    reference.check(opened, answering.tokenizer)
    layer_numbers = selected(options.layers, len(opened.architecture.layers))
    model = PathwayModel(opened, layer_numbers, options.tokens, reference.facts.scores)
    return PathwayAnswerer(model, answering.tokenizer, reference, options, answering.embed)


def compare(arguments: argparse.Namespace) -> tuple[list[Score], int, int]:
    """Return scores, the plain model's first; the number of items, and the largest top-k."""
    sets = {
        str(folder): read_reference(folder, arguments.embedding) for folder in arguments.reference
    }
    choices = combinations({"reference": list(sets), **varied(arguments.set)})
    options = []
    for choice in choices:
        content = {name: value for name, value in choice.items() if name != "reference"}
        options.append(read_as(PathwayOptions, content, "--set", closed=True))
    tasks = arguments.tasks.split(",") if arguments.tasks else ()
    items = items_of(tasks, arguments.calibration, arguments.limit, arguments.include_path, False)
    opened = open_model(locate(arguments.model), arguments.dtype, arguments.device)
    first = next(iter(sets.values()))
    answering = load_answering(opened, first, options[0], arguments.trust_remote_code)
    rows = tokenised(items, answering.tokenizer, opened.vocabulary, positions(opened.config))
    questions = [item for item, _ in rows]

    def grade(item: Item) -> tuple[bool, float]:
        forward = answering.run(item)
        return answers_right(item, forward), float(
            likelihoods(forward.logits, forward.rows)[item.right]
        )

    plain, seconds = ask(questions, grade)
    scores = [
        Score(
            {}, by_task(questions, plain[:, 0]), 0.0, 0.0, float(plain[:, 1].mean()), 1.0, seconds
        )
    ]
    for choice, chosen in zip(choices, options, strict=True):
        print(f"Asking {len(questions)} items: {choice}", file=sys.stderr)
        optimising = with_options(answering, chosen, sets[choice["reference"]])
        grades, seconds = ask(questions, optimising.grade)
        changes = (grades - plain)[:, 0]
        error = float(changes.std()) / math.sqrt(len(changes))
        accuracy = by_task(questions, grades[:, 0])
        likelihood = float(grades[:, 1].mean())
        cost = optimising.cost, seconds, optimising.coverage
        scores.append(Score(choice, accuracy, float(changes.mean()), error, likelihood, *cost))
    return scores, len(questions), max(layer.top_k for layer in opened.architecture.layers)


def varied(settings: Sequence[str]) -> dict[str, list[Any]]:
    """['steps=5,10'] -> {'steps': [5, 10]}."""
    values: dict[str, list[Any]] = {}
    for text in settings:
        name, _, listed = text.partition("=")
        message = f"--set {text!r} should be option=value,value, such as steps=5,10"
        for value in listed.split(","):
            key, read = read_option(f"{name}={value}" if value else name, message)
            values.setdefault(key, []).append(read)
    return values


def combinations(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """{'a': [1, 2], 'b': [3]} -> [{'a': 1, 'b': 3}, {'a': 2, 'b': 3}]."""
    return [
        dict(zip(values, choice, strict=True)) for choice in itertools.product(*values.values())
    ]


def parsed(words: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--reference", type=Path, action="append", required=True)
    parser.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE,VALUE")
    parser.add_argument("--tasks")
    parser.add_argument("--calibration", type=Path, help="Items, as for `moe-compress reference`.")
    parser.add_argument("--include-path", type=Path)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--embedding", default=OWN)
    parser.add_argument("--trust-remote-code", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", action="store_true", help="Print all figures as JSON.")
    return parser.parse_args(words)


def main() -> None:
    """Print the comparison."""
    arguments = parsed(sys.argv[1:])
    try:
        scores, items, top_k = compare(arguments)
    except CompressionError as error:
        sys.exit(f"Error: {error}")
    print_report(arguments.json, plain_json(scores), blocks(scores, items, top_k))


if __name__ == "__main__":
    main()
