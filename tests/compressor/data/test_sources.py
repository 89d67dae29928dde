"""Sources of calibration text: arguments, weights, division, names, and refusals."""

import math
from fractions import Fraction
from itertools import pairwise, product
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given
from hypothesis import strategies as st

from compressor.data.sources import (
    GivenTexts,
    SourceSpec,
    WeightedSource,
    divide,
    parse_sources,
    short_names,
    sources_or_texts,
    with_folders,
    without_folders,
)
from compressor.errors import CompressionError
from compressor.recipe.step import TextOptions
from tests.support.texts import write

WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6)


@given(WEIGHTS, st.integers(0, 500))
def test_a_division_is_whole_and_proportional(weights: list[float], more: int) -> None:
    total = len(weights) + more
    counts = divide(total, weights)
    due = [total * Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    assert sum(counts) == total and min(counts) >= 1
    if min(due) >= 1:
        assert all(abs(count - share) < 1 for count, share in zip(counts, due, strict=True))
    assert all(count == 1 for count, share in zip(counts, due, strict=True) if share < 1)
    ordered = sorted(zip(weights, counts, strict=True))
    assert all(one[1] <= two[1] for one, two in pairwise(ordered) if one[0] < two[0])


@given(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.integers(0, 6))
def test_no_other_division_comes_nearer(weights: list[int], more: int) -> None:
    total = len(weights) + more
    due = [Fraction(total * weight, sum(weights)) for weight in weights]
    if min(due) >= 1:
        others = [each for each in product(range(1, total + 1), repeat=len(weights)) if sum(each) == total]
        far = [sum((count - share) ** 2 for count, share in zip(each, due, strict=True)) for each in others]
        counts = divide(total, weights)
        assert sum((count - share) ** 2 for count, share in zip(counts, due, strict=True)) == min(far)


PARSED: list[tuple[list[str], list[tuple[str, float]]]] = [
    (["x.jsonl"], [("x.jsonl", 1.0)]),
    (["x.jsonl=0.5"], [("x.jsonl", 1.0)]),
    (["x.jsonl=0.5", "y=1.5"], [("x.jsonl", 0.25), ("y", 0.75)]),
    (["a", "b", "org/c:en"], [("a", 1 / 3), ("b", 1 / 3), ("org/c:en", 1 / 3)]),
    (["a=b=3", "c=1"], [("a=b", 0.75), ("c", 0.25)]),
    (["a=b", "c="], [("a=b", 0.5), ("c=", 0.5)]),
    (["7"], [("7", 1.0)]),
    (["a=1e308", "b=1e308"], [("a", 0.5), ("b", 0.5)]),
]


@pytest.mark.parametrize(("arguments", "expected"), PARSED)
def test_sources_and_weights_are_read(arguments: list[str], expected: list[tuple[str, float]]) -> None:
    found = parse_sources(arguments)
    assert [entry.source for entry in found] == [source for source, _ in expected]
    assert [entry.weight for entry in found] == pytest.approx([weight for _, weight in expected], rel=1e-15)
    assert math.fsum(entry.weight for entry in found) == pytest.approx(1, rel=1e-15)


def test_a_file_whose_name_ends_like_a_weight_is_a_file(tmp_path: Path) -> None:
    names = [str(write(tmp_path, "text", name)) for name in ("a=b.txt", "c=2")]
    assert parse_sources(names) == tuple(WeightedSource(name, 0.5) for name in names)
    assert parse_sources([f"{names[0]}=1", f"{names[1]}=3"]) == tuple(map(WeightedSource, names, (0.25, 0.75)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no calibration source is given; name a text"),
        (["=0.5"], "'=0.5' names no source before its weight; write SOURCE=WEIGHT"),
        (["x=0"], r"'x' has weight 0.0; give a positive number"),
        (["x=-1"], "'x' has weight -1.0"),
        (["x=nan"], "'x' has weight nan"),
        (["x=inf"], "'x' has weight inf"),
        (["x=1", "y"], "'y' has no weight but others have; write SOURCE=WEIGHT for all or for none"),
        (["x", "y", "x"], "'x' is given twice"),
        (["x=1", "x=2"], "'x' is given twice"),
    ],
)
def test_bad_sources_are_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(CompressionError, match=message):
        parse_sources(arguments)


def test_one_file_under_two_names_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "text")
    with pytest.raises(CompressionError, match="is given twice"):
        parse_sources([str(path), f"{tmp_path}/../{tmp_path.name}/data.txt"])


def test_short_names_are_unique(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    files = [str(write(folder, "a", name)) for folder, name in ((tmp_path, "a.txt"), (tmp_path / "x", "a.jsonl"))]
    assert short_names([*files, "a-2", "org/a", "org/a", "org/a"]) == (
        "a", "a-2", "a-2-2", "org/a", "org/a-2", "org/a-3",
    )  # fmt: skip


def test_relative_files_are_recorded_with_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "set").mkdir()
    names = ("a.txt", "allenai/c4", "a.txt#body", "set:plain@test")
    found = with_folders({"source": "?", "sources": [{"source": name} for name in names], "seed": 3})
    places = [f"{tmp_path}/a.txt", "allenai/c4", f"{tmp_path}/a.txt#body", f"{tmp_path}/set:plain@test"]
    assert found == {"source": " + ".join(places), "sources": [{"source": place} for place in places], "seed": 3}
    assert [entry["source"] for entry in without_folders(found)["sources"]] == list(names)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("allenai/c4:en", ("allenai/c4", "en", None, None)),
        ("HuggingFaceH4/ultrachat_200k@train_sft", ("HuggingFaceH4/ultrachat_200k", None, "train_sft", None)),
        ("org/data:a.b@train[:9%]#my column", ("org/data", "a.b", "train[:9%]", "my column")),
        ("folder/a.jsonl#body", ("folder/a.jsonl", None, None, "body")),
        ("../x:3/a.txt", ("../x:3/a.txt", None, None, None)),
        ("demo", ("demo", None, None, None)),
    ],
)
def test_addresses_are_taken_apart(text: str, parts: tuple[str | None, ...]) -> None:
    address = SourceSpec.parse(text)
    assert (address.name, address.config, address.split, address.column) == parts and str(address) == text


def test_python_names_sources_or_gives_texts(tmp_path: Path) -> None:
    path = str(write(tmp_path, "text", "my file"))
    for sources in (["a.txt", "my corpus.jsonl", path, "org/data@test"], "a b", None, ["org/a=0.5", "demo=1"]):
        assert sources_or_texts(sources) is sources
    for texts in (["one text", "demo"], ("A text.", path)):
        assert sources_or_texts(texts) == GivenTexts.of(texts)
    assert TextOptions(data=Path("a.txt")).data == ("a.txt",) == TextOptions(data=[Path("a.txt")]).data
    with pytest.raises(CompressionError, match="calibration is a DatasetDict with train, test; pass one of its splits"):
        TextOptions(data=DatasetDict(dict.fromkeys(("train", "test"), Dataset.from_list([{"text": "a"}]))))
