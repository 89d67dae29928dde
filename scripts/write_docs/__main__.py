"""Write the parts of pages that are made from code: `python -m scripts.write_docs [--check] [PART ...]`.

Parts are `packages` (docs/architecture.md), `schema` (the steps' options in docs/reference/plan.schema.json),
`statistics` (docs/plugins.md), `shown` (outputs below commands, minutes) and `architectures` (docs/architectures.md,
half an hour); the first three are the default. `shown:PAGE` and `architectures:FAMILY` are one page or family. With
--check nothing is written, and the exit status is 1 if a part has changed; figures of `shown` may differ.
"""

from pathlib import Path

from compressor.records import readable_json
from scripts.benchmarks import frame
from scripts.write_docs import architectures, packages, reference, shown


def main() -> None:
    """Write the parts that are named, or compare them."""
    parser = frame.options(__doc__, check=False)
    parser.add_argument("parts", nargs="*", metavar="PART", default=["packages", "schema", "statistics"])
    given = parser.parse_args()
    changed = False
    for part in given.parts:
        name, _, detail = part.partition(":")
        if name == "packages":
            contents = {packages.PAGE: packages.page()}
        elif name == "schema":
            contents = {reference.SCHEMA: readable_json(reference.schema_with_options())}
        elif name == "statistics":
            contents = {reference.PLUGINS: reference.statistics_page()}
        elif name == "shown":
            pages = [Path(detail).resolve()] if detail else shown.pages()
            contents = {page: shown.page_with_outputs(page, not given.check) for page in pages}
        elif name == "architectures":
            contents = {architectures.PAGE: architectures.page_with([detail] if detail else [])}
        else:
            parser.error(f"{name} is none of packages, schema, statistics, shown and architectures")
        for page, content in contents.items():
            if page.read_text(encoding="utf-8") == content:
                continue
            changed = True
            print(f"{page}: {'changed' if given.check else 'written'}")
            if not given.check:
                page.write_text(content, encoding="utf-8")
    raise SystemExit(int(given.check and changed))


if __name__ == "__main__":
    main()
