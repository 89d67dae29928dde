"""Text of one or several weighted sources: calibration batches, named parts for other steps, and what is held out.

Each source is tokenised once, as one row of token ids, which is cut in this order: the calibration's sequences, the
last of them held out; the sequences reserved for evaluation; the parts; further held-out sequences; and, where any
text is left, those that the finished output is evaluated on. These last ones change nothing of the others.
"""

import hashlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
from compressor.errors import CompressionError, reason_of
from compressor.model import tokenizer as checkpoint_tokenizer

logger = logging.getLogger(__name__)

BATCH_SIZE = 8
LEAST_TO_CUT = 8  # tokens of a sequence that may be cut in two
Rows = Tensor | Sequences  # token ids [n, L], or sequences with pictures
Batches = tuple[Tensor, ...]  # token ids [B, L] each
HELDOUT = 48  # held-out sequences at the least, where parts are asked for and the text suffices
MOST_HELDOUT = 0.2  # share of a short text


@dataclass(frozen=True, slots=True)
class EvaluationSet:
    """Token ids [B, L] of one source that are evaluated on and never calibrated with."""

    name: str
    batches: Batches
    counted: Batches = ()  # masks [B, L] of the tokens that count where not all but the first do

    @property
    def tokens(self) -> int:
        return sum(batch.numel() for batch in self.batches)


EvaluationSets = tuple[EvaluationSet, ...]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Token ids ready to run. `batches` are [B, L], each of one source and wholly held out or not; no padding."""

    batches: Batches
    identity: dict[str, Any]  # what the batches were made of, and the SHA-256 of the token ids
    sources: tuple[int, ...] = ()  # number of each batch's source; empty if all are of source 0
    weights: tuple[float, ...] = (1.0,)  # share of each source
    heldout: frozenset[int] = frozenset()  # numbers of the batches that no plan may see
    reserved: EvaluationSets = ()  # what follows the calibration's sequences in each source
    emphasis: Batches = ()  # weights [B, L] of each batch's tokens; empty if all count alike

    @property
    def tokens(self) -> int:
        """Number of tokens in all batches, held-out ones included."""
        return sum(batch.numel() for batch in self.batches)

    @property
    def fit(self) -> list[int]:
        """Numbers of the batches that are not held out."""
        return [number for number in range(len(self.batches)) if number not in self.heldout]

    @property
    def heldout_batches(self) -> Batches:
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


@dataclass(frozen=True, slots=True)
class PartSpec:
    """A part of the text that one step trains on."""

    sequences: int
    length: int  # tokens of a sequence
    heldout: int = HELDOUT  # held-out sequences that the step needs; all steps share them
    batch_size: int = BATCH_SIZE
    minimum: int = 0  # sequences of full length without which the step cannot run


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
    strict: bool = False  # a row that cannot be read ends the run
    emphasis: Emphasis = PLAIN
    evaluation: int = 0  # sequences behind all others, as far as the text goes; not part of a plan's identity

    def __post_init__(self) -> None:
        least = len(self.sources)
        if self.samples < (0 if self.parts else 1) or self.sequence_length < 2:
            raise CompressionError(
                f"--samples {self.samples} and --sequence-length {self.sequence_length} leave nothing to run; give at "
                "least 1 and 2"
            )
        if 0 < self.samples < least or 0 < self.reserve < least:
            raise CompressionError(
                f"{self.samples} samples and {self.reserve} reserved sequences are too few for {least} calibration "
                "sources; give one of each for every source"
            )

    @classmethod
    def from_identity(cls, identity: Mapping[str, Any]) -> "TextSpec":
        """Return the spec that an identity in a plan names; raise `CompressionError` if it is incomplete."""
        try:
            content = {name: identity[name] for name in ("sources", "seed", "heldout")}
            spec = TypeAdapter(cls).validate_python({**identity["asked"], **content})
            return replace(spec, emphasis=Emphasis.read(identity.get("emphasis", {})))
        except (ValidationError, KeyError, TypeError) as error:
            raise CompressionError(
                f"the plan's calibration cannot be repeated ({reason_of(error)}); restore the plan or plan again"
            ) from error

    @property
    def heldout_wanted(self) -> int:
        """Number of held-out sequences that the parts need together."""
        needs = [part.heldout for part in self.parts.values()]
        return max(HELDOUT, len(self.sources), *needs) if needs else 0

    @property
    def heldout_length(self) -> int:
        """Tokens of a held-out sequence behind the parts: as many as in the part that needs most of them."""
        if not self.parts:
            return self.sequence_length
        return max(self.parts.values(), key=lambda part: part.heldout).length


@dataclass(frozen=True, slots=True)
class Text:
    """Calibration batches, the batches of named parts, and one set of held-out sequences that nothing is fitted to."""

    fit: Calibration  # its own held-out batches and reserved sets included
    identity: dict[str, Any]  # the sources, the spec, and digests of everything that was cut from them
    _parts: Mapping[str, Batches]  # by name: batches [B, L], each of one source
    heldout: EvaluationSets  # of each source that has any: for all evaluations of the whole model
    evaluation: EvaluationSets  # that no step has read; of a `short` source those that are held out, too
    emphasis: Emphasis = PLAIN  # of all that is fitted to it
    short: tuple[str, ...] = ()  # sources of whose evaluation steps have read a part

    @property
    def names(self) -> frozenset[str]:
        """Names of its parts."""
        return frozenset(self._parts)

    def part(self, name: str) -> Batches:
        """Batches [B, L] to train on, each of one source."""
        return self._parts[name]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Numbers of sequences that one source should give."""

    samples: int
    reserve: int
    sample_heldout: int  # of the samples
    heldout: int  # in all
    evaluation: int
    parts: tuple[tuple[int, int], ...]  # sequences of each part, and their tokens

    @property
    def further(self) -> int:
        """Held-out sequences behind the parts."""
        return max(0, self.heldout - self.sample_heldout)

    @property
    def part_tokens(self) -> int:
        """Tokens of all parts."""
        return sum(count * length for count, length in self.parts)


