"""Text of one or several weighted sources: calibration batches, named parts for other steps, and what is held out.

Each source is tokenised once, as one row of token ids, which is cut in this order: the calibration's sequences, the
last of them held out; the sequences reserved for evaluation; the parts; further held-out sequences; and, where any
text is left, those that the finished output is evaluated on. These last ones change nothing of the others.
"""

import hashlib
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from compressor.data.documents import HasMediaError, as_rows, opened, read_tokens
from compressor.data.emphasis import PLAIN, Emphasis
from compressor.data.media import Sequences, divided, read_sequences
from compressor.data.sources import WeightedSource as WeightedSource
from compressor.data.sources import divide, shares, short_names
from compressor.errors import CompressionError
from compressor.model import tokenizer as checkpoint_tokenizer

logger = logging.getLogger(__name__)

BATCH_SIZE = 8
LEAST_TO_CUT = 8  # tokens of a sequence that may be cut in two
Rows = Tensor | Sequences  # token ids [n, L], or sequences with pictures
HELDOUT = 48  # held-out sequences at the least, where parts are asked for and the text suffices
MOST_HELDOUT = 0.2  # share of a short text


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Token ids [B, L] of one source that are evaluated on and never calibrated with."""

    name: str
    batches: tuple[Tensor, ...]
    counted: tuple[Tensor, ...] = ()  # masks [B, L] of the tokens that count where not all but the first do


@dataclass(frozen=True, slots=True)
class Calibration:
    """Token ids ready to run. `batches` are [B, L], each of one source and wholly held out or not; no padding."""

    batches: tuple[Tensor, ...]
    identity: dict[str, Any]  # what the batches were made of, and the SHA-256 of the token ids
    sources: tuple[int, ...] = ()  # number of each batch's source; empty if all are of source 0
    weights: tuple[float, ...] = (1.0,)  # share of each source
    heldout: frozenset[int] = frozenset()  # numbers of the batches that no plan may see
    reserved: tuple[EvaluationSet, ...] = ()  # what follows the calibration's sequences in each source
    emphasis: tuple[Tensor, ...] = ()  # weights [B, L] of each batch's tokens; empty if all count alike

    def __post_init__(self) -> None:
        assert len(self.sources) in (0, len(self.batches)), "each batch has a source, or none"
        assert set(self.sources) <= set(range(len(self.weights))), "each source has a weight"
        assert self.heldout <= set(range(len(self.batches))), "held-out batches are batches"

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
        names = short_names([entry["source"] for entry in self.identity.get("sources", ())])
        return names or tuple(f"source {number}" for number in range(len(self.weights)))

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
            emphasis=tuple(self.emphasis[number] for number in numbers) if self.emphasis else (),
        )


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A part of the text that one step trains on."""

    sequences: int
    length: int  # tokens of a sequence
    heldout: int = HELDOUT  # held-out sequences that the step needs; all steps share them
    batch_size: int = BATCH_SIZE
    minimum: int = 0  # sequences of full length without which the step cannot run

    def __post_init__(self) -> None:
        for name, least in (("sequences", 1), ("length", 2), ("heldout", 0), ("batch_size", 1), ("minimum", 0)):
            if (value := getattr(self, name)) < least:
                raise CompressionError(f"{name} {value} of a part of the text is too low; give at least {least}")


