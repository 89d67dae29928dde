import json
import logging
import math
import re
from pathlib import Path
from typing import Any
from unicodedata import category
from xml.dom import minidom
from xml.etree import ElementTree

import pytest
from huggingface_hub import ModelCardData
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import norm

from compressor.cli.compress import show_gated
from compressor.cli.gate import summarise
from compressor.errors import CompressionError
from compressor.formatting import readable
from compressor.pipeline.outcome import Attempt
from compressor.quality_gate.report import (
    advice,
    card_metrics,
    change,
    full_content,
    gate_json,
    junit,
    level,
    read_gate,
    verdict_line,
    write_gate,
)
from compressor.quality_gate.report import gate_page as page
from compressor.quality_gate.statistics import items_needed
from compressor.quality_gate.verdict import GateResult, gate_from_content
from tests.support.gate_results import gate, gates, likelihood, mixed, pool, task
from tests.support.report_data import table

TURNS = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # the direction of what follows


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


@given(gates())
def test_any_result_is_read_back_from_strict_json(result: GateResult) -> None:
    assert gate_from_content(strict(gate_json(result))) == result


def test_what_is_no_number_is_read_back() -> None:
    result = gate(task(drop=math.nan, lower=-math.inf, upper=math.inf), options={"folder": Path("a"), "both": (1, 2)})
    content = strict(gate_json(result))
    (shown,) = content["tasks"]
    assert (shown["drop"], shown["lower"], shown["upper"]) == ("NaN", "-Infinity", "Infinity")
    back = gate_from_content(content)
    assert math.isnan(back.tasks[0].drop) and back.tasks[0].upper == math.inf
    assert back.options == {"folder": "a", "both": [1, 2]}


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.pop("format"), "no report of the gate in the format moe-compressor-gate/2"),
        (lambda c: c.update(format="moe-compressor-gate/1"), "no report of the gate"),
        (lambda c: c["tasks"][1].pop("upper"), r"tasks\[1\]\.upper is missing"),
        (lambda c: c["pooled"].pop("upper"), r"pooled\.upper is missing"),
        (lambda c: c["tasks"][0].update(verdict="maybe"), "verdict should be 'pass', 'fail' or 'inconclusive'"),
        (lambda c: c["tasks"][3].update(perplexity_ratio=[1.0]), r"perplexity_ratio\[1\] is missing"),
    ],
)
def test_what_is_no_result_is_refused(edit: Any, message: str, tmp_path: Path) -> None:
    content = strict(gate_json(mixed()))
    edit(content)
    file = tmp_path / "gate.json"
    file.write_text(json.dumps(content))
    with pytest.raises(CompressionError, match=rf"gate\.json: .*({message}).*; name a gate\.json that"):
        read_gate(file)


def test_reports_are_three_files_in_a_new_folder(tmp_path: Path) -> None:
    written = write_gate(mixed(), tmp_path / "out", overwrite=False)
    assert [path.name for path in written] == ["gate.json", "gate.xml", "gate.md"]
    assert list(tmp_path.iterdir()) == [tmp_path / "out"] and sorted(written) == sorted((tmp_path / "out").iterdir())
    assert read_gate(written[0]) == read_gate(tmp_path / "out") == mixed()
    assert written[0].read_text(encoding="utf-8") == gate_json(mixed())
    assert ElementTree.parse(written[1]).getroot().tag == "testsuites"
    assert written[2].read_text(encoding="utf-8") == page(mixed())
    assert write_gate(gate(task()), tmp_path / "out", overwrite=True) == written
    assert read_gate(written[0]) == gate(task()) and list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_names_that_utf8_cannot_hold_are_written(tmp_path: Path) -> None:
    result = gate(task(), compressed="folder-\udcff")  # as Python names a file of other bytes
    written = write_gate(result, tmp_path / "out", overwrite=False)
    assert read_gate(written[0]) == result
    assert "folder-\\udcff" in ElementTree.parse(written[1]).getroot()[0].attrib["name"]
    assert r"folder-\\udcff" in written[2].read_text(encoding="utf-8")


def test_a_summary_is_appended_or_a_warning_given(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path))
    summarise(gate(task()), as_json=True)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING and "Is a directory" in record.getMessage()
    assert not list(tmp_path.iterdir())
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    summary.write_text("before")
    for result in (gate(task()), mixed()):
        summarise(result, as_json=True)
    assert summary.read_text(encoding="utf-8") == f"before\n{page(gate(task()))}\n\n{page(mixed())}\n"


def test_card_metrics_have_the_figures_of_both_models() -> None:
    for found, each in zip(card_metrics(mixed()), mixed().tasks, strict=True):
        assert (found.task_type, found.dataset_type, found.dataset_name) == ("text-generation", each.task, each.task)
        assert (found.metric_type, found.metric_value) == (each.metric, each.compressed)
        assert f"base {each.base:.4f}, drop +" in str(found.metric_name)
    card = ModelCardData(model_name="smaller", eval_results=card_metrics(mixed()))
    assert card.to_dict()["model-index"] == full_content(mixed())["model_index"]


