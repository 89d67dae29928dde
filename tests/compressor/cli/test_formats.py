"""Exporters of third parties: `export --format NAME` and `compress --format safetensors,NAME`."""

import json
from pathlib import Path

import pytest

import compressor
from compressor.errors import CompressionError
from tests.support import small
from tests.support.command_line import Run, captured, names, refused
from tests.support.plugins import install

pytestmark = pytest.mark.usefixtures("offline")
TOY = '''
"""A list of tensors as text."""
from safetensors import safe_open
from compressor.plugins import NamedOptions
class Options(NamedOptions):
    title: str = "tensors"
    fail: bool = False
def export(checkpoint, output, options, progress):
    progress.start("listing", 1)
    output.mkdir()
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        (output / "list.txt").write_text("\\n".join([options.title, *sorted(file.keys())]))
    if options.fail:
        raise ValueError("the [toy] is\\nbroken")
    progress.advance("done")
'''
PLAIN = """
def export(checkpoint, output, options, progress):
    assert options is None
    output.mkdir()
    (output / "name.txt").write_text(checkpoint.name)
"""
NEEDY = """
from compressor.errors import CompressionError
def require_packages():
    raise CompressionError("needy needs the package nowhere; install it")
def export(*arguments): ...
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small.save(tmp_path_factory.mktemp("formats") / "model")


@pytest.fixture(autouse=True)
def site(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = {"toy": TOY, "plain": PLAIN, "needy": NEEDY, "broken": "exports = 3"}
    for name, source in sources.items():
        folder = tmp_path_factory.mktemp("site")
        install(folder, monkeypatch, name, source)
        entries = folder / f"{name}_plugin-1.0.dist-info" / "entry_points.txt"
        entries.write_text(f"[moe_compressor.exporters]\n{name} = {name}_plugin\n")


def test_export_by_name_with_options(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    result = run("export", checkpoint, "-o", tmp_path / "out", "--format", "toy", "--option", "title=mine")
    assert (result.status, result.out) == (0, f"Written to {tmp_path / 'out'}\n")
    lines = (tmp_path / "out" / "list.txt").read_text().splitlines()
    assert lines[0] == "mine" and "lm_head.weight" in lines and names(tmp_path) == ["out"]
    as_json = run("export", checkpoint, "-o", tmp_path / "more", "--format", "plain", "--json")
    assert json.loads(as_json.out) == {"format": "plain", "folder": str(tmp_path / "more")}
    refused(run("export", checkpoint, "-o", tmp_path / "out", "--format", "toy", "--json"), "exists already")


def test_a_recipe_in_python_writes_its_formats(checkpoint: Path, tmp_path: Path) -> None:
    steps = [{"prune": {"experts": 4, "strategy": "model-centric"}}]
    content = {"model": str(checkpoint), "steps": steps, "output": {"formats": ["safetensors", "toy", "plain"]}}
    compressor.compress(compressor.Recipe.of(content), tmp_path / "both")
    assert names(tmp_path / "both" / "toy") == ["list.txt"] and names(tmp_path / "both" / "plain") == ["name.txt"]
    recipe = compressor.Recipe.of({**content, "output": {"formats": "toy"}})
    compressor.compress(recipe, tmp_path / "alone")
    assert names(tmp_path / "alone") == ["list.txt"]
    with pytest.raises(CompressionError, match="writes two formats to one folder"):
        compressor.compress(compressor.Recipe.of({**content, "output": {"formats": "toy,plain"}}), tmp_path / "out")
    assert names(tmp_path) == ["alone", "both"]


def test_an_exporter_that_fails_leaves_nothing(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    ask = ("export", checkpoint, "-o", tmp_path / "out", "--format", "toy", "--json")
    refused(run(*ask, "--option", "fail=true"), r"exporter 'toy' failed: ValueError: the \[toy\] is broken")
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--format", "toi"), r"there is no exporter 'toi'; did you mean 'toy'\? known are .*onnx, plain"),
        (("--format", "safetensors"), "safetensors is what compress writes"),
        (("--format", "needy"), "needy needs the package nowhere"),
        (("--format", "broken"), "exporter 'broken' is no plugin: it needs a function export"),
        (("--format", "toy", "--option", "colour=red"), "exporter 'toy' has no option 'colour'; known are title, fail"),
        (("--format", "toy", "--option", "colour"), "--option 'colour' should be name=value"),
        (("--format", "toy", "--opset", 20), "exporter 'toy' has no option 'opset'"),
        (("--format", "plain", "--option", "title=a"), "exporter 'plain' has no option 'title'; known are none"),
        (("--format", "onnx", "--option", "overwrite=true"), "pass that"),
    ],
)
def test_refused_before_anything_is_read(more: tuple[str, ...], message: str, run: Run, tmp_path: Path) -> None:
    refused(run("export", tmp_path / "no-such-model", "-o", tmp_path / "out", *more), message)
    assert names(tmp_path) == []


def test_refused_formats_of_compress(run: Run, checkpoint: Path, tmp_path: Path) -> None:
    ask = ("compress", checkpoint, "-o", tmp_path / "out", "--experts", 4, "--strategy", "model-centric", "--format")
    refused(run(*ask, "safetensors,toi"), "there is no exporter 'toi'; did you mean 'toy'")
    refused(run(*ask, "toy,plain"), "writes two formats to one folder; add safetensors or name one")
    refused(run(*ask, "safetensors,needy"), "needy needs the package nowhere")
    assert captured(*ask, "safetensors,safetensors").status == 0 and names(tmp_path) == ["out"]
