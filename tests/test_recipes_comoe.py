"""The recipes of CoMoE's tables and figures, each as a user runs it, with the fewest steps."""

import json
from pathlib import Path

import pytest

from tests.support.doc_pages import ROOT
from tests.support.recipes import run_recipe

RECIPES = sorted((ROOT / "recipes" / "comoe").glob("*.sh"))
QUICK = {"OPTIONS": "--rank 2 --steps 1 --batch-size 2", "LIMIT": 2, "TIMED_TOKENS": 1}
ROWS = {"figure3": 10, "figures4-7": 2, "table1": 8, "table2": 5, "table3": 4, "table6": 5, "table7": 2, "table8": 4}


@pytest.mark.full
@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_makes_its_table(path: Path, tmp_path: Path) -> None:
    printed = run_recipe(path, tmp_path, **QUICK)
    output = tmp_path / f"comoe-{path.stem}"
    head, _, *rows = (output / "table.md").read_text().splitlines()
    assert len(rows) == ROWS[path.stem] and printed.splitlines()[-len(rows) :] == rows
    assert all(row.count("|") == head.count("|") for row in rows)
    accuracy = json.loads((output / "accuracy.json").read_text())
    for (name, (by_task,)), line in zip(accuracy.items(), rows, strict=True):
        assert set(by_task) == {"arithmetic", "sorting"}
        assert line.startswith(f"| {name.replace(', ', ' | ')} |") and f"| {50 * sum(by_task.values()):.1f} |" in line
    pictures = 2 if path.stem == "figures4-7" else 0
    assert len([*output.glob("*-report/scatter.png")]) == pictures


def test_every_recipe_says_what_it_repeats() -> None:
    assert {path.stem for path in RECIPES} == set(ROWS)
    for path in RECIPES:
        head = path.read_text().split("\n\n")[0]
        assert "CoMoE (Feng et al., 2025), " in head and "As in the paper, on a GPU" in head and "MODEL=" in head
