"""Weights and names of calibration text's sources: text or JSONL files, streamed `datasets` ids, or the demo."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from os.path import isfile
from pathlib import Path
from typing import Any

from compressor.errors import CompressionError, without_tokens
from compressor.formatting import distinct

DEFAULT_SOURCE = "allenai/c4"  # the papers' choice; its config "en" is used
DEMO_SOURCE = "demo"
DATA_SET_ID = re.compile(r"\w[\w.-]*/[\w.-]+(:[\w.-]+)?")
MOST_TOKENS = 10**9  # of calibration text
TEXT_SUFFIXES = (".jsonl", ".json", ".txt", ".text", ".md")


@dataclass(frozen=True, slots=True)
class WeightedSource:
    """A text or JSONL file, a data set id or the demo, and its share of the sequences (relative to the others')."""

    source: str
    weight: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.weight) and self.weight > 0):
            raise CompressionError(
                f"calibration source {self.source!r} has weight {self.weight}; give a positive number"
            )


def parse_sources(arguments: Sequence[str]) -> tuple[WeightedSource, ...]:
    """`SOURCE` or `SOURCE=WEIGHT` each: the sources with weights that sum to 1, equal ones if none is given."""
    if not arguments:
        raise CompressionError("no calibration source is given; name a text or JSONL file, a data set id, or 'demo'")
    pairs = [_split_weight(argument) for argument in arguments]
    bare = [source for source, weight in pairs if weight is None]
    if bare and len(bare) < len(pairs):
        raise CompressionError(
            f"calibration source {bare[0]!r} has no weight but others have; write SOURCE=WEIGHT for all or for none"
        )
    places = [Path(source).resolve() if isfile(source) else source for source, _ in pairs]
    for number, (source, _) in enumerate(pairs):
        if places[number] in places[:number]:
            raise CompressionError(f"calibration source {source!r} is given twice; name it once, with a larger weight")
    weighted = [WeightedSource(source, 1.0 if weight is None else weight) for source, weight in pairs]
    return tuple(WeightedSource(entry.source, share) for entry, share in zip(weighted, shares(weighted), strict=True))


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


def short_names(sources: Sequence[str]) -> tuple[str, ...]:
    """A file's name without folder and suffix, or the source itself; numbered where two would be equal."""
    return tuple(distinct(Path(source).stem if isfile(source) else source for source in sources))


def without_folders(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity with file names in place of paths, and no access token in one; it may be a hand-edited one."""
    stored = identity.get("sources")
    entries = [dict(entry) for entry in stored if isinstance(entry, dict)] if isinstance(stored, list) else []
    for entry in entries:
        source = str(entry.get("source"))
        # the id of a data set has no folders; a file that is gone is known by its suffix
        is_id = DATA_SET_ID.fullmatch(source) and not isfile(source) and Path(source).suffix not in TEXT_SUFFIXES
        entry["source"] = without_tokens(source if is_id else Path(source).name)
    joined = " + ".join(entry["source"] for entry in entries) or without_tokens(Path(identity["source"]).name)
    return {**identity, "source": joined, **({"sources": entries} if "sources" in identity else {})}
