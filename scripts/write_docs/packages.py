"""The packages of the product: their order and meaning, from docs/architecture.md, and their lines and imports.

An arrow is an import, read from the source by `ast`, function-level and type-only ones included. For a new package add
a row to the page's table by hand; a package imports earlier ones only.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- packages: begin -->", "<!-- packages: end -->"
PRODUCT = ("compressor", "strategies", "exporters")
TOP = "compressor (the public names)"  # with api.py, which holds the functions
WORDS = "compressor (files in the root)"  # words that everybody uses: errors, files, memory, progress ...
OPTIONS = "steps (options.py of each)"
_ROWS = PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip().splitlines()
# What lives in each package, by its name.
ORDER: Mapping[str, str] = {row.split(" | ")[0].removeprefix("| "): row.split(" | ")[1] for row in _ROWS[2:-1]}
# Found by entry points alone.
OPTIONAL = ("strategies", "exporters", "attribution", "pathways", "comoe", "gguf_files")
PLACE = {name: place for place, name in enumerate(ORDER)}


@dataclass(frozen=True, slots=True)
class Import:
    """One import of a module of the product by another, and where it stands."""

    file: Path
    line: int
    package: str
    imported: str  # the package


def sources() -> Iterator[Path]:
    """Yield every file of the product."""
    for name in PRODUCT:
        yield from sorted((ROOT / name).rglob("*.py"))


def package_of(module: str) -> str:
    """'compressor.quality_gate.verdict' -> 'quality_gate'; 'strategies.hope' -> 'strategies'."""
    head, *rest = module.split(".")
    if head != "compressor":
        return head
    if rest == ["plugins"]:
        return "strategies"
    if rest in ([], ["api"]):
        return TOP
    if rest[0] == "steps" and rest[-1] == "options":
        return OPTIONS
    if rest[0] == "steps" and len(rest) > 1 and (ROOT / "compressor" / "steps" / rest[1]).is_dir():
        return f"steps.{rest[1]}"
    if (ROOT / "compressor" / rest[0]).is_dir():
        return rest[0]
    return "cli" if rest[0] == "__main__" else WORDS


def module_of(file: Path) -> str:
    """'compressor/quality_gate/verdict.py' -> 'compressor.quality_gate.verdict'."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(node: ast.AST) -> list[str]:
    """Return the modules that a statement imports; of `from package import name` the name too, if it is one."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom) or node.module is None:
        return []
    inner = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if (ROOT / f"{name.replace('.', '/')}.py").is_file() else node.module for name in inner]


def imports() -> list[Import]:
    """Return every import of one file of the product by another one."""
    found = []
    for file in sources():
        package, path = package_of(module_of(file)), file.relative_to(ROOT)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for name in dict.fromkeys(imported_modules(node)):
                if name.split(".")[0] in PRODUCT:
                    line = getattr(node, "lineno", 0)
                    found.append(Import(path, line, package, package_of(name)))
    return found


def arrows(found: Iterable[Import]) -> dict[str, list[str]]:
    """Return for each package the other ones that it imports, without the words that all use."""
    pairs = {(entry.package, entry.imported) for entry in found}
    others = [name for name in ORDER if name != WORDS]
    return {name: [o for o in others if o != name and (name, o) in pairs] for name in ORDER}


def page() -> str:
    """Return docs/architecture.md with the table of packages as it is now, each after those that it imports."""
    lines_of: dict[str, list[int]] = {name: [] for name in ORDER}
    for file in sources():
        lines_of[package_of(module_of(file))].append(len(file.read_text(encoding="utf-8").splitlines()))
    reached = arrows(imports())
    rows = ["| package | what lives there | lines | files | imports |", "|---|---|---|---|---|"]
    for name, meaning in ORDER.items():
        size = f"{sum(lines_of[name]):,} | {len(lines_of[name])}"
        rows.append(f"| {name} | {meaning} | {size} | {', '.join(reached[name]) or '-'} |")
    lines = [count for package in lines_of.values() for count in package]
    rows.append(f"| all | | {sum(lines):,} | {len(lines)} | |")
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    return "\n".join([f"{before}{BEGIN}", *rows, f"{END}{rest.split(END)[1]}"])
