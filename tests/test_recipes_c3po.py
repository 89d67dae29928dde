"""C3PO's recipes, each as a user runs it, on a few items of the demo."""

from pathlib import Path

import pytest

from tests.support.doc_pages import ROOT
from tests.support.recipes import run_recipe

FOLDER = ROOT / "recipes" / "c3po"
RECIPES = sorted(path.name for path in FOLDER.glob("*.sh") if path.name != "run.sh")
ROWS = {"table1.sh": 5, "table3.sh": 5, "table9.sh": 13, "figure3.sh": 8, "transfer.sh": 5, "oracle.sh": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("c3po")


@pytest.mark.full
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_prints_its_table(name: str, folder: Path) -> None:
    printed = run_recipe(FOLDER / name, folder, LIMIT=3, SAMPLES=24, COLUMNS=200)
    if name == "routers.sh":
        assert "forced; held-out text confirms" in printed
    else:
        rows = printed.partition("Top-")[0].count(" │\n")  # with the plain model's
        assert rows == ROWS.get(name, rows) and rows > 3 and "moe_demo_recall" in printed


def test_the_page_names_every_recipe() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"({name})" in page for name in RECIPES)
