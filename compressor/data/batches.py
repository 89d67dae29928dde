"""Text from one or several weighted sources: calibration batches, parts for other steps, and
held-out sequences.

Each source is tokenised once, into one row of token ids, which is cut in this order: the
calibration's sequences, the last of them held out; the sequences reserved for evaluation; the
parts; more held-out sequences; and, if any text is left, the sequences that the finished output is
evaluated on. The last ones do not change the others."""

import hashlib
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from compressor.data.documents import HasMediaError, as_rows, read_tokens, with_opening
from compressor.data.emphasis import PLAIN, Emphasis
from compressor.data.media import content_of, read_sequences
from compressor.data.rows import hub_answers
from compressor.data.sources import (
    SAMPLE_TOKENS,
    TextPart,
    WeightedSource,
    divide,
    hub_id,
    normalized,
    shares,
    short_names,
)
from compressor.errors import CompressionError, reason_of
from compressor.frozen import frozen
from compressor.model.inputs import Inputs
from compressor.prompt_date import dated

logger = logging.getLogger(__name__)

BATCH_SIZE = 8
LEAST_TO_CUT = 8  # tokens; a shorter sequence is not cut in two
Rows = tuple[Tensor, ...]  # sequences: token ids [1, L] each, or `Inputs` with pictures
Batches = tuple[Tensor, ...]  # token ids [B, L] each
HELDOUT = 48  # fewest held-out sequences if there are parts and enough text
MOST_HELDOUT = 0.2  # largest held-out share of a text that is too short for that

# Uses of a source's sequences, besides the parts of other steps.
FIT = "fit"
HELD = "held out"  # the last of the calibration's sequences
RESERVED = "reserved"
BEHIND = "held out behind"  # held out after the parts
EVALUATION = "evaluation"
# the number of sequences and their tokens, by use, in the order of the text
Demand = dict[str, tuple[int, int]]


@frozen
class EvaluationSet:
    """Token ids [B, L] of one source, for evaluation only."""

    name: str
    batches: Batches
    counted: Batches = ()  # masks [B, L] of the tokens that count; empty if all but the first do

    @property
    def tokens(self) -> int:
        return sum(batch.numel() for batch in self.batches)


EvaluationSets = tuple[EvaluationSet, ...]


@frozen
class Calibration:
    """Calibration batches of token ids [B, L] without padding, each of one source and held out as a
    whole or not."""

    batches: Batches
    # the sources and settings of the text, and the SHA-256 of the token ids
    identity: dict[str, Any]
    sources: tuple[int, ...] = ()  # each batch's source; empty if there is only one
    weights: tuple[float, ...] = (1.0,)  # share of each source
    heldout: frozenset[int] = frozenset()  # batches that no plan may see
    reserved: EvaluationSets = ()  # the text after the calibration's sequences in each source
    emphasis: Batches = ()  # weights [B, L] of each batch's tokens; empty if all count alike
    # of each MoE layer, on which its experts are compared; None: all
    sample_tokens: int | None = SAMPLE_TOKENS

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

    def without_heldout(self) -> "Calibration":
        """Return the calibration without what is held out, which nothing that decides a plan may
        see."""
        return Calibration(
            tuple(self.batches[number] for number in self.fit),
            self.identity,
            sources=tuple(self.source_of(number) for number in self.fit),
            weights=self.weights,
        )

    def source_of(self, batch: int) -> int:
        """Number of the source of a batch."""
        return self.sources[batch] if self.sources else 0


