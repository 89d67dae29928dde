"""Write the table of servers' rules in docs/reference/servers.md from the rules themselves.

python -m scripts.write_serving_rules            # print the table
python -m scripts.write_serving_rules --write    # put it into docs/reference/servers.md
"""

import argparse
from pathlib import Path

from compressor.model.serving import RULES, Served, breach_text

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "servers.md"
BEGIN, END = "<!-- rules: begin -->", "<!-- rules: end -->"
EXAMPLE = Served("mixtral", 44, 12, 96)  # what the last column speaks of


def table() -> str:
    """A row for each rule, as Markdown."""
    rows = [
        "| server | for | full speed where | otherwise, for example | effect | source |",
        "|---|---|---|---|---|---|",
    ]
    for rule in RULES:
        source = f"`{rule.source}`" if ";" not in rule.source and " " not in rule.source else rule.source
        seen = {"read": "", "run": "; seen when run", "reported": "; reported, not seen"}[rule.evidence]
        example = breach_text(rule, EXAMPLE)
        rows.append(
            f"| {rule.server} | {rule.whom.words} | {rule.needs.words} | {example} | {rule.effect} | "
            f"{source}, {rule.version}{seen} |"
        )
    return "\n".join(rows)


def with_table(text: str) -> str:
    """The page with the table that the rules make now."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


def main() -> None:
    """Print the table, or write it into the page."""
    parser = argparse.ArgumentParser(description="List what servers ask of a model.")
    parser.add_argument("--write", action="store_true", help="put the table into docs/reference/servers.md")
    if not parser.parse_args().write:
        print(table())
        return
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