@dataclass(slots=True)
class _Cut:
    """The token ids [n, L] of one source, cut; `rest` [T] follows the calibration's and the reserved sequences."""

    name: str
    wanted: _Wanted
    fit: Rows
    held: Rows
    reserved: Rows
    further: Rows  # held out, behind the parts
    evaluation: Rows  # behind everything else
    rest: Tensor
    parts: tuple[Rows, ...] = ()
    opening: tuple[int, ...] = ()  # tokens that every sequence of text begins with

    @property
    def is_short(self) -> bool:
        """Return True if there is less text to evaluate on than is wanted."""
        return len(self.evaluation) < self.wanted.evaluation

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


def read_text(spec: TextSpec, tokenizer: Any, vocabulary: int) -> Text:
    """Read and tokenise each source once, and cut it; raise `CompressionError` if there is too little text.

    Parts are disjoint. Where a source is too short for them, they take again from the beginning of its calibration
    text, though never twice the same sequence within a part, and never what is held out or reserved.
    """
    pairs = zip(spec.sources, _wanted(spec), strict=True)
    cuts = [_cut_source(spec, source, wanted, tokenizer, vocabulary) for source, wanted in pairs]
    if spec.samples:
        counts = _heldout_counts([cut.fit.shape for cut in cuts], spec.heldout)
        for cut, count in zip(cuts, counts, strict=True):
            cut.fit, cut.held = _split_last(cut.name, cut.fit, count)
    if spec.parts:
        plain = [cut for cut in cuts if isinstance(cut.fit, Tensor)]
        pictured = sum(len(cut.further) for cut in cuts)
        for cut, tail in zip(plain, _tails(plain, spec.heldout_length, bool(pictured)), strict=True):
            _cut_parts(cut, *tail)
        _require_minimum(spec, cuts)
    for cut in cuts:
        cut.open_sequences()
    text = _text(spec, cuts)
    fitted = [*text.fit.batches]
    for name in spec.parts:
        fitted += text.part(name)
    for name, count in spec.emphasis.counts(fitted).items():
        if not count:
            logger.warning("emphasis.%s has no effect: the text has no such token; name text that has", name)
    return text