def test_a_card_names_no_folder_and_no_figure_that_is_none() -> None:
    result = gate(task(), likelihood(compressed=math.inf), compressed="/home/me/smaller")
    (index,) = full_content(result)["model_index"]
    assert index["name"] == "smaller"
    assert [result["dataset"]["name"] for result in index["results"]] == ["boolq"]


def test_a_compression_under_a_gate_shows_its_attempts(capsys: pytest.CaptureFixture[str]) -> None:
    attempts = (Attempt(6, gate(task(verdict="fail")), False), Attempt(7, mixed(), False))
    show_gated(mixed(), None, attempts, [], as_json=True)
    content = strict(capsys.readouterr().out)
    assert gate_from_content(content) == mixed() and content["compression"] is None
    assert [entry["experts"] for entry in content["attempts"]] == [6, 7]
    show_gated(mixed(), None, attempts, [Path("smaller.gate/gate.md")], as_json=False)
    out = capsys.readouterr().out
    assert "Models tried" in out and "org/smaller was not written." in out and "Fail: with" in out


def shown_text(text: str) -> str:
    return re.sub(r"\\([!-/:-@\[-`{-~])", r"\1", text)


def test_cells_are_the_tasks_numbers() -> None:
    rows = table(page(mixed()))
    assert [row["task"] for row in rows] == ["boolq", "rte", "openbookqa", "wikitext", "all together"]
    for row, each in zip(rows, mixed().rows, strict=True):
        assert row["verdict"] == each.verdict and row["items"] == f"{each.items:,}"
        assert row["lost / gained"] == f"{each.lost} / {each.gained}"
        assert float(row["base"]) == pytest.approx(each.base) and float(row["compressed"]) == each.compressed
        scale = 100 if each.kind == "likelihood" else 1
        figures = {"drop": each.drop, "at least": each.lower, "at most": each.upper, "detectable": each.detectable}
        for column, value in figures.items():
            assert row[column][0] in "+-" and row[column].endswith("%") == (scale == 100)
            assert float(row[column].rstrip("%")) == pytest.approx(scale * value, abs=5.1e-3 if scale > 1 else 5.1e-5)


def test_the_verdict_comes_first_and_all_else_is_told() -> None:
    text = page(mixed())
    assert text.startswith(
        "<!-- moe-compress gate: org/model, org/smaller -->\n"
        "# Accuracy gate: fail\n\n**Fail: with confidence 95%, more than 0.03 was lost on rte and more than 0.01 was "
        "lost over all 1,500 items."
    )
    assert "would decide" not in text  # for it is decided, whatever a task alone says
    assert "arXiv:2411.00640" in text and "(Holm)" in text and "commit c0ffee" in text
    assert "torch 2.13.0, lm-eval 0.4.13" in text and "boolq version 2.0" in text
    assert "of an earlier run" not in text
    assert "The base's results are of an earlier run." in page(gate(task(), reused_base=True))
    both = page(gate(task(), streamed=("base", "compressed")))
    assert "With one layer in memory at a time: the base and the compressed model." in both


def test_verdicts_as_sentences() -> None:
    plain = "Pass: with confidence 95%, no more than 0.01 was lost over all 500 items"
    assert verdict_line(gate(task())) == f"{plain}."
    assert verdict_line(gate(likelihood(max_drop=0.025), confidence=0.975)) == (
        "Pass: with confidence 97.5%, no more than 2.5% of perplexity was lost on wikitext."
    )
    both = "no more than 1% of perplexity was lost on wikitext and no more than 0.01 was lost over all 500 items"
    assert verdict_line(gate(task(), likelihood())) == f"Pass: with confidence 95%, {both}."
    assert verdict_line(gate(task(), task("rte", "inconclusive"))) == (
        "Inconclusive: with confidence 95%, it cannot be said whether more than 0.01 was lost over all 1,000 items."
    )
    refused = gate(task(), task("rte", "fail"), pooled=pool(items=1000))
    assert verdict_line(refused) == "Fail: with confidence 95%, more than 0.03 was lost on rte."
    undecided = gate(task(verdict="inconclusive"), pooled=pool(items=500))  # a task alone need not be decided
    assert verdict_line(undecided) == f"{plain}."


@given(gates())
@example(gate(task(metric="\r")))
@example(gate(task(metric="\x1f")))
def test_any_names_stay_in_their_cells(result: GateResult) -> None:
    rows = table(page(result))
    for name in ("task", "metric"):
        wanted = [" ".join(readable(getattr(each, name)).split()) for each in result.rows]
        assert [shown_text(row[name]) for row in rows] == wanted