@frozen
class TextSpec:
    """The text to read: `samples` calibration sequences, `reserve` sequences for evaluation, and
    named parts.

    All are divided among the sources by weight. A share `heldout` of the calibration sequences is
    held out. With parts or evaluation, there may be no calibration sequences."""

    sources: tuple[WeightedSource, ...]
    samples: int
    sequence_length: int
    seed: int = 0
    heldout: float = 0.0
    reserve: int = 0
    parts: Mapping[str, TextPart] = field(default_factory=dict)
    strict: bool = False  # stop at a row that cannot be read
    emphasis: Emphasis = PLAIN
    # sequences after all others, as far as the text goes; not part of a plan's identity
    evaluation: int = 0
    left_out: tuple[str, ...] = ()  # sources that could not be read
    date: str | None = None  # that chat templates are given; None: today's

    def __post_init__(self) -> None:
        least = sum(not entry.is_optional for entry in self.sources)
        if self.samples < (0 if self.parts or self.evaluation else 1) or self.sequence_length < 2:
            raise CompressionError(
                f"--samples {self.samples} and --sequence-length {self.sequence_length} leave "
                "nothing to run; give at least 1 and 2"
            )
        if 0 < self.samples < least or 0 < self.reserve < least:
            raise CompressionError(
                f"{self.samples} samples and {self.reserve} reserved sequences are too few for "
                f"{least} calibration sources; give one of each for every source"
            )

    def heaviest(self) -> "TextSpec":
        """Return the spec without the lightest optional sources, where there are more sources than
        sequences."""
        most = min(count for count in (self.samples, self.reserve, len(self.sources)) if count)
        optional = [entry for entry in reversed(self.sources) if entry.is_optional]
        optional.sort(key=lambda entry: entry.weight)
        spare = optional[: len(self.sources) - most]
        rest = [entry for entry in self.sources if entry not in spare]
        return replace(self, sources=normalized(rest)) if spare else self

    @property
    def heldout_wanted(self) -> int:
        """The number of held-out sequences that all parts need together."""
        return max(HELDOUT, len(self.sources)) if self.parts else 0

    @property
    def heldout_length(self) -> int:
        """The tokens of a held-out sequence after the parts: as many as in a sequence of the first
        part."""
        return next((part.length for part in self.parts.values()), self.sequence_length)


@frozen
class TextBatches:
    """Calibration batches, batches of named parts, and held-out sequences that nothing is fitted
    to."""

    fit: Calibration  # including its own held-out batches and reserved sets
    # the sources, the spec, and digests of everything cut from the sources
    identity: dict[str, Any]
    parts: Mapping[str, Batches]  # training batches [B, L] by name, each of one source
    heldout: EvaluationSets  # for all evaluations of the whole model, by source
    # read by no step, except in a `short` source: there the held-out sequences, too
    evaluation: EvaluationSets
    emphasis: Emphasis = PLAIN  # in everything that is fitted to the text
    short: tuple[str, ...] = ()  # sources whose evaluation text steps have partly read
    # of each part's batches
    part_sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass
class _SourceText:
    """A source cut into sequences; `rest` [T] are the tokens after the calibration's and the
    reserved sequences."""

    name: str
    demand: Demand
    sequences: dict[str, Rows]  # by use
    rest: Tensor
    opening: tuple[int, ...] = ()  # tokens at the beginning of every sequence of text
    is_pictured: bool = False

    def rows(self, *uses: str) -> Rows:
        """Return the sequences of these uses."""
        return tuple(row for use in uses for row in self.sequences[use])

    def batches(self, *uses: str, size: int = BATCH_SIZE) -> Batches:
        """Return the sequences of these uses in batches of at most this size; one with pictures is
        its own batch."""
        if self.is_pictured:
            return self.rows(*uses)
        batches = []
        for use in uses:
            rows = self.sequences[use]
            batches += [
                torch.cat(rows[begin : begin + size]) for begin in range(0, len(rows), size)
            ]
        return tuple(batches)


def read_text(spec: TextSpec, tokenizer: Any, vocabulary: int) -> TextBatches:
    """Read and tokenise each source once, and cut it; raise `CompressionError` if there is too
    little text.

    Parts are disjoint. If a source is too short for them, they start again from the beginning of
    its calibration text. No sequence occurs twice in a part, and held-out or reserved text never
    occurs in one. Optional sources that cannot be read are left out with a warning, or refused if
    `strict`."""
    with dated(spec.date) as date:
        spec, texts = _read_sources(spec, tokenizer, vocabulary)
    spec = replace(spec, date=str(date) if date.is_used else None)
    if spec.samples:
        fits = [text.rows(FIT) for text in texts]
        shapes = []
        for rows in fits:
            shapes.append((len(rows), max(row.shape[1] for row in rows)))
        counts = _heldout_counts(shapes, spec.heldout)
        for text, rows, count in zip(texts, fits, counts, strict=True):
            text.sequences[FIT], text.sequences[HELD] = _split_last(text.name, rows, count)
    if spec.parts:
        _cut_parts(spec, texts)
    for text in texts:
        for use, rows in text.sequences.items():
            text.sequences[use] = tuple(with_opening(row, text.opening) for row in rows)
    return _text(spec, texts)