@dataclass(frozen=True, slots=True)
class TextSpec:
    """The text to read: `samples` calibration sequences, `reserve` sequences for evaluation, and named parts.

    All are divided over the sources by weight. A share `heldout` of the calibration's sequences is held out. There may
    be no samples if there are parts.
    """

    sources: tuple[WeightedSource, ...]
    samples: int
    sequence_length: int
    seed: int = 0
    heldout: float = 0.0
    reserve: int = 0
    parts: Mapping[str, PartSpec] = field(default_factory=dict)
    batch_size: int = BATCH_SIZE
    strict: bool = False  # whether a row that cannot be read ends the run
    emphasis: Emphasis = PLAIN
    evaluation: int = 0  # sequences behind all others, as far as the text goes; not part of a plan's identity

    def __post_init__(self) -> None:
        samples, length, sources, reserve = self.samples, self.sequence_length, len(self.sources), self.reserve
        if samples < (0 if self.parts else 1) or length < 2:
            fault = f"--samples {samples} and --sequence-length {length} leave nothing to run; give at least 1 and 2"
        elif not 0 <= self.seed < 2**63:
            fault = f"--seed {self.seed} is out of range; give a number from 0 on"
        elif sources < 1:
            fault = "no calibration source is given; name a text or JSONL file, a data set id, or 'demo'"
        elif 0 < samples < sources:
            fault = f"--samples {samples} is too few for {sources} calibration sources; give one each at the least"
        elif reserve < 0 or 0 < reserve < sources or (reserve and not samples):
            fault = f"{reserve} sequences cannot be reserved of {sources} sources; give 0, or one for each"
        elif not 0 <= self.heldout < 1:
            fault = f"a share of {self.heldout} cannot be held out; give at least 0 and less than 1"
        else:
            return
        raise CompressionError(fault)

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any], batch_size: int = BATCH_SIZE) -> "TextSpec":
        """Return the spec that an identity in a plan names; raise `CompressionError` if it is incomplete."""
        asked = identity.get("asked")
        content = {"reserve": None, **(asked if isinstance(asked, dict) else {}), "batch_size": batch_size}
        content |= {name: identity.get(name) for name in ("sources", "seed", "heldout")}
        try:
            spec = TypeAdapter(cls).validate_json(json.dumps(content), strict=True)
            return replace(spec, emphasis=Emphasis.read(identity.get("emphasis") or {}))
        except (ValidationError, KeyError, TypeError, AttributeError) as error:
            place = ".".join(map(str, error.errors()[0]["loc"])) if isinstance(error, ValidationError) else "emphasis"
            raise CompressionError(
                f"the plan's calibration has no usable {place!r} to repeat it by (edited, or of an older plan); plan "
                "again"
            ) from error

    @property
    def heldout_wanted(self) -> int:
        """Number of held-out sequences that the parts need together."""
        return max(HELDOUT, len(self.sources), *(part.heldout for part in self.parts.values())) if self.parts else 0

    @property
    def heldout_length(self) -> int:
        """Tokens of a held-out sequence behind the parts: as many as in the part that needs most of them."""
        return max(self.parts.values(), key=lambda part: part.heldout).length if self.parts else self.sequence_length


@dataclass(frozen=True, slots=True)
class Text:
    """Calibration batches, the batches of named parts, and one set of held-out sequences that nothing is fitted to."""

    fit: Calibration  # its own held-out batches and reserved sets included
    identity: dict[str, Any]  # the sources, the spec, and digests of everything that was cut from them
    _parts: Mapping[str, tuple[tuple[Tensor, ...], ...]]  # by name: each source's batches [B, L]
    _heldout: tuple[EvaluationSet, ...]  # one for each source, maybe empty
    _evaluation: tuple[EvaluationSet, ...]  # likewise
    emphasis: Emphasis = PLAIN  # of all that is fitted to it
    short: tuple[str, ...] = ()  # sources of whose evaluation steps have read a part

    @property
    def names(self) -> frozenset[str]:
        """Names of its parts."""
        return frozenset(self._parts)

    def part(self, name: str) -> tuple[Tensor, ...]:
        """Batches [B, L] to train on, each of one source."""
        return tuple(batch for own in self._parts[name] for batch in own)

    @property
    def heldout(self) -> tuple[EvaluationSet, ...]:
        """Held-out sequences of each source that has any, for all evaluations of the whole model."""
        return tuple(each for each in self._heldout if each.batches)

    @property
    def evaluation(self) -> tuple[EvaluationSet, ...]:
        """Sequences of each source that no step has read; of a `short` one with those that are held out, too."""
        return tuple(each for each in self._evaluation if each.batches)

    def only(self, source: int) -> "Text":
        """The text of one source alone, with an identity that names it."""
        return Text(
            self.fit.only(source),
            {**self.identity, "only": self.fit.source_names[source]},
            {name: (batches[source],) for name, batches in self._parts.items()},
            (self._heldout[source],),
            (self._evaluation[source],),
            self.emphasis,
            self.short,
        )


