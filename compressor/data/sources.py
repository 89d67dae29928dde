"""Names and weights of the sources of text: files, streamed data sets, blends, the demo, or texts
given in Python."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from fractions import Fraction
from os.path import abspath, exists, isfile
from pathlib import Path
from typing import Any

from compressor.errors import CompressionError, without_tokens
from compressor.formatting import distinct
from compressor.frozen import frozen
from compressor.options import Options, validated
from compressor.plain_yaml import read_yaml
from compressor.records import Json

DEFAULT_SOURCE = "blend"
BLEND = Path(__file__).with_name("blend.yaml")
DEMO_SOURCE = "demo"
SAMPLE_TOKENS = 512  # of the text, on which all of a layer's experts are compared
DATA_SET_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
ADDRESS = re.compile(
    r"(?P<name>.+?)(:(?P<config>[^:@#/]+))?(@(?P<split>[^@#/]+)(@(?P<revision>[^@#/]+))?)?"
    r"(#(?P<column>[^#]+))?",
    re.DOTALL,
)
JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
TABLE_SUFFIXES = (".csv", ".tsv")
COMPRESSED_SUFFIXES = (".gz", ".zst", ".bz2")
BLEND_SUFFIXES = (".yaml", ".yml")
TEXT_SUFFIXES = (
    *JSON_SUFFIXES,
    *TABLE_SUFFIXES,
    *COMPRESSED_SUFFIXES,
    ".parquet",
    ".txt",
    ".text",
    ".md",
)
NAME_TEXT = "name a text or JSONL file, a data set id, or 'demo'"
GIVEN = "memory"  # texts given in Python are named `memory:DIGEST`


def has_text_suffix(name: str) -> bool:
    """Return True for the name of a text file, a table, or a compressed file."""
    return Path(name).suffix.lower() in TEXT_SUFFIXES


def absent_text(sources: Iterable[Any]) -> str | None:
    """Return the first name that ends like a file's and is none here; None if all are."""
    for source in map(str, sources):
        # the second is its name where a weight or a domain follows
        names = [SourceSpec.parse(text).name for text in (source, source.rpartition("=")[0])]
        if not any(map(exists, names)):
            for name in filter(has_text_suffix, names):
                return name
    return None


def refuse_absent_texts(sources: Iterable[Any], purpose: str = "calibration") -> None:
    """Refuse a file of text that is not here, before anything is read."""
    name = absent_text(sources)
    if name is not None:
        raise CompressionError(f"{purpose} file {name} does not exist; {NAME_TEXT}")


@frozen
class SourceSpec:
    """The parts of `ID:config@split@revision#column`; the name is an id, the path of a file or
    folder, or `demo`."""

    name: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    column: str | None = None

    @classmethod
    def parse(cls, text: str) -> "SourceSpec":
        """Return the parts of a source; the path of a file or folder has no other parts."""
        match = None if exists(text) else ADDRESS.fullmatch(text)
        return cls(text) if match is None else cls(**match.groupdict())

    def __str__(self) -> str:
        parts = (self.config, self.split, self.revision, self.column)
        signed = zip(":@@#", parts, strict=True)
        return self.name + "".join(sign + part for sign, part in signed if part is not None)


@frozen
class GivenTexts:
    """Texts or rows given in Python, named by a digest of their content."""

    name: str
    rows: Sequence[Any] = field(repr=False, compare=False)

    @classmethod
    def of(cls, texts: Iterable[Any]) -> "GivenTexts":
        """Return the texts of a `datasets.Dataset` or of an iterable of strings and dicts, which is
        read to its end."""
        if isinstance(texts, Mapping):
            raise CompressionError(
                f"calibration is a {type(texts).__name__} with "
                f"{', '.join(map(str, texts)) or 'nothing'}; pass one of "
                "its splits, or a list of texts"
            )
        rows: Any = texts if hasattr(texts, "__getitem__") else list(texts)
        digest = hashlib.sha256()

        def spelled(value: Any) -> str:
            """Return text for what JSON cannot hold: the digest of a picture, for example."""
            is_array = hasattr(value, "tobytes")
            return hashlib.sha256(value.tobytes()).hexdigest() if is_array else str(value)

        for row in rows:
            content = json.dumps(row, sort_keys=True, default=spelled)
            digest.update(content.encode() + b"\n")
        return cls(f"{GIVEN}:{digest.hexdigest()[:16]}", rows)

    def __str__(self) -> str:
        return self.name


