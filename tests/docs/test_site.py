"""The site builds without a warning, and a browser that opens a page loads nothing from the network."""

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.doc_pages import ROOT

pytestmark = pytest.mark.full

LOADING = {  # attributes whose address a browser loads by itself
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "audio": "src", "link": "href",
}  # fmt: skip
NOT_LOADED = {"canonical", "prev", "next", "alternate", "edit"}


class Loaded(HTMLParser):
    """The addresses that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if tag in LOADING and (address := values.get(LOADING[tag])) and values.get("rel") not in NOT_LOADED:
            self.found.append(address)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return folder


def test_generated_tables_are_in_their_pages(site: Path) -> None:
    for name, word in (("plan", "An entry of"), ("servers", "FlashInfer"), ("command-line", "Steps of a recipe")):
        text = (site / "reference" / f"{name}.html").read_text(encoding="utf-8")
        assert word in text and "<table>" in text, name


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    for page in site.rglob("*.html"):
        reader = Loaded()
        reader.feed(page.read_text(encoding="utf-8"))
        for address in reader.found:
            assert not re.match(r"(https?:)?//", address), f"{page.name} loads {address}"
            if page.name != "404.html":  # whose addresses are a server's
                assert (page.parent / re.sub(r"[?#].*", "", address)).exists(), f"{page.name} lacks {address}"
    for sheet in site.rglob("*.css"):
        addresses = re.findall(r"(?:url\(|@import )[\"']?([^\"')]+)", sheet.read_text(encoding="utf-8"))
        assert not [address for address in addresses if re.match(r"(https?:)?//", address)], sheet.name