def _read_sources(
    spec: TextSpec, tokenizer: Any, vocabulary: int
) -> tuple[TextSpec, list[_SourceText]]:
    """Read and cut the sources; return the spec of those that could be read, too."""
    requested = len(spec.sources)
    spec = spec.heaviest()
    if len(spec.sources) < requested:
        logger.warning(
            "fewer sequences than sources: only the heaviest are read (--samples adds others): %s",
            ", ".join(entry.source for entry in spec.sources),
        )
    first: CompressionError | None = None
    texts = list[_SourceText]()
    while len(texts) < len(spec.sources):
        source = spec.sources[len(texts)]
        # divide the requested sequences among the sources
        weights = [entry.weight for entry in spec.sources]
        uses = {
            FIT: (spec.samples, spec.sequence_length),
            RESERVED: (spec.reserve, spec.sequence_length),
        }
        uses |= {name: (part.sequences, part.length) for name, part in spec.parts.items()}
        uses[BEHIND] = spec.heldout_wanted, spec.heldout_length
        uses[EVALUATION] = spec.evaluation, spec.heldout_length
        demands: list[Demand] = [{} for _ in weights]
        for use, (total, length) in uses.items():
            counts = divide(max(total, len(weights)), weights) if total else (0,) * len(weights)
            for of_source, count in zip(demands, counts, strict=True):
                of_source[use] = count, length
        heldout = _heldout_counts([of_source[FIT] for of_source in demands], spec.heldout)
        demand = demands[len(texts)]
        wanted, length = demand[BEHIND]
        if sum(heldout) >= spec.heldout_wanted:
            wanted = 0
        demand[BEHIND] = max(0, wanted - heldout[len(texts)]), length
        try:
            try:
                texts.append(_cut_source(spec, source, demand, tokenizer, vocabulary))
            except HasMediaError:
                texts.append(_cut_sequences(spec, source, demand, tokenizer, vocabulary))
        except CompressionError as error:
            if spec.strict or not source.is_optional:
                raise
            first = first or error
            unread = [source]
            if hub_id(source.source) and not hub_answers():
                unread = [
                    entry for entry in spec.sources if entry.is_optional and hub_id(entry.source)
                ]
            rest = [entry for entry in spec.sources if entry not in unread]
            if not rest:
                raise CompressionError(
                    f"no source of the blend can be read; of the first one, {first}"
                ) from error
            names = [entry.source for entry in unread]
            logger.warning(
                "%s of the blend cannot be read, so the others count for more: %s",
                ", ".join(names),
                error,
            )
            spec = replace(spec, sources=normalized(rest), left_out=(*spec.left_out, *names))
            texts.clear()  # the others have more to give
    return spec, texts


def _heldout_counts(shapes: Sequence[tuple[int, int]], share: float) -> list[int]:
    """Return how many of each source's [n, L] sequences are held out: at least one overall, and
    never all of a source.

    The only sequence of a source may be held out if there is no other.
    """
    counts = []
    for count, _ in shapes:
        due = math.floor(count * share + 0.5)
        counts.append(max(0, min(due, count - 1)))
    if share > 0 and not any(counts):
        counts[shapes.index(max(shapes))] = 1
    return counts


