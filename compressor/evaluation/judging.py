"""Judging without generating: both models read the same text, or the base's own answers, one layer in memory at a time.

Under teacher forcing the base's answer is what a model has said so far, whatever it would have said itself; only the
answer's tokens count. Rows are padded on the right: what follows a token does not reach it, so no mask is needed.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import t as student_t
from torch.nn.utils.rnn import pad_sequence

from compressor.data.batches import BATCH_SIZE, EvaluationSet
from compressor.data.chats import note_columns, read_row, untaken
from compressor.data.documents import read_tokens
from compressor.data.rows import source_rows
from compressor.data.sources import WeightedSource, domain_of
from compressor.errors import CompressionError, ItemError, LeftOut
from compressor.evaluation.answers import Answer, StockWriter
from compressor.evaluation.base_answers import check_base
from compressor.evaluation.conditions import Condition, Verdict
from compressor.evaluation.domains import judged
from compressor.evaluation.endings import Markers
from compressor.evaluation.evaluator import FEWEST, Evaluator, Figures
from compressor.evaluation.judged import CONFIDENCE, Judged
from compressor.evaluation.prompts import Prompt, tokens_of
from compressor.model.opened import OpenModel, open_model
from compressor.model.tokenizer import first_part, has_chat_template, load_tokenizer, render_chat
from compressor.progress import Progress, Silent, quiet_transformers

SHORTEST = 16  # tokens of a sequence of text
SAMPLES, LENGTH = 64, 512  # sequences of each text at most, and their tokens
COLUMNS = (("messages",), ("conversations",), ("prompt", "answer"), ("prompt", "completion"), ("prompt", "response"))
END, THINKING_END = "the answer", "its thinking"


@dataclass(frozen=True, slots=True)
class Judging:
    """What both models read, and what may rise in it."""

    texts: tuple[str, ...] = ()  # SOURCE or SOURCE=DOMAIN
    samples: int = SAMPLES
    length: int = LENGTH
    answers: tuple[str, ...] = ()  # FILE or FILE=DOMAIN
    forced: bool = False  # of prompts, only the base writes answers, and both read them
    max_flips: float | None = None  # share of positions, in each domain
    max_loss_rise: float | None = None  # nats per token, in each domain
    strict: bool = False  # whether a row that cannot be read ends the run

    def __post_init__(self) -> None:
        if self.samples < FEWEST or self.length < SHORTEST:
            raise CompressionError(
                f"{self.samples} sequences of {self.length} tokens tell no difference; give --text-samples {FEWEST} "
                f"and --text-length {SHORTEST} at the least"
            )
        for option, limit in self.limits.values():
            if not (math.isfinite(limit) and limit > 0):
                raise CompressionError(f"{option} {limit} can never be shown; give a number above 0, such as 0.05")

    @property
    def limits(self) -> dict[str, tuple[str, float]]:
        """By figure: the option and what it allows."""
        named = {"flips": ("--max-flips", self.max_flips), "loss": ("--max-loss-rise", self.max_loss_rise)}
        return {name: (option, limit) for name, (option, limit) in named.items() if limit is not None}


def text_sets(
    arguments: Sequence[str],
    tokenizer: Any,
    vocabulary: int,
    samples: int = SAMPLES,
    length: int = LENGTH,
    seed: int = 0,
    strict: bool = False,
) -> tuple[EvaluationSet, ...]:
    """A set for each domain of `SOURCE` or `SOURCE=DOMAIN`: at most so many sequences of each source.

    A short text is cut into shorter sequences, so that there are eight of them. Raises `CompressionError` for one that
    is too short even so.
    """
    found = defaultdict[str, list[torch.Tensor]](list)
    for source, domain in map(domain_of, dict.fromkeys(arguments)):
        most, entry = samples * length, WeightedSource(source, 1.0)
        stream = read_tokens(entry, tokenizer, most, seed, vocabulary, "text", strict)
        tokens = len(stream.ids)
        own = min(length, tokens // FEWEST)
        if own < SHORTEST:
            raise CompressionError(
                f"--text {source} gives {tokens:,} tokens, too few to tell a difference; give it more text, at least "
                f"{FEWEST * SHORTEST:,}"
            )
        found[domain] += stream.rows(own)[:samples].split(BATCH_SIZE)
    return tuple(EvaluationSet(domain, tuple(batches)) for domain, batches in found.items())


@dataclass(frozen=True, slots=True)
class Forced:
    """An answer that models read, an end token included where it ended, and the tokens that it answers."""

    id: str  # the prompt's
    domain: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    seed: int = 0


def forced(prompt: Prompt, answer: Answer, tokenizer: Any, end: int, chat: bool = False) -> Forced:
    """An answer that was written; one without tokens, a server's, is tokenised anew. `end` ends it then."""
    tokens = answer.tokens
    if not tokens:
        own = tokenizer(answer.text, add_special_tokens=False)["input_ids"]
        tokens = (*own, *([end] if answer.ended == "end" else []))
    return Forced(prompt.id, prompt.domain, tokens_of(prompt, tokenizer, chat), tokens, answer.seed)


