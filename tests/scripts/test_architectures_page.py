"""docs/architectures.md is what its script would write, as far as that is cheap to check."""

from pathlib import Path

import pytest
import transformers

from compressor import CompressionError
from compressor.model.architecture import discover
from scripts.write_docs.architectures import PAGE, refused_families, refused_row, supported_row
from tests.support import zoo

REFUSED = refused_families()


def rows() -> dict[str, list[str]]:
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row for row in cells if row[0] != "Family"}


def test_the_page_lists_every_family_once() -> None:
    families = [line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    installed = {folder.name for folder in (Path(transformers.__file__).parent / "models").iterdir()}
    assert [name for name in families if name in installed] == [*sorted(zoo.FAMILIES), *REFUSED]
    assert len(set(families)) == len(families) - 1  # the heads of two tables


def test_other_pages_count_the_families_as_the_page_does() -> None:
    graphs = [row[5] for row in rows().values() if row[2] == "yes"]
    refused = [cell for cell in graphs if cell.startswith("no:")]
    without = [cell for cell in graphs if "no cache" in cell]
    count, with_cache = len(graphs), len(graphs) - len(refused) - len(without)
    exported = f"Of the {count} families {with_cache} export with a cache and {len(without)} without"
    assert PAGE.read_text(encoding="utf-8").split("\n\n")[1].startswith(f"{count} families of transformers ")
    assert f"[{count} architectures](docs/architectures.md)" in Path("README.md").read_text()
    assert f"[{count} families](architectures.md)" in Path("docs/index.md").read_text()
    assert f"{exported}; {len(refused)} are refused" in Path("docs/how-to/exporting.md").read_text()


def test_the_page_names_the_model_classes_of_the_tests_and_supports_them() -> None:
    listed = {family: row[1:3] for family, row in rows().items() if family in zoo.FAMILIES}
    assert listed == {name: [entry.model_class, "yes"] for name, entry in zoo.FAMILIES.items()}


def test_known_families_of_another_interface_are_found() -> None:
    assert {"dbrx", "jetmoe", "llama4", "nllb_moe", "switch_transformers"} <= set(REFUSED)
    assert not set(REFUSED) & set(zoo.FAMILIES)


@pytest.mark.full
@pytest.mark.parametrize("family", REFUSED)
def test_refused_families_get_the_message_on_the_page(family: str) -> None:
    assert refused_row(family) == "| " + " | ".join(rows()[family]) + " |"
    assert "not supported" in refused_row(family)


@pytest.mark.full
@pytest.mark.parametrize("name", ["mixtral", "diffusion_gemma"])
def test_rows_are_what_the_script_finds(name: str) -> None:
    assert supported_row(name) == "| " + " | ".join(rows()[name]) + " |"


def test_a_model_that_transformers_does_not_generate_text_with_is_refused() -> None:
    with pytest.raises(CompressionError, match="no language model"):
        discover(transformers.SwitchTransformersConfig())
