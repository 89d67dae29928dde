"""Routing attribution by several processes that do one run together, against one process."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import small
from tests.command_line import Run, captured, names
from tests.test_ranks import fine, launched

ASK: tuple[Any, ...] = ("--samples", 28, "--sequence-length", 32)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """A model and text, as a command takes them."""
    folder = tmp_path_factory.mktemp("attributed")
    return small.save(folder / "model", num_hidden_layers=4), "--calibration", small.text_file(folder), *ASK


def written(folder: Path) -> dict[str, Any]:
    """What attribute wrote, but for the seconds that it took, and for pictures of them."""
    content = json.loads((folder / "attribution.json").read_text())
    assert content.pop("seconds")
    return {**small.tree(folder), "attribution.json": json.dumps(content)}


@pytest.mark.parametrize("more", [(), ("--keys", 3, "--edges", "experts", "--edges-kept", 50)])
def test_ranks_attribute_what_one_process_does(
    given: tuple[Any, ...], tmp_path: Path, more: tuple[Any, ...]
) -> None:
    assert captured("attribute", *given, *more, "-o", tmp_path / "alone").status == 0
    fine(launched(3 if more else 2, tmp_path, "attribute", *given, *more, "-o", tmp_path / "together"))
    assert written(tmp_path / "together") == written(tmp_path / "alone")
