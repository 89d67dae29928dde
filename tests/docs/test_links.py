"""Every relative link of README and pages leads to a file, and its anchor to a heading; figures are told once."""

import re
import tomllib
from pathlib import Path

import pytest

from compressor.cli import demonstration
from tests.support.doc_pages import DOCS, GENERATED, PAGES, ROOT, links, name_of, prose, text_of

FOLDERS = "compressor|strategies|exporters|scripts|tests|docs|examples|findings|recipes"  # of the clone


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub and the site's builder make them."""
    titles = re.findall(r"^#+ (.+)$", text_of(page), re.MULTILINE)
    kept = [re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)).strip().lower() for title in titles]
    return {re.sub(r"\s", "-", title) for title in kept}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists() or target in GENERATED, f"{name_of(page)}: {target}"
        if anchor and not anchor.startswith("compressor."):  # which the site's builder checks
            assert anchor in anchors(target), f"{name_of(page)}: {target.name}#{anchor}"


def test_the_readme_is_short_and_reaches_every_part() -> None:
    readme = ROOT / "README.md"
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= 100
    reached = {target.relative_to(DOCS).parts[0] for target, _ in links(readme) if DOCS in target.parents}
    assert {"tutorial.md", "how-to", "reference", "explanation", "results.md", "index.md"} <= reached


def test_files_that_pages_name_exist() -> None:
    """Paths of the clone in code, in which NAME stands for any name, and scripts run as modules."""
    for page in PAGES:
        for code in re.findall(r"`([^`\n]+)`", prose(page)):
            paths = re.findall(rf"(?<![\w/.*-])(?:{FOLDERS})/[\w./-]*\w", code)
            scripts = re.findall(r"python -m (scripts[\w.]+)", code)
            for path in [*paths, *(f"{script.replace('.', '/')}*" for script in scripts)]:
                assert list(ROOT.glob(path.replace("NAME", "*"))), f"{name_of(page)}: {path}"


def test_every_finding_has_a_row_and_pinned_packages() -> None:
    page = (DOCS / "reference" / "other-tools.md").read_text(encoding="utf-8")
    listed = (ROOT / "findings" / "README.md").read_text(encoding="utf-8")
    for script in (ROOT / "findings").glob("*.sh"):
        assert page.count(f"`findings/{script.name}`") == 1 and f"`{script.name}`" in listed, script.name
        text = script.read_text(encoding="utf-8").replace("\\\n", " ")
        installed = re.findall(r"-m pip install --quiet (.*)", text)
        packages = [word for line in installed for word in line.split()]
        assert packages and all("==" in package for package in packages), script.name


def test_counts_in_the_readme_are_those_of_the_code() -> None:
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    with (ROOT / "pyproject.toml").open("rb") as stream:
        entry_points = tomllib.load(stream)["project"]["entry-points"]
    assert f"{len(entry_points['moe_compressor.strategies'])} ways to choose and merge experts" in readme
    words = {3: "three", 4: "four", 5: "five"}
    assert f"demo model with {words[len(demonstration.STRATEGIES)]} strategies" in readme
    (steps,) = re.findall(r"\[Recipes\]\([^)]*\)\*\*: (.*?) as YAML", readme)
    named = re.sub(r"\[(\w+)\]\([^)]*\)", r"\1", steps).split(", ")
    assert sorted(named) == sorted(entry_points["moe_compressor.steps"])
