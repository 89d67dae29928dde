"""Calibration data: text of one or several weighted sources, packed into sequences of equal length.

Each source is packed on its own. Its first sequences are the calibration's, the last of them held out if so asked;
the sequences after those are reserved for evaluation.
"""

import hashlib
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.data.documents import read_rows
from compressor.data.sources import WeightedSource as WeightedSource
from compressor.data.sources import divide, shares, short_names
from compressor.errors import CompressionError
from compressor.model import tokenizer as checkpoint_tokenizer

logger = logging.getLogger(__name__)

BATCH_SIZE = 8
LEAST_TO_CUT = 8  # tokens of a sequence that may be cut in two


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Token ids [B, L] of one source that are evaluated on and never calibrated with."""

    name: str
    batches: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Token ids ready to run. `batches` are [B, L], each of one source and wholly held out or not; no padding."""

    batches: tuple[Tensor, ...]
    identity: dict[str, Any]  # what the batches were made of, and the SHA-256 of the token ids
    sources: tuple[int, ...] = ()  # number of each batch's source; empty if all are of source 0
    weights: tuple[float, ...] = (1.0,)  # share of each source
    heldout: frozenset[int] = frozenset()  # numbers of the batches that no plan may see
    reserved: tuple[EvaluationSet, ...] = ()  # what follows the calibration's sequences in each source

    def __post_init__(self) -> None:
        if self.sources and len(self.sources) != len(self.batches):
            raise CompressionError(f"{len(self.batches)} batches have {len(self.sources)} sources; name one for each")
        if not set(self.sources) <= set(range(len(self.weights))):
            raise CompressionError(
                f"batches are of source {max(self.sources)}, but {len(self.weights)} have weights; give one for each"
            )
        if not self.heldout <= set(range(len(self.batches))):
            raise CompressionError(
                f"held-out batches {sorted(self.heldout)} are not among the {len(self.batches)}; name existing ones"
            )

    @property
    def tokens(self) -> int:
        """Number of tokens in all batches, held-out ones included."""
        return sum(batch.numel() for batch in self.batches)

    @property
    def fit(self) -> list[int]:
        """Numbers of the batches that are not held out."""
        return [number for number in range(len(self.batches)) if number not in self.heldout]

    @property
    def heldout_batches(self) -> tuple[Tensor, ...]:
        """The batches that are held out, in their order."""
        return tuple(self.batches[number] for number in sorted(self.heldout))

    @property
    def source_names(self) -> tuple[str, ...]:
        """A short name for each source, without folders."""
        named = short_names([entry["source"] for entry in self.identity.get("sources", ())])
        return named or tuple(f"source {number}" for number in range(len(self.weights)))

    def source_of(self, batch: int) -> int:
        """Number of the source of a batch."""
        return self.sources[batch] if self.sources else 0

    def only(self, source: int) -> "Calibration":
        """The batches of one source alone, with an identity that says so."""
        numbers = [number for number in range(len(self.batches)) if self.source_of(number) == source]
        return Calibration(
            tuple(self.batches[number] for number in numbers),
            {**self.identity, "only": self.source_names[source]},
            heldout=frozenset(place for place, number in enumerate(numbers) if number in self.heldout),
        )


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer; raises `CompressionError` if it has none, or one that knows no text."""
    return checkpoint_tokenizer.load_tokenizer(folder, "calibration needs one, model-centric does not")


def _split_last(source: str, rows: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """[n, L] -> all rows but the last `count`, and those; a single row is cut after three quarters of its tokens."""
    if count < len(rows):
        return rows[: len(rows) - count], rows[len(rows) - count :]
    tokens = rows.shape[1]
    if tokens < LEAST_TO_CUT:
        raise CompressionError(
            f"calibration data {source} gives {tokens} tokens, too few to keep a part of them from the plan; "
            f"give it more text, {LEAST_TO_CUT} tokens at the least"
        )
    place = tokens - tokens // 4
    return rows[:, :place], rows[:, place:]


def _share_out(source: str, rows: Tensor, samples: int, reserve: int, length: int) -> tuple[Tensor, Tensor]:
    """A source's sequences for calibration, and the reserved ones; in the same proportion where it is too short."""
    if reserve == 0 or len(rows) == samples + reserve:
        if rows.numel() < samples * length:
            logger.warning(
                "calibration data %s fills %d of %d tokens asked for", source, rows.numel(), samples * length
            )
        return _split_last(source, rows, reserve)
    parts = _split_last(source, rows, divide(len(rows), (samples, reserve))[1] if len(rows) > 1 else 1)
    logger.warning(
        "calibration data %s is short: %d of %d tokens asked for go to calibration, %d of %d are reserved",
        source,
        parts[0].numel(),
        samples * length,
        parts[1].numel(),
        reserve * length,
    )
    return parts