@dataclass(slots=True)
class _Cut:
    """The token ids [n, L] of one source, cut; `rest` [T] follows the calibration's and the reserved sequences."""

    source: WeightedSource
    fit: Rows
    held: Rows
    reserved: Rows
    rest: Tensor
    wanted: tuple[tuple[int, int], ...]  # sequences and tokens of each part
    further: Rows  # held out, behind the parts
    evaluation: Rows  # behind everything else
    parts: tuple[Rows, ...] = ()
    opening: tuple[int, ...] = ()  # tokens that every sequence of text begins with
    is_short: bool = False  # for what was asked for evaluation

    @property
    def tokens_wanted(self) -> int:
        return sum(count * length for count, length in self.wanted)

    def open_sequences(self) -> None:
        """Begin each sequence of text as the model saw texts begin, wherever it was cut."""
        for name in ("fit", "held", "reserved", "further", "evaluation"):
            setattr(self, name, self._opened(getattr(self, name)))
        self.parts = tuple(self._opened(rows) for rows in self.parts)

    def _opened(self, rows: Rows) -> Rows:
        return rows if isinstance(rows, Sequences) else opened(rows, self.opening)


def load_tokenizer(folder: Path) -> Any:
    """The checkpoint's tokenizer; raises `CompressionError` if it has none, or one that knows no text."""
    return checkpoint_tokenizer.load_tokenizer(folder, "calibration needs one, model-centric does not")


def _split_last(source: str, rows: Rows, count: int) -> tuple[Rows, Rows]:
    """[n, L] -> all rows but the last `count`, and those; a single row is cut after three quarters of its tokens."""
    if count < len(rows):
        return rows[: len(rows) - count], rows[len(rows) - count :]
    if isinstance(rows, Sequences):
        raise CompressionError(
            f"calibration data {source} gives one sequence with pictures, and a part is kept from the plan; give more"
        )
    tokens = rows.shape[1]
    if tokens < LEAST_TO_CUT:
        raise CompressionError(
            f"calibration data {source} gives {tokens} tokens, too few to keep a part of them from the plan; "
            f"give it more text, {LEAST_TO_CUT} tokens at the least"
        )
    place = tokens - tokens // 4
    return rows[:, :place], rows[:, place:]


def _share_out(source: str, rows: Tensor, samples: int, reserve: int, length: int) -> tuple[Rows, Rows]:
    """A source's sequences for calibration, and the reserved ones; in the same proportion where it is too short."""
    if reserve == 0 or len(rows) == samples + reserve:
        if rows.numel() < (wanted := samples * length):
            logger.warning("calibration data %s fills %d of %d tokens asked for", source, rows.numel(), wanted)
        return _split_last(source, rows, reserve)
    fit, reserved = _split_last(source, rows, divide(len(rows), (samples, reserve))[1] if len(rows) > 1 else 1)
    logger.warning(
        "calibration data %s is short: %d of %d tokens asked for go to calibration, %d of %d are reserved",
        *(source, fit.numel(), samples * length, reserved.numel(), reserve * length),
    )
    return fit, reserved


def _heldout_counts(shapes: Sequence[Sequence[int]], share: float) -> list[int]:
    """Return how many of each source's [n, L] sequences are held out: never all of several, but any at all."""
    counts = [max(0, min(math.floor(count * share + 0.5), count - 1)) for count, _ in shapes]
    if share > 0 and not any(counts):
        counts[max(range(len(shapes)), key=lambda number: tuple(shapes[number]))] = 1
    return counts


