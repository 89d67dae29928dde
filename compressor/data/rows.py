"""Rows of a source in any form: JSON, JSON lines, CSV, parquet or prose, compressed or not, or a
data set."""

import csv
import json
import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from itertools import chain, groupby, islice
from operator import itemgetter
from os.path import isfile
from pathlib import Path
from typing import Any, BinaryIO, Literal

from compressor.data.chats import parse_json
from compressor.data.demo import load_documents, load_items
from compressor.data.sources import (
    COMPRESSED_SUFFIXES,
    DEMO_SOURCE,
    GIVEN,
    JSON_SUFFIXES,
    NAME_TEXT,
    TABLE_SUFFIXES,
    SourceSpec,
    WeightedSource,
    has_text_suffix,
)
from compressor.errors import CompressionError, ItemError, reason_of, wrap_faults
from compressor.frozen import frozen

# also the names of options
Purpose = Literal["calibration", "heldout", "prompts", "text", "answers", "items"]
Form = Literal["parquet", "table", "JSON lines", "prose"]  # of a file
Row = tuple[str, Any]  # the place of a row, for error messages, and its content
REMEDIES = ("split it up", "restore the model's tokenizer and processor, or mend the text")
# by their first bytes
COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd", b"BZh": "bz2"}
MOST_UNPACKED = 2**30  # bytes
PARQUET = b"PAR1"  # the first bytes of such a file
C4 = "allenai/c4"  # without a config of that name, "en" is read
WINDOW = 10_000  # rows of a streamed data set that are shuffled together


@frozen
class SourceRows:
    """Rows of a source, to be read once."""

    rows: Iterator[Row]
    is_streamed: bool = False  # a data set, in the order of the seed
    is_prose: bool = False  # documents of a text file, separated by blank lines