def read_answers(
    arguments: Sequence[str], tokenizer: Any, stops: Collection[int], most: int = sys.maxsize, strict: bool = False
) -> tuple[Forced, ...]:
    """The answers of `FILE` or `FILE=DOMAIN`: rows with prompt and answer, or messages that end with the assistant's.

    A row's own `domain` counts where none is named. An answer without an end token gets one, unless its row says
    `"ended": "length"`. Rows that template or tokenizer cannot take, or not in `most` tokens, are left out with one
    warning for each file, or refused if `strict`.
    """
    found = list[Forced]()
    for argument in arguments:
        source, domain = domain_of(argument)
        left_out = LeftOut(f"answers of {source}", strict)
        with quiet_transformers():
            for where, row in source_rows(WeightedSource(source, 1.0), 0, "answers").rows:
                with left_out.each():
                    named = row.get("domain") if isinstance(row, Mapping) and source == argument else None
                    chosen = named if isinstance(named, str) else domain
                    found.append(_given(row, chosen, tokenizer, stops, most, where, left_out))
        left_out.report()
        if not left_out.used:
            raise CompressionError(f"--answers {source} has no answers; give it rows with prompt and answer")
    return tuple(found)


def _given(
    row: Any, domain: str, tokenizer: Any, stops: Collection[int], most: int, where: str, left_out: LeftOut
) -> Forced:
    conversation = read_row(row, None, where, COLUMNS)
    note_columns(row, conversation, left_out)
    *asked, last = conversation.messages
    if last.get("role") != "assistant" or not asked:
        raise ItemError(f"{where} does not end with the assistant's answer to a message; give it one")
    is_pair = len(conversation.columns) == 2 and len(asked) == 1
    if is_pair and not has_chat_template(tokenizer):
        prompt, text = Prompt.of(asked[0]["content"], domain, where=where), str(last["content"])
        before = tokens_of(prompt, tokenizer, most=most)
    else:
        prompt = Prompt.of(asked, domain, conversation.tools, where)
        before = tokens_of(prompt, tokenizer, most=most)
        try:
            whole = render_chat(tokenizer, [*asked, last], tools=prompt.tools)
            opening = render_chat(tokenizer, asked, tools=prompt.tools, add_generation_prompt=True)
        except Exception as error:  # a template raises what it likes
            raise untaken(where, error) from error
        same = (place for place, pair in enumerate(zip(whole, opening, strict=False)) if pair[0] != pair[1])
        text = whole[next(same, min(len(whole), len(opening))) :]
    try:
        ids = [int(token) for token in first_part(tokenizer, text, most + 1)[1]]
    except Exception as error:  # tokenizers, too
        raise untaken(where, error, "tokenizer") from error
    end = next((place for place, token in enumerate(ids) if token in stops), None)
    if end is not None:
        ids = ids[: end + 1]  # a template may go on after it
    elif stops and row.get("ended") != "length":
        own = tokenizer.eos_token_id
        ids.append(own if own in stops else min(stops))
    if not text.strip():
        raise ItemError(f"{where} has an empty answer; give it some text or remove it")
    if len(before) + len(ids) > most:
        raise ItemError(f"{where} has more tokens than the {most:,} positions that the model was made for; shorten it")
    return Forced(prompt.id, domain, before, tuple(ids))


