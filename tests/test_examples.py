"""The recipes and scripts in examples/, each used as a reader would: with the demo model in the place of theirs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from compressor.recipe.recipe import read_recipe
from tests.support.command_line import Run, names, succeeded
from tests.support.doc_pages import ROOT

RECIPES = sorted((ROOT / "examples" / "recipes").glob("*.yaml"))
DEMO = ROOT / "compressor" / "demo" / "checkpoint"
MINE = ("--set", f"model={DEMO}", "--calibration", "demo", "--samples", "16", "--sequence-length", "128")
MORE = {  # in the place of what a demo model has not, or is too small for
    "smallest-that-passes": ("--gate", "moe_demo_sorting", "--limit", "50", "--set", "gate.max_drop=0.3"),
    "fit-a-size": ("--bytes", "2MB", "--for", "vllm"),
}


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_name_what_a_reader_has_to_change(recipe: Path) -> None:
    content = read_recipe(recipe)
    assert (content.model, content.calibration.data) == ("org/model", ("texts.jsonl",))
    assert f"moe-compress compress {recipe.name}" in recipe.read_text(encoding="utf-8")


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_run(recipe: Path, run: Run, offline: None, hasty: None, tmp_path: Path) -> None:
    succeeded(run("compress", recipe, "-o", tmp_path / "smaller", *MINE, *MORE.get(recipe.stem, ())))
    assert (tmp_path / "smaller" / "model.safetensors").stat().st_size < (DEMO / "model.safetensors").stat().st_size


def script(name: str, folder: Path, *arguments: object) -> str:
    """Run a script of the clone in a folder; returns what it prints."""
    words = [sys.executable, ROOT / "examples" / f"{name}.py", *arguments]
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "MOE_COMPRESSOR_CACHE": str(folder / "cache"),
    }  # fmt: skip
    done = subprocess.run([*map(str, words)], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
def test_scripts_run(tmp_path: Path) -> None:
    printed = script("compress_and_gate", tmp_path, DEMO, "demo", "gated", "moe_demo_sorting")
    assert printed.splitlines() == ["16 experts became 12", "pass"] and (tmp_path / "gated").is_dir()
    printed = script("choose_by_loss", tmp_path, DEMO, "demo", "chosen", "2", "12", "8")
    assert printed.startswith("8 experts cost") and (tmp_path / "chosen").is_dir()
    printed = script("distill_and_publish", tmp_path, "chosen", DEMO, "demo", "distilled", "org/distilled")
    assert "files would go to" in printed
    assert {"distilled", "distilled.html", "distilled.md"} <= set(names(tmp_path))
    assert "license" not in (tmp_path / "distilled.md").read_text(encoding="utf-8").partition("# distilled")[0]
