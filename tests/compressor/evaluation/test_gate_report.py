"""The gate's reports: read back, read by stock parsers, escaped, accepted by the Hub's cards, whole or not there."""

import json
import logging
import math
import re
import warnings
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from huggingface_hub import ModelCardData
from hypothesis import given, settings

from compressor.cli.rendering import show_gate, show_gated
from compressor.cli.searching import Attempt, Gated
from compressor.document.markdown import markdown
from compressor.errors import CompressionError
from compressor.evaluation import gate_report
from compressor.evaluation.gate_report import (
    append_summary,
    card_metrics,
    gate_blocks,
    gate_json,
    model_index,
    read_gate,
    write_gate,
)
from compressor.evaluation.gate_verdict import GateResult, gate_content, gate_from_content
from compressor.files import check_folder
from tests.gates import gate, gates, likelihood, mixed, task


def strict(text: str) -> Any:
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


# JSON


@settings(max_examples=80, deadline=None)
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


def test_files_are_read_back_by_file_and_folder(tmp_path: Path) -> None:
    written = write_gate(mixed(), tmp_path / "out", overwrite=False)
    assert read_gate(written[0]) == read_gate(tmp_path / "out") == mixed()
    content = strict(written[0].read_text(encoding="utf-8"))
    assert content["format"] == "moe-compressor-gate/1"
    assert content["model_index"] == model_index(mixed())


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.pop("format"), "no report of the gate in the format moe-compressor-gate/1"),
        (lambda c: c.update(format="moe-compressor-gate/2"), "no report of the gate"),
        (lambda c: c.pop("base"), "base is missing"),
        (lambda c: c["tasks"][1].pop("upper"), r"tasks\[1\].upper|tasks\[1\]\.upper is missing"),
        (lambda c: c["tasks"][0].update(lost=1.5), r"tasks\[0\].lost should be a whole number, it is 1.5"),
        (lambda c: c["tasks"][0].update(drop=True), r"tasks\[0\].drop should be a number, it is True"),
        (lambda c: c["tasks"][0].update(drop=[]), r"tasks\[0\].drop should be a number, it is \[\]"),
        (lambda c: c["tasks"][0].update(verdict="maybe"), "verdict should be one of pass, fail, inconclusive"),
        (lambda c: c["tasks"][3].update(perplexity_ratio=[1.0]), "perplexity_ratio should be a list of 3"),
        (lambda c: c.update(tasks=c["tasks"] * 251), "tasks should be 1,000 at most, they are 1,004"),
        (lambda c: c.update(tasks={}), "tasks should be a list, it is {}"),
        (lambda c: c.update(tasks=[7]), r"tasks\[0\] should be an object, it is 7"),
        (lambda c: c.update(options=[]), r"options should be an object, it is \[\]"),
        (lambda c: c.update(versions={"torch": 2}), "versions.torch should be text, it is 2"),
        (lambda c: c.update(reused_base="yes"), "reused_base should be true or false"),
    ],
)
def test_what_is_no_result_is_refused(edit: Any, message: str, tmp_path: Path) -> None:
    content = strict(gate_json(mixed()))
    edit(content)
    file = tmp_path / "gate.json"
    file.write_text(json.dumps(content))
    with pytest.raises(CompressionError, match=rf"gate\.json: .*({message}).*; name a gate\.json that"):
        read_gate(file)


def test_files_that_are_no_json_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match=r"absent cannot be read \(No such file or directory\); name a gate"):
        read_gate(tmp_path / "absent")
    for content in (b"{", b"\xff", b"[" * 100_000):
        (tmp_path / "odd").write_bytes(content)
        with pytest.raises(CompressionError, match=r"odd is not valid JSON .*; name a gate"):
            read_gate(tmp_path / "odd")


def test_further_fields_are_left_aside_and_those_with_defaults_may_lack() -> None:
    content = {**gate_content(mixed()), "later": 1}
    assert gate_from_content(content) == mixed()
    assert gate_from_content({k: v for k, v in content.items() if k != "seconds"}).seconds == {}


# Files


def test_reports_are_three_files_in_a_new_folder(tmp_path: Path) -> None:
    written = write_gate(mixed(), tmp_path / "out", overwrite=False)
    assert [path.name for path in written] == ["gate.json", "gate.xml", "gate.md"]
    assert list(tmp_path.iterdir()) == [tmp_path / "out"] and sorted(written) == sorted((tmp_path / "out").iterdir())
    assert ElementTree.parse(written[1]).getroot().tag == "testsuites"
    assert written[2].read_text(encoding="utf-8") == markdown(gate_blocks(mixed()))
    with pytest.raises(CompressionError, match="out exists already"):
        check_folder(tmp_path / "out", gate_report.NAMES)
    assert write_gate(gate(task()), tmp_path / "out", overwrite=True) == written
    assert read_gate(written[0]) == gate(task()) and list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_names_that_utf8_cannot_hold_are_written(tmp_path: Path) -> None:
    result = gate(task(), compressed="folder-\udcff")  # as Python names a file of other bytes
    written = write_gate(result, tmp_path / "out", overwrite=False)
    assert read_gate(written[0]) == result
    assert "folder-\\udcff" in ElementTree.parse(written[1]).getroot()[0].attrib["name"]
    assert r"folder-\\udcff" in written[2].read_text(encoding="utf-8")


