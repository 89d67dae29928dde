import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from scipy.spatial.distance import cdist
from torch.nn.functional import normalize

from compressor.answers.items import Item
from compressor.errors import CompressionError
from compressor.pathways.reference import (
    NAMES,
    ReferenceFacts,
    ReferenceSet,
    read_reference,
    tokenizer_digest,
    write_reference,
)
from tests.support import small

ITEMS = tuple(Item(f"prompt {number}", "yes", ("yes", "no"), "task") for number in range(4))
EMBEDDINGS = torch.tensor([[2.0, 0.0], [1.0, 0.1], [0.0, 3.0], [-1.0, 0.0]])


def made() -> ReferenceSet:
    facts = ReferenceFacts(
        "model", "f" * 64, tokenizer_digest(small.tokenizer()), 8, ("layers.0", "layers.1"), ("softmax", "sigmoid"),
        "own", 6,
    )  # fmt: skip
    pathways = torch.rand(4, 2, 8, generator=torch.Generator().manual_seed(0))
    return ReferenceSet(facts, ITEMS, EMBEDDINGS, pathways)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_reference(made(), tmp_path / "reference", False)
    return tmp_path / "reference"


def test_a_set_is_read_as_it_was_written(folder: Path, tmp_path: Path) -> None:
    found, original = read_reference(folder), made()
    assert found.facts == original.facts and found.items == original.items
    assert torch.equal(found.embeddings, original.embeddings) and torch.equal(found.pathways, original.pathways)
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    write_reference(found, tmp_path / "again", False)
    assert small.tree(tmp_path / "again") == small.tree(folder)


def test_neighbours_are_the_nearest_by_angle() -> None:
    query = torch.tensor([5.0, 0.0])
    places, decoder_layer, near = made().neighbours(query, 2)
    assert places == [0, 1] and decoder_layer.tolist() == [1, 0]
    torch.testing.assert_close(near, EMBEDDINGS[:2] / EMBEDDINGS[:2].norm(dim=1, keepdim=True))
    assert made().neighbours(query, 9)[0] == [0, 1, 2, 3]
    assert made().neighbours(query, 2, but="prompt 0")[0] == [1, 2]
    assert made().neighbours(query, 1, radius=0.5)[0] == [0, 1]
    assert made().neighbours(query, 1, radius=0.5, but="prompt 1")[0] == [0]
    places, _, near = made().neighbours(torch.tensor([-1.0, -1.0]), 1, radius=0.1)
    assert places == [] and near.shape == (0, 2)


def test_of_items_as_near_the_first_comes_first() -> None:
    """Against SciPy's distances, of many items that are asked twice."""
    points = torch.randn(30, 8, generator=torch.Generator().manual_seed(1)).repeat(2, 1)
    items = tuple(Item(f"prompt {number}", "yes") for number in range(60))
    query = torch.randn(8, generator=torch.Generator().manual_seed(2))
    rows = normalize(points)
    distances = cdist(rows.double(), normalize(query, dim=0)[None].double())[:, 0].round(12)
    nearest = ReferenceSet(made().facts, items, points, made().pathways).neighbours(query, 60)[0]
    assert nearest == sorted(range(60), key=lambda index: (distances[index], index))


def fact(name: str, value: Any) -> Callable[[Path], Any]:
    return lambda folder: small.edit_json(folder / NAMES[0], lambda content: content.update({name: value}))


def tensors(**changed: Any) -> Callable[[Path], Any]:
    kept = {"embeddings": EMBEDDINGS, "pathways": made().pathways}
    return lambda folder: save_file({**kept, **changed}, folder / NAMES[1])


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no set": (lambda folder: (folder / NAMES[0]).unlink(), r"reference\.json cannot be read .*; name a folder that"),
    "no items": (lambda folder: (folder / NAMES[2]).unlink(), r"items\.jsonl cannot be read"),
    "an item too many": (
        lambda folder: (folder / NAMES[2]).open("a").write(json.dumps({"prompt": "a", "answer": "b"})),
        "does not fit the files beside it",
    ),
    "another report": (fact("format", "moe-compressor-gate"), "format should be 'moe-compressor-reference/1'"),
    "an unknown score": (fact("scores", ["softmax", "relu"]), r"scores\[1\] should be 'softmax'"),
    "another shape": (tensors(pathways=torch.rand(4, 1, 8)), "does not fit the files beside it"),
    "embeddings that are none": (tensors(embeddings=EMBEDDINGS * torch.nan), "does not fit the files beside it"),
    "another embedding": (fact("embedding", "some/model"), "are embedded by 'some/model', not 'own'"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_reference_set_is_told(name: str, folder: Path) -> None:
    damage, message = BAD[name]
    damage(folder)
    with pytest.raises(CompressionError, match=message) as error:
        read_reference(folder)
    assert "\n" not in str(error.value)
