"""docs/plugins.md: its table is the meters', and examples/plugin is a package that works in every command."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

import compressor
import compressor.plugins
from compressor.plugins import check_strategy
from compressor.progress import Silent
from compressor.recipe.registry import exporter_options, load_exporter, load_strategy
from compressor.statistics.statistics import ALL, STATISTICS
from tests.support import small
from tests.support.command_line import Run

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "compressor" / "demo" / "checkpoint"
TEXT = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")


TEMPLATE = ROOT / "examples" / "plugin"


def files() -> dict[str, str]:
    """The template's files by their paths in it."""
    found = (path for path in TEMPLATE.rglob("*") if path.suffix in (".py", ".toml"))
    return {str(path.relative_to(TEMPLATE)): path.read_text(encoding="utf-8") for path in found}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The template as `pip install` would leave it: its files, and the metadata with its entry points."""
    site = tmp_path / "site"
    for name, content in files().items():
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        (site / name).write_text(content, encoding="utf-8")
    project = tomllib.loads((site / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = site / f"moe_loudest-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    (info / "entry_points.txt").write_text(
        "\n".join(f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in names.items()) for group, names in groups)
    )
    monkeypatch.syspath_prepend(str(site))
    for name in [name for name in sys.modules if name.partition(".")[0] == "moe_loudest"]:
        monkeypatch.delitem(sys.modules, name)
    return site


def test_the_table_of_statistics_is_that_of_the_meters(run: Run) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", TEXT, re.MULTILINE)
    written = [(name, "" if shape == "-" else shape, meaning) for name, shape, meaning in rows if name in ALL]
    assert written == [(name, each.shape, each.meaning) for name, each in STATISTICS.items()]
    printed = json.loads(run("list", "strategies", "--needs", "--json").out)
    assert [(row["name"], row["shape"], row["meaning"]) for row in printed] == written
    table = run("list", "strategies", "--needs").out
    assert all(name in table for name, _, _ in written) and "[E, S, H]" in table


def test_plugins_import_from_one_module_alone() -> None:
    public = set(compressor.plugins.__all__)
    assert {"Step", "MergeOptions", "fake_statistics"} < public and not {"torch", "inspect", "typing"} & public
    for text in ("\n".join(files().values()), *(file.read_text() for file in (ROOT / "strategies").glob("*.py"))):
        assert set(re.findall(r"^ *(?:from|import) (compressor\S*)", text, re.MULTILINE)) <= {"compressor.plugins"}


def test_the_template_strategy_compresses_and_compares(package: Path, tmp_path: Path, run: Run) -> None:
    check_strategy(__import__("moe_loudest.strategy").strategy)
    assert load_strategy("loudest", {"count_power": 0.5}).options.count_power == 0.5
    assert "loudest" in run("list", "strategies").out
    model, text = small.save(tmp_path / "model"), small.text_file(tmp_path)
    data = ("--calibration", text, "--samples", 8, "--sequence-length", 16)
    made = run(
        "compress", model, "-o", tmp_path / "out", "--experts", 4, "--strategy", "loudest",
        "--option", "count_power=0.5", *data,
    )  # fmt: skip
    assert made.status == 0, made.err
    written = json.loads((tmp_path / "out" / "compression.json").read_text(encoding="utf-8"))["plan"]
    (asked,) = [step["options"] for step in written["steps"] if step["name"] == "prune"]
    assert (asked["strategy"], asked["options"]) == ("loudest", {"count_power": 0.5})
    compared = run(
        "compare", model, "-o", tmp_path / "found", "--experts", 4, "--strategies", "loudest,count-guided",
        "--correct", "none", "--random-seeds", 1, "--evaluation-samples", 2, *data,
    )  # fmt: skip
    assert compared.status == 0 and "loudest" in compared.out, compared.err


def test_the_template_exporter_writes_every_tensor(package: Path, tmp_path: Path) -> None:
    model, exporter = small.save(tmp_path / "model"), load_exporter("npz")
    summary = exporter.export(model, tmp_path / "out", exporter_options("npz", {"compress": True}), Silent())
    tensors = load_file(model / "model.safetensors")
    with np.load(tmp_path / "out" / "model.npz") as found:
        assert set(found) == set(tensors) and summary.tensors == len(tensors)
        assert all(np.array_equal(found[name], value.float().numpy()) for name, value in tensors.items())


@pytest.mark.full
def test_the_templates_own_tests_pass(package: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(package), "tests"]
    path = {"PYTHONPATH": f"{package}:{ROOT}", "PATH": "", "HOME": str(package)}
    done = subprocess.run(command, cwd=package, env=path, capture_output=True, text=True)
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.usefixtures("package")
def test_the_template_scales_the_experts_of_the_demo_model(tmp_path: Path, run: Run) -> None:
    steps = [{"prune": {"strategy": "model-centric", "experts": 12}}, {"scale": {"factor": 0.5}}]
    for name, chosen in (("pruned", steps[:1]), ("scaled", steps)):
        recipe = tmp_path / f"{name}.yaml"
        recipe.write_text(yaml.safe_dump({"model": str(DEMO), "steps": chosen}))
        made = run("compress", recipe, "-o", tmp_path / name)
        assert made.status == 0, made.err
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("pruned", "scaled"))
    assert set(before) == set(after)
    experts = {name for name in before if "experts" in name and "down_proj" in name}
    assert experts
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor * 0.5 if name in experts else tensor), name
    repeated = run("compress", tmp_path / "scaled" / "recipe.yaml", "-o", tmp_path / "again")
    assert repeated.status == 0, repeated.err
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "scaled" / "model.safetensors"
    ).read_bytes()


@pytest.mark.usefixtures("package")
def test_the_template_is_listed_and_its_options_are_checked(tmp_path: Path, run: Run) -> None:
    listed = {entry["name"]: entry["summary"] for entry in json.loads(run("list", "steps", "--json").out)}
    assert listed["scale"].startswith("Multiply each expert's down projection")
    for option, message in (("fator=0.5", r"has no option 'fator'; did you mean 'factor'\?"), ("factor=0", "factor")):
        refused = run("compress", DEMO, "-o", tmp_path / "out", "--experts", 12, "--set", f"scale.{option}")
        assert refused.status == 2 and re.search(message, refused.err), refused.err
    with pytest.raises(compressor.CompressionError, match=r"no step 'scall' at steps\[0\]; did you mean 'scale'"):
        compressor.Recipe.of({"model": str(DEMO), "steps": ["scall"]})
