"""Every relative link of README and pages leads to a file, and its anchor to a heading; figures are told once."""

import re
from pathlib import Path

import pytest

from tests.pages import DOCS, PAGES, ROOT, links, name_of


def anchors(page: Path) -> set[str]:
    """Names of a page's headings, as GitHub and the site's builder make them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    kept = [re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)).strip().lower() for title in titles]
    return {re.sub(r"\s", "-", title) for title in kept}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        assert target.exists(), f"{name_of(page)}: {target}"
        if anchor and not anchor.startswith("compressor."):  # which the site's builder checks
            assert anchor in anchors(target), f"{name_of(page)}: {target.name}#{anchor}"


def test_the_readme_is_short_and_reaches_every_part() -> None:
    readme = ROOT / "README.md"
    assert len(readme.read_text(encoding="utf-8").splitlines()) <= 100
    reached = {target.relative_to(DOCS).parts[0] for target, _ in links(readme) if DOCS in target.parents}
    assert {"tutorial.md", "how-to", "reference", "explanation", "results.md", "index.md"} <= reached


def test_the_readme_shows_the_measured_table() -> None:
    readme, results = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/results.md"))
    rows = re.findall(r"^\|.*%.*\|$", readme, re.MULTILINE)
    assert len(rows) == 5 and all(row in results for row in rows)
