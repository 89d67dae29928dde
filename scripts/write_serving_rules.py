"""Build the table of servers' rules in docs/reference/servers.md from the rules themselves.

`make docs` puts it into the site; python -m scripts.write_serving_rules prints it.
"""

from compressor.model.serving import RULES, Served, breach_text

PAGE = "reference/servers.md"  # in the site
MARK = "<!-- rules -->"
EXAMPLE = Served("mixtral", 44, 12, 96)  # what the last column speaks of


def table() -> str:
    """A row for each rule, as Markdown."""
    rows = [
        "| server | for | full speed where | otherwise, for example | effect | source |",
        "|---|---|---|---|---|---|",
    ]
    for rule in RULES:
        source = (
            f"`{rule.source}`" if ";" not in rule.source and " " not in rule.source else rule.source
        )
        seen = {"read": "", "run": "; seen when run", "reported": "; reported, not seen"}[
            rule.evidence
        ]
        example = breach_text(rule, EXAMPLE)
        rows.append(
            f"| {rule.server} | {', '.join(rule.families) or rule.whom} | {rule.needs} | {example} | {rule.effect} | "
            f"{source}, {rule.version}, {rule.date}{seen} |"
        )
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
