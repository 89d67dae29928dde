"""Small models and tasks that evaluations are tested on, without a network."""

from pathlib import Path
from typing import Any

import pytest

from tests.support import small
from tests.support.eval_tasks import no_network, own_tasks


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The requests that were tried; none succeeds."""
    return no_network(monkeypatch)


@pytest.fixture(scope="package")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a byte tokenizer that has a token for the start of a text."""
    return small.save(tmp_path_factory.mktemp("tiny") / "model", max_position_embeddings=256)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return own_tasks(tmp_path)
