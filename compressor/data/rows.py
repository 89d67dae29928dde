"""Rows of a source, whatever form it has: JSON, JSON lines, CSV, parquet, prose, compressed or not, or a data set."""

import csv
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from io import BytesIO, TextIOWrapper
from itertools import chain, groupby
from os.path import isfile
from pathlib import Path
from typing import Any, BinaryIO, Literal

from compressor.data.demo import load_documents, load_items
from compressor.data.sources import (
    COMPRESSED_SUFFIXES,
    DEFAULT_SOURCE,
    DEMO_SOURCE,
    GIVEN,
    JSON_SUFFIXES,
    TABLE_SUFFIXES,
    Address,
    WeightedSource,
    has_text_suffix,
)
from compressor.errors import CompressionError, ItemError, first_line, wrap_faults

Purpose = Literal["calibration", "heldout", "prompts", "text", "answers"]  # which options are called, too
Row = tuple[str, Any]  # the place of a row, for messages, and its content
REMEDIES = ("split it up", "restore the model's tokenizer and processor, or mend the text")
READING = (REMEDIES[0], "mend it, or download it again")
PARQUET = b"PAR1"  # the first bytes of such a file
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}
ARCHIVES = {
    b"PK\x03\x04": "a ZIP archive; unzip it first",
    b"\xfd7zXZ": "compressed by xz; run unxz first",
    b"7z\xbc\xaf": "a 7z archive; extract it first",
    b"\x89HDF": "an HDF5 file; convert it to JSON lines first",
    b"SQLite": "an SQLite database; export its table as CSV first",
}
MOST_LETTERS = 2**27  # of a document, or of the line that holds one
MOST_NAMES = 20  # of splits or configurations in an error
SHUFFLE_BUFFER = 10_000  # documents of a streamed data set that are shuffled together


@dataclass(frozen=True, slots=True)
class SourceRows:
    """Rows of a source, to be read once."""

    rows: Iterator[Row]
    is_streamed: bool = False  # a data set, in the order of the seed
    is_prose: bool = False  # documents of a text file, which blank lines separate


def source_rows(source: WeightedSource, seed: int, purpose: Purpose) -> SourceRows:
    """Return the rows of a source; raise `CompressionError` where it is missing or of no known form."""
    address = Address.parse(source.source)
    path = Path(address.name)
    if source.rows is not None:
        return SourceRows((f"{address}, row {number}", row) for number, row in enumerate(source.rows, 1))
    if address.name == GIVEN:
        raise CompressionError(f"the text {address} was given in Python and is in no file; name one with --{purpose}")
    if address.name == DEMO_SOURCE and not path.exists():
        if purpose == "prompts":
            return SourceRows((f"{DEMO_SOURCE}, {item.skill}", item.question) for item in load_items())
        part = "calibration" if purpose == "calibration" else "heldout"
        return SourceRows((DEMO_SOURCE, text) for text, _ in load_documents(part))
    if isfile(path):
        if address.config or address.split:
            plain = replace(address, config=None, split=None)
            raise CompressionError(f"{purpose} file {path} has no configurations and splits; write {plain}")
        return _file_rows(path, purpose)
    if has_text_suffix(address.name) and not path.exists():
        raise CompressionError(
            f"{purpose} file {path} does not exist; name a text or JSONL file, a data set id, or 'demo'"
        )
    return SourceRows(_data_set_rows(address, seed, purpose), is_streamed=True)