def _cut_source(
    spec: TextSpec, source: WeightedSource, demand: Demand, tokenizer: Any, vocabulary: int
) -> _SourceText:
    """Read a source, and cut the calibration's, the reserved and the evaluation's sequences from
    it."""
    length = spec.sequence_length
    sizes = [math.prod(size) for size in demand.values()]
    stream = read_tokens(source, tokenizer, sum(sizes), spec.seed, vocabulary, strict=spec.strict)
    sequences: dict[str, Rows] = dict.fromkeys((*demand, HELD), ())
    rest, behind = stream.ids.tensor_split([sum(sizes[:-1])])
    if behind.numel() >= spec.heldout_length:
        sequences[EVALUATION] = as_rows(behind, spec.heldout_length).split(1)
    wanted = sum(sizes[:2])
    if wanted:
        first = as_rows(rest[:wanted], length)
        rest = rest[first.numel() :]
        reserved = demand[RESERVED][0]
        if first.numel() < wanted:
            logger.warning(
                "calibration data %s fills %d of %d tokens asked for",
                source.source,
                first.numel(),
                wanted,
            )
            if reserved:
                reserved = (
                    divide(len(first), (demand[FIT][0], reserved))[1] if len(first) > 1 else 1
                )
        sequences[FIT], sequences[RESERVED] = _split_last(source.source, first.split(1), reserved)
    return _SourceText(source.source, demand, sequences, rest, stream.opening)


def _cut_sequences(
    spec: TextSpec, source: WeightedSource, demand: Demand, tokenizer: Any, vocabulary: int
) -> _SourceText:
    """Cut a source with pictures, each row of which is a sequence; divide them in proportion if
    there are too few."""
    counts = [count for count, _ in demand.values()]
    most = sum(counts)
    needed = most - counts.pop()
    read = read_sequences(
        source, tokenizer, most, spec.sequence_length, spec.seed, vocabulary, strict=spec.strict
    )
    available = min(len(read), needed)
    if available < needed:
        logger.warning(
            "calibration data %s is short: it has %d of %d sequences asked for",
            source.source,
            available,
            needed,
        )
        wanted = [count for count in counts if count]
        if available < len(wanted):
            raise CompressionError(
                f"calibration data {source.source} gives {available} sequences with pictures, too "
                f"few for its {len(wanted)} parts; give more rows"
            )
        fewer = iter(divide(available, wanted))
        counts = [next(fewer) if count else 0 for count in counts]
    bounds = [0, *accumulate(counts), len(read)]
    sequences: dict[str, Rows] = {HELD: ()}
    for use, (begin, end) in zip(demand, pairwise(bounds), strict=True):
        sequences[use] = read[begin:end]
    return _SourceText(
        source.source, demand, sequences, torch.empty(0, dtype=torch.long), is_pictured=True
    )


def _split_last(source: str, rows: Rows, count: int) -> tuple[Rows, Rows]:
    """Return all rows but the last `count`, and the last `count`; a single row is cut after three
    quarters of it."""
    if count < len(rows):
        first = len(rows) - count
        return rows[:first], rows[first:]
    (row,) = rows
    if isinstance(row, Inputs):
        raise CompressionError(
            f"calibration data {source} gives one sequence with pictures, and some must be held "
            "out; give more"
        )
    tokens = row.shape[1]
    if tokens < LEAST_TO_CUT:
        raise CompressionError(
            f"calibration data {source} gives {tokens} tokens, too few to hold some of them out; "
            f"give it more text, {LEAST_TO_CUT} tokens at least"
        )
    first = tokens - tokens // 4
    return (row[:, :first],), (row[:, first:],)


