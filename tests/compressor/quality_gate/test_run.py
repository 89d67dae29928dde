import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compressor.answers.tasks import EvaluationTask
from compressor.errors import CompressionError
from compressor.quality_gate.options import GateOptions
from compressor.quality_gate.report import power_blocks
from compressor.quality_gate.run import FLIPS, analyse_power, passable
from compressor.quality_gate.statistics import at_most
from scripts import simulate_gate


def task(name: str, *counts: int, aggregation: str = "mean") -> EvaluationTask:
    """A task of these items, or a group with so many in each part."""
    part = SimpleNamespace(aggregation=lambda: {"metric": SimpleNamespace(__name__=aggregation)})
    return EvaluationTask(name, "1", {name: part}, len(counts) > 1, None, counts)


def asked(limit: int | None = None, **settings: Any) -> GateOptions:
    return GateOptions(tasks=("t",), limit=limit, **settings)


DEFAULT = (task("mmlu", *[246] * 57), task("boolq", 3270), task("openbookqa", 500), task("rte", 277))


def test_items_margins_and_what_they_show() -> None:
    found = analyse_power(DEFAULT, asked())
    assert found.pooled is not None and found.refusal is None
    assert [row.items for row in found.tasks] == [14022, 3270, 500, 277] and found.pooled.items == 18069
    assert [row.max_drop for row in (*found.tasks, found.pooled)] == [0.03] * 4 + [0.01]
    rte = found.tasks[3].shown
    assert rte is not None and rte[0] == pytest.approx(1 - 0.05 ** (1 / 277)) and rte[0] > 0.01
    assert all(row.shown is not None and [*row.shown] == sorted(row.shown) for row in found.tasks)
    for tasks in (DEFAULT[:2], DEFAULT[1:], (DEFAULT[1], DEFAULT[3])):  # those that the documentation names
        assert analyse_power(tasks, asked()).refusal is None
    limited = analyse_power(DEFAULT, asked(100))
    assert [row.items for row in limited.tasks] == [5700, 100, 100, 100]  # of each part of a group


@pytest.mark.parametrize("flips", FLIPS[1:])
def test_the_margin_shown_is_passed_four_times_in_five(flips: float) -> None:
    found = analyse_power([task("t", 2000)], asked())
    assert found.pooled is not None and found.pooled.shown is not None
    shares = [0.7 - flips / 2, flips / 2, flips / 2, 0.3 - flips / 2]  # both right, only one, only the other, none
    _, lost, gained, _ = np.random.default_rng(5).multinomial(2000, shares, size=2000).T
    passing, _ = simulate_gate.exact(lost, gained, 2000, found.pooled.shown[FLIPS.index(flips)])
    assert (passing < 0.05).mean() == pytest.approx(0.8, abs=0.04)


def test_a_perplexity_is_held_to_the_margin_and_foretells_nothing() -> None:
    text = task("wikitext", 62, aggregation="weighted_perplexity")
    found = analyse_power([text], asked(5))
    assert (found.tasks[0].items, found.tasks[0].max_drop, found.tasks[0].shown) == (5, 0.01, None)
    assert found.pooled is None and found.refusal is None
    mixed = analyse_power([text, task("rte", 277)], asked())
    assert mixed.pooled is not None and mixed.pooled.items == 277 and mixed.refusal is not None
    rows = power_blocks(mixed)[0].rows
    assert [row[:4] for row in rows] == [
        ("wikitext", "62", "0.01", "-"), ("rte", "277", "0.03", "0.0108"), ("all together", "277", "0.01", "0.0108")
    ]  # fmt: skip


@given(st.integers(1, 3000), st.sampled_from([1e-3, 0.01, 0.05, 0.3]), st.sampled_from([0.6, 0.95, 0.999]))
def test_what_no_identical_model_passes_is_refused(items: int, max_drop: float, confidence: float) -> None:
    request = asked(items, max_drop=max_drop, confidence=confidence)
    tasks = [task("a", 2 * 10**4), task("b", 10)]
    refusal = analyse_power(tasks, request).refusal
    count = items + min(items, 10)
    assert (refusal is None) == ((1 - max_drop) ** count < 1 - confidence)
    if refusal is not None:
        numbers = re.search(r"at least ([\d,]+) items \(--limit (\d+)\), or --max-drop ([\d.e-]+)", refusal)
        assert numbers is not None
        needed, limit, margin = int(numbers[1].replace(",", "")), int(numbers[2]), float(numbers[3])
        assert at_most(0, 0, needed, max_drop) < 1 - confidence <= at_most(0, 0, needed - 1, max_drop)
        for other in (asked(limit, max_drop=max_drop, confidence=confidence),
                      asked(items, max_drop=margin, confidence=confidence)):  # fmt: skip
            assert analyse_power(tasks, other).refusal is None
        assert analyse_power(tasks, asked(limit - 1, max_drop=max_drop, confidence=confidence)).refusal is not None


RTE = [task("rte", 277)]


@pytest.mark.parametrize(
    ("options", "tasks", "message"),
    [
        (asked(), RTE, r"277 items .* of no more than 0\.01; it takes at least 299 items \(name more tasks\), or"),
        (asked(20), DEFAULT[1:], r"60 items .*95%.* at least 299 items \(--limit 100\), or --max-drop 0\.049"),
        (asked(max_drop=0), DEFAULT, r"it takes --max-drop 0\.00017, or --inconclusive pass"),
        (asked(max_drop=5e-324), DEFAULT, r"it takes --max-drop 0\.00017, or --inconclusive pass"),
    ],
)
def test_refusals_say_what_would_do(options: GateOptions, tasks: list[EvaluationTask], message: str) -> None:
    with pytest.raises(CompressionError, match=f"this gate could not even pass an identical model: .*{message}"):
        passable(analyse_power(tasks, options))


def test_a_gate_that_may_stay_undecided_is_not_refused() -> None:
    assert analyse_power([task("rte", 277)], asked(inconclusive="pass")).refusal is None
    assert analyse_power([task("rte", 277)], asked(inconclusive="fail")).refusal is not None
    assert passable(analyse_power([task("rte", 299)], asked())).refusal is None