def test_figures_without_a_number_are_signs() -> None:
    levels = [level(x) for x in (math.inf, -math.inf, math.nan, 0.5, 123456.0)]
    assert levels == ["inf", "-inf", "nan", "0.5000", "1.235e+05"]
    assert [change(x, "score") for x in (0.0, -0.00001, -0.02)] == ["+0.0000", "+0.0000", "-0.0200"]
    assert [change(x, "likelihood") for x in (0.0123, -0.5, math.inf)] == ["+1.23%", "-50.00%", "+inf%"]


@given(st.floats(-0.05, 0.05), st.floats(0.02, 0.2), st.floats(0.8, 0.99), st.booleans())
def test_the_items_needed_decide_with_probability_four_fifths(
    drop: float, error: float, confidence: float, likelihoods: bool
) -> None:
    allowed = 0.01
    half = norm.ppf(confidence) * error
    figures = {"drop": drop, "lower": drop - half, "upper": drop + half, "max_drop": allowed}
    if likelihoods:  # the same on the scale of logarithms
        figures = {name: math.expm1(value) for name, value in figures.items()}
    made = (likelihood if likelihoods else task)(verdict="inconclusive", items=10_000, **figures)
    found = items_needed(made, confidence)
    if found is None:
        assert abs(allowed - drop) < 0.3 * error
    else:
        distance = abs(allowed - drop) / (error * math.sqrt(10_000 / found))  # in standard errors of so many items
        power = norm.sf(norm.isf(1 - confidence) - distance)
        assert power == pytest.approx(0.8, abs=0.005) or found < 100


def test_items_needed_by_hand() -> None:
    # 0.0185 from the bound to the drop, 0.006 from there to the margin: 500 * (0.0185 / 0.006 * 2.4865 / 1.6449)^2
    result = gate(task(verdict="inconclusive"), options={})
    assert result.pooled is not None and items_needed(result.pooled, 0.95) == pytest.approx(10862, abs=5)
    sentences = advice(result)
    assert "all together: about 11,000 items would decide it instead of 500, an estimate" in sentences[0]
    assert "Name more tasks" in sentences[1] and not advice(gate(task()))
    assert "Raise --limit, which is 500" in advice(gate(task(verdict="inconclusive")))[1]
    assert "too near the margin" in advice(gate(likelihood(verdict="inconclusive", drop=0.01)))[0]


def test_no_name_turns_the_direction_of_what_follows() -> None:
    tasks = task(f"a{TURNS}b", "fail"), task(f"c{TURNS}", "inconclusive")
    made = junit(gate(*tasks, base=TURNS, options={TURNS: TURNS})).decode()
    assert not set(TURNS) & set(made) and made.count("\ufffd") > 6 * len(TURNS)


def test_junit_tells_each_task_and_the_whole() -> None:
    root = ElementTree.fromstring(junit(mixed()))
    (suite,) = root.findall("testsuite")
    counts = {"tests": "5", "failures": "2", "errors": "0", "skipped": "1", "time": "50.750"}
    assert counts.items() <= root.attrib.items() and counts.items() <= suite.attrib.items()
    cases = {case.attrib["name"]: case for case in suite.findall("testcase")}
    assert list(cases) == ["boolq", "rte", "openbookqa", "wikitext", "all together"]
    assert [name for name, case in cases.items() if case.find("failure") is not None] == ["rte", "all together"]
    assert [name for name, case in cases.items() if case.find("skipped") is not None] == ["openbookqa"]
    assert cases["rte"].find("failure").attrib["message"] == (  # type: ignore[union-attr]
        "acc dropped by +0.0800 (at least +0.0500, at most +0.1100); 0.03 is allowed"
    )
    properties = {each.attrib["name"]: each.attrib["value"] for each in suite.findall("properties/property")}
    named = {"exit-status": "1", "verdict": "fail", "base": "org/model", "max-drop": "0.01", "max-task-drop": "0.03"}
    assert named.items() <= properties.items()
    texts = [case.findtext("system-out") or "" for case in cases.values()]
    assert all("drop: +" in text and "p of pass: " in text for text in texts)
    (wiki,) = ElementTree.fromstring(junit(gate(likelihood(verdict="fail")))).iter("failure")
    assert wiki.attrib["message"].endswith("at most +0.67%); 1% of perplexity is allowed")
    assert suite[0].tag == "properties"  # as the schema orders them


@given(gates())
def test_any_result_is_xml_to_two_parsers(result: GateResult) -> None:
    made = junit(result)
    cases = ElementTree.fromstring(made).findall("testsuite/testcase")
    other = minidom.parseString(made).getElementsByTagName("testcase")
    assert [case.attrib["name"] for case in cases] == [case.getAttribute("name") for case in other]
    for case, each in zip(cases, result.rows, strict=True):
        allowed = all(category(letter) not in ("Cc", "Cn") and letter not in TURNS for letter in each.task)
        if allowed:
            assert case.attrib["name"] == each.task
        else:
            assert len(case.attrib["name"]) == len(each.task)