def _cut_parts(spec: TextSpec, texts: Sequence[_SourceText]) -> None:
    """Cut the parts from the rest of each source of plain text, and held-out sequences after
    them.

    Short text has fewer of these, but there is at least one unless other text is held out. A part
    with too few sequences of full length for its step is refused."""
    tails = []
    heldout = 0
    for text in texts:
        heldout += len(text.rows(HELD, BEHIND))
        if text.is_pictured:
            continue
        count, length = text.demand[BEHIND]
        needed = sum(math.prod(text.demand[name]) for name in spec.parts)
        available = text.rest.numel()
        if available < needed + count * length:
            fit = sum(row.numel() for row in text.rows(FIT))
            most = math.floor((fit + available) // length * MOST_HELDOUT + 0.5)
            count = min(count, available // length, most)
        tails.append((text, needed, count, length))
        heldout += count
    if not heldout:
        sizes = [text.rest.numel() for text, *_ in tails]
        available = max(sizes)
        if available < LEAST_TO_CUT:
            raise CompressionError(
                "the calibration text is too short to hold a part of it out; give more text, or "
                "lower --samples"
            )
        index = sizes.index(available)
        text, needed, _, length = tails[index]
        tails[index] = text, needed, 1, length if available >= 2 * length else available // 4
    for text, needed, count, length in tails:
        available = text.rest.numel() - count * length
        if needed > available:
            logger.warning(
                "calibration data %s is short: behind its first sequences are %d of %d tokens "
                "asked for, so training starts again from its beginning",
                text.name,
                available,
                needed,
            )
        behind = text.rest[min(needed, available) :][: count * length]
        # an empty tensor splits into one
        text.sequences[BEHIND] = behind.view(count, length).split(1)[:count]
        stream = torch.cat([*(row[0] for row in text.rows(FIT)), text.rest[:available]])
        total = len(stream)
        begin = total - available
        for name in spec.parts:
            sequences, tokens = text.demand[name]
            most = min(sequences * tokens, total // tokens * tokens or total)
            part_ids = stream[(begin + torch.arange(most)) % total]
            text.sequences[name] = as_rows(part_ids, tokens).split(1)
            begin += most
    for name, part in spec.parts.items():
        full = 0
        for text in texts:
            full += sum(text.is_pictured or row.shape[1] == part.length for row in text.rows(name))
        if full < part.minimum:
            raise CompressionError(
                f"the text gives {full} sequences of {part.length} tokens to train on for {name}, "
                f"and at least {part.minimum} are needed; give more text, or ask for less, as with "
                "--tokens-per-step"
            )


def _text(spec: TextSpec, texts: Sequence[_SourceText]) -> TextBatches:
    """Return the batches of all sources, and the identity of the text."""
    names = short_names([text.name for text in texts])
    batches = list[Tensor]()
    sources = list[int]()
    heldout = set[int]()
    for number, text in enumerate(texts):
        batches += text.batches(FIT)
        begin = len(batches)
        batches += text.batches(HELD)
        heldout.update(range(begin, len(batches)))
        sources += [number] * (len(batches) - len(sources))
    identity = _identity(spec, texts)
    emphasis = [spec.emphasis.weights(batch) for batch in batches] if spec.emphasis.marked else []
    fit = Calibration(
        tuple(batches),
        identity,
        tuple(sources),
        shares(spec.sources),
        frozenset(heldout),
        _evaluation_sets(names, [text.batches(RESERVED) for text in texts]),
        tuple(emphasis),
    )
    parts = {}
    part_sources = {}
    for name, part in spec.parts.items():
        by_source = [text.batches(name, size=part.rows) for text in texts]
        parts[name] = tuple(chain.from_iterable(by_source))
        part_sources[name] = tuple(
            source for source, batches in zip(names, by_source, strict=True) for _ in batches
        )
    held_out = _evaluation_sets(names, [text.batches(HELD, BEHIND) for text in texts])
    evaluated = []
    short = set()
    for name, text in zip(names, texts, strict=True):
        uses = [EVALUATION]
        if len(text.sequences[EVALUATION]) < text.demand[EVALUATION][0]:
            uses += [HELD, BEHIND]
            short.add(name)
        evaluated.append(text.batches(*uses))
    for name in spec.emphasis.missing([*batches, *chain.from_iterable(parts.values())]):
        logger.warning(
            "emphasis.%s has no effect: the text has no such token; give text that has", name
        )
    read = tuple(entry.name for entry in held_out if entry.name in short)
    evaluation = _evaluation_sets(names, evaluated)
    return TextBatches(
        fit, identity, parts, held_out, evaluation, spec.emphasis, read, part_sources
    )


def _evaluation_sets(names: Sequence[str], batches: Sequence[Batches]) -> EvaluationSets:
    """Return the batches of each source that has any."""
    pairs = zip(names, batches, strict=True)
    return tuple(EvaluationSet(name, of_source) for name, of_source in pairs if of_source)


def _identity(spec: TextSpec, texts: Sequence[_SourceText]) -> dict[str, Any]:
    """Return the description of the text and its parts by which `repeat_text` repeats and checks
    it."""
    sources = []
    used = list[Tensor]()
    for entry, text in zip(spec.sources, texts, strict=True):
        rows = text.rows(FIT, HELD, *spec.parts, BEHIND)
        heldout = len(text.rows(HELD, BEHIND))
        facts = {"source": text.name, "weight": float(entry.weight), "heldout_samples": heldout}
        sources.append(facts | _counted(rows))
        used += rows
    fields = {"samples", "sequence_length", "reserve", "parts", "emphasis"}
    asked = TypeAdapter(TextSpec).dump_python(spec, mode="json", include=fields)
    marked = asked.pop("emphasis")["marked"]
    identity = {
        "source": " + ".join(entry.source for entry in spec.sources),
        "sources": sources,
        **_counted(used),
        "sequence_length": max((row.shape[1] for row in used), default=0),
        "heldout": float(spec.heldout),
        "seed": spec.seed,
        "asked": asked,
    }
    optional = {"emphasis": marked, "left_out": list(spec.left_out), "date": spec.date}
    identity |= {name: value for name, value in optional.items() if value}
    if spec.parts:
        identity["parts"] = {}
        for name in spec.parts:
            identity["parts"][name] = _counted([row for text in texts for row in text.rows(name)])
        held = [row for text in texts for row in text.rows(HELD, BEHIND)]
        identity["heldout_text"] = _counted(held)
    return identity


def _counted(rows: Sequence[Tensor]) -> dict[str, Any]:
    """Return the number of sequences and of tokens, and the SHA-256 of the token ids."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(content_of(row))
    return {
        "samples": len(rows),
        "tokens": sum(row.numel() for row in rows),
        "sha256": digest.hexdigest(),
    }


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
    """Read calibration text without parts (`read_text`); `more` are other fields of `TextSpec`."""
    entries = (WeightedSource(sources, 1.0),) if isinstance(sources, str) else tuple(sources)
    return read_text(TextSpec(entries, samples, length, seed, **more), tokenizer, vocab).fit


def evaluation_sets(
    sources: Sequence[str],
    tokenizer: Any,
    *,
    length: int,
    seed: int,
    vocab: int,
    most: int,
    strict: bool = False,
) -> EvaluationSets:
    """Return at most `most` sequences of each file or data set, packed like calibration text."""
    batches = []
    for name in sources:
        entry = WeightedSource(name, 1.0)
        try:
            stream = read_tokens(entry, tokenizer, most * length, seed, vocab, "heldout", strict)
            batches.append(stream.rows(length).split(BATCH_SIZE))
        except HasMediaError:
            batches.append(
                read_sequences(entry, tokenizer, most, length, seed, vocab, "heldout", strict)
            )
    return _evaluation_sets(short_names(sources), batches)


def repeat_text(
    identity: Mapping[str, Any], tokenizer: Any, vocabulary: int, evaluation: int = 0
) -> TextBatches:
    """Repeat the text that a plan names; raise `CompressionError` unless the same tokens come
    out."""
    try:
        content = {name: identity[name] for name in ("sources", "seed", "heldout")}
        content["left_out"] = identity.get("left_out", ())
        content["date"] = identity.get("date")
        content["emphasis"] = {"marked": identity.get("emphasis", {})}
        content["evaluation"] = evaluation
        spec = TypeAdapter(TextSpec).validate_python({**identity["asked"], **content})
    except (ValidationError, KeyError, TypeError) as error:
        raise CompressionError(
            f"the plan's calibration cannot be repeated ({reason_of(error)}); restore the "
            "plan or plan again"
        ) from error
    text = read_text(spec, tokenizer, vocabulary)
    for entry, stored in zip(text.identity["sources"], identity["sources"], strict=True):
        if entry["sha256"] != stored.get("sha256"):
            raise CompressionError(
                f"calibration source {entry['source']} no longer gives the tokens that the plan "
                "was made with (its text, the tokenizer or the plan has changed); restore it or "
                "plan again"
            )
    for name, value in text.identity.items():
        if identity.get(name) != value:
            raise CompressionError(
                f"the plan's calibration has {name!r} that do not follow from its text; restore "
                "the plan or plan again"
            )
    return text


def sample_positions(tokens: int, count: int, seed: int) -> Tensor:
    """Return the sorted positions [S] of a sample of the calibration tokens, independent of how
    batches are cut."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(tokens, generator=generator)[:count].sort().values
