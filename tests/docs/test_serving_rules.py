"""The table of docs/reference/servers.md shows the rules that the program goes by."""

from compressor.model.serving import RULES
from scripts.write_serving_rules import MARK, PAGE, table
from tests.support.doc_pages import DOCS


def test_the_table_has_every_rule() -> None:
    assert (DOCS / PAGE).read_text(encoding="utf-8").count(MARK) == 1
    rows = table().splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [rule.server for rule in RULES]
    assert all(rule.needs.words in row for rule, row in zip(RULES, rows, strict=True))