@frozen
class WeightedSource:
    """A file, a data set, the demo, or rows given in Python, and its share of the sequences."""

    source: str
    weight: float  # relative to other sources
    rows: Sequence[Any] | None = field(default=None, repr=False, compare=False)
    # of a blend, which is read without it if need be
    is_optional: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise CompressionError(f"a calibration source has no name; {NAME_TEXT}")
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise CompressionError(
                f"calibration source {self.source!r} has weight {self.weight}; give a positive "
                "number"
            )


class BlendEntry(Options):
    """A source in a blend, with notes for its readers."""

    source: str
    weight: float
    domain: str = ""
    licence: str = ""


def read_blend(name: str = DEFAULT_SOURCE) -> list[BlendEntry]:
    """Return the sources of the default blend, or those in a YAML file like it."""
    path = BLEND if name == DEFAULT_SOURCE else Path(name)
    remedy = f"give it a list of sources with weights, as in {BLEND}"
    content = read_yaml(path, f"the blend {name}", remedy)
    is_list = isinstance(content, list) and all(isinstance(entry, Mapping) for entry in content)
    if not content or not is_list:
        raise CompressionError(f"the blend {name} is no list of sources; {remedy}")
    return [validated(BlendEntry, entry, str(path)) for entry in content]


@frozen
class TextPart:
    """Text that a step trains on."""

    sequences: int
    length: int
    rows: int = 8  # most sequences in a batch
    minimum: int = 1  # fewest sequences with which the step can run


def sources_or_texts(given: Any) -> Any:
    """Return the calibration given in Python: names of sources unchanged, a list of texts as
    `GivenTexts`.

    A list of strings counts as texts unless each is a file, ends like one, or has no white space.
    """
    is_list = isinstance(given, Sequence) and not isinstance(given, str)
    if not is_list or not all(isinstance(text, str) for text in given):
        return given
    for text in given:
        if not isfile(text) and not has_text_suffix(text) and len(text.split()) != 1:
            return GivenTexts.of(given)
    return given


def parse_sources(arguments: Sequence[str | GivenTexts]) -> tuple[WeightedSource, ...]:
    """Parse `SOURCE` or `SOURCE=WEIGHT` arguments; weights sum to 1, and are equal if none is
    given.

    The sources of a blend share its weight.
    """
    if not arguments:
        raise CompressionError(f"no calibration source is given; {NAME_TEXT}")
    entries = []
    addresses = []
    bare = []
    for argument in arguments:
        text = str(argument)
        source, sign, number = text.rpartition("=")
        weight = None
        if sign and not isfile(text):
            with suppress(ValueError):
                weight = float(number)
        if weight is None:
            source = text
            weight = 1.0
            bare.append(source)
        elif not source:
            raise CompressionError(
                f"calibration {text!r} names no source before its weight; write SOURCE=WEIGHT"
            )
        rows = argument.rows if isinstance(argument, GivenTexts) else None
        group = [WeightedSource(source, 1.0, rows)]
        if source.endswith(BLEND_SUFFIXES) or (source == DEFAULT_SOURCE and not exists(source)):
            group = [
                WeightedSource(entry.source, entry.weight, is_optional=True)
                for entry in read_blend(source)
            ]
        for entry in normalized(group):
            address = SourceSpec.parse(entry.source)
            if exists(address.name):
                address = replace(address, name=str(Path(address.name).resolve()))
            if address in addresses:
                raise CompressionError(
                    f"calibration source {entry.source!r} is given twice; name it once, with a "
                    "larger weight"
                )
            addresses.append(address)
            entries.append(replace(entry, weight=weight * entry.weight))
    if 0 < len(bare) < len(arguments):
        raise CompressionError(
            f"calibration source {bare[0]!r} has no weight but others have; write SOURCE=WEIGHT "
            "for all or for none"
        )
    return normalized(entries)


