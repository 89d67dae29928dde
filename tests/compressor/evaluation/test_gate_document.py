"""The gate's result as Markdown: cells read back, names shown as they are, the items needed against their power."""

import math
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from compressor.document import markdown as rendered
from compressor.evaluation.gate_report import advice, change, gate_blocks, items_needed, level, verdict_line
from compressor.evaluation.gate_verdict import GateResult, RoutedBy
from compressor.formatting import readable
from tests.gates import gate, gates, likelihood, mixed, task


def markdown(result: GateResult) -> str:
    return rendered.markdown(gate_blocks(result))


def table(text: str) -> list[dict[str, str]]:
    """The rows of the only table of a Markdown text, by column; a cell may hold an escaped bar."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    split = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    header, ruler, *rows = split
    assert all(set(cell) <= set(":-") for cell in ruler)
    return [dict(zip(header, cells, strict=True)) for cells in rows]


def shown_text(text: str) -> str:
    """What Markdown shows of escaped text."""
    return re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", text)


def test_cells_are_the_tasks_numbers() -> None:
    rows = table(markdown(mixed()))
    assert [row["task"] for row in rows] == ["boolq", "rte", "openbookqa", "wikitext"]
    for row, each in zip(rows, mixed().tasks, strict=True):
        assert row["verdict"] == each.verdict and row["items"] == str(each.items)
        assert row["lost / gained"] == f"{each.lost} / {each.gained}"
        assert float(row["base"]) == pytest.approx(each.base) and float(row["compressed"]) == each.compressed
        scale = 100 if each.kind == "likelihood" else 1
        figures = {"drop": each.drop, "at least": each.lower, "at most": each.upper, "detectable": each.detectable}
        for column, value in figures.items():
            assert row[column][0] in "+-" and row[column].endswith("%") == (scale == 100)
            assert float(row[column].rstrip("%")) == pytest.approx(scale * value, abs=5.1e-3 if scale > 1 else 5.1e-5)


def test_the_verdict_comes_first_and_all_else_is_told() -> None:
    text = markdown(mixed())
    assert text.startswith("# Accuracy gate: fail\n\n**Fail: with confidence 95%, more than 0.01 (1% of perplexity) ")
    assert "was lost on rte." in text.splitlines()[2]
    assert "wikitext: the perplexity is 1.0050 times the base's, at least 1.0033, at most 1.0067." in text
    assert "openbookqa: about" in text and "raise --limit, which is 500" in text
    assert "arXiv:2411.00640" in text and "(Holm)" in text and "commit c0ffee" in text
    assert "torch 2.13.0, lm-eval 0.4.13" in text and "boolq version 2.0" in text
    assert "stored by an earlier run" not in text and "(Holm)" not in markdown(gate(task()))
    assert "Base: org/model, commit c0ffee (results stored by" in markdown(gate(task(), reused_base=True))


def test_verdicts_as_sentences() -> None:
    assert verdict_line(gate(task())) == "Pass: with confidence 95%, no task lost more than 0.01."
    assert verdict_line(gate(likelihood(), max_drop=0.025, confidence=0.975)) == (
        "Pass: with confidence 97.5%, no task lost more than 2.5% of perplexity."
    )
    open_ended = gate(task(), task("rte", "inconclusive"), task("arc", "inconclusive"))
    assert verdict_line(open_ended) == (
        "Inconclusive: with confidence 95%, it cannot be said whether more than 0.01 was lost on rte, arc."
    )


def test_a_routed_model_is_told_of_with_the_verdict() -> None:
    options = {"optimizer": "ngd", "neighbours": 3, "radius": None}
    long = gate(task(), routing=RoutedBy("c3po", "0123456789abcdef", options, 3.456, 2))
    plain = "Pass: with confidence 95%, no task lost more than 0.01. The compressed model answered on pathways "
    assert verdict_line(long) == (
        f"{plain}optimised by c3po (ngd, 3 neighbours of the reference set 0123456789ab), which cost 3.46 plain "
        "forwards of the same items; left as they are, being too long: 2 items."
    )
    near = gate(task(), routing=RoutedBy("c3po", "ab", {**options, "optimizer": "mode", "radius": 0.5}, 2.0))
    assert "neighbours within reach of the reference set ab), which cost 2 plain forwards of the same items." in (
        markdown(near)
    )


@settings(max_examples=80, deadline=None)
@given(gates())
@example(gate(task(metric="\r")))
@example(gate(task(metric="\x1f")))
def test_any_names_stay_in_their_cells(result: GateResult) -> None:
    rows = table(markdown(result))
    for name in ("task", "metric"):
        wanted = [" ".join(readable(getattr(each, name)).split()) for each in result.tasks]
        assert [shown_text(row[name]) for row in rows] == wanted


def test_figures_without_a_number_are_signs() -> None:
    assert [level(x) for x in (math.inf, -math.inf, math.nan, 0.5, 123456.0)] == ["∞", "-∞", "-", "0.5000", "1.235e+05"]
    assert [change(x, "score") for x in (0.0, -0.00001, -0.02)] == ["+0.0000", "+0.0000", "-0.0200"]
    assert [change(x, "likelihood") for x in (0.0123, -0.5, math.inf)] == ["+1.23%", "-50.00%", "+∞"]


@settings(max_examples=60, deadline=None)
@given(st.floats(-0.05, 0.05), st.floats(0.02, 0.2), st.floats(0.8, 0.99), st.integers(1, 9), st.booleans())
def test_the_items_needed_decide_with_probability_four_fifths(
    drop: float, error: float, confidence: float, count: int, likelihoods: bool
) -> None:
    allowed = 0.01
    half = norm.ppf(confidence) * error
    figures = {"drop": drop, "lower": drop - half, "upper": drop + half}
    if likelihoods:  # the same on the scale of logarithms
        figures = {name: math.expm1(value) for name, value in figures.items()}
    made = (likelihood if likelihoods else task)(verdict="inconclusive", items=10_000, **figures)
    found = items_needed(made, math.expm1(allowed) if likelihoods else allowed, confidence, count)
    if found is None:
        assert abs(allowed - drop) < 0.3 * error
    else:
        distance = abs(allowed - drop) / (error * math.sqrt(10_000 / found))  # in standard errors of so many items
        power = norm.sf(norm.isf((1 - confidence) / count) - distance)
        assert power == pytest.approx(0.8, abs=0.005) or found < 100


def test_items_needed_by_hand() -> None:
    # 0.0185 from the bound to the drop, 0.006 from there to the margin: 500 * (0.0185 / 0.006 * 2.4865 / 1.6449)^2
    result = gate(task(verdict="inconclusive"), options={})
    assert items_needed(result.tasks[0], 0.01, 0.95) == pytest.approx(10862, abs=5)
    told = advice(result)
    assert "boolq: about 11,000 items would decide it instead of 500, an estimate" in told[0]
    assert "no more items" in told[1] and not advice(gate(task()))
    assert "too near the margin" in advice(gate(task(verdict="inconclusive", drop=0.01)))[0]