def source_rows(source: WeightedSource, seed: int, purpose: Purpose) -> SourceRows:
    """Return the rows of a source; raise `CompressionError` if it is missing or of no known
    form."""
    address = SourceSpec.parse(source.source)
    path = Path(address.name)
    if source.rows is not None:
        return SourceRows(
            (f"{address}, row {number}", row) for number, row in enumerate(source.rows, 1)
        )
    if address.name == GIVEN:
        raise CompressionError(
            f"the text {address} was given in Python and is in no file; name one with --{purpose}"
        )
    if address.name == DEMO_SOURCE and not path.exists():
        if purpose == "prompts":
            questions = load_items()
            return SourceRows((f"{DEMO_SOURCE}, {item.skill}", item.question) for item in questions)
        documents = load_documents("calibration" if purpose == "calibration" else "heldout")
        return SourceRows((DEMO_SOURCE, text) for text, _ in documents)
    if not isfile(path):
        if has_text_suffix(address.name) and not path.exists():
            raise CompressionError(f"{purpose} file {path} does not exist; {NAME_TEXT}")
        return SourceRows(_data_set_rows(address, seed, purpose), is_streamed=True)
    if address.config or address.split:
        plain = replace(address, config=None, split=None, revision=None)
        raise CompressionError(
            f"{purpose} file {path} has no configurations and splits; write {plain}"
        )
    # the form of a file is that of its content, or that of its suffix if the content leaves it open
    with _opened(path, purpose) as stream:
        start = stream.read(16)
    if start.startswith(PARQUET) or path.suffix.lower() == ".parquet":
        return SourceRows(_file_rows(path, purpose, "parquet"))
    if b"\0" in start:
        raise CompressionError(
            f"{purpose} file {path} is no text in UTF-8; convert it to JSON lines, CSV or parquet"
        )
    lowered = [suffix.lower() for suffix in path.suffixes]
    suffix = next((name for name in reversed(lowered) if name not in COMPRESSED_SUFFIXES), "")
    if suffix in TABLE_SUFFIXES:
        return SourceRows(_file_rows(path, purpose, "table"))
    first_line = next((line.strip() for line in _lines(path, purpose) if line.strip()), "")
    is_object = parse_json(first_line, dict) is not None
    if first_line.startswith(("[", "{")) and not is_object:
        with _opened(path, purpose) as stream:
            content = parse_json(stream.read().decode("utf-8-sig", "replace"), list | dict)
        if content is not None:
            rows = content if isinstance(content, list) else [content]
            return SourceRows((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
    if is_object or suffix in JSON_SUFFIXES:
        return SourceRows(_file_rows(path, purpose, "JSON lines"))
    return SourceRows(_file_rows(path, purpose, "prose"), is_prose=True)


def hub_answers() -> bool:
    """Return True if the Hub answers at all, with whatever status."""
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    # the client's, which depend on its version, or a refusal to ask while offline
    except Exception:
        return False
    return True


def _reading(path: Path, purpose: str) -> AbstractContextManager[None]:
    return wrap_faults(
        f"{purpose} file {path} cannot be read", REMEDIES[0], "mend it, or download it again"
    )


@contextmanager
def _opened(path: Path, purpose: str) -> Iterator[BinaryIO]:
    """Open a file for reading, decompressed if necessary."""
    with _reading(path, purpose):
        with path.open("rb") as raw:
            start = raw.read(4)
            raw.seek(0)
            compressions = [name for magic, name in COMPRESSIONS.items() if start.startswith(magic)]
            if not compressions:
                yield raw
                return
        import pyarrow

        with pyarrow.input_stream(str(path), compression=compressions[0]) as stream:
            content = stream.read(MOST_UNPACKED + 1)
        if len(content) > MOST_UNPACKED:
            raise CompressionError(
                f"{path} unpacks to more than {MOST_UNPACKED:,} bytes; split it up"
            )
        yield BytesIO(content)


def _lines(path: Path, purpose: str) -> Iterator[str]:
    with _opened(path, purpose) as raw:
        # a bad byte spoils only its row
        yield from TextIOWrapper(raw, "utf-8-sig", "surrogateescape")


def _file_rows(path: Path, purpose: str, form: Form) -> Iterator[Row]:
    """Yield the rows of a file.

    Those of a table have the names in its first line, whose most frequent separator counts;
    documents of prose are separated by blank lines.
    """
    if form == "parquet":
        from pyarrow.parquet import ParquetFile

        with _reading(path, purpose), ParquetFile(path) as table:
            batched = chain.from_iterable(batch.to_pylist() for batch in table.iter_batches())
            yield from ((f"{path}, row {number}", row) for number, row in enumerate(batched, 1))
        return
    lines = _lines(path, purpose)
    if form == "table":
        csv.field_size_limit(sys.maxsize)
        header = next(lines, "")
        separator = max(",;\t", key=header.count)
        reader = csv.DictReader(chain([header], lines), delimiter=separator)
        for fields in reader:
            where = f"{path}, line {reader.line_num}"
            if None in fields:
                message = f"{where} has more fields than the first line has names"
                yield where, ItemError(f"{message}; mend or remove it")
            else:
                yield where, fields
    elif form == "JSON lines":
        for number, line in enumerate(lines, 1):
            where = f"{path}, line {number}"
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    row = ItemError(
                        f"{where} is not valid JSON ({reason_of(error)}); mend or remove it"
                    )
                yield where, row
    else:
        for is_blank, paragraph in groupby(enumerate(lines, 1), lambda entry: entry[1] == "\n"):
            if not is_blank:
                (number, first), *more = paragraph
                text = first + "".join(line for _, line in more)
                yield f"{path}: the document at line {number}", text.removesuffix("\n") + "\n"


def _data_set_rows(address: SourceSpec, seed: int, purpose: str) -> Iterator[Row]:
    """Yield rows of a data set in the order of the seed, which no release of `datasets` changes.

    Raises `CompressionError` for a configuration or split that it does not have.
    """
    import datasets

    name = address.name
    split = address.split or "train"
    config = address.config or ("en" if name == C4 else None)
    order = []
    try:
        if isfile(f"{name}/state.json") or isfile(f"{name}/dataset_dict.json"):
            saved = datasets.load_from_disk(name)
            if hasattr(saved, "keys"):
                if split not in saved:
                    raise ValueError(f"it has no split {split!r}, but {', '.join(saved)}")
                saved = saved[split]
            order = list(range(len(saved)))
            random.Random(seed).shuffle(order)
            stream = saved.select(order).to_iterable_dataset()
        else:
            stream = datasets.load_dataset(
                name, config, split=split, revision=address.revision, streaming=True
            )
        stream = stream.decode(False) if stream.features else stream  # `data.media` opens pictures
        if order:
            for number, row in zip(order, stream, strict=True):
                yield f"data set {address}, row {number + 1}", row
            return
        # `WINDOW` rows at a time, from the stream's files in the order of the seed; if there are no
        # more rows than that, they come in the order of the same rows in one file
        files = stream.num_shards
        by_file = (
            ((file, number), row)
            for file in random.Random(seed).sample(range(files), files)
            for number, row in enumerate(stream.shard(num_shards=files, index=file))
        )
        generator = random.Random(seed)
        for window in iter(lambda: list(islice(by_file, WINDOW)), []):
            window.sort(key=itemgetter(0))
            generator.shuffle(window)
            for (_, number), row in window:
                yield f"data set {address}, row {number + 1}", row
    except Exception as error:  # data sets raise anything
        raise CompressionError(
            f"{purpose} data {str(address)!r} is no file, and cannot be read as a data set "
            f"({reason_of(error)}); pass --{purpose} with a text or JSONL file, "
            "ID:CONFIGURATION@SPLIT of a data set, or 'demo'"
        ) from error
