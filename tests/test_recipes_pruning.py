"""Every recipe of the paper on pruning and merging, run as a reader runs it, on the least that shows it works."""

from pathlib import Path

import pytest

from tests.support.doc_pages import ROOT
from tests.support.recipes import run_recipe

RECIPES = sorted(path for path in (ROOT / "recipes" / "pruning").glob("*.sh") if path.name != "settings.sh")
LEAST = {"EXPERTS": 12, "SAMPLES": 4, "LENGTH": 32, "TASKS": "moe_demo_facts", "LIMIT": 2, "SIZES": "4 8", "MOST": 2}
WRITTEN = {
    "table3": ("4/comparison.md", "8/comparison.md"),
    "figure2-A1-A2": ("linear-cka.png", "rbf-cka.png", "../out.html"),
    "figure6": ("count-guided-figures/visits.png", "data-centric-figures/visits.png"),
    "figureA3": ("model.safetensors", "../out.json"),
}


@pytest.mark.full
@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_runs_on_the_demo_model(recipe: Path, tmp_path: Path) -> None:
    run_recipe(recipe, tmp_path, **LEAST, OUT="out", MOE_COMPRESSOR_CACHE=tmp_path / "cache")
    for name in WRITTEN.get(recipe.stem, ("comparison.md", "comparison.png")):
        assert (tmp_path / "out" / name).is_file()
    if recipe.stem.startswith("table"):
        tables = list((tmp_path / "out").rglob("comparison.md"))
        assert all("moe_demo_facts" in table.read_text(encoding="utf-8") for table in tables)
