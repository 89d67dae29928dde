"""`moe-compress report` through the command line, from nothing but what `compress` left."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compressor.report.page import SECTIONS
from tests.support import small
from tests.support.command_line import Run, captured, names, refused

pytestmark = pytest.mark.usefixtures("offline")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    small.save(folder / "model")
    (folder / "text.txt").write_text("\n\n".join(f"Document {number} of a text." for number in range(400)))
    ask = ("--calibration", folder / "text.txt", "--samples", 8, "--sequence-length", 32)
    result = captured("compress", folder / "model", "-o", folder / "out", "--experts", 4, "--strategy", "hc-smoe", *ask)
    assert result.status == 0, result
    return folder / "out"


def test_the_folder_alone_gives_a_whole_page(run: Run, out: Path, tmp_path: Path) -> None:
    before = small.tree(out)
    result = run("report", out, "-o", tmp_path / "report.html", "--figures", tmp_path / "figures")
    assert result.status == 0, result
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    for name, heading, *_ in SECTIONS:
        assert f'id="{name}"' in page and heading in page
    assert "moe-compress compress" in page and "hc-smoe" in page
    drawn = ("errors", "experts", "similarity", "visits")
    assert names(tmp_path / "figures") == [f"{name}.png" for name in drawn]
    assert names(tmp_path) == ["figures", "report.html"]
    assert small.tree(out) == before
    refused(run("report", out, "-o", tmp_path / "report.html"), "exists already")
    assert run("report", out, "-o", tmp_path / "report.html", "--overwrite").status == 0
    before = small.tree(out)
    (tmp_path / "other.html").write_text("<!doctype html><p>A page of mine.")
    for kept in (out / "model.safetensors", out / "config.json", tmp_path / "other.html"):
        refused(run("report", out, "-o", kept, "--overwrite"), "is not a report's page, so --overwrite will not")
    assert small.tree(out) == before and "mine" in (tmp_path / "other.html").read_text()


def read(text: str) -> Any:
    return json.loads(text, object_hook=lambda content: SimpleNamespace(**content))


def test_json_holds_what_the_page_shows(run: Run, out: Path, tmp_path: Path) -> None:
    result = run("report", out, "-o", tmp_path / "report.html", "--json")
    assert result.status == 0, result
    data = read(result.out)
    assert not data.missing and data.measured_tokens == 8 * 32
    assert set(vars(data.seconds)) >= {"open", "plan", "write"} and data.peak_memory_bytes
    for layer in data.layers:
        assert len(layer.similarity) == len(layer.visits_before) == layer.experts
        assert len(layer.visits_after) == len(layer.groups) == 4 and layer.error > 0
    result = run("report", out, "-o", tmp_path / "bare.html", "--no-measure", "--json")
    data = read(result.out)
    assert data.measured_tokens == 0 and set(vars(data.seconds)) >= {"open", "plan", "write"}
    assert all(layer.error is None and layer.similarity is None for layer in data.layers)


def test_a_folder_from_another_machine_says_what_is_missing(
    run: Run, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOE_COMPRESSOR_CACHE", str(tmp_path / "cache"))
    shutil.copytree(out, tmp_path / "out")
    result = run("report", tmp_path / "out", "-o", tmp_path / "report.html", "--json")
    assert result.status == 0, result
    said = " ".join(json.loads(result.out)["missing"])
    assert "--model" in said and "--calibration" in said and "no record of the run" in said
    sources = ("--model", out.parent / "model", "--calibration", out.parent / "text.txt", "--sequence-length", 32)
    result = run("report", tmp_path / "out", "-o", tmp_path / "whole.html", "--json", *sources)
    assert result.status == 0, result
    assert json.loads(result.out)["layers"][0]["visits_after"] is not None


@pytest.mark.parametrize(
    ("arguments", "page", "message"),
    [
        (("missing",), "report.html", "is not a folder"),
        (("model",), "report.html", "compression.json cannot be read"),
        (("out", "--hubs", "missing.json"), "report.html", "missing.json cannot be read"),
        (("out", "--model", "out"), "report.html", "is not the model"),
        (("out",), "missing/report.html", "missing is not a folder; create it or name another place for the report"),
        (("out",), "", "is a folder; name a file"),
    ],
)
def test_bad_input_leaves_no_page(
    run: Run, out: Path, tmp_path: Path, arguments: tuple[str, ...], page: str, message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(out.parent)
    refused(run("report", *arguments, "-o", tmp_path / page), message)
    assert names(tmp_path) == []


def test_page_and_figures_share_no_place(run: Run, out: Path, tmp_path: Path) -> None:
    refused(run("report", out, "-o", tmp_path / "same", "--figures", tmp_path / "same"), "is a folder; name a file")
    assert names(tmp_path) == []