def read_text(spec: TextSpec, tokenizer: Any, vocabulary: int) -> Text:
    """Read and tokenise each source once, and cut it; raise `CompressionError` if there is too little text.

    Parts are disjoint. Where a source is too short for them, they take again from the beginning of its calibration
    text, though never twice the same sequence within a part, and never what is held out or reserved.
    """
    weights, length = [entry.weight for entry in spec.sources], spec.sequence_length

    def divided(count: int) -> tuple[int, ...]:
        return divide(max(count, len(weights)), weights) if count else (0,) * len(weights)

    samples, reserve = divided(spec.samples), divided(spec.reserve)
    sequences = [divided(part.sequences) for part in spec.parts.values()]
    held = _heldout_counts([(count, length) for count in samples], spec.heldout)
    tails = divided(spec.heldout_wanted if sum(held) < spec.heldout_wanted else 0)
    evaluated = divided(spec.evaluation)
    cuts = list[_Cut]()
    for number, entry in enumerate(spec.sources):
        calibrating = (samples[number] + reserve[number]) * length
        fit = reserved = torch.empty(0, length, dtype=torch.long)
        lengths = (part.length for part in spec.parts.values())
        wanted = tuple((counts[number], tokens) for counts, tokens in zip(sequences, lengths, strict=True))
        cut = _Cut(entry, fit, fit, reserved, fit, wanted, fit, fit)
        behind = cut.tokens_wanted + max(0, tails[number] - held[number]) * spec.heldout_length
        most = calibrating + behind + evaluated[number] * spec.heldout_length
        try:
            stream = read_tokens(entry, tokenizer, most, spec.seed, vocabulary, strict=spec.strict)
        except HasMediaError:
            own = samples[number], reserve[number], held[number], tails[number], evaluated[number]
            cuts.append(_cut_sequences(spec, entry, tokenizer, vocabulary, own, [each[number] for each in sequences]))
            continue
        cut.opening = stream.opening
        ids, left = stream.ids[: calibrating + behind], stream.ids[calibrating + behind :]
        cut.evaluation = as_rows(left, spec.heldout_length) if left.numel() >= spec.heldout_length else reserved
        if calibrating:
            rows = as_rows(ids[:calibrating], length)
            cut.fit, cut.reserved = _share_out(entry.source, rows, samples[number], reserve[number], length)
            ids = ids[rows.numel() :]
        cut.rest = ids
        cuts.append(cut)
    if spec.samples:
        counts = _heldout_counts([cut.fit.shape for cut in cuts], spec.heldout)
        for cut, count in zip(cuts, counts, strict=True):
            cut.fit, cut.held = _split_last(cut.source.source, cut.fit, count)
    for cut, count in zip(cuts, evaluated, strict=True):
        cut.is_short = len(cut.evaluation) < count
    if spec.parts:
        plain = [number for number, cut in enumerate(cuts) if isinstance(cut.fit, Tensor)]
        for number, tail in zip(plain, _tails(spec, cuts, plain, tails), strict=True):
            _cut_parts(cuts[number], *tail)
        for place, (name, part) in enumerate(spec.parts.items()):
            parts = [cut.parts[place] for cut in cuts]
            full = sum(len(own) for own in parts if isinstance(own, Sequences) or own.shape[1] == part.length)
            if full < part.minimum:
                raise CompressionError(
                    f"the text gives {full} sequences of {part.length} tokens to train on for {name}, and at "
                    f"least {part.minimum} are needed; give more text, or ask for less, as with --tokens-per-step"
                )
    for cut in cuts:
        cut.open_sequences()
    return _text(spec, cuts)


