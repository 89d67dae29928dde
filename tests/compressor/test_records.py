"""Dataclasses from JSON: there and back for what fits, one sentence with its place for what does not."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as some

from compressor.errors import CompressionError
from compressor.records import plain_json, read_as, read_json, read_object


@dataclass(frozen=True)
class Inner:
    name: str
    share: float
    pair: tuple[int, str] | None = None


@dataclass(frozen=True)
class Outer:
    kind: Literal["one", "two"]
    count: int
    inner: tuple[Inner, ...] = ()
    times: Mapping[str, float] = field(default_factory=dict)
    rest: Any = None


COUNTS = some.integers(-(2**63) + 1, 2**63 - 1)
INNER = some.builds(Inner, some.text(), some.floats(allow_nan=False), some.none() | some.tuples(COUNTS, some.text()))
OUTER = some.builds(
    Outer,
    some.sampled_from(["one", "two"]),
    COUNTS,
    some.lists(INNER, max_size=3).map(tuple),
    some.dictionaries(some.text(), some.floats(allow_nan=False), max_size=2),
    some.none() | some.booleans() | some.lists(some.integers(), max_size=2),
)


@given(OUTER)
def test_a_record_comes_back_from_strict_json(record: Outer) -> None:
    assert read_as(Outer, json.loads(json.dumps(plain_json(asdict(record)), allow_nan=False))) == record


def test_defaults_may_be_missing_and_further_fields_are_left_aside() -> None:
    assert read_as(Outer, {"kind": "one", "count": 3, "later": []}) == Outer("one", 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": True}, "^count should be a whole number, it is True$"),
        ({"count": 1.0}, "^count should be a whole number, it is 1.0$"),
        ({"kind": "three"}, "^kind should be 'one' or 'two', it is 'three'$"),
        ({"inner": [{"share": 1}]}, r"^inner\[0\]\.name is missing; add it$"),
        ({"inner": [{"name": "a", "share": True}]}, r"^inner\[0\]\.share should be a number, it is True$"),
        ({"inner": [{"name": "a", "share": "x" * 99}]}, r"^inner\[0\]\.share should be a number, it is 'x{79} \.\.\.$"),
        ({"inner": [{"name": "a", "share": 0, "pair": [1]}]}, r"^inner\[0\]\.pair\[1\] is missing"),
        ({"times": {"all": "1"}}, r"^times\.all should be a number, it is '1'$"),
        ({"times": []}, r"^times should be an object, it is \[\]$"),
    ],
)
def test_what_does_not_fit_is_named_with_its_place(change: dict[str, Any], message: str) -> None:
    with pytest.raises(CompressionError, match=message):
        read_as(Outer, {"kind": "one", "count": 3, **change})


def test_files_that_hold_no_json_are_refused_with_the_remedy(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    for content in (b"{", b"\xff", b"[" * 100_000):
        file.write_bytes(content)
        with pytest.raises(CompressionError, match=r"a\.json is not valid JSON .*; mend it$"):
            read_json(file, "mend it")
    file.write_text("[]")
    assert read_json(file, "mend it") == []
    with pytest.raises(CompressionError, match=r"a\.json should hold a JSON object; restore the file from its source"):
        read_object(file)
    with pytest.raises(FileNotFoundError):
        read_object(tmp_path / "absent")
    with pytest.raises(CompressionError, match=r"absent cannot be read \(No such file or directory\); name another$"):
        read_json(tmp_path / "absent", "mend it", "name another")
