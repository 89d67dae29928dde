"""Divergence without generation: both models read text, or the base's answers, with one layer in
memory at a time.

Under teacher forcing each model predicts every next token of the base's answer; only the answer's
tokens count. Rows are padded on the right: what follows a token does not reach it, so no mask is
needed."""

import sys
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from scipy.special import stdtrit
from torch.nn.utils.rnn import pad_sequence

from compressor.answers.prompts import Prompt, is_chat, tokens_of
from compressor.answers.stock import StockModel
from compressor.data.batches import BATCH_SIZE, EvaluationSet
from compressor.data.chats import CHAT_COLUMNS, note_columns, read_row, untaken
from compressor.data.documents import read_tokens
from compressor.data.rows import source_rows
from compressor.data.sources import WeightedSource, domain_of
from compressor.divergence.evaluator import Evaluator
from compressor.divergence.teacher_outputs import check_base
from compressor.errors import CompressionError, ItemError, LeftOut
from compressor.formatting import common_prefix
from compressor.frozen import frozen
from compressor.model.opened import OpenModel, open_model
from compressor.model.tokenizer import check_vocabulary, first_part, load_tokenizer, render_chat
from compressor.progress import Progress, quiet_transformers
from compressor.quality_gate.domain_divergence import DomainDivergence, Paired
from compressor.quality_gate.domains import domain_divergence
from compressor.quality_gate.endings import Markers
from compressor.quality_gate.options import FEWEST, SHORTEST, BehaviourOptions, Limits
from compressor.quality_gate.verdict import GateCondition, Verdict

# figures of a domain that may have a limit
LIMITED = {"flips": "share of flips", "loss": "rise of the loss"}
END, THINKING_END = "the answer", "its thinking"


