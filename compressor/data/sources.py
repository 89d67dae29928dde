"""Names and weights of calibration text's sources: files, streamed data sets, the demo, or texts given in Python."""

import hashlib
import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from os.path import abspath, exists, isfile
from pathlib import Path
from typing import Any

from compressor.errors import CompressionError, without_tokens
from compressor.formatting import distinct

DEFAULT_SOURCE = "allenai/c4"  # the papers' choice; its config "en" is used
DEMO_SOURCE = "demo"
DATA_SET_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
ADDRESS = re.compile(r"(?P<name>.+?)(:(?P<config>[^:@#/]+))?(@(?P<split>[^@#/]+))?(#(?P<column>[^#]+))?", re.DOTALL)
JSON_SUFFIXES, TABLE_SUFFIXES = (".jsonl", ".json", ".ndjson"), (".csv", ".tsv")
COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2")
TEXT_SUFFIXES = (*JSON_SUFFIXES, *TABLE_SUFFIXES, *COMPRESSED_SUFFIXES, ".parquet", ".txt", ".text", ".md")
GIVEN = "memory"  # such texts are named `memory:` and their digest


def has_text_suffix(name: str) -> bool:
    """Return True for the name of a file of text, of a table, or of a compressed one."""
    return Path(name).suffix.lower() in TEXT_SUFFIXES


@dataclass(frozen=True, slots=True)
class Address:
    """A source by its parts, as in `ID:config@split#column`; the name is an id, a path of a file or folder, or demo."""

    name: str
    config: str | None = None
    split: str | None = None
    column: str | None = None

    @classmethod
    def parse(cls, text: str) -> "Address":
        """The parts of a source; one that names a file or folder as it stands has no others."""
        match = None if exists(text) else ADDRESS.fullmatch(text)
        return cls(text) if match is None else cls(**match.groupdict())

    def __str__(self) -> str:
        parts = zip(":@#", (self.config, self.split, self.column), strict=True)
        return self.name + "".join(f"{sign}{part}" for sign, part in parts if part is not None)


def _shown(value: Any) -> str:
    """What stands for a value that JSON has no form of, such as a picture: a digest of its content."""
    return hashlib.sha256(value.tobytes()).hexdigest() if hasattr(value, "tobytes") else str(value)


@dataclass(frozen=True, slots=True)
class GivenTexts:
    """Texts or rows given in Python; the name holds a digest of their content."""

    name: str
    rows: Sequence[Any] = field(repr=False, compare=False)

    @classmethod
    def of(cls, texts: Iterable[Any]) -> "GivenTexts":
        """Take a `datasets.Dataset`, or an iterable of strings and dicts, which is read to its end."""
        if isinstance(texts, Mapping):
            raise CompressionError(
                f"calibration is a {type(texts).__name__} with {', '.join(map(str, texts)) or 'nothing'}; pass one of "
                "its splits, or a list of texts"
            )
        rows: Any = texts if hasattr(texts, "__getitem__") else list(texts)
        digest = hashlib.sha256()
        for row in rows:
            try:
                content = json.dumps(row, sort_keys=True, default=_shown)
            except (TypeError, ValueError, RecursionError):  # such a row is left out when it is read
                content = reprlib.repr(row)
            digest.update(content.encode("utf-8", "backslashreplace") + b"\n")
        return cls(f"{GIVEN}:{digest.hexdigest()[:16]}", rows)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class WeightedSource:
    """A file, a data set or the demo, or the rows given in Python, and its share of the sequences."""

    source: str
    weight: float  # relative to the others'
    rows: Sequence[Any] | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise CompressionError(
                f"calibration source {self.source!r} has weight {self.weight}; give a positive number"
            )


def sources_or_texts(given: Any) -> Any:
    """What Python gave as calibration: names of sources as they are, and a list of texts as `GivenTexts`.

    A list of strings counts as texts unless each is a file, ends like one, or has no white space.
    """
    if isinstance(given, Sequence) and not isinstance(given, str) and all(isinstance(each, str) for each in given):
        named = (isfile(each) or has_text_suffix(each) or len(each.split()) == 1 for each in given)
        return given if all(named) else GivenTexts.of(given)
    return given


