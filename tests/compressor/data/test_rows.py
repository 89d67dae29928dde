"""Forms of files and data sets: the same rows come out of each."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow
import pytest
from datasets import Dataset, DatasetDict

from compressor.data.rows import source_rows
from compressor.data.sources import WeightedSource
from compressor.errors import CompressionError
from tests.texts import run, write

ROWS = [{"instruction": f"sort {number}", "input": 'x;y, "z"', "output": "é\nok"} for number in range(3)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def table(separator: str) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(ROWS[0]), delimiter=separator)
    writer.writeheader()
    writer.writerows(ROWS)
    return stream.getvalue()


def zstd(content: str) -> bytes:
    return bytes(pyarrow.compress(content.encode(), codec="zstd", asbytes=True))


FILES: dict[str, str | bytes] = {
    "lines.ndjson": LINES,
    "LINES.JSONL": LINES,
    "lines": "\n" + LINES,
    "lines.txt": LINES,
    "array.json": json.dumps(ROWS),
    "indented.json": json.dumps(ROWS, indent=2),
    "array": "\ufeff" + json.dumps(ROWS, ensure_ascii=False),
    "table.csv": table(","),
    "semicolons.csv": table(";"),
    "table.TSV": table("\t"),
    "lines.jsonl.gz": gzip.compress(LINES.encode()),
    "lines.zst": zstd(LINES),
    "table.csv.gz": gzip.compress(table(",").encode()),
    "array.json.zst": zstd(json.dumps(ROWS, indent=1)),
}


def rows_of(path: Path) -> list[object]:
    return [row for _, row in source_rows(WeightedSource(str(path), 1.0), 0, "calibration").rows]


@pytest.mark.parametrize("name", FILES)
def test_rows_are_read_by_what_a_file_holds(name: str, tmp_path: Path) -> None:
    assert rows_of(write(tmp_path, FILES[name], name)) == ROWS


@pytest.mark.parametrize(
    "save",
    [
        lambda folder: Dataset.from_list(ROWS).save_to_disk(folder),
        lambda folder: DatasetDict({"train": Dataset.from_list(ROWS)}).save_to_disk(folder),
        lambda folder: Dataset.from_list(ROWS).to_parquet(folder),
    ],
)
def test_data_sets_that_were_saved_are_read(save: Callable[[Path], object], tmp_path: Path) -> None:
    save(tmp_path / "saved")
    assert sorted(map(str, rows_of(tmp_path / "saved"))) == sorted(map(str, ROWS))


def test_an_array_may_hold_strings_and_an_object_is_a_row(tmp_path: Path) -> None:
    assert rows_of(write(tmp_path, json.dumps(["one\n\ntwo", "three"]), "a.json")) == ["one\n\ntwo", "three"]
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    assert rows_of(write(tmp_path, json.dumps(chat, indent=1), "b.json")) == [chat]


def test_prose_that_begins_like_json_is_prose(tmp_path: Path) -> None:
    assert rows_of(write(tmp_path, "{\n  int x;\n}\n\nmore\n", "a.h")) == ["{\n  int x;\n}\n", "more\n"]
    assert rows_of(write(tmp_path, gzip.compress(b"[link](x)\n\nmore\n"), "a.md.gz")) == ["[link](x)\n", "more\n"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"PK\x03\x04...", "is a ZIP archive; unzip it first"),
        ("a.txt.xz", b"\xfd7zXZ\x00", "is compressed by xz; run unxz first"),
        ("a.gz", gzip.compress(LINES.encode() * 99)[:-40], "a.gz cannot be read"),
        ("a.csv", '"', "a.csv is empty"),
    ],
)
def test_what_is_not_read_is_said(name: str, content: str | bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(CompressionError, match=message):
        run(write(tmp_path, content, name))


def test_a_split_that_a_saved_data_set_lacks_is_named(tmp_path: Path) -> None:
    DatasetDict({"one": Dataset.from_list(ROWS), "two": Dataset.from_list(ROWS)}).save_to_disk(tmp_path / "saved")
    with pytest.raises(CompressionError, match=r"has no split 'train'; its splits are one, two; write .*saved@one"):
        rows_of(tmp_path / "saved")
    assert len(rows_of(Path(f"{tmp_path}/saved@two"))) == 3
