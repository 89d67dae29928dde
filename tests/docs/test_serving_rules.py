"""docs/reference/servers.md shows the rules that the program goes by."""

from compressor.model.serving import RULES
from scripts.write_serving_rules import BEGIN, END, PAGE, with_table


def test_the_table_is_what_the_rules_make() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text) == text, "run python -m scripts.write_serving_rules --write"
    rows = text.split(BEGIN)[1].split(END)[0].strip().splitlines()[2:]
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == [rule.server for rule in RULES]
    assert all(rule.needs.words in row for rule, row in zip(RULES, rows, strict=True))