def _wanted(spec: TextSpec) -> Iterator[_Wanted]:
    """Divide what a spec asks for over its sources."""
    weights = [entry.weight for entry in spec.sources]

    def divided_over_sources(count: int) -> tuple[int, ...]:
        return divide(max(count, len(weights)), weights) if count else (0,) * len(weights)

    samples = divided_over_sources(spec.samples)
    reserve = divided_over_sources(spec.reserve)
    sample_heldout = _heldout_counts([(count, spec.sequence_length) for count in samples], spec.heldout)
    is_enough = sum(sample_heldout) >= spec.heldout_wanted
    heldout = divided_over_sources(0 if is_enough else spec.heldout_wanted)
    evaluation = divided_over_sources(spec.evaluation)
    lengths = [part.length for part in spec.parts.values()]
    counts = [divided_over_sources(part.sequences) for part in spec.parts.values()]
    for number in range(len(weights)):
        parts = zip((count[number] for count in counts), lengths, strict=True)
        entry = samples[number], reserve[number], sample_heldout[number], heldout[number], evaluation[number]
        yield _Wanted(*entry, tuple(parts))


def _heldout_counts(shapes: Sequence[Sequence[int]], share: float) -> list[int]:
    """Return how many of each source's [n, L] sequences are held out: never all of several, but any at all."""
    counts = list[int]()
    for count, _ in shapes:
        due = math.floor(count * share + 0.5)
        counts.append(max(0, min(due, count - 1)))
    if share > 0 and not any(counts):
        largest = max(tuple(shape) for shape in shapes)
        counts[[tuple(shape) for shape in shapes].index(largest)] = 1
    return counts


def _cut_source(spec: TextSpec, source: WeightedSource, wanted: _Wanted, tokenizer: Any, vocabulary: int) -> _Cut:
    """Read a source, and cut off the calibration's, the reserved and the evaluation's sequences."""
    length, heldout_length = spec.sequence_length, spec.heldout_length
    calibrating = (wanted.samples + wanted.reserve) * length
    needed = calibrating + wanted.part_tokens + wanted.further * heldout_length
    most = needed + wanted.evaluation * heldout_length
    try:
        stream = read_tokens(source, tokenizer, most, spec.seed, vocabulary, strict=spec.strict)
    except HasMediaError:
        return _cut_sequences(spec, source, wanted, tokenizer, vocabulary)
    none = torch.empty(0, length, dtype=torch.long)
    ids = stream.ids[:needed]
    cut = _Cut(source.source, wanted, none, none, none, none, none, ids, opening=stream.opening)
    left = stream.ids[needed:]
    if left.numel() >= heldout_length:
        cut.evaluation = as_rows(left, heldout_length)
    if calibrating:
        rows = as_rows(ids[:calibrating], length)
        cut.fit, cut.reserved = _share_out(source.source, rows, wanted, calibrating)
        cut.rest = ids[rows.numel() :]
    return cut


def _cut_sequences(spec: TextSpec, source: WeightedSource, wanted: _Wanted, tokenizer: Any, vocabulary: int) -> _Cut:
    """Cut a source with pictures, whose rows are sequences of their own; too few are shared out in proportion."""
    counts = [wanted.samples, wanted.reserve, *(count for count, _ in wanted.parts), wanted.further]
    needed = sum(counts)
    most = needed + wanted.evaluation
    read = read_sequences(source, tokenizer, most, spec.sequence_length, spec.seed, vocabulary, strict=spec.strict)
    sequences = read[:needed]
    if len(sequences) < needed:
        logger.warning(
            "calibration data %s is short: it has %d of %d sequences asked for", source.source, len(sequences), needed
        )
    bounds = pairwise([0, *accumulate(divided(len(sequences), counts, source.source))])
    fit, reserved, *parts, further = (sequences[begin:end] for begin, end in bounds)
    rest = torch.empty(0, dtype=torch.long)
    return _Cut(source.source, wanted, fit, Sequences(), reserved, further, read[needed:], rest, tuple(parts))