def answer_sets(answers: Sequence[Forced], vocabulary: int) -> tuple[tuple[EvaluationSet, ...], tuple[Forced, ...]]:
    """A set for each domain, the longest first, of which the answers' tokens count; and the answers in that order."""
    if strange := next((each for each in answers if max(*each.prompt, *each.answer) >= vocabulary), None):
        token = max(*strange.prompt, *strange.answer)
        raise CompressionError(
            f"the tokenizer makes token {token}, the model knows {vocabulary}; they do not belong together"
        )
    sets, order = list[EvaluationSet](), list[Forced]()
    for domain in dict.fromkeys(each.domain for each in answers):
        own = sorted((each for each in answers if each.domain == domain), key=_length, reverse=True)
        batches, masks = list[torch.Tensor](), list[torch.Tensor]()
        for rows in (own[begin : begin + BATCH_SIZE] for begin in range(0, len(own), BATCH_SIZE)):
            batches.append(pad_sequence([torch.tensor(row.prompt + row.answer) for row in rows], batch_first=True))
            places = torch.arange(batches[-1].shape[1])
            masks.append(torch.stack([(places >= len(row.prompt)) & (places < _length(row)) for row in rows]))
        sets.append(EvaluationSet(domain, tuple(batches), tuple(masks)))
        order += own
    return tuple(sets), tuple(order)


def _length(answer: Forced) -> int:
    return len(answer.prompt) + len(answer.answer)


def marks_of(tokenizer: Any, stops: Collection[int]) -> dict[str, tuple[int, ...]]:
    """Tokens that end an answer, and those that end its thinking where the tokenizer has one for that."""
    closings = (
        tokenizer(closing, add_special_tokens=False)["input_ids"] for _, closing in Markers.of(tokenizer).thinking
    )
    thinking = {int(ids[0]) for ids in closings if len(ids) == 1}
    named = {END: tuple(sorted(stops)), THINKING_END: tuple(sorted(thinking))}
    return {name: ids for name, ids in named.items() if ids}


@dataclass(frozen=True, slots=True)
class ForcedFigures:
    """What one answer shows: the means of an answer's tokens, and what both models give its end."""

    id: str
    seed: int
    domain: str
    tokens: int
    kl: float
    flips: float
    end: tuple[float, float] | None  # probability of an end token where the answer ended, the base's first
    elsewhere: tuple[float, float] | None  # and the mean of it at the answer's other tokens


@dataclass(frozen=True, slots=True)
class JudgedModels:
    """What text and answers showed; None of what was not read."""

    text: Judged | None = None
    answers: Judged | None = None
    each: tuple[ForcedFigures, ...] = ()  # of the answers, longest first by domain


def judge(
    base: OpenModel,
    compressed: OpenModel,
    texts: Sequence[EvaluationSet] = (),
    answers: Sequence[Forced] = (),
    marks: Mapping[str, Sequence[int]] | None = None,
    confidence: float = CONFIDENCE,
    progress: Progress | None = None,
) -> JudgedModels:
    """Both models on texts and answers, in one streamed pass of each.

    Raises `CompressionError` for models of other vocabularies or tokenizers.
    """
    check_base(compressed, base)
    named = dict(marks or {})
    forced_sets, order = answer_sets(answers, base.vocabulary)
    evaluator = Evaluator(base, [*texts, *forced_sets], [*named.values()])
    (figures,) = evaluator.measure(compressed, progress=progress or Silent(), phase="judge")
    named_sets = list(enumerate(evaluator.names))
    of_texts, of_answers = dict(named_sets[: len(texts)]), dict(named_sets[len(texts) :])
    return JudgedModels(
        judged(figures, of_texts, (), confidence) if of_texts else None,
        judged(figures, of_answers, [*named], confidence) if of_answers else None,
        tuple(_each(order, figures.of(of_answers))),
    )


