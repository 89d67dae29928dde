from typing import Any

import numpy as np
import pytest
from scipy.stats import binomtest

from compressor.answers.scores import AnsweredItem, ItemScores
from compressor.errors import CompressionError
from compressor.quality_gate.options import Expectation, GateOptions
from compressor.quality_gate.statistics import find_anomalies
from compressor.quality_gate.verdict import Anomaly, TaskGate
from tests.support.gate_results import task

ITEMS = 200
RNG = np.random.default_rng(0)


def answered(name: str, values: Any, compressed: Any, chance: float | None = None) -> tuple[TaskGate, ItemScores]:
    """A task with the base's scores and another model's."""
    items = tuple(AnsweredItem(str(at), float(value)) for at, value in enumerate(values))
    lost, gained = int((values > compressed).sum()), int((values < compressed).sum())
    p = binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    mcnemar = p if set(values) <= {0, 1} else None
    means = {"base": float(values.mean()), "compressed": float(compressed.mean())}
    row = task(name, items=len(values), lost=lost, gained=gained, mcnemar=mcnemar, **means)
    return row, ItemScores(name, "acc", "1", "score", items, chance=chance)


def found(tasks: list[tuple[TaskGate, ItemScores]], *expect: str) -> tuple[Anomaly, ...]:
    rows, scores = zip(*tasks, strict=True)
    asked = {row.task: {"chat_template": "default"} for row in rows}
    return find_anomalies(rows, scores, {each.task: each for each in map(Expectation.read, expect)}, asked)


def drawn(right: float, flips: float = 0.0, items: int = ITEMS) -> tuple[Any, Any]:
    """A base that answers a share of the items right, and a model that flips as many either way."""
    base = (RNG.random(items) < right).astype(float)
    return base, np.where(RNG.random(items) < flips, (RNG.random(items) < right).astype(float), base)


@pytest.mark.parametrize("expect", [("a=0.7±0.05", "b=0.4"), ("a=0.8+-0.05", "b=0.4", "c=0.6±0")])
def test_where_nothing_is_wrong_few_runs_have_an_anomaly(expect: tuple[str, ...]) -> None:
    alarms = 0
    for _ in range(300):
        tasks = [answered("a", *drawn(0.75, 0.3), 0.5), answered("b", *drawn(0.4, 0.3), 0.25)]
        alarms += bool(found([*tasks, answered("c", *drawn(0.6, 0.3), 0.0)], *expect))
    assert alarms <= 15


@pytest.mark.parametrize(
    ("right", "better", "chance", "expect", "reason"),
    [
        (0.55, 0.55, 0.25, ("t=0.78±0.02",), "not 0.78±0.02 as expected"),
        (0.99, 0.99, 0.25, ("t=0.78+-0.02",), "as expected"),
        (0.25, 0.25, 0.25, (), "no better than guessing, 0.2500"),
        (0.0, 0.0, 0.0, (), "no better than guessing, 0.0000"),
        (0.5, 0.8, 0.25, (), "clearly worse than the compressed model"),
    ],
)
def test_what_is_wrong_is_found(
    right: float, better: float, chance: float, expect: tuple[str, ...], reason: str
) -> None:
    hits = 0
    for _ in range(20):
        base = RNG.permutation(np.arange(ITEMS) < right * ITEMS).astype(float)
        compressed = np.maximum(base, RNG.random(ITEMS) < (better - right) / (1 - right + 1e-9))
        sentences = [each.sentence for each in found([answered("t", base, compressed, chance)], *expect)]
        hits += any(reason in text and "used was default" in text for text in sentences)
    assert hits >= 19


def test_scores_that_are_no_right_answers_are_expected_too() -> None:
    base = RNG.normal(30, 5, ITEMS)
    assert not found([answered("bleu", base, base)], "bleu=30±1") and not found([answered("bleu", base, base)])
    assert found([answered("bleu", base, base)], "bleu=40±1")
    logs = RNG.normal(-2.0, 0.3, ITEMS)
    _, scores = answered("text", logs, logs)
    perplexity = task("text", kind="likelihood", items=ITEMS, base=float(np.exp(-logs.mean())), mcnemar=None)
    assert not found([(perplexity, scores)], "text=7.4±0.2") and found([(perplexity, scores)], "text=5±0.2")


def test_expectations_are_read_and_others_refused() -> None:
    options = GateOptions(tasks=("a", "b"), expect=("a=0.5, b = 7.8e-1 ± 0.02", "a=0.6+/-0.1"))
    read = {name: (each.value, each.tolerance) for name, each in options.expectations.items()}
    assert read == {"a": (0.6, 0.1), "b": (0.78, 0.02)}
    for text in ("a", "a=", "=0.5", "a=x", "a=0.5±-1", "a=nan", "a=0.5±"):
        with pytest.raises(CompressionError, match="should be task=score or task=score±tolerance"):
            GateOptions(tasks="a", expect=text)
    with pytest.raises(CompressionError, match=r"the task 'c', which is not asked; asked are a and b"):
        GateOptions(tasks="a,b", expect="c=0.5")