def _share_out(source: str, rows: Tensor, wanted: _Wanted, tokens: int) -> tuple[Rows, Rows]:
    """A source's sequences for calibration, and the reserved ones; in the same proportion where it is too short."""
    samples, count = wanted.samples, wanted.reserve
    if rows.numel() < tokens:
        logger.warning("calibration data %s fills %d of %d tokens asked for", source, rows.numel(), tokens)
        if count:
            count = divide(len(rows), (samples, count))[1] if len(rows) > 1 else 1
    return _split_last(source, rows, count)


def _split_last(source: str, rows: Rows, count: int) -> tuple[Rows, Rows]:
    """[n, L] -> all rows but the last `count`, and those; a single row is cut after three quarters of its tokens."""
    if count < len(rows):
        first = len(rows) - count
        return rows[:first], rows[first:]
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
    first = tokens - tokens // 4
    return rows[:, :first], rows[:, first:]


def _tails(cuts: Sequence[_Cut], length: int, is_pictured: bool) -> list[tuple[int, int]]:
    """Return the number of held-out sequences at the end of each source of plain text, and the tokens of each.

    They are fewer of short text, but any at all, unless pictures are held out (`is_pictured`).
    """
    counts = list[int]()
    for cut in cuts:
        count = max(0, cut.wanted.heldout - len(cut.held))
        available = cut.rest.numel()
        if available < cut.wanted.part_tokens + count * length:
            most = math.floor((cut.fit.numel() + available) // length * MOST_HELDOUT + 0.5)
            count = min(count, available // length, most)
        counts.append(count)
    tails = [(count, length) for count in counts]
    if cuts and not (is_pictured or any(counts) or any(len(cut.held) for cut in cuts)):
        sizes = [cut.rest.numel() for cut in cuts]
        available = max(sizes)
        if available < LEAST_TO_CUT:
            raise CompressionError(
                "the calibration text is too short to hold a part of it out; give it more text, or lower --samples"
            )
        tails[sizes.index(available)] = (1, length if available >= 2 * length else available // 4)
    return tails


def _cut_parts(cut: _Cut, count: int, length: int) -> None:
    """Cut the parts from the rest of a source, and `count` held-out sequences after them."""
    tail = count * length
    needed = cut.wanted.part_tokens
    available = cut.rest.numel() - tail
    if needed <= available:
        sizes = [sequences * tokens for sequences, tokens in cut.wanted.parts]
        *parts, further, _ = cut.rest.split([*sizes, tail, available - needed])
        lengths = [tokens for _, tokens in cut.wanted.parts]
        cut.parts = tuple(part.view(-1, tokens) for part, tokens in zip(parts, lengths, strict=True))
        cut.further = further.view(count, length)
        return
    cut.further = cut.rest[available:].view(count, length)
    logger.warning(
        "calibration data %s is short: behind its first sequences are %d of %d tokens asked for to train on, so that "
        "training starts again from its beginning",
        *(cut.name, available, needed),
    )
    assert isinstance(cut.fit, Tensor)
    stream = torch.cat([cut.fit.flatten(), cut.rest[:available]])
    total = stream.numel()
    begin = cut.fit.numel()
    for sequences, tokens in cut.wanted.parts:
        most = min(sequences * tokens, total // tokens * tokens or total)
        cut.parts += (as_rows(stream[(begin + torch.arange(most)) % total], tokens),)
        begin += most


def _require_minimum(spec: TextSpec, cuts: Sequence[_Cut]) -> None:
    """Refuse parts that have too few sequences of full length for their step."""
    for index, (name, part) in enumerate(spec.parts.items()):
        rows = [cut.parts[index] for cut in cuts]
        full = sum(len(each) for each in rows if isinstance(each, Sequences) or each.shape[1] == part.length)
        if full < part.minimum:
            raise CompressionError(
                f"the text gives {full} sequences of {part.length} tokens to train on for {name}, and at "
                f"least {part.minimum} are needed; give more text, or ask for less, as with --tokens-per-step"
            )


def _text(spec: TextSpec, cuts: Sequence[_Cut]) -> Text:
    """Cut everything into batches, and describe it."""
    batches, sources, heldout = list[Tensor](), list[int](), set[int]()
    for number, cut in enumerate(cuts):
        for is_held, rows in enumerate((cut.fit, cut.held)):
            for batch in _batches([rows], spec.batch_size):
                if is_held:
                    heldout.add(len(batches))
                batches.append(batch)
                sources.append(number)
    names = [cut.name for cut in cuts]
    reserved = _evaluation_sets(names, [[cut.reserved] for cut in cuts], spec.batch_size) if spec.reserve else ()
    emphasis = [spec.emphasis.weights(batch) for batch in batches] if spec.emphasis.marked else []
    fit = Calibration(
        tuple(batches),
        _identity(spec, cuts, whole=False),
        tuple(sources),
        shares(spec.sources),
        frozenset(heldout),
        reserved,
        tuple(emphasis),
    )
    held_out = _evaluation_sets(names, [[cut.held, cut.further] for cut in cuts], spec.batch_size)
    evaluated = list[list[Rows]]()
    for cut in cuts:
        more = [cut.held, cut.further] if cut.is_short else []
        evaluated.append([cut.evaluation, *more])
    evaluation = _evaluation_sets(names, evaluated, spec.batch_size)
    short = {name for name, cut in zip(short_names(names), cuts, strict=True) if cut.is_short}
    identity, parts = fit.identity, dict[str, Batches]()
    if spec.parts:
        digests = dict[str, Any]()
        for index, (name, part) in enumerate(spec.parts.items()):
            part_rows = [cut.parts[index] for cut in cuts]
            parts[name] = _batches(part_rows, part.batch_size)
            digests[name] = _counted(part_rows)
        held_rows = [rows for cut in cuts for rows in (cut.held, cut.further)]
        identity = _identity(spec, cuts, whole=True)
        identity |= {"parts": digests, "heldout_text": _counted(held_rows)}
    read = tuple(entry.name for entry in held_out if entry.name in short)
    return Text(fit, identity, parts, held_out, evaluation, spec.emphasis, read)


def _batches(rows: Iterable[Rows], size: int) -> Batches:
    """Rows in batches of at most so many."""
    return tuple(batch for each in rows for batch in each.split(size) if len(batch))


def _evaluation_sets(sources: Sequence[str], rows: Sequence[Sequence[Rows]], batch_size: int) -> EvaluationSets:
    """Rows of each source that has any in batches."""
    sets = list[EvaluationSet]()
    for name, groups in zip(short_names(sources), rows, strict=True):
        batches = _batches(groups, batch_size)
        if batches:
            sets.append(EvaluationSet(name, batches))
    return tuple(sets)


def _identity(spec: TextSpec, cuts: Sequence[_Cut], whole: bool) -> dict[str, Any]:
    """Describe the calibration, or the whole text with its parts, so that `repeat_text` can check and repeat it."""
    sources, used = list[dict[str, Any]](), list[Rows]()
    for entry, cut in zip(spec.sources, cuts, strict=True):
        heldout = [cut.held, cut.further] if whole else [cut.held]
        rows = [cut.fit, cut.held, *cut.parts, cut.further] if whole else [cut.fit, cut.held]
        facts = {"source": cut.name, "weight": float(entry.weight), "heldout_samples": sum(map(len, heldout))}
        sources.append(facts | _counted(rows))
        used += rows
    asked: dict[str, Any] = {name: getattr(spec, name) for name in ("samples", "sequence_length", "reserve")}
    if whole:
        asked["parts"] = {name: asdict(part) for name, part in spec.parts.items()}
    identity = {
        "source": " + ".join(entry.source for entry in spec.sources),
        "sources": sources,
        **_counted(used),
        "sequence_length": max((rows.shape[1] for rows in used if len(rows)), default=0),
        "heldout": float(spec.heldout),
        "seed": spec.seed,
        "asked": asked,
    }
    if spec.emphasis.marked:
        identity["emphasis"] = spec.emphasis.to_dict()
    return identity


def _counted(rows: Sequence[Rows]) -> dict[str, Any]:
    """Number of sequences and of tokens, and the SHA-256 of their token ids."""
    digest = hashlib.sha256()
    for each in rows:
        if isinstance(each, Sequences):
            each.update(digest)
        else:
            digest.update(each.contiguous().numpy().tobytes())
    samples = sum(len(each) for each in rows)
    tokens = sum(each.numel() for each in rows)
    return {"samples": samples, "tokens": tokens, "sha256": digest.hexdigest()}


def calibrate(
    sources: str | Sequence[WeightedSource],
    tokenizer: Any,
    *,
    samples: int,
    length: int,
    seed: int,
    vocab: int,
    **more: Any,
) -> Calibration:
    """Read calibration text without parts; `more` are other fields of `TextSpec`. See `read_text`."""
    entries = (WeightedSource(sources, 1.0),) if isinstance(sources, str) else tuple(sources)
    return read_text(TextSpec(entries, samples, length, seed, **more), tokenizer, vocab).fit


def evaluation_sets(
    sources: Sequence[str], tokenizer: Any, *, length: int, seed: int, vocab: int, most: int, strict: bool = False
) -> EvaluationSets:
    """At most `most` sequences of each file or data set, packed like calibration."""
    rows = list[list[Rows]]()
    for name in sources:
        entry = WeightedSource(name, 1.0)
        try:
            stream = read_tokens(entry, tokenizer, most * length, seed, vocab, "heldout", strict)
            rows.append([stream.rows(length)])
        except HasMediaError:
            rows.append([read_sequences(entry, tokenizer, most, length, seed, vocab, "heldout", strict)])
    return _evaluation_sets(sources, rows, BATCH_SIZE)


def repeat_text(identity: Mapping[str, Any], tokenizer: Any, vocabulary: int, evaluation: int = 0) -> Text:
    """Repeat the text that a plan names; raise `CompressionError` unless the same tokens come out."""
    spec = replace(TextSpec.from_identity(identity), evaluation=evaluation)
    text = read_text(spec, tokenizer, vocabulary)
    for entry, stored in zip(text.identity["sources"], identity["sources"], strict=True):
        if entry["sha256"] != stored.get("sha256"):
            raise CompressionError(
                f"calibration source {entry['source']} no longer gives the tokens that the plan was made with "
                "(its text, the tokenizer or the plan was changed); restore it or plan again"
            )
    for name, value in text.identity.items():
        if identity.get(name) != value:
            raise CompressionError(
                f"the plan's calibration has {name!r} that do not come out of its text again; restore the plan or plan "
                "again"
            )
    return text


def sample_positions(tokens: int, count: int, seed: int) -> Tensor:
    """Positions [S] of a sample of the calibration tokens, sorted; they do not depend on how batches are cut."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(tokens, generator=generator)[:count].sort().values


def sample_rows(sizes: Sequence[int], count: int, seed: int) -> list[Tensor]:
    """Rows of each batch, of so many tokens (`sizes`), in a sample of `count` tokens of all batches."""
    positions = sample_positions(sum(sizes), count, seed)
    rows = list[Tensor]()
    for begin, end in pairwise([0, *accumulate(sizes)]):
        inside = (positions >= begin) & (positions < end)
        rows.append(positions[inside] - begin)
    return rows
