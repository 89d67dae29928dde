"""The gate's reports: read back, read by stock parsers, escaped, accepted by the Hub's cards, whole or not there."""

import json
import logging
import math
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
    full_content,
    gate_blocks,
    gate_json,
    read_gate,
    write_gate,
)
from compressor.evaluation.gate_verdict import GateResult, gate_from_content
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


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda c: c.pop("format"), "no report of the gate in the format moe-compressor-gate/1"),
        (lambda c: c.update(format="moe-compressor-gate/2"), "no report of the gate"),
        (lambda c: c["tasks"][1].pop("upper"), r"tasks\[1\]\.upper is missing"),
        (lambda c: c["tasks"][0].update(verdict="maybe"), "verdict should be one of pass, fail, inconclusive"),
        (lambda c: c["tasks"][3].update(perplexity_ratio=[1.0]), "perplexity_ratio should be a list of 3"),
        (lambda c: c.update(tasks=c["tasks"] * 251), "tasks should be 1,000 at most, they are 1,004"),
    ],
)
def test_what_is_no_result_is_refused(edit: Any, message: str, tmp_path: Path) -> None:
    content = strict(gate_json(mixed()))
    edit(content)
    file = tmp_path / "gate.json"
    file.write_text(json.dumps(content))
    with pytest.raises(CompressionError, match=rf"gate\.json: .*({message}).*; name a gate\.json that"):
        read_gate(file)


# Files


def test_reports_are_three_files_in_a_new_folder(tmp_path: Path) -> None:
    written = write_gate(mixed(), tmp_path / "out", overwrite=False)
    assert [path.name for path in written] == ["gate.json", "gate.xml", "gate.md"]
    assert list(tmp_path.iterdir()) == [tmp_path / "out"] and sorted(written) == sorted((tmp_path / "out").iterdir())
    assert read_gate(written[0]) == read_gate(tmp_path / "out") == mixed()
    content = strict(written[0].read_text(encoding="utf-8"))
    assert content["format"] == "moe-compressor-gate/1"
    assert content == strict(gate_json(mixed()))
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
    assert card.to_dict()["model-index"] == full_content(mixed())["model_index"]


def test_a_card_names_no_folder_and_no_figure_that_is_none() -> None:
    result = gate(task(), likelihood(compressed=math.inf), compressed="/home/me/smaller")
    (index,) = full_content(result)["model_index"]
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
