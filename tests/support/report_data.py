"""Data of reports made up for the tests of what shows them."""

import random
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from compressor.attribution.hubs import Hub
from compressor.checkpoint.reader import Size
from compressor.recipe.plan import Group, LayerPlan, Source
from compressor.recipe.steps_plan import Plan, PlannedStep, decision_from_dict, layer_to_dict
from compressor.report.data import LayerReport, Report, named
from tests.support.gate_results import mixed

HOSTILE = "<script>alert(1)</script> & \"q\" 'a' $x_1$ \x00\x1b \ud800 \u202e ]]> --> </style></svg>"
VOID = {"meta", "br", "img", "hr", "link", "input"}


def table(text: str) -> list[dict[str, str]]:
    """The rows of the only table of a Markdown text, by column; a cell may hold an escaped bar."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    header, ruler, *rows = split
    assert all(set(cell) <= set(":-") for cell in ruler)
    return [dict(zip(header, cells, strict=True)) for cells in rows]


def shares(made: random.Random, count: int) -> tuple[float, ...]:
    """Shares that sum to about 1."""
    sizes = [made.expovariate(1) + 0.05 for _ in range(count)]
    return tuple(round(size / sum(sizes), 4) for size in sizes)


def layer(number: int, experts: int = 16, kept: int = 12, gone: int = 1, **others: Any) -> LayerReport:
    """The last experts are dropped, those before them merged into the first slots by turns."""
    made = random.Random(number)
    grouped = experts - gone
    groups = tuple(tuple(range(slot, grouped, kept)) for slot in range(kept))
    matrix = [[1.0] * experts for _ in range(experts)]
    for row in range(experts):
        for column in range(row):
            alike = row % kept == column % kept and row < grouped
            matrix[row][column] = matrix[column][row] = round(made.uniform(0.5, 0.9) if alike else made.random() / 2, 4)
    planned: dict[str, Any] = {
        "groups": groups, "rescaled": (), "decided_by": "mean outputs, average linkage",
        "heldout_error_before": round(0.11 + 0.001 * number, 4), "heldout_error_after": round(0.02 + 0.001 * number, 4),
        "figures": {"largest_group": 2, "cost": {"a_b": 1.5}},
    }  # fmt: skip
    fields: dict[str, Any] = {
        "module": f"model.layers.{number}.mlp.experts", "name": f"Layer {number}",
        "protected": (kept - 1,) if number == 1 else (),
        "similarity": tuple(map(tuple, matrix)),
        "similarity_label": "linear CKA of expert outputs, 256 tokens", "visits_before": shares(made, experts),
        "visits_after": shares(made, kept), "error": round(0.002 * (number + 1) + made.random() / 100, 6),
    }  # fmt: skip
    planned |= {name: others.pop(name) for name in planned if name in others}
    fields |= others
    errors = {"heldout_error_before": planned["heldout_error_before"], "heldout_error": planned["heldout_error_after"]}
    plan = LayerPlan(
        fields["module"], number, experts, min(2, kept),
        tuple(group(members, 0.5 if members[0] in planned["rescaled"] else 1.0) for members in planned["groups"]),
        decided_by=planned["decided_by"], figures={**planned["figures"], "correction": errors},
    )  # fmt: skip
    return LayerReport(plan=plan, **fields)


def group(members: tuple[int, ...], scale: float = 1.0) -> Group:
    """These experts in equal parts."""
    parts = (1 / len(members),) * len(members)
    return Group(members, parts, parts, scale)


ROUTERS = {
    "name": "routers", "options": {"method": "auto"}, "result": {
        "before": 0.41, "after": 0.36, "taken": "router", "steps": [
            {"ridge": 0.01, "step": 1.5, "gain": 0.05, "standard_error": 0.004},
            {"ridge": 0.0, "step": 0.0, "gain": 0.0, "standard_error": 0.0}]}}  # fmt: skip
DISTILLED = {
    "name": "distill", "options": {"train": "experts", "steps": 30}, "result": {
        "changed": True, "before": 0.36, "after": 0.125, "best": 20, "ended": "all steps are done", "curve": [
            {"step": 10 * number, "kl": apart, "loss": 2 + apart, "training": {}}
            for number, apart in enumerate((0.36, 0.21, 0.125, 0.13))]}}  # fmt: skip
STEPS: tuple[dict[str, Any], ...] = (ROUTERS, DISTILLED)


def report(depth: int = 4, experts: int = 16, kept: int = 12, **others: Any) -> Report:
    """Everything known, of so many layers."""
    hub = Hub("model.layers.1.mlp.experts", 1, kept - 1, 3.21, 40.1, 7.2, 5.5, 0.31)
    planned: dict[str, Any] = {
        "source": "org/some-moe-model", "revision": "c0ffee123", "strategy": "hc-smoe",
        "options": {"linkage": "average"}, "correction": {"method": "tune", "steps": 300}, "steps": STEPS,
        "calibration": {"source": "texts.jsonl", "samples": 128, "sequence_length": 512, "sha256": "bcd778843d96ce6f",
                        "sources": [{"source": "a.jsonl", "weight": 0.25}, {"source": "b.jsonl", "weight": 0.75}]},
    }  # fmt: skip
    fields: dict[str, Any] = {
        "out": "smaller-model", "experts_before": experts, "experts_after": kept,
        "before": Size(2_991_616, 5_983_232), "after": Size(2_301_440, 4_602_880),
        "versions": {"torch": "2.13.0", "transformers": "5.23.0"},
        "layers": tuple(layer(number, experts, kept) for number in range(depth)),
        "seconds": {"calibrating": 22.41, "planning": 1.2, "correcting": 40.7}, "peak_memory": 812_345_678,
        "command": ("moe-compress", "compress", "org/some-moe-model", "-o", "smaller model"), "gate": mixed(),
        "hubs": (hub,), "missing": ("No second opinion was asked for; give --opinion.",), "left_out": ("mtp.layers.0",),
        "zeroed_fields": ("num_nextn",), "measured_tokens": 16_384, "measured_text": "texts.jsonl",
    }  # fmt: skip
    planned |= {name: others.pop(name) for name in planned if name in others}
    fields |= others
    fields["layers"] = named(fields["layers"])
    return Report(plan=a_plan(fields["layers"], **planned), **fields)


def a_plan(
    layers: tuple[LayerReport, ...], *, source: str, revision: str | None, strategy: str, options: dict[str, Any],
    correction: dict[str, Any] | None, steps: tuple[dict[str, Any], ...], calibration: dict[str, Any] | None,
) -> Plan:  # fmt: skip
    """The plan of layers that were pruned, with further steps on the whole model."""
    protected = {each.module: list(each.protected) for each in layers if each.protected}
    decided = {
        "experts": len(layers[0].plan.groups), "protected": protected,
        "layers": [layer_to_dict(each.plan) for each in layers],
    }  # fmt: skip
    asked = {"strategy": strategy, "options": options, **({"correct": correction} if correction else {})}
    made = [
        PlannedStep("prune", asked, decision_from_dict(decided, "prune")),
        *(PlannedStep(each["name"], each["options"], None, each["result"]) for each in steps),
    ]
    return Plan(Source(source, revision, "f" * 64), tuple(made), calibration)


def bare(**others: Any) -> Report:
    """What a plan without data, record, measurement and gate leaves."""
    unknown: dict[str, Any] = dict.fromkeys(
        ("similarity", "visits_before", "visits_after", "error", "heldout_error_before",
         "heldout_error_after")
    )  # fmt: skip
    layers = tuple(layer(number, similarity_label="", protected=(), figures={}, **unknown) for number in range(2))
    fields: dict[str, Any] = {
        "layers": layers, "revision": None, "options": {}, "correction": None, "calibration": None, "steps": (),
        "seconds": {}, "peak_memory": 0, "command": None, "gate": None, "hubs": (),
        "missing": ("The source was not found; name it with --model.",), "measured_tokens": 0, "measured_text": None,
    }  # fmt: skip
    return report(**{**fields, **others})


def hostile() -> Report:
    """Names that would do harm wherever a name can stand."""
    gate = mixed()
    tasks = tuple(replace(each, task=HOSTILE + each.task, metric=HOSTILE) for each in gate.tasks)
    layers = tuple(
        layer(0, module=f"{HOSTILE}{number}", decided_by=HOSTILE, similarity_label=HOSTILE, figures={HOSTILE: HOSTILE})
        for number in range(2)
    )
    return report(
        out=re.sub("[/\x00\ud800]", "", HOSTILE), source=HOSTILE, revision=HOSTILE, strategy=HOSTILE,
        options={HOSTILE: HOSTILE}, correction={"method": HOSTILE},
        calibration={"source": HOSTILE, "sha256": HOSTILE, HOSTILE: HOSTILE}, versions={HOSTILE: HOSTILE},
        layers=layers, seconds={HOSTILE: 1.0}, command=(HOSTILE,),
        gate=replace(gate, base=HOSTILE, compressed=HOSTILE, tasks=tasks, options={HOSTILE: HOSTILE}),
        hubs=(Hub(HOSTILE, 0, 1, 3.21, 40.1, 7.2, 5.5, 0.31),), missing=(HOSTILE,),
        left_out=(HOSTILE,), zeroed_fields=(HOSTILE,), measured_text=HOSTILE,
        steps=(
            {"name": HOSTILE, "options": {HOSTILE: HOSTILE}, "result": {HOSTILE: HOSTILE}},
            {"name": "distill", "options": {HOSTILE: HOSTILE}, "result": {HOSTILE: HOSTILE}},
            {"name": "routers", "options": {}, "result": {
                "before": 0.4, "after": 0.3, "taken": HOSTILE, "layers": [{"place": HOSTILE}], "steps": []}},
            {"name": "distill", "options": {}, "result": {
                "changed": True, "before": "Infinity", "best": 1, "after": 0.1, "ended": HOSTILE, "curve": [
                    {"step": number, "kl": apart, "loss": "NaN", "training": {HOSTILE: 1.0}}
                    for number, apart in enumerate(("Infinity", 0.1, 0.2))]}},
        ),
    )  # fmt: skip


class Tree(HTMLParser):
    """A page's elements in order, each with its attributes, its ancestors and the text in it; refuses wrong nesting."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self.ancestors: list[list[str]] = []
        self._open: list[int] = []
        self.feed(page)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names))
        self.ancestors.append([self.elements[place][0] for place in self._open])
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))
        if tag not in VOID:
            self._open.append(len(self.elements) - 1)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.elements[self._open.pop()][0] == tag

    def handle_data(self, data: str) -> None:
        for place in self._open:
            self.elements[place][2].append(data)

    def named(self, *tags: str) -> Iterator[tuple[dict[str, str], str]]:
        """Attributes and text of each element of these names."""
        return ((attributes, "".join(text)) for tag, attributes, text in self.elements if tag in tags)
