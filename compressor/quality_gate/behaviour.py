"""Behaviour of a smaller model beside its base: answers to the same prompts, and divergence on text
and answers.

`Behaviour` is the record of which commands, reports and the gate's conditions are made; its parts
are optional."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from compressor.answers.answering import Answer, Model, answer_all
from compressor.answers.options import GenerationOptions
from compressor.answers.prompts import Prompt, PromptSet, tokens_of
from compressor.answers.stock import StockModel, fits_whole
from compressor.errors import CompressionError
from compressor.formatting import counted
from compressor.frozen import frozen
from compressor.model.opened import open_model
from compressor.model.tokenizer import templates_of
from compressor.progress import Progress
from compressor.prompt_date import date_facts
from compressor.quality_gate.domain_divergence import DomainDivergence
from compressor.quality_gate.endings import (
    Ending,
    Markers,
    Rate,
    ending_of,
    pair_endings,
    pair_lengths,
    rates,
)
from compressor.quality_gate.language import unclear_language, wanted_by
from compressor.quality_gate.options import (
    LENGTH,
    OTHER_LANGUAGE,
    BehaviourOptions,
    GateOptions,
    Limits,
)
from compressor.quality_gate.statistics import (
    POWER,
    advise,
    corrected,
    measure,
    measure_change,
    shown_by,
)
from compressor.quality_gate.teacher_forced import (
    AnswerDivergence,
    TeacherForcedAnswer,
    divergence_conditions,
    measure_divergence,
    read_all,
    stop_tokens_of,
)
from compressor.quality_gate.verdict import GateCondition
from compressor.records import Json, plain_json

logger = logging.getLogger(__name__)

FORMAT = "moe-compressor-behaviour/1"
UNIT = "answers"


@frozen
class AnswerPair:
    """Both answers to a prompt with the same seed."""

    prompt: Prompt
    seed: int
    base: Answer
    smaller: Answer
    base_ending: Ending
    smaller_ending: Ending

    @property
    def verdict(self) -> str:
        """The difference of the smaller model's answer from the base's, in two words."""
        base = self.base_ending
        smaller = self.smaller_ending
        if smaller.looped and not base.looped:
            return "new loop"
        if base.ended and not smaller.ended:
            return "end missed"
        if smaller.other_language and not base.other_language:
            return OTHER_LANGUAGE
        if smaller.refused and not base.refused:
            return "new refusal"
        if (base.looped and not smaller.looped) or (smaller.ended and not base.ended):
            return "better"
        return "same text" if self.base.text == self.smaller.text else "other text"


@frozen
class Written:
    """Written answers of both models: figures, and pairs."""

    prompts: int
    seeds: int
    options: Json
    rates: tuple[Rate, ...]
    pairs: tuple[AnswerPair, ...] = ()


@frozen
class Behaviour:
    """Comparison of two models; parts that were not requested are None."""

    base: str
    smaller: str
    confidence: float
    written: Written | None = None
    text: DomainDivergence | None = None
    answers: DomainDivergence | None = None  # on the base's answers
    each: tuple[AnswerDivergence, ...] = ()  # of these answers
    conditions: tuple[GateCondition, ...] = ()

    def to_dict(self) -> Json:
        """Return plain JSON without the pairs of answers, which have a file of their own."""
        written = None if self.written is None else replace(self.written, pairs=())
        return {"format": FORMAT, **plain_json(replace(self, written=written))}


def shown_sentence(answers: int, confidence: float) -> str:
    """Say which rise a number of answers can show."""
    alpha = 1 - confidence
    least, some = (shown_by(answers, flips, alpha) for flips in (0.0, 0.02))
    return (
        f"{counted(answers, 'answer')} of each model can show, with confidence "
        f"{100 * confidence:g}%, that loops or missed ends rise by no more than {least:.2g} where "
        f"no answer changes in that, and than {some:.2g} with probability {POWER:g} where 2% do."
    )


def compare_answers(
    prompts: PromptSet,
    options: GenerationOptions,
    tokenizers: Sequence[Any],
    base: Sequence[Answer],
    smaller: Sequence[Answer],
    limits: Limits,
    confidence: float,
) -> tuple[Written, tuple[GateCondition, ...]]:
    """Compare both models' answers to all requests, given the tokenizers of both.

    Each of the conditions on them has to pass; failures are corrected by Holm."""
    endings = list[list[Ending]]()
    wanted = {prompt.id: wanted_by(prompt) for prompt in prompts.prompts}
    for tokenizer, answers in zip(tokenizers, (base, smaller), strict=True):
        markers = Markers.of(tokenizer)
        endings.append([])
        for (prompt, _), answer in zip(prompts.requests, answers, strict=True):
            before = ""
            if markers.thinking:
                before = str(tokenizer.decode(tokens_of(prompt, tokenizer, options.chat)))
            language = wanted[prompt.id]
            endings[-1].append(ending_of(answer, prompt, markers, tokenizer, before, language))
    ending_pairs = list(zip(*endings, strict=True))
    pairs = [
        AnswerPair(prompt, seed, *both)
        for (prompt, seed), *both in zip(prompts.requests, base, smaller, *endings, strict=True)
    ]
    asked = options.facts("max_new_tokens", "temperature", "top_p", "seed", "chat")
    domains = [pair.prompt.domain for pair in pairs]
    written = Written(
        len(prompts.prompts),
        prompts.options.seeds,
        {**asked, **date_facts(templates_of(tokenizers[0]))},
        rates(domains, ending_pairs, confidence),
        tuple(pairs),
    )
    alpha = 1 - confidence
    tests = []
    for name, (_, limit) in limits.items():
        if name == LENGTH:
            tests.append(measure_change(pair_lengths(ending_pairs), limit, alpha))
        else:
            marks = pair_endings(name, ending_pairs)
            if not len(marks.drops):
                raise unclear_language()
            tests.append(measure(marks, limit, alpha, True))
    conditions = []
    for test in corrected(tests, alpha, "p_fail"):
        name = f"rise of {test.task}"
        scale = 1.0
        undecided = test
        if test.task == LENGTH:
            name = "relative change of length"
            scale = fmean(max(ending.tokens, 1) for ending in endings[0])
            undecided = replace(test, max_drop=math.copysign(test.max_drop, test.drop))
        advice = ""
        if test.verdict == "inconclusive":
            advice = (
                f"{advise(undecided, confidence, UNIT, 'rise')}; name more --prompts, or sample "
                "more --seeds"
            )
        condition = GateCondition.of(
            test,
            name=name,
            option=limits[test.task][0],
            unit=UNIT,
            # the smaller model comes first, so that a drop is a rise
            base=scale * test.compressed,
            compressed=scale * test.base,
            advice=advice,
        )
        conditions.append(condition)
    return written, tuple(conditions)


def evaluate_behaviour(
    base: Model,
    smaller: Model,
    options: BehaviourOptions,
    prompts: PromptSet | None,
    confidence: float,
    cache: Path,
    progress: Progress,
    announce: Callable[[PromptSet], object] | None = None,
    reads_written: bool = True,
) -> Behaviour:
    """Compare two models; answers of earlier runs are in the folder `cache`.

    `announce` gets the prompts that both models take, before either is loaded. With `reads_written`
    both models, if both are checkpoints, also read the base's written answers; a smaller model that
    does not fit into memory does nothing else. Raises `CompressionError` where no prompt is left, a
    model cannot write, or ends are judged and the base ends none of its answers."""
    stock = stock_pair(base, smaller, options)
    if stock is not None:
        model, texts, given_answers = read_all(stock[0], options)
        answers = [*given_answers]
    written = None
    conditions = tuple[GateCondition, ...]()
    gate = options if isinstance(options, GateOptions) else None
    if prompts is not None:
        forced = options.teacher_forced
        if reads_written and stock is not None and not forced:
            forced = not fits_whole(stock[1].source, stock[1].dtype, stock[1].device)
            if forced:
                logger.warning(
                    "%s does not fit into memory, so it only reads the base's answers",
                    smaller.label,
                )
        opened = [base.opened()] if forced else [base.opened(), smaller.opened()]
        prompts, generation = prompts.fitted(opened)
        if announce is not None and not forced:
            announce(prompts)
        requests = prompts.requests
        base_answers = answer_all(base, requests, generation, cache, progress)
        if not forced:
            limits = gate.answer_limits if gate else {}
            missed = sum(answer.ended != "end" for answer in base_answers)
            message = (
                f"{missed:,} of {len(base_answers):,} answers of {base.label} do not end within "
                f"{generation.max_new_tokens:,} tokens"
            )
            hint = "raise --max-new-tokens, or ask as the model was taught (--chat)"
            if "missed ends" in limits and missed == len(base_answers):
                raise CompressionError(
                    f"{message}, so no end can be missed; {hint}, or judge loops alone: "
                    "--max-missed-rise 1"
                )
            if 2 * missed > len(base_answers):
                logger.warning("%s, so little can be said of ends; %s", message, hint)
            smaller_answers = answer_all(smaller, requests, generation, cache, progress)
            written, conditions = compare_answers(
                prompts,
                generation,
                [tokenizer for tokenizer, _ in opened],
                base_answers,
                smaller_answers,
                limits,
                confidence,
            )
        if stock is not None and (forced or reads_written):
            tokenizer, _ = opened[0]
            for (prompt, _), answer in zip(requests, base_answers, strict=True):
                before = tokens_of(prompt, tokenizer, options.chat)
                answers.append(
                    TeacherForcedAnswer(
                        prompt.id, prompt.domain, before, answer.tokens, answer.seed
                    )
                )
    text = given = None
    each = tuple[AnswerDivergence, ...]()
    if stock is not None and (texts or answers):
        stop_tokens = {}
        if answers:
            tokenizer, facts = base.opened()
            stop_tokens = stop_tokens_of(tokenizer, facts.stops)
        compressed = open_model(stock[1].source, stock[1].dtype, stock[1].device)
        text, given, each = measure_divergence(
            model, compressed, texts, answers, stop_tokens, confidence, progress
        )
    if gate:
        conditions += divergence_conditions(text, given, gate.divergence_limits, confidence)
    return Behaviour(base.label, smaller.label, confidence, written, text, given, each, conditions)


def stock_pair(
    base: Model, smaller: Model, options: BehaviourOptions
) -> tuple[StockModel, StockModel] | None:
    """Return both models if both are checkpoints; refuse a server if text or answers are to be
    read."""
    if isinstance(base, StockModel) and isinstance(smaller, StockModel):
        return base, smaller
    if options.reads:
        raise CompressionError(
            "a server or an ONNX export does not show what reading takes, the probabilities of all "
            "tokens; name two checkpoints, or leave out --text, --answers and --teacher-forced"
        )
    return None