@pytest.mark.parametrize("part", ["junit", "markdown"])
@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing(
    part: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Any) -> Any:
        raise error

    write_gate(mixed(), tmp_path / "old", overwrite=False)
    monkeypatch.setattr(gate_report, part, fail)
    for name, overwrite in (("new", False), ("old", True)):
        with pytest.raises(type(error)):
            write_gate(gate(task()), tmp_path / name, overwrite)
    assert list(tmp_path.iterdir()) == [tmp_path / "old"] and read_gate(tmp_path / "old") == mixed()


def test_a_summary_is_appended(tmp_path: Path) -> None:
    page = tmp_path / "summary.md"
    page.write_text("before")
    append_summary(gate(task()), page)
    append_summary(mixed(), page)
    text = page.read_text(encoding="utf-8")
    assert text == f"before\n{markdown(gate_blocks(gate(task())))}\n\n{markdown(gate_blocks(mixed()))}\n"


def test_a_summary_that_cannot_be_written_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for path, reason in ((tmp_path / "absent", "No such file"), (tmp_path, "Is a directory")):
        caplog.clear()
        append_summary(gate(task()), path)
        (record,) = caplog.records
        assert record.levelno == logging.WARNING and reason in record.getMessage()
    assert not list(tmp_path.iterdir())


# The model card


def test_card_metrics_are_accepted_by_the_hubs_cards(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        card = ModelCardData(model_name="smaller", eval_results=card_metrics(mixed()))
        text = card.to_yaml()
    assert not caplog.records
    assert "value: 0.746" in text and "verified: false" in text
    back = ModelCardData(**card.to_dict())
    assert back.eval_results == card_metrics(mixed())
    for found, each in zip(card_metrics(mixed()), mixed().tasks, strict=True):
        assert (found.task_type, found.dataset_type, found.dataset_name) == ("text-generation", each.task, each.task)
        assert (found.metric_type, found.metric_value) == (each.metric, each.compressed)
        assert f"base {each.base:.4f}, drop +" in str(found.metric_name)
    assert card.to_dict()["model-index"] == model_index(mixed())


def test_a_card_names_no_folder_and_no_figure_that_is_none() -> None:
    (index,) = model_index(gate(task(), likelihood(compressed=math.inf), compressed="/home/me/smaller"))
    assert index["name"] == "smaller"
    assert [result["dataset"]["name"] for result in index["results"]] == ["boolq"]


# The terminal


def test_json_is_the_report_and_what_was_written(capsys: pytest.CaptureFixture[str]) -> None:
    show_gate(mixed(), as_json=True, written=[Path("out/gate.json")])
    content = strict(capsys.readouterr().out)
    assert content.pop("written") == ["out/gate.json"]
    assert content == strict(gate_json(mixed())) and gate_from_content(content) == mixed()


def test_the_printed_table_has_a_row_for_each_task(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    show_gate(gate(*mixed().tasks, task("[bold]x")), as_json=False, written=[Path("out") / "gate.md"])
    out = capsys.readouterr().out
    lines = [[cell.strip() for cell in line[1:-1].split("│")] for line in out.splitlines() if line.startswith("│")]
    rows = {cells[0]: cells for cells in lines}
    assert rows["rte"][3:8] == ["0.7500", "0.6700", "+0.0800", "+0.0500", "+0.1100"] and rows["rte"][-1] == "fail"
    assert rows["wikitext"][5] == "+0.50%" and "[bold]x" in rows
    assert "Fail: with confidence 95%" in out and "Written: out/gate.md" in out and "about" in out


def test_names_are_whole_where_no_terminal_limits_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    show_gate(gate(task("moe_demo_arithmetic", "inconclusive")), as_json=False)
    assert re.search("│ moe_demo_arithmetic │ .*│ *inconclusive │", capsys.readouterr().out)


def test_a_narrow_terminal_shows_fewer_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # which rich takes for a terminal
    monkeypatch.setenv("COLUMNS", "80")
    show_gate(mixed(), as_json=False)
    text = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    table, _, below = text.partition("└")
    assert "+0.0800" in table and "detectable" not in table and "+0.50%" in table
    assert "In a wider terminal, or with --json: metric, detectable, lost / gained" in below


def test_a_compression_under_a_gate_shows_its_attempts(capsys: pytest.CaptureFixture[str]) -> None:
    attempts = (Attempt(6, gate(task(verdict="fail")), False), Attempt(7, mixed(), False))
    found = Gated(None, attempts)
    show_gated(found, as_json=True, written=[])
    content = strict(capsys.readouterr().out)
    assert gate_from_content(content) == mixed() and content["compression"] is None
    assert [entry["experts"] for entry in content["attempts"]] == [6, 7]
    show_gated(found, as_json=False, written=[Path("smaller.gate/gate.md")])
    out = capsys.readouterr().out
    assert "Models tried" in out and "org/smaller was not written." in out and "Fail: with" in out