def normalized(sources: Sequence[WeightedSource]) -> tuple[WeightedSource, ...]:
    """Return the sources with weights that sum to 1."""
    return tuple(
        replace(entry, weight=share) for entry, share in zip(sources, shares(sources), strict=True)
    )


def domain_of(argument: str) -> tuple[str, str]:
    """Parse `SOURCE` or `SOURCE=DOMAIN`; the domain is a file's name or a data set's id by
    default."""
    source, sign, domain = argument.rpartition("=")
    if not sign or isfile(argument):
        return argument, short_names([argument])[0]
    if not (source.strip() and domain.strip()):
        raise CompressionError(
            f"{argument!r} lacks a source or a domain; write FILE=DOMAIN, or the file alone"
        )
    return source, domain.strip()


def shares(sources: Sequence[WeightedSource]) -> tuple[float, ...]:
    """Return the weights, scaled to sum to 1."""
    whole = sum(Fraction(entry.weight) for entry in sources)  # exact: huge weights do not overflow
    return tuple(float(Fraction(entry.weight) / whole) for entry in sources)


def divide(total: int, weights: Sequence[float]) -> tuple[int, ...]:
    """Divide `total` in proportion to the weights into whole numbers of at least 1, by largest
    remainders.

    A share below 1 is raised to 1, and the others divide the rest; ties go to the lower index.
    `total` must not be less than the number of weights."""
    free = {index: Fraction(weight) for index, weight in enumerate(weights)}
    while True:
        left = total - len(weights) + len(free)
        whole = sum(free.values())
        due = {index: left * weight / whole for index, weight in free.items()}
        large = {index: weight for index, weight in free.items() if due[index] >= 1}
        if len(large) == len(free):
            break
        free = large
    counts = [math.floor(due.get(index, 1)) for index in range(len(weights))]
    by_remainder = sorted(free, key=lambda index: counts[index] - due[index])
    for index in by_remainder[: total - sum(counts)]:
        counts[index] += 1
    return tuple(counts)


def hub_id(source: str) -> str | None:
    """Return the id of a data set on the Hub; None for other sources."""
    name = SourceSpec.parse(source).name
    is_id = DATA_SET_ID.fullmatch(name) and not has_text_suffix(name) and not exists(name)
    return name if is_id else None


def local_name(source: str) -> str:
    """Return the source without the folders of its file or local data set."""
    address = SourceSpec.parse(source)
    return str(address if hub_id(source) else replace(address, name=Path(address.name).name))


def short_names(sources: Sequence[str]) -> tuple[str, ...]:
    """Return each file's name without folder and suffix, or the source without revision; equal
    names are numbered."""
    names = []
    for source in sources:
        address = replace(SourceSpec.parse(source), revision=None)
        is_file = isfile(address.name)
        names.append(Path(address.name).stem if is_file else local_name(str(address)))
    return tuple(distinct(names))


def with_folders(identity: Json | None) -> dict[str, Any] | None:
    """Return the identity with absolute paths, valid from any working folder."""

    def absolute(source: str) -> str:
        address = SourceSpec.parse(source)
        name = abspath(address.name) if exists(address.name) else address.name
        return str(replace(address, name=name))

    return None if identity is None else _renamed(identity, absolute)


def without_folders(identity: Json) -> dict[str, Any]:
    """Return the identity with file names in place of paths, without access tokens."""
    return _renamed(identity, lambda source: without_tokens(local_name(source)))


def _renamed(identity: Json, name: Callable[[str], str]) -> dict[str, Any]:
    """Return the identity with its sources renamed by `name`."""
    if "sources" not in identity:
        return {**identity, "source": name(identity["source"])}
    entries = [{**entry, "source": name(entry["source"])} for entry in identity["sources"]]
    joined = " + ".join(entry["source"] for entry in entries)
    renamed = {**identity, "source": joined, "sources": entries}
    if "left_out" in identity:
        renamed["left_out"] = [name(source) for source in identity["left_out"]]
    return renamed