def _heldout_counts(rows: Sequence[Tensor], share: float) -> list[int]:
    """How many of each source's sequences are held out: never all of several, and one of the whole at the least."""
    counts = [min(math.floor(len(own) * share + 0.5), len(own) - 1) for own in rows]
    if share > 0 and not any(counts):
        counts[max(range(len(rows)), key=lambda number: tuple(rows[number].shape))] = 1
    return counts


def _digest(parts: Iterable[Tensor]) -> str:
    return hashlib.sha256(torch.cat([part.reshape(-1) for part in parts]).numpy().tobytes()).hexdigest()


def _check_sizes(samples: int, length: int, sources: int, heldout: float, reserve: int) -> None:
    if samples < 1 or length < 2:
        fault = f"--samples {samples} and --sequence-length {length} leave nothing to run; give at least 1 and 2"
    elif sources < 1:
        fault = "no calibration source is given; name a text or JSONL file, a data set id, or 'demo'"
    elif samples < sources:
        fault = f"--samples {samples} is too few for {sources} calibration sources; give one each at the least"
    elif reserve < 0 or 0 < reserve < sources:
        fault = f"{reserve} sequences cannot be reserved of {sources} sources; give 0, or one for each"
    elif not 0 <= heldout < 1:
        fault = f"a share of {heldout} cannot be held out; give at least 0 and less than 1"
    else:
        return
    raise CompressionError(fault)


def calibrate(
    sources: str | Sequence[WeightedSource],
    tokenizer: Any,
    *,
    samples: int,
    length: int,
    seed: int,
    vocab: int,
    batch_size: int = BATCH_SIZE,
    heldout: float = 0.0,
    reserve: int = 0,
) -> Calibration:
    """Read, shuffle, tokenise and pack calibration text; raises `CompressionError` if there is too little.

    `samples` sequences are divided over the sources by weight, and so are `reserve` more that follow them; the last
    ones of each source's samples are held out, `heldout` of them.
    """
    entries = (WeightedSource(sources, 1.0),) if isinstance(sources, str) else tuple(sources)
    _check_sizes(samples, length, len(entries), heldout, reserve)
    names, weights = [entry.source for entry in entries], [entry.weight for entry in entries]
    beyond = divide(reserve, weights) if reserve else (0,) * len(entries)
    shared = [
        _share_out(source, read_rows(source, tokenizer, own + more, length, seed, vocab), own, more, length)
        for source, own, more in zip(names, divide(samples, weights), beyond, strict=True)
    ]
    used = [calibrating for calibrating, _ in shared]
    parts = [_split_last(*each) for each in zip(names, used, _heldout_counts(used, heldout), strict=True)]
    listed = [
        (number, held, batch)
        for number, pair in enumerate(parts)
        for held, rows in enumerate(pair)
        for batch in rows.split(batch_size)
        if len(batch)
    ]
    batches = tuple(batch for _, _, batch in listed)
    identity = {
        "source": " + ".join(names),
        "sources": [_source_identity(*each) for each in zip(entries, parts, strict=True)],
        "samples": sum(len(batch) for batch in batches),
        "sequence_length": max(batch.shape[1] for batch in batches),
        "tokens": sum(batch.numel() for batch in batches),
        "heldout": float(heldout),
        "seed": seed,
        "asked": {"samples": samples, "sequence_length": length, "reserve": reserve},  # what `recalibrate` repeats
        "sha256": _digest(batches),
    }
    return Calibration(
        batches,
        identity,
        sources=tuple(number for number, _, _ in listed),
        weights=shares(entries),
        heldout=frozenset(place for place, (_, held, _) in enumerate(listed) if held),
        reserved=_evaluation_sets(names, [rows for _, rows in shared], batch_size) if reserve else (),
    )


