"""The recipes of the papers, each as a user runs it on the demo model, on the least that shows it works."""

import json
import re
from pathlib import Path

import pytest

from tests.support.doc_pages import ROOT
from tests.support.recipes import run_recipe

FOLDER = ROOT / "recipes"
READ = ("--samples", 2, "--length", 32)
PRUNED = (
    *("--experts", 12, "--samples", 4, "--length", 32, "--tasks", "moe_demo_facts", "--limit", 2),
    *("--sizes", "4,8", "--most", 2, "--out", "out"),
)  # fmt: skip
WRITTEN = {
    "table1": (), "table2": (), "table4": (), "tableA1": (), "figure4": (), "figure5": (),
    "table3": ("4/comparison.md", "8/comparison.md"),
    "figures2": ("linear-cka.png", "rbf-cka.png", "../out.html"),
    "figure6": ("count-guided-figures/visits.png", "data-centric-figures/visits.png"),
    "figureA3": ("model.safetensors", "../out.json"),
}  # fmt: skip
TUNED = ("--options", "--rank 2 --steps 1 --batch-size 2", "--limit", 2)
TUNED_ROWS = {
    "figure3": 10, "figures4-7": 2, "table1": 8, "table2": 5, "table3": 4, "table6": 5, "table7": 2, "table8": 4,
}  # fmt: skip
ASKED_ROWS = {
    "table1": 5, "table3": 5, "table9": 13, "figure3": 8, "figure5": 7, "transfer": 5, "oracle": 5, "neighbours": 5,
    "kernels": 13, "schedule": 7, "efficiency": 13, "custom": 2, "routers": None,
}  # fmt: skip


def run(name: str, folder: Path, *words: object, **environment: object) -> str:
    return run_recipe(FOLDER / f"{name}.py", folder, *words, MOE_COMPRESSOR_CACHE=folder / "cache", **environment)


def test_the_page_has_every_recipe() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    for paper, names in (("pruning", WRITTEN), ("comoe", TUNED_ROWS), ("c3po", ASKED_ROWS)):
        listed = re.findall(rf"`{paper}\.py ([\w, -]+)`", page)
        assert sorted(name for words in listed for name in words.split(", ")) == sorted(names)


@pytest.mark.full
@pytest.mark.parametrize("name", WRITTEN)
def test_a_recipe_of_pruning_leaves_its_table_or_pictures(name: str, tmp_path: Path) -> None:
    run("pruning", tmp_path, name, *PRUNED)
    for file in WRITTEN[name] or ("comparison.md", "comparison.png"):
        assert (tmp_path / "out" / file).is_file()
    tables = list((tmp_path / "out").rglob("comparison.md"))
    assert all("moe_demo_facts" in table.read_text(encoding="utf-8") for table in tables)


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which all recipes of C3PO find the reference set of the first."""
    return tmp_path_factory.mktemp("c3po")


@pytest.mark.full
@pytest.mark.parametrize("name", ASKED_ROWS)
def test_a_recipe_of_c3po_prints_its_table(name: str, asked: Path) -> None:
    printed = run("c3po", asked, name, "--limit", 3, "--samples", 24, COLUMNS=200)
    if name == "routers":
        assert "forced; held-out text confirms" in printed
    else:
        assert printed.partition("Top-")[0].count(" │\n") == ASKED_ROWS[name]  # with the plain model's
        assert "moe_demo_recall" in printed


@pytest.mark.full
@pytest.mark.parametrize("name", TUNED_ROWS)
def test_a_recipe_of_comoe_makes_its_table(name: str, tmp_path: Path) -> None:
    printed = run("comoe", tmp_path, name, *TUNED, "--timed-tokens", 1)
    output = tmp_path / f"comoe-{name}"
    head, _, *rows = (output / "table.md").read_text().splitlines()
    assert len(rows) == TUNED_ROWS[name] and printed.splitlines()[-len(rows) :] == rows
    assert all(row.count("|") == head.count("|") for row in rows)
    accuracy = json.loads((output / "accuracy.json").read_text())
    for (row, (by_task,)), line in zip(accuracy.items(), rows, strict=True):
        assert set(by_task) == {"arithmetic", "sorting"}
        assert line.startswith(f"| {row.replace(', ', ' | ')} |") and f"| {50 * sum(by_task.values()):.1f} |" in line
    assert len([*output.glob("*-report/scatter.png")]) == (2 if name == "figures4-7" else 0)


@pytest.mark.full
def test_figures_and_zeroing(tmp_path: Path) -> None:
    run("attribution", tmp_path, "figures", *READ)
    names = ("influence.png", "scores.png", "experts.png", "causal.png")
    assert all((tmp_path / "figures" / name).is_file() for name in names)
    printed = run("attribution", tmp_path, "zeroing", *READ, "--experts", "L1E3")
    senders = json.loads((tmp_path / "zeroing" / "attribution.json").read_text())["senders"]
    (expert,) = (sender for sender in senders if sender["name"] == "model.layers.1.mlp.experts expert 3")
    rows = [line.split() for line in printed.splitlines() if line.startswith("L")]
    assert [float(row[1]) for row in rows] == pytest.approx([*filter(None.__ne__, expert["rank_change"])], abs=1e-4)


@pytest.mark.full
def test_blocking(tmp_path: Path) -> None:
    run("attribution", tmp_path, "blocking", *READ)
    content = json.loads((tmp_path / "blocking" / "all" / "attribution.json").read_text())
    without = sorted((tmp_path / "blocking").glob("without-*"))
    assert len(without) == 3
    before = {sender["name"]: sender for sender in content["senders"]}
    for folder in without:
        found = json.loads((folder / "attribution.json").read_text())
        assert sorted(found["without"]["experts"]) == sorted(folder.name.split("-")[1:])
        shares = {f"L{each['layer']}E{each['number']}": each["share"] for each in found["senders"] if each["number"]}
        assert {shares.get(label, 0.0) for label in found["without"]["experts"]} == {0.0}
        for each in found["without"]["before"]:
            assert each["influence"] == before[each["name"]]["influence"]


@pytest.mark.full
def test_heads_of_ioi_by_role(tmp_path: Path) -> None:
    run("attribution", tmp_path, "ioi", "--prompts", 2, "--top", 3, "--out", "ioi.json")
    rows = json.loads((tmp_path / "ioi.json").read_text())
    assert len(rows) == 3 and all(row[role] >= 0 for row in rows for role in ("IO", "S1", "S2", "END", "other"))
    assert max(row["IO"] + row["S1"] for row in rows) > 0
