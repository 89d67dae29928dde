"""Pages show what the commands above a block print today: words, verdicts and exit statuses, if not every figure."""

from pathlib import Path

import pytest

from scripts.write_docs.shown import SHOWN, blocks, excerpt, masked, pages
from tests.support.doc_pages import name_of


@pytest.mark.full
@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_shown_outputs_are_those_of_the_commands(page: Path) -> None:
    for block in blocks(page):
        assert block.ended == block.status
        assert masked(block.shown) == masked(block.printed), "run python -m scripts.write_docs shown"


def test_pages_show_outputs() -> None:
    names = {name_of(page) for page in pages()}
    assert {"docs/tutorial.md", "docs/how-to/evaluating.md", "docs/how-to/split.md"} <= names
    for page in pages():
        text = page.read_text(encoding="utf-8")
        assert len(SHOWN.findall(text)) == text.count("<!-- shown: "), name_of(page)


def test_an_excerpt_is_compared_by_its_words() -> None:
    printed = "Loading\n\nFail: more than 0.05 was lost\n┃ task ┃ 200 ┃ fail ┃\nWritten: a\nmore\n"
    part = excerpt(printed, "Fail", "Written")
    assert part.splitlines() == ["Fail: more than 0.05 was lost", "┃ task ┃ 200 ┃ fail ┃", "Written: a"]
    assert masked(part) == masked("Fail: more than 0.10 was lost\n┃ task  ┃ 1,000 ┃ fail ┃\nWritten: a")
    assert masked(part) != masked(part.replace("fail", "inconclusive"))