def _source_identity(entry: WeightedSource, parts: tuple[Tensor, Tensor]) -> dict[str, Any]:
    fit, held = parts
    return {
        "source": entry.source,
        "weight": float(entry.weight),
        "samples": len(fit) + len(held),
        "tokens": fit.numel() + held.numel(),
        "heldout_samples": len(held),
        "sha256": _digest(parts),
    }


def _evaluation_sets(sources: Sequence[str], rows: Sequence[Tensor], batch_size: int) -> tuple[EvaluationSet, ...]:
    named = zip(short_names(sources), rows, strict=True)
    return tuple(EvaluationSet(name, own.split(batch_size)) for name, own in named)


def evaluation_sets(
    sources: Sequence[str], tokenizer: Any, *, length: int, seed: int, vocab: int, most: int
) -> tuple[EvaluationSet, ...]:
    """At most `most` sequences of each file or data set, packed like calibration."""
    if most < 1 or length < 2:
        raise CompressionError(f"{most} sequences of {length} tokens leave nothing to evaluate; give at least 1 and 2")
    rows = [read_rows(source, tokenizer, most, length, seed, vocab, "evaluation") for source in sources]
    return _evaluation_sets(sources, rows, BATCH_SIZE)


def _stored(content: Any, name: str, kind: Any) -> Any:
    value = content.get(name) if isinstance(content, Mapping) else None
    if not isinstance(value, kind):
        raise CompressionError(
            f"the plan's calibration has no usable {name!r} to repeat it by (edited, or of an older plan); plan again"
        )
    return value


def _refuse_difference(stored: Mapping[str, Any], made: Mapping[str, Any], where: str) -> None:
    for name, value in made.items():
        if stored.get(name) != value:
            raise CompressionError(
                f"the plan's {where} says {name!r} is {stored.get(name)!r}, but repeating it gives {value!r}; "
                "restore the plan or plan again"
            )


def recalibrate(identity: Mapping[str, Any], tokenizer: Any, vocab: int, batch_size: int = BATCH_SIZE) -> Calibration:
    """Repeat the calibration that a plan names; raises `CompressionError` unless the same tokens come out."""
    asked, entries = _stored(identity, "asked", dict), _stored(identity, "sources", list)
    digests = [_stored(entry, "sha256", str) for entry in entries]
    sources = [WeightedSource(_stored(entry, "source", str), _stored(entry, "weight", float)) for entry in entries]
    samples, length, reserve = (_stored(asked, name, int) for name in ("samples", "sequence_length", "reserve"))
    made = calibrate(
        sources,
        tokenizer,
        samples=samples,
        length=length,
        seed=_stored(identity, "seed", int),
        vocab=vocab,
        batch_size=batch_size,
        heldout=_stored(identity, "heldout", float),
        reserve=reserve,
    )
    for entry, old, digest in zip(made.identity["sources"], entries, digests, strict=True):
        if entry["sha256"] != digest:
            raise CompressionError(
                f"calibration source {entry['source']} no longer gives the tokens that the plan was made with "
                "(its text, the tokenizer or the plan was changed); restore it or plan again"
            )
        _refuse_difference(old, entry, f"calibration source {entry['source']}")
    _refuse_difference(identity, {**made.identity, "sources": entries}, "calibration")
    if (only := identity.get("only")) is None:
        return made
    if only not in made.source_names:
        raise CompressionError(f"the plan's calibration names the source {only!r}, which it does not have; restore it")
    return made.only(made.source_names.index(only))


def sample_positions(tokens: int, count: int, seed: int) -> Tensor:
    """Positions [S] of a sample of the calibration tokens, sorted; they do not depend on how batches are cut."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(tokens, generator=generator)[:count].sort().values