def _each(answers: Sequence[Forced], figures: Figures) -> Iterator[ForcedFigures]:
    for number, answer in enumerate(answers):
        end = elsewhere = None
        tokens, kl, flips = len(answer.answer), float(figures.kl[number]), float(figures.flips[number])
        if figures.marks.shape[1]:
            due, here, ours_here, there, ours_there = figures.marks[number, 0].tolist()
            end = (here / due, ours_here / due) if due else None
            elsewhere = (there / (tokens - due), ours_there / (tokens - due)) if tokens > due else None
        yield ForcedFigures(answer.id, answer.seed, answer.domain, tokens, kl, flips, end, elsewhere)


@dataclass(frozen=True, slots=True)
class Readings:
    """The base, opened, and all that is to be read; no weight is read to make one."""

    base: OpenModel
    texts: tuple[EvaluationSet, ...]
    answers: tuple[Forced, ...]


def read_all(base: StockWriter, wanted: Judging) -> Readings:
    """Read texts and given answers; raises `CompressionError` for what the base's tokenizer cannot take."""
    model = open_model(base.source, base.dtype, base.device)
    tokenizer, answers = load_tokenizer(base.source.folder), tuple[Forced, ...]()
    if wanted.answers:
        facts = base.opened()[1]
        answers = read_answers(wanted.answers, tokenizer, facts.stops, facts.positions or sys.maxsize, wanted.strict)
    sizes = wanted.samples, wanted.length
    texts = text_sets(wanted.texts, tokenizer, model.vocabulary, *sizes, strict=wanted.strict)
    return Readings(model, texts, answers)


def judge_both(
    readings: Readings,
    base: StockWriter,
    compressed: StockWriter,
    written: Sequence[tuple[Prompt, Answer]] = (),
    chat: bool = False,
    confidence: float = CONFIDENCE,
    progress: Progress | None = None,
) -> JudgedModels:
    """Both models on all that was read, and on the answers that the base has written."""
    answers, marks = readings.answers, dict[str, tuple[int, ...]]()
    if answers or written:
        tokenizer, facts = base.opened()
        answers += tuple(forced(*each, tokenizer, min(facts.stops), chat) for each in written)
        marks = marks_of(tokenizer, facts.stops)
    other = open_model(compressed.source, compressed.dtype, compressed.device)
    return judge(readings.base, other, readings.texts, answers, marks, confidence, progress)


def judged_conditions(found: JudgedModels, wanted: Judging, confidence: float) -> tuple[Condition, ...]:
    """For each domain of texts and answers: the figures that have a limit, each of which has to pass.

    Where one fails, its lower bound is that of a confidence corrected for their number (Bonferroni).
    """
    conditions = []
    reads = [(found.text, "", "text"), (found.answers, "answers of ", "answers")]
    count = max(1, len(wanted.limits) * sum(len(read.domains) for read, _, _ in reads if read is not None))
    for read, of, more in reads:
        for row in () if read is None else read.domains:
            alpha, freedom = 1 - confidence, max(row.sequences - 1, 1)
            farther = float(student_t.isf(alpha / count, freedom) / student_t.isf(alpha, freedom))
            for name, (option, limit) in wanted.limits.items():
                pair, what = (row.flips, "share of flips") if name == "flips" else (row.loss, "rise of the loss")
                verdict: Verdict = "pass" if pair.upper <= limit else "inconclusive"
                if pair.change - farther * (pair.change - pair.lower) > limit:
                    verdict = "fail"
                base = pair.base if name == "loss" else None
                named, figures = f"{what} on {of}{row.domain}", (pair.change, pair.lower, pair.upper)
                advice = f"give it more {more}, or allow more" if verdict == "inconclusive" else ""
                of_both = (base, pair.compressed, advice)
                conditions.append(Condition(named, option, limit, *figures, row.tokens, "tokens", verdict, *of_both))
    return tuple(conditions)