def parse_sources(arguments: Sequence[str | GivenTexts]) -> tuple[WeightedSource, ...]:
    """`SOURCE` or `SOURCE=WEIGHT` each: the sources with weights that sum to 1, equal ones if none is given."""
    if not arguments:
        raise CompressionError("no calibration source is given; name a text or JSONL file, a data set id, or 'demo'")
    pairs = [_split_weight(str(argument)) for argument in arguments]
    rows = [argument.rows if isinstance(argument, GivenTexts) else None for argument in arguments]
    bare = [source for source, weight in pairs if weight is None]
    if bare and len(bare) < len(pairs):
        raise CompressionError(
            f"calibration source {bare[0]!r} has no weight but others have; write SOURCE=WEIGHT for all or for none"
        )
    parsed = [Address.parse(source) for source, _ in pairs]
    places = [replace(each, name=str(Path(each.name).resolve())) if exists(each.name) else each for each in parsed]
    for number, (source, _) in enumerate(pairs):
        if places[number] in places[:number]:
            raise CompressionError(f"calibration source {source!r} is given twice; name it once, with a larger weight")
    weighted = [
        WeightedSource(source, 1.0 if weight is None else weight, own)
        for (source, weight), own in zip(pairs, rows, strict=True)
    ]
    return tuple(replace(entry, weight=share) for entry, share in zip(weighted, shares(weighted), strict=True))


def _split_weight(argument: str) -> tuple[str, float | None]:
    source, sign, number = argument.rpartition("=")
    try:
        weight = float(number)
    except ValueError:
        return argument, None
    if not sign or isfile(argument):
        return argument, None
    if not source:
        raise CompressionError(f"calibration {argument!r} names no source before its weight; write SOURCE=WEIGHT")
    return source, weight


def domain_of(argument: str) -> tuple[str, str]:
    """`SOURCE` or `SOURCE=DOMAIN`: the source and its domain, by default a file's name or the data set's id."""
    source, sign, domain = argument.rpartition("=")
    if not sign or isfile(argument):
        return argument, short_names([argument])[0]
    if not (source.strip() and domain.strip()):
        raise CompressionError(f"{argument!r} lacks a source or a domain; write FILE=DOMAIN, or the file alone")
    return source, domain.strip()


def shares(sources: Sequence[WeightedSource]) -> tuple[float, ...]:
    """The weights, made to sum to 1."""
    whole = sum(Fraction(entry.weight) for entry in sources)  # exact: huge weights do not overflow
    return tuple(float(Fraction(entry.weight) / whole) for entry in sources)


def divide(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in proportion to the weights that sum to `total`, each at least 1: largest remainders.

    What is due less than 1 gets 1, and the others share the rest; ties go to the lower index. Needs total >= number.
    """
    exact = [Fraction(weight) for weight in weights]
    due, raised = [Fraction(0)] * len(exact), set[int]()
    while True:
        free = [number for number in range(len(exact)) if number not in raised]
        rest, whole = total - len(raised), sum(exact[number] for number in free)
        for number in free:
            due[number] = rest * exact[number] / whole
        small = {number for number in free if due[number] < 1}
        if not small:
            break
        raised |= small
    counts = [1 if number in raised else math.floor(share) for number, share in enumerate(due)]
    for number in sorted(free, key=lambda number: counts[number] - due[number])[: total - sum(counts)]:
        counts[number] += 1
    return tuple(counts)


def local_name(source: str) -> str:
    """The source without the folders of its file or local data set; the id of a data set has none."""
    address = Address.parse(source)
    is_id = DATA_SET_ID.fullmatch(address.name) and not has_text_suffix(address.name)
    return str(address if is_id and not exists(address.name) else replace(address, name=Path(address.name).name))


def short_names(sources: Sequence[str]) -> tuple[str, ...]:
    """A file's name without folder and suffix, or the source itself; numbered where two would be equal."""
    names = ((Address.parse(source).name, local_name(source)) for source in sources)
    return tuple(distinct(Path(name).stem if isfile(name) else shown for name, shown in names))


def with_folders(identity: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The identity with absolute paths, so that its files are found from any working folder."""
    if identity is None:
        return None
    stored = identity.get("sources")
    if not isinstance(stored, list) or not all(isinstance(entry, dict) for entry in stored):
        return dict(identity)
    parsed = [Address.parse(str(entry.get("source"))) for entry in stored]
    places = [str(replace(each, name=abspath(each.name)) if exists(each.name) else each) for each in parsed]
    entries = [{**entry, "source": place} for entry, place in zip(stored, places, strict=True)]
    return {**identity, "source": " + ".join(places), "sources": entries}


def without_folders(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity with file names in place of paths, and no access token in one; it may be a hand-edited one."""
    stored = identity.get("sources")
    entries = [dict(entry) for entry in stored if isinstance(entry, dict)] if isinstance(stored, list) else []
    for entry in entries:
        entry["source"] = without_tokens(local_name(str(entry.get("source"))))
    joined = " + ".join(entry["source"] for entry in entries) or without_tokens(Path(identity["source"]).name)
    return {**identity, "source": joined, **({"sources": entries} if "sources" in identity else {})}
