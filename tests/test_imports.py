"""Packages import earlier ones only, files import each other in no circle, and light imports stay light."""

import ast
import re
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest

from scripts.write_docs.packages import (
    OPTIONAL,
    ORDER,
    PAGE,
    PLACE,
    PRODUCT,
    ROOT,
    arrows,
    imported_modules,
    imports,
    module_of,
    sources,
)

FOUND = imports()


def test_every_package_has_a_place() -> None:
    assert {entry.package for entry in FOUND} | {entry.imported for entry in FOUND} <= set(ORDER)
    folders = {path.parent.name for path in (ROOT / "compressor").glob("*/__init__.py")}
    folders |= {f"steps.{path.parent.name}" for path in (ROOT / "compressor" / "steps").glob("*/__init__.py")}
    assert folders <= set(ORDER)


def test_packages_import_earlier_ones_only() -> None:
    wrong = [
        f"{entry.file}:{entry.line}: {entry.package} imports {entry.imported}"
        for entry in FOUND
        if entry.package != entry.imported and PLACE[entry.package] <= PLACE[entry.imported]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_core_imports_no_optional_package() -> None:
    """Not inside functions, nor for types: entry points announce their strategies, commands, functions and so on."""
    assert not [entry for entry in FOUND if entry.imported in OPTIONAL and entry.package not in OPTIONAL]


def test_optional_packages_import_the_core_alone() -> None:
    between = [entry for entry in FOUND if {entry.package, entry.imported} <= {*OPTIONAL}]
    assert not [entry for entry in between if entry.package != entry.imported]


def test_files_import_each_other_in_no_circle() -> None:
    """Within a package, too; imports inside functions count."""
    left = {module_of(path): imported_by(path) for path in sources()}
    while leaves := [name for name, reached in left.items() if not reached & set(left) - {name}]:
        for name in leaves:
            del left[name]
    assert not left


def imported_by(path: Path) -> set[str]:
    """The product's modules that a file imports, outside `if TYPE_CHECKING`."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = [node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    tree.body = [node for node in tree.body if node not in for_types]
    return {name for node in ast.walk(tree) for name in imported_modules(node) if name.split(".")[0] in PRODUCT}


@pytest.mark.parametrize("code", ["import compressor", "import compressor.errors"])
def test_what_is_light_loads_neither_torch_nor_transformers(code: str) -> None:
    after = "import atexit, sys; heavy = {'torch', 'transformers', 'numpy', 'matplotlib', 'networkx'}\n" \
        "atexit.register(lambda: print(sorted(heavy & set(sys.modules)), file=sys.stderr))\n"  # fmt: skip
    found = subprocess.run([sys.executable, "-c", after + code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stderr.strip() == "[]"


def test_public_names_are_those_of_the_package(tmp_path: Path) -> None:
    import compressor
    from compressor.entry_points import FUNCTIONS, names

    announced = {"attribute", "reference", "train_comoe", "evaluate_comoe", "compress_gguf"}
    assert announced <= {name for name in names(FUNCTIONS) if getattr(compressor, name)}
    assert sorted(compressor.__all__) == sorted(name for name in compressor.__all__ if getattr(compressor, name))
    with pytest.raises(AttributeError, match="nothing"):
        compressor.nothing  # noqa: B018


def test_files_are_short() -> None:
    long = {str(path.relative_to(ROOT)): count for path in sources() if (count := _lines(path)) > 800}
    assert not long


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_the_page_draws_every_package_with_its_arrows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    rows = {cells[1]: cells for line in page.splitlines() if len(cells := [c.strip() for c in line.split("|")]) == 7}
    reached = arrows(FOUND)
    for name, meaning in ORDER.items():
        assert rows[name][1:3] == [name, meaning]
        assert rows[name][5] == (", ".join(reached[name]) or "-"), f"run python -m scripts.write_docs packages ({name})"


def test_the_page_names_files_and_code_that_exist() -> None:
    page = PAGE.read_text(encoding="utf-8")
    others = (*ROOT.glob("tests/**/*.py"), *ROOT.glob("*.toml"), *ROOT.glob("compressor/*/*.toml"))
    files = [f"/{path.relative_to(ROOT)}" for path in (*sources(), *others)]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources())
    for name in set(re.findall(r"`([\w./*-]+\.(?:py|toml))`", page)):
        assert any(fnmatch(file, f"*/{name}") for file in files), name
    for name in set(re.findall(r"`@?(?:\w+\.)?(\w+)`", page)) - {"py", "toml"}:
        assert re.search(rf"\b{name}\b", code), name