def text_sets(
    options: BehaviourOptions, tokenizer: Any, vocabulary: int
) -> tuple[EvaluationSet, ...]:
    """Return an evaluation set for each domain of the texts.

    A short text is cut into shorter sequences, so that there are eight of them. Raises
    `CompressionError` for one that is too short even so."""
    batches = defaultdict[str, list[torch.Tensor]](list)
    for source, domain in map(domain_of, dict.fromkeys(options.text)):
        most = options.text_samples * options.text_length
        stream = read_tokens(
            WeightedSource(source, 1.0), tokenizer, most, 0, vocabulary, "text", options.strict
        )
        tokens = len(stream.ids)
        sequence_length = min(options.text_length, tokens // FEWEST)
        if sequence_length < SHORTEST:
            raise CompressionError(
                f"--text {source} gives {tokens:,} tokens, too few to tell a difference; give it "
                f"more text, at least {FEWEST * SHORTEST:,}"
            )
        batches[domain] += stream.rows(sequence_length)[: options.text_samples].split(BATCH_SIZE)
    return tuple(EvaluationSet(domain, tuple(parts)) for domain, parts in batches.items())


@frozen
class TeacherForcedAnswer:
    """The tokens of a prompt and of the answer that models read, with the end token if it ended."""

    id: str  # the prompt's
    domain: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    seed: int = 0


def read_answers(
    arguments: Sequence[str],
    tokenizer: Any,
    stops: Collection[int],
    most: int = sys.maxsize,
    strict: bool = False,
) -> tuple[TeacherForcedAnswer, ...]:
    """Read the answers of `FILE` or `FILE=DOMAIN`: rows with prompt and answer, or messages that
    end with an answer.

    A row's own `domain` counts where none is named. An answer without an end token gets one, unless
    its row says `"ended": "length"`. Rows that template or tokenizer cannot take, or not in `most`
    tokens, are left out with one warning for each file, or refused if `strict`."""
    answers = []
    for argument in arguments:
        source, domain = domain_of(argument)
        left_out = LeftOut(f"answers of {source}", strict)
        with quiet_transformers():
            for where, row in source_rows(WeightedSource(source, 1.0), 0, "answers").rows:
                with left_out.each():
                    row_domain = domain
                    if source == argument and isinstance(row, Mapping):
                        row_domain = str(row.get("domain") or domain)
                    answers.append(_given(row, row_domain, tokenizer, stops, most, where, left_out))
        left_out.report()
        if not left_out.used:
            raise CompressionError(
                f"--answers {source} has no answers; give it rows with prompt and answer"
            )
    return tuple(answers)


def _given(
    row: Any,
    domain: str,
    tokenizer: Any,
    stops: Collection[int],
    most: int,
    where: str,
    left_out: LeftOut,
) -> TeacherForcedAnswer:
    """Return a row's answer; raises `ItemError` for one that cannot be read."""
    conversation = read_row(row, None, where, CHAT_COLUMNS)
    note_columns(row, conversation, left_out)
    *messages, last = conversation.messages
    if last.get("role") != "assistant" or not messages:
        raise ItemError(
            f"{where} does not end with the assistant's answer to a message; give it one"
        )
    is_pair = len(conversation.columns) == 2 and len(messages) == 1
    prompt = Prompt.of(
        messages, domain, conversation.tools, where, messages[0]["content"] if is_pair else None
    )
    before = tokens_of(prompt, tokenizer, most=most)
    text = str(last["content"])
    if is_chat(prompt, tokenizer, False):
        try:
            whole = render_chat(tokenizer, [*messages, last], tools=prompt.tools)
            opening = render_chat(
                tokenizer, messages, tools=prompt.tools, add_generation_prompt=True
            )
        except Exception as error:  # a template raises what it likes
            raise untaken(where, error) from error
        text = whole[common_prefix(whole, opening) :]
    if not text.strip():
        raise ItemError(f"{where} has an empty answer; give it some text or remove it")
    try:
        ids = [int(token) for token in first_part(tokenizer, text, most + 1)[1]]
    except Exception as error:  # tokenizers, too
        raise untaken(where, error, "tokenizer") from error
    end = next((index for index, token in enumerate(ids) if token in stops), None)
    if end is not None:
        ids = ids[: end + 1]  # a template may go on after it
    elif stops and row.get("ended") != "length":
        ids.append(tokenizer.eos_token_id if tokenizer.eos_token_id in stops else min(stops))
    if len(before) + len(ids) > most:
        raise ItemError(
            f"{where} has more tokens than the {most:,} positions that the model was made for; "
            "shorten it"
        )
    return TeacherForcedAnswer(prompt.id, domain, before, tuple(ids))


def answer_sets(
    answers: Sequence[TeacherForcedAnswer], vocabulary: int
) -> tuple[tuple[EvaluationSet, ...], tuple[TeacherForcedAnswer, ...]]:
    """Return a set for each domain, longest first, in which only answers count; and the answers in
    that order."""
    for answer in answers:
        check_vocabulary(max(*answer.prompt, *answer.answer), vocabulary)
    sets = []
    order = []
    for domain in dict.fromkeys(answer.domain for answer in answers):
        of_domain = [answer for answer in answers if answer.domain == domain]
        of_domain.sort(key=lambda answer: len(answer.prompt) + len(answer.answer), reverse=True)
        batches = []
        masks = []
        for begin in range(0, len(of_domain), BATCH_SIZE):
            tokens = []
            counted = []
            for row in of_domain[begin : begin + BATCH_SIZE]:
                tokens.append(torch.tensor(row.prompt + row.answer))
                counted.append(torch.tensor([False] * len(row.prompt) + [True] * len(row.answer)))
            batches.append(pad_sequence(tokens, batch_first=True))
            masks.append(pad_sequence(counted, batch_first=True))
        sets.append(EvaluationSet(domain, tuple(batches), tuple(masks)))
        order += of_domain
    return tuple(sets), tuple(order)


def stop_tokens_of(tokenizer: Any, stops: Collection[int]) -> dict[str, tuple[int, ...]]:
    """Return the tokens that end an answer and, if the tokenizer has one, the token that ends its
    thinking."""
    thinking = set[int]()
    for _, closing in Markers.of(tokenizer).thinking:
        ids = tokenizer(closing, add_special_tokens=False)["input_ids"]
        if len(ids) == 1:
            thinking.add(int(ids[0]))
    named = {END: tuple(sorted(stops)), THINKING_END: tuple(sorted(thinking))}
    return {name: ids for name, ids in named.items() if ids}


@frozen
class AnswerDivergence:
    """Figures of one answer: means over its tokens, and probabilities of its end by both models."""

    id: str
    seed: int
    domain: str
    tokens: int
    kl: float
    flips: float
    # probability of an end token where the answer ended, the base's first
    end: tuple[float, float] | None
    elsewhere: tuple[float, float] | None  # and the mean of it at the answer's other tokens


# on text and on answers, None for what was not read; and of each answer, longest first by domain
Divergence = tuple[DomainDivergence | None, DomainDivergence | None, tuple[AnswerDivergence, ...]]


def measure_divergence(
    base: OpenModel,
    compressed: OpenModel,
    texts: Sequence[EvaluationSet],
    answers: Sequence[TeacherForcedAnswer],
    stop_tokens: Mapping[str, Sequence[int]],
    confidence: float,
    progress: Progress,
) -> Divergence:
    """Compare both models on texts and answers, in one streamed pass of each.

    Raises `CompressionError` for models of other vocabularies or tokenizers.
    """
    check_base(compressed, base)
    forced_sets, order = answer_sets(answers, base.vocabulary)
    evaluator = Evaluator(base, [*texts, *forced_sets], [*stop_tokens.values()])
    (figures,) = evaluator.measure(compressed, progress=progress, phase="judge")
    named_sets = list(enumerate(evaluator.names))
    of_texts = dict(named_sets[: len(texts)])
    of_answers = dict(named_sets[len(texts) :])
    by_answer = figures.of(of_answers)
    each = []
    for index, answer in enumerate(order):
        end = elsewhere = None
        tokens = len(answer.answer)
        if stop_tokens:
            due, *sums = by_answer.stop_tokens[index, 0].tolist()
            if due:
                end = (sums[0] / due, sums[1] / due)
            if tokens > due:
                elsewhere = (sums[2] / (tokens - due), sums[3] / (tokens - due))
        kl = float(by_answer.kl[index])
        flips = float(by_answer.flips[index])
        each.append(
            AnswerDivergence(
                answer.id, answer.seed, answer.domain, tokens, kl, flips, end, elsewhere
            )
        )
    return (
        domain_divergence(figures, of_texts, (), confidence) if of_texts else None,
        domain_divergence(figures, of_answers, [*stop_tokens], confidence) if of_answers else None,
        tuple(each),
    )


def read_all(
    base: StockModel, options: BehaviourOptions
) -> tuple[OpenModel, tuple[EvaluationSet, ...], tuple[TeacherForcedAnswer, ...]]:
    """Open the base, and tokenise texts and given answers; no weight is read.

    Raises `CompressionError` for what the base's tokenizer cannot take.
    """
    model = open_model(base.source, base.dtype, base.device)
    tokenizer = load_tokenizer(base.source.folder)
    answers = tuple[TeacherForcedAnswer, ...]()
    if options.answers:
        _, facts = base.opened()
        answers = read_answers(
            options.answers, tokenizer, facts.stops, facts.positions or sys.maxsize, options.strict
        )
    return model, text_sets(options, tokenizer, model.vocabulary), answers


def divergence_conditions(
    text: DomainDivergence | None,
    answers: DomainDivergence | None,
    limits: Limits,
    confidence: float,
) -> tuple[GateCondition, ...]:
    """Return a condition for each limit and each domain of texts and answers; each has to pass.

    Where one fails, its lower bound is that of a confidence corrected for their number
    (Bonferroni)."""
    # name of the domain, what would decide an inconclusive condition, and the figures
    rows = []
    if text is not None:
        rows += [(row.domain, "text", row) for row in text.domains]
    if answers is not None:
        rows += [(f"answers of {row.domain}", "answers", row) for row in answers.domains]
    alpha = 1 - confidence
    tests = max(1, len(limits) * len(rows))
    conditions = []
    for domain, source, row in rows:
        freedom = max(row.sequences - 1, 1)
        widening = float(stdtrit(freedom, alpha / tests) / stdtrit(freedom, alpha))
        for name, (option, limit) in limits.items():
            figure: Paired = getattr(row, name)
            verdict: Verdict = "pass" if figure.upper <= limit else "inconclusive"
            if figure.change - widening * (figure.change - figure.lower) > limit:
                verdict = "fail"
            advice = f"give it more {source}, or allow more" if verdict == "inconclusive" else ""
            conditions.append(
                GateCondition(
                    name=f"{LIMITED[name]} on {domain}",
                    option=option,
                    limit=limit,
                    observed=figure.change,
                    lower=figure.lower,
                    upper=figure.upper,
                    items=row.tokens,
                    unit="tokens",
                    verdict=verdict,
                    base=figure.base if name == "loss" else None,
                    compressed=figure.compressed,
                    advice=advice,
                )
            )
    return tuple(conditions)