def _cut_sequences(
    spec: TextSpec,
    entry: WeightedSource,
    tokenizer: Any,
    vocabulary: int,
    counts: tuple[int, int, int, int, int],
    parts: Sequence[int],
) -> _Cut:
    """A source with pictures, whose rows are sequences of their own; too few are shared out in proportion.

    `counts` are those of the calibration, reserved, held out of the calibration, held out in all, and for evaluation.
    """
    samples, reserve, held, tail, evaluated = counts
    wanted = (samples, reserve, *parts, max(0, tail - held))
    own = (entry, tokenizer, sum(wanted) + evaluated, spec.sequence_length, spec.seed, vocabulary)
    read = read_sequences(*own, strict=spec.strict)
    sequences, left = read[: sum(wanted)], read[sum(wanted) :]
    if len(sequences) < sum(wanted):
        logger.warning(
            "calibration data %s is short: it has %d of %d sequences asked for",
            *(entry.source, len(sequences), sum(wanted)),
        )
    bounds = pairwise([0, *accumulate(divided(len(sequences), wanted, entry.source))])
    fit, reserved, *trained, further = (sequences[begin:end] for begin, end in bounds)
    rest, none = torch.empty(0, dtype=torch.long), Sequences()
    return _Cut(entry, fit, none, reserved, rest, (), further, left, tuple(trained))