def _file_rows(path: Path, purpose: str) -> SourceRows:
    """Return the rows of a file by its content; its suffix decides only what the content leaves open."""
    try:
        with path.open("rb") as stream:
            start = stream.read(8)
    except OSError as error:
        raise CompressionError(f"{purpose} file {path} cannot be read: {error.strerror}") from error
    for magic, what in ARCHIVES.items():
        if start.startswith(magic):
            raise CompressionError(f"{purpose} file {path} is {what}")
    if start.startswith(PARQUET) or path.suffix.lower() == ".parquet":
        return SourceRows(_parquet_rows(path, purpose))
    suffixes = [suffix.lower() for suffix in path.suffixes if suffix.lower() not in COMPRESSED_SUFFIXES]
    suffix = suffixes[-1] if suffixes else ""
    if suffix in TABLE_SUFFIXES:
        return SourceRows(_table_rows(path, purpose))
    begin = next((line.lstrip() for _, line in _lines(path, purpose) if line.strip()), "")
    if _is_object(begin):
        return SourceRows(_json_lines(path, purpose))
    if begin.startswith(("[", "{")) and (rows := _json_rows(path, purpose)) is not None:
        return SourceRows((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
    if suffix in JSON_SUFFIXES:
        return SourceRows(_json_lines(path, purpose))
    return SourceRows(_prose(path, purpose), is_prose=True)


def _is_object(line: str) -> bool:
    if line.startswith("{"):
        with suppress(ValueError, RecursionError):
            return isinstance(json.loads(line), dict)
    return False


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed if need be."""
    with path.open("rb") as raw:
        start = raw.read(8)
        compression = next((name for magic, name in COMPRESSIONS.items() if start.startswith(magic)), None)
        if compression is None:
            raw.seek(0)
            yield raw
            return
        import pyarrow

        with pyarrow.input_stream(str(path), compression=compression) as stream:
            content = stream.read()
        yield BytesIO(content)


def _lines(path: Path, purpose: str) -> Iterator[tuple[int, str]]:
    """Yield each line of a file after its number."""
    with wrap_faults(f"{purpose} file {path} cannot be read", *READING), _opened(path) as raw:
        stream = TextIOWrapper(raw, "utf-8-sig", "surrogateescape")  # a bad byte costs its row alone
        for number, line in enumerate(iter(lambda: stream.readline(MOST_LETTERS + 1), ""), 1):
            yield number, _bounded(line, f"{path}, line {number}")


def _bounded(text: str, where: str) -> str:
    if len(text) > MOST_LETTERS:
        raise CompressionError(f"{where} has more than {MOST_LETTERS:,} letters; {REMEDIES[0]}")
    return text


def _prose(path: Path, purpose: str) -> Iterator[Row]:
    for is_blank, paragraph in groupby(_lines(path, purpose), lambda numbered: numbered[1] == "\n"):
        if not is_blank:
            (number, first), *more = paragraph
            where = f"{path}: the document at line {number}"
            text = "".join([first, *(line for _, line in more)])
            yield where, _bounded(text, where).removesuffix("\n") + "\n"


def _json_lines(path: Path, purpose: str) -> Iterator[Row]:
    for number, line in _lines(path, purpose):
        where = f"{path}, line {number}"
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                row = ItemError(f"{where} is not valid JSON ({error}); mend or remove it")
            yield where, row


def _json_rows(path: Path, purpose: str) -> list[Any] | None:
    """Return the rows of a file that is one JSON array, or one object; None for any other file."""
    with wrap_faults(f"{purpose} file {path} cannot be read", *READING), _opened(path) as stream:
        try:
            content = json.loads(stream.read().decode("utf-8-sig"))
        except (ValueError, RecursionError):
            return None
    return content if isinstance(content, list) else [content]


def _table_rows(path: Path, purpose: str) -> Iterator[Row]:
    """Yield the rows of a CSV file by the names in its first line; the separator is what stands there most often."""
    csv.field_size_limit(MOST_LETTERS)
    lines = (line for _, line in _lines(path, purpose))
    header = next(lines, "")
    separator = max(",;\t", key=header.count)
    reader = csv.DictReader(chain([header], lines), delimiter=separator)
    try:
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row:
                yield where, ItemError(f"{where} has more fields than the first line has names; mend or remove it")
            else:
                yield where, row
    except csv.Error as error:
        raise CompressionError(f"{path}, line {reader.line_num} is no CSV ({error}); mend it") from error


def _parquet_rows(path: Path, purpose: str) -> Iterator[Row]:
    from pyarrow.parquet import ParquetFile

    with wrap_faults(f"{purpose} file {path} cannot be read", *READING), ParquetFile(path) as table:
        rows = chain.from_iterable(batch.to_pylist() for batch in table.iter_batches())
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))


def _data_set_rows(address: Address, seed: int, purpose: str) -> Iterator[Row]:
    """Yield rows of a data set, streamed in the order of the seed.

    Raises `CompressionError` for a configuration or split that it does not have, naming those that there are.
    """
    import datasets

    name, split = address.name, address.split or "train"
    config = address.config or ("en" if name == DEFAULT_SOURCE else None)
    try:
        if any((Path(name) / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
            rows = _saved(name, address, split).shuffle(seed=seed).to_iterable_dataset()
        else:
            stream = datasets.load_dataset(name, config, split=split, streaming=True)
            rows = stream.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
        if rows.features:
            rows = rows.decode(False)  # pictures are opened by `data.media`
        for number, row in enumerate(rows, 1):
            yield f"data set {address}, row {number} as shuffled", row
    except CompressionError:
        raise
    except Exception as error:
        fault = f"{purpose} data {str(address)!r} is no file, and cannot be read as a data set ({first_line(error)})"
        remedy = f"pass --{purpose} with a text or JSONL file, a data set id, or 'demo'"
        with suppress(Exception):  # what keeps the data set from being read may keep these from being listed
            configs = datasets.get_dataset_config_names(name)
            chosen = config or datasets.get_dataset_default_config_name(name)
            if chosen not in configs:
                fault = f"data set {name} has no {f'configuration {config!r}' if config else 'default configuration'}"
                remedy = f"its configurations are {_shown(configs)}; write {replace(address, config=configs[0])}"
            elif split not in (splits := datasets.get_dataset_split_names(name, chosen)):
                fault = f"data set {name} has no split {split!r}"
                remedy = f"its splits are {_shown(splits)}; write {replace(address, split=splits[0])}"
        raise CompressionError(f"{fault}; {remedy}") from error


def _saved(folder: str, address: Address, split: str) -> Any:
    """Return a data set that `save_to_disk` has written."""
    import datasets

    saved = datasets.load_from_disk(folder)
    if not isinstance(saved, datasets.DatasetDict):
        return saved
    if split not in saved:
        names = list(saved)
        example = replace(address, split=names[0])
        raise CompressionError(
            f"data set {folder} has no split {split!r}; its splits are {_shown(names)}; write {example}"
        )
    return saved[split]


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:MOST_NAMES]) + (f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else "")
