"""A checkpoint to push, and a Hub to push it to."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub import Hub
from tests.support.hub_pushes import checkpoint, logged_in, with_card


@pytest.fixture(scope="package")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="package")
def carded(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_card(made, tmp_path_factory.mktemp("carded") / "smaller")


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy that a test may change; times of change are kept."""
    return Path(shutil.copytree(made, tmp_path / "smaller"))


@pytest.fixture
def hub() -> Iterator[Hub]:
    with logged_in() as running:
        yield running