def _tails(spec: TextSpec, cuts: Sequence[_Cut], plain: Sequence[int], wanted: Sequence[int]) -> list[tuple[int, int]]:
    """Held-out sequences at the end of each source of plain text, and the tokens of each.

    They are fewer of short text, but any at all.
    """
    length, tails, pictured = spec.heldout_length, list[tuple[int, int]](), sum(len(cut.further) for cut in cuts)
    cuts = [cuts[number] for number in plain]
    for cut, count in zip(cuts, (wanted[number] for number in plain), strict=True):
        further = max(0, count - len(cut.held))
        if cut.rest.numel() < cut.tokens_wanted + further * length:
            most = math.floor((cut.fit.numel() + cut.rest.numel()) // length * MOST_HELDOUT + 0.5)
            further = min(further, cut.rest.numel() // length, most)
        tails.append((further, length))
    if cuts and not pictured and not any(len(cut.held) + count for cut, (count, _) in zip(cuts, tails, strict=True)):
        longest = max(range(len(cuts)), key=lambda number: cuts[number].rest.numel())
        if (tokens := cuts[longest].rest.numel()) < LEAST_TO_CUT:
            raise CompressionError(
                "the calibration text is too short to hold a part of it out; give it more text, or lower --samples"
            )
        tails[longest] = (1, length if tokens >= 2 * length else tokens // 4)
    return tails


def _cut_parts(cut: _Cut, count: int, length: int) -> None:
    """Cut the parts from the rest of a source, and `count` held-out sequences after them."""
    place, needed = cut.rest.numel() - count * length, cut.tokens_wanted
    if needed <= place:
        cut.further = cut.rest[needed : needed + count * length].view(count, length)
        flat = cut.rest[:needed].split([sequences * tokens for sequences, tokens in cut.wanted])
        cut.parts = tuple(own.view(-1, tokens) for own, (_, tokens) in zip(flat, cut.wanted, strict=True))
        return
    cut.further, train = cut.rest[place:].view(count, length), cut.rest[:place]
    logger.warning(
        "calibration data %s is short: behind its first sequences are %d of %d tokens asked for to train on, so that "
        "training starts again from its beginning",
        *(cut.source.source, train.numel(), needed),
    )
    assert isinstance(cut.fit, Tensor)
    stream, begin = torch.cat([cut.fit.flatten(), train]), cut.fit.numel()
    for sequences, tokens in cut.wanted:
        most = min(sequences * tokens, stream.numel() // tokens * tokens or stream.numel())
        cut.parts += (as_rows(stream[(begin + torch.arange(most)) % stream.numel()], tokens),)
        begin += most


def _text(spec: TextSpec, cuts: Sequence[_Cut]) -> Text:
    batches = [
        (number, held, batch)
        for number, cut in enumerate(cuts)
        for held, rows in enumerate((cut.fit, cut.held))
        for batch in rows.split(spec.batch_size)
        if len(batch)
    ]
    names = [entry.source for entry in spec.sources]
    fit = Calibration(
        tuple(batch for _, _, batch in batches),
        _identity(spec, cuts, False),
        sources=tuple(number for number, _, _ in batches),
        weights=shares(spec.sources),
        heldout=frozenset(place for place, (_, held, _) in enumerate(batches) if held),
        reserved=_evaluation_sets(names, [[cut.reserved] for cut in cuts], spec.batch_size) if spec.reserve else (),
        emphasis=tuple(spec.emphasis.weights(batch) for _, _, batch in batches) if spec.emphasis.marked else (),
    )
    fitted = [rows for cut in cuts for rows in (cut.fit, *cut.parts)]
    rows_alone = [row for rows in fitted for row in (rows.rows if isinstance(rows, Sequences) else (rows,))]
    for name, count in spec.emphasis.counts(rows_alone).items():
        if not count:
            logger.warning("emphasis.%s has no effect: the text has no such token; name text that has", name)
    heldout = _evaluation_sets(names, [[cut.held, cut.further] for cut in cuts], spec.batch_size)
    evaluated = [[cut.evaluation, *((cut.held, cut.further) if cut.is_short else ())] for cut in cuts]
    evaluation = _evaluation_sets(names, evaluated, spec.batch_size)
    short = tuple(own.name for own, cut in zip(heldout, cuts, strict=True) if cut.is_short and own.batches)
    more = heldout, evaluation, spec.emphasis, short
    if not spec.parts:
        return Text(fit, fit.identity, {}, *more)
    parts, digests = dict[str, tuple[tuple[Tensor, ...], ...]](), dict[str, Any]()
    for place, (name, part) in enumerate(spec.parts.items()):
        rows = [cut.parts[place] for cut in cuts]
        parts[name] = tuple(own.split(part.batch_size) for own in rows)
        digests[name] = _counted(rows)
    held_out = _counted([rows for cut in cuts for rows in (cut.held, cut.further)])
    return Text(fit, {**_identity(spec, cuts, True), "parts": digests, "heldout_text": held_out}, parts, *more)


def _counted(rows: Sequence[Rows]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for own in rows:
        if isinstance(own, Sequences):
            own.update(digest)
        else:
            digest.update(own.contiguous().numpy().tobytes())
    counts = {"samples": sum(map(len, rows)), "tokens": sum(own.numel() for own in rows)}
    return {**counts, "sha256": digest.hexdigest()}


def _identity(spec: TextSpec, cuts: Sequence[_Cut], whole: bool) -> dict[str, Any]:
    """Describe the calibration, or the whole text with its parts, so that `repeat_text` can check and repeat it."""
    asked: dict[str, Any] = {name: getattr(spec, name) for name in ("samples", "sequence_length", "reserve")}
    if whole:
        asked["parts"] = {name: asdict(part) for name, part in spec.parts.items()}
    used = [(cut.fit, cut.held, *((*cut.parts, cut.further) if whole else ())) for cut in cuts]
    return {
        "source": " + ".join(entry.source for entry in spec.sources),
        "sources": [
            {
                "source": cut.source.source,
                "weight": float(cut.source.weight),
                "heldout_samples": len(cut.held) + (len(cut.further) if whole else 0),
                **_counted(own),
            }
            for cut, own in zip(cuts, used, strict=True)
        ],
        **_counted([rows for own in used for rows in own]),
        "sequence_length": max((rows.shape[1] for own in used for rows in own if len(rows)), default=0),
        "heldout": float(spec.heldout),
        "seed": spec.seed,
        "asked": asked,
        **({"emphasis": spec.emphasis.to_dict()} if spec.emphasis.marked else {}),
    }


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
    strict: bool = False,
) -> Calibration:
    """Read calibration text without parts; see `read_text`."""
    entries = (WeightedSource(sources, 1.0),) if isinstance(sources, str) else tuple(sources)
    spec = TextSpec(entries, samples, length, seed, heldout, reserve, batch_size=batch_size, strict=strict)
    return read_text(spec, tokenizer, vocab).fit


def _evaluation_sets(
    sources: Sequence[str], rows: Sequence[Sequence[Rows]], batch_size: int
) -> tuple[EvaluationSet, ...]:
    return tuple(
        EvaluationSet(name, tuple(batch for each in own for batch in each.split(batch_size) if len(batch)))
        for name, own in zip(short_names(sources), rows, strict=True)
    )


def evaluation_sets(
    sources: Sequence[str], tokenizer: Any, *, length: int, seed: int, vocab: int, most: int, strict: bool = False
) -> tuple[EvaluationSet, ...]:
    """At most `most` sequences of each file or data set, packed like calibration."""
    if most < 1 or length < 2:
        raise CompressionError(f"{most} sequences of {length} tokens leave nothing to evaluate; give at least 1 and 2")
    entries = (WeightedSource(source, 1.0) for source in sources)

    def rows(entry: WeightedSource) -> Rows:
        try:
            return read_tokens(entry, tokenizer, most * length, seed, vocab, "heldout", strict).rows(length)
        except HasMediaError:
            return read_sequences(entry, tokenizer, most, length, seed, vocab, "heldout", strict)

    return _evaluation_sets(sources, [[rows(entry)] for entry in entries], BATCH_SIZE)


def _refuse_difference(stored: Mapping[str, Any], made: Mapping[str, Any], where: str) -> None:
    for name, value in made.items():
        if stored.get(name) != value:
            raise CompressionError(
                f"the plan's {where} says {name!r} is {stored.get(name)!r}, but repeating it gives {value!r}; "
                "restore the plan or plan again"
            )


def repeat_text(
    identity: Mapping[str, Any], tokenizer: Any, vocabulary: int, batch_size: int = BATCH_SIZE, evaluation: int = 0
) -> Text:
    """Repeat the text that a plan names; raise `CompressionError` unless the same tokens come out."""
    spec = replace(TextSpec.from_identity(identity, batch_size), evaluation=evaluation)
    made = read_text(spec, tokenizer, vocabulary)
    entries = identity["sources"]
    for entry, old in zip(made.identity["sources"], entries, strict=True):
        if entry["sha256"] != old.get("sha256"):
            raise CompressionError(
                f"calibration source {entry['source']} no longer gives the tokens that the plan was made with "
                "(its text, the tokenizer or the plan was changed); restore it or plan again"
            )
        _refuse_difference(old, entry, f"calibration source {entry['source']}")
    _refuse_difference(identity, {**made.identity, "sources": entries}, "calibration")
    if (only := identity.get("only")) is None:
        return made
    names = made.fit.source_names
    if only not in names:
        raise CompressionError(f"the plan's calibration names the source {only!r}, which it does not have; restore it")
    return made.only(names.index(only))


def sample_positions(tokens: int, count: int, seed: int) -> Tensor:
    """Positions [S] of a sample of the calibration tokens, sorted; they do not depend on how batches are cut."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(tokens, generator=generator)[:count].sort().values


def sample_rows(sizes: Sequence[int], count: int, seed: int) -> list[Tensor]:
    """Rows of each batch, of so many tokens (`sizes`), in a sample of `count` tokens of all batches."""
    positions = sample_positions(sum(sizes), count, seed)
    bounds = pairwise([0, *accumulate(sizes)])
    return [positions[(positions >= begin) & (positions < end)] - begin for begin, end in bounds]
