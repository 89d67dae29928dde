"""C3PO: which experts a question is routed to, optimised at test time (arXiv:2504.07964).

    python recipes/c3po.py table1                                # the demo model, offline, on a CPU, in a minute
    python recipes/c3po.py table1 org/model --tasks arc_easy --limit 100
    python recipes/c3po.py table1 allenai/OLMoE-1B-7B-0924 --embedding nvidia/NV-Embed-v2 --trust-remote-code

The last is the paper: a GPU of 48 GB, by estimate 10 hours a row of NGD. A recipe asks the items of --tasks, plain and
with each combination of its settings; --set NAME=VALUE,VALUE replaces one of them. The reference set is made of
--reference-tasks, unless OUT has it already. The optimizer "oracle" knows each item's answer, and bounds what the
others can gain. Forwards count decoder layers times tokens, thrice for a backward pass. Coverage is the share of the
top-k experts after optimisation that are among the n of largest weight before.

routers puts the average optimised pathway into the routers of a pruned model for good, the paper's open question, on
calibration --text. The bias goes in at the best of its scales, even where held-out text says that none is a gain;
record and card say so.
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
from running import DEMO, moe_compress, parser
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
# Name: the settings of each table; NEAR stands for the number of layers that the paper's 5 are.
RECIPES = {
    "table1": ("optimizer=mode,kernel,ngd,oracle layers=NEAR",),
    "table3": ("tokens=1,2,3,5 layers=NEAR",),
    "table9": (
        "optimizer=kernel,ngd tokens=first:1,middle:1,last:1,last:3,all,scored layers=NEAR",
    ),
    "figure3": (
        "layers=first:NEAR,middle:NEAR,last:NEAR,first:NEAR+middle:NEAR,first:NEAR+last:NEAR"
        ",middle:NEAR+last:NEAR,all",
    ),
    "figure5": ("experts=8,12,16,20,32,64 layers=NEAR",),
    "neighbours": ("neighbours=1,3,5,10 layers=NEAR", "radius=0.5 layers=NEAR"),
    "kernels": ("optimizer=mode,kernel,ngd kernel=gaussian,matern,polynomial,linear layers=NEAR",),
    "schedule": ("steps=5,10,50 schedule=cosine,constant layers=NEAR",),
    "transfer": ("optimizer=kernel,ngd layers=NEAR",),  # also on a reference set of --other-tasks
    "oracle": ("optimizer=ngd,oracle layers=NEAR,all",),
    "efficiency": ("optimizer=mode,kernel,ngd layers=NEAR,all experts=20,1000",),  # 1000: all
    "custom": ("",),  # settings by --set alone
    "routers": (),
}
ON_DEMO = (
    "moe_demo_facts,moe_demo_sorting",
    "moe_demo_arithmetic",
    "moe_demo_recall,moe_demo_reversal",
)
ON_OTHERS = (
    "commonsense_qa,openbookqa,social_iqa",
    "logiqa,mathqa",
    "arc_challenge,arc_easy,hellaswag,mmlu,piqa,winogrande",
)


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
    costs = ("nats", "forwards", "seconds")
    columns = ("settings", *plain.accuracy, "gain", "± standard error", *costs)
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


def compare(
    given: argparse.Namespace, settings: Sequence[str], references: Sequence[Path]
) -> tuple[list[Score], int, int]:
    """Return scores, the plain model's first; the number of items, and the largest top-k."""
    sets = {str(folder): read_reference(folder, given.embedding) for folder in references}
    choices = combinations({"reference": list(sets), **varied(settings)})
    options = []
    for choice in choices:
        content = {name: value for name, value in choice.items() if name != "reference"}
        options.append(read_as(PathwayOptions, content, "--set", closed=True))
    items = items_of(given.tasks.split(","), None, given.limit, given.include_path, False)
    opened = open_model(locate(given.model), given.dtype, given.device)
    first = next(iter(sets.values()))
    answering = load_answering(opened, first, options[0], given.trust_remote_code)
    rows = tokenised(items, answering.tokenizer, opened.vocabulary, positions(opened.config))
    questions = [item for item, _ in rows]

    def grade(item: Item) -> tuple[bool, float]:
        forward = answering.run(item)
        likelihood = likelihoods(forward.logits, forward.rows)[item.right]
        return answers_right(item, forward), float(likelihood)

    plain, seconds = ask(questions, grade)
    accuracy, likelihood = by_task(questions, plain[:, 0]), float(plain[:, 1].mean())
    scores = [Score({}, accuracy, 0.0, 0.0, likelihood, 1.0, seconds)]
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


def main() -> None:
    """Run one table or figure."""
    texts = {"text": "demo", "device": "auto", "dtype": "auto", "embedding": OWN}
    later: dict[str, Any] = dict.fromkeys(("reference_tasks", "other_tasks", "tasks"))
    options = {**texts, **later, "samples": 64, "trust_remote_code": False, "json": False}
    made = parser(__doc__, RECIPES, **options, optimizer="own")
    made.add_argument("--set", action="append", default=[], metavar="OPTION=VALUE,VALUE")
    made.add_argument("--include-path", type=Path, help="a folder with lm-eval task files")
    made.add_argument("--limit", type=int, help="items of each task (default: 10 of demo's, 200)")
    made.add_argument("--near", type=int, help="layers of the paper's 5 (default: 1 of the demo's)")
    given = made.parse_args()
    on_demo = given.model == str(DEMO)
    for name, tasks in zip(later, ON_DEMO if on_demo else ON_OTHERS, strict=True):
        setattr(given, name, getattr(given, name) or tasks)
    given.limit = given.limit or (10 if on_demo else 200)
    near, out = str(given.near or (1 if on_demo else 5)), given.out or Path("c3po")
    out.mkdir(parents=True, exist_ok=True)
    if given.name == "routers":
        calibration = ("--calibration", given.text, "--samples", given.samples)
        routers = {"sequences": given.samples, "rounds": 1, "accept": "always"}
        routers["optimizer"] = given.optimizer
        flags = [word for name in routers for word in ("--set", f"routers.{name}={routers[name]}")]
        words = ("-o", out / "model", "--ratio", 0.25, "--correct", "none", "--routers", "bias")
        moe_compress("compress", given.model, *words, *calibration, *flags)
        return

    def reference(folder: Path, tasks: str) -> Path:
        if not folder.is_dir():
            words = ["--tasks", tasks, "--limit", given.limit, "--embedding", given.embedding]
            words += ["--device", given.device, "--dtype", given.dtype]
            words += ["--include-path", given.include_path] if given.include_path else []
            words += ["--trust-remote-code"] if given.trust_remote_code else []
            moe_compress("reference", given.model, "-o", folder, *words, stdout=sys.stderr)
        return folder

    references = [reference(out / "reference", given.reference_tasks)]
    if given.name == "transfer":
        references.append(reference(out / "other", given.other_tasks))
    for settings in RECIPES[given.name]:
        by_name = {}
        for setting in (*settings.replace("NEAR", near).split(), *given.set):
            by_name[setting.partition("=")[0]] = setting
        try:
            scores, items, top_k = compare(given, [*by_name.values()], references)
        except CompressionError as error:
            sys.exit(f"Error: {error}")
        print_report(given.json, plain_json(scores), blocks(scores, items, top_k))


if __name__ == "__main__":
    main()
