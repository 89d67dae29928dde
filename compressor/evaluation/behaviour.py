"""How a smaller model behaves beside its base: what both write to the same prompts, and what either would have.

`Behaviour` is the record, of parts that may be missing; commands, reports and the gate's conditions are made of it.
"""

import logging
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from compressor.errors import CompressionError
from compressor.evaluation.answers import Answer, Asked, Journal, StockWriter, Writer, answer_all
from compressor.evaluation.conditions import Condition
from compressor.evaluation.endings import Ending, Markers, Rate, ending_of, paired, rates
from compressor.evaluation.evaluate import fits_whole
from compressor.evaluation.gate_statistics import POWER, holm, items_needed, measure, shown_by, verdict
from compressor.evaluation.gate_verdict import TaskGate
from compressor.evaluation.generate import ModelFacts
from compressor.evaluation.judged import Judged
from compressor.evaluation.judging import (
    ForcedFigures,
    JudgedModels,
    Judging,
    judge_both,
    judged_conditions,
    read_all,
)
from compressor.evaluation.options import GenerationOptions
from compressor.evaluation.prompts import Prompt, tokens_of, usable_prompts
from compressor.formatting import counted
from compressor.progress import Progress
from compressor.records import plain_json

logger = logging.getLogger(__name__)

FORMAT = "moe-compressor-behaviour/1"
NEW_TOKENS = 512  # of an answer, where nobody says how many, and half of the model's positions are no fewer
UNIT = "answers"


@dataclass(frozen=True, slots=True)
class Answering:
    """Which answers are written, and what may rise in them."""

    prompts: tuple[Prompt, ...]
    max_new_tokens: int | None = None
    temperature: float = 0.0
    top_p: float | None = None
    seeds: int = 1  # answers to each prompt
    seed: int = 0  # of the first
    chat: bool = False  # texts become a user's message
    max_loop_rise: float | None = None
    max_missed_rise: float | None = None  # of answers that do not end by themselves; None: as of loops
    strict: bool = False  # whether a prompt that cannot be read ends the run

    def __post_init__(self) -> None:
        self.options(NEW_TOKENS)  # whose errors name what is wrong
        if self.seeds < 1:
            raise CompressionError(f"--seeds {self.seeds} asks nothing; give at least 1")
        if self.seeds > 1 and not self.temperature:
            raise CompressionError("--seeds has no effect without sampling; add --temperature 1")
        for name in ("max_loop_rise", "max_missed_rise"):
            rise = getattr(self, name)
            if rise is not None and not (math.isfinite(rise) and 0 <= rise <= 1):
                option = f"--{name.replace('_', '-')}"
                raise CompressionError(f"{option} {rise} should be a share from 0 to 1, such as 0.01")

    def options(self, most: int) -> GenerationOptions:
        """How each answer is written, where nobody says otherwise of at most so many tokens."""
        named = (self.temperature, self.top_p, None, self.seed, self.chat)
        return GenerationOptions(self.max_new_tokens or most, *named)

    def asked(self, prompts: Sequence[Prompt]) -> list[Asked]:
        """Each of these prompts with each seed."""
        return [(prompt, self.seed + number) for prompt in prompts for number in range(self.seeds)]

    @property
    def answers(self) -> int:
        """Answers of each model."""
        return len(self.prompts) * self.seeds

    @property
    def limits(self) -> dict[str, tuple[str, float]]:
        """By measure: the option and the rise that it allows."""
        if self.max_loop_rise is None and self.max_missed_rise is None:
            return {}
        missed = self.max_loop_rise if self.max_missed_rise is None else self.max_missed_rise
        found = {} if missed is None or missed == 1 else {"missed ends": ("--max-missed-rise", missed)}
        return found if self.max_loop_rise is None else {"loops": ("--max-loop-rise", self.max_loop_rise), **found}


@dataclass(frozen=True, slots=True)
class Pair:
    """Both answers to a prompt with the same seed."""

    prompt: Prompt
    seed: int
    base: Answer
    smaller: Answer
    base_ending: Ending
    smaller_ending: Ending

    @property
    def verdict(self) -> str:
        """In a word, what became of the base's answer."""
        base, smaller = self.base_ending, self.smaller_ending
        if smaller.looped and not base.looped:
            return "new loop"
        if base.ended and not smaller.ended:
            return "end missed"
        if (base.looped and not smaller.looped) or (smaller.ended and not base.ended):
            return "better"
        return "same text" if self.base.text == self.smaller.text else "other text"


@dataclass(frozen=True, slots=True)
class Written:
    """What both models have written, in figures, and pair by pair."""

    prompts: int
    seeds: int
    options: Mapping[str, Any]
    rates: tuple[Rate, ...]
    pairs: tuple[Pair, ...] = ()


@dataclass(frozen=True, slots=True)
class Behaviour:
    """All that was found; parts that nobody asked for are None."""

    base: str
    smaller: str
    confidence: float
    written: Written | None = None
    text: Judged | None = None  # read by both
    answers: Judged | None = None  # the base's, read by both
    each: tuple[ForcedFigures, ...] = ()  # of these answers
    conditions: tuple[Condition, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON without the answers, which stand beside it line by line."""
        written = None if self.written is None else replace(self.written, pairs=())
        return {"format": FORMAT, **plain_json(replace(self, written=written))}


def shown_sentence(answers: int, confidence: float) -> str:
    """What so many answers can show, beforehand."""
    alpha = 1 - confidence
    least, some = (shown_by(answers, flips, alpha) for flips in (0.0, 0.02))
    return (
        f"{counted(answers, 'answer')} of each model can show, with confidence {100 * confidence:g}%, that loops or "
        f"missed ends rise by no more than {least:.2g} where no answer changes in that, and than {some:.2g} with "
        f"probability {POWER:g} where 2% do."
    )


def fitting(
    wanted: Answering, opened: Sequence[tuple[Any, ModelFacts]]
) -> tuple[GenerationOptions, tuple[Prompt, ...]]:
    """How answers are written, and the prompts that all of these writers take: tokenizers and facts of models."""
    positions = min((facts.positions for _, facts in opened if facts.positions is not None), default=None)
    options = wanted.options(NEW_TOKENS if positions is None else max(1, min(NEW_TOKENS, positions // 2)))
    most = sys.maxsize if positions is None else max(0, positions - options.max_new_tokens)
    prompts = wanted.prompts
    for tokenizer, _ in opened:
        if tokenizer is not None:
            prompts = usable_prompts(prompts, tokenizer, wanted.chat, most, wanted.strict)
    return options, prompts


def write_base(base: Writer, wanted: Answering, cache: Path, progress: Progress) -> list[tuple[Prompt, Answer]]:
    """The base's answers to all prompts, with these."""
    options, prompts = fitting(wanted, [base.opened()])
    asked = wanted.asked(prompts)
    made = answer_all(base, asked, options, Journal.of(base, options, cache), progress)
    return [(prompt, answer) for (prompt, _), answer in zip(asked, made, strict=True)]


def write_both(
    base: Writer,
    smaller: Writer,
    wanted: Answering,
    confidence: float,
    cache: Path,
    progress: Progress,
    announce: Callable[[Answering], None] | None = None,
) -> Written:
    """Both models' answers to all prompts, and what differs; answers of earlier runs are in the folder `cache`.

    `announce` gets what is asked, of the prompts that both models take, before they are loaded. Raises
    `CompressionError` where no prompt is left, or a model cannot write.
    """
    opened = [writer.opened() for writer in (base, smaller)]
    options, prompts = fitting(wanted, opened)
    if announce is not None:
        announce(replace(wanted, prompts=prompts))
    asked = wanted.asked(prompts)
    answers, endings = list[list[Answer]](), list[list[Ending]]()
    for writer, (tokenizer, _) in zip((base, smaller), opened, strict=True):
        made = answer_all(writer, asked, options, Journal.of(writer, options, cache), progress)
        markers = Markers() if tokenizer is None else Markers.of(tokenizer)

        def before(prompt: Prompt, tokenizer: Any = tokenizer) -> str:
            return "" if tokenizer is None else str(tokenizer.decode(tokens_of(prompt, tokenizer, wanted.chat)))

        if not answers:
            _check_ends(made, base.label, options.max_new_tokens, "missed ends" in wanted.limits)
        answers.append(made)
        endings.append(
            [
                ending_of(answer, prompt, markers, tokenizer, before(prompt) if markers.thinking else "")
                for answer, (prompt, _) in zip(made, asked, strict=True)
            ]
        )
    pairs = tuple(
        Pair(prompt, seed, *both, *ends)
        for (prompt, seed), both, ends in zip(
            asked, zip(*answers, strict=True), zip(*endings, strict=True), strict=True
        )
    )
    named = ("max_new_tokens", "temperature", "top_p", "seed", "chat")
    facts = {name: getattr(options, name) for name in named}
    found = rates([prompt.domain for prompt, _ in asked], endings[0], endings[1], confidence)
    return Written(len(prompts), wanted.seeds, facts, found, pairs)


def _check_ends(answers: Sequence[Answer], base: str, most: int, judged: bool) -> None:
    """Warn where most of the base's answers are cut off; refuse to judge ends where all are: none can be missed."""
    missed = sum(answer.ended != "end" for answer in answers)
    fault = f"{missed:,} of {len(answers):,} answers of {base} do not end within {most:,} tokens"
    remedy = "raise --max-new-tokens, or ask as the model was taught (--chat)"
    if judged and missed == len(answers):
        raise CompressionError(f"{fault}, so no end can be missed; {remedy}, or judge loops alone: --max-missed-rise 1")
    if 2 * missed > len(answers):
        logger.warning("%s, so little can be said of ends; %s", fault, remedy)


def written_conditions(written: Written, wanted: Answering, confidence: float) -> tuple[Condition, ...]:
    """The conditions on what was written, corrected for their number (Holm) where they fail: each has to pass."""
    alpha, tasks = 1 - confidence, list[TaskGate]()
    for name, (_, limit) in wanted.limits.items():
        pairs = paired(name, [each.base_ending for each in written.pairs], [x.smaller_ending for x in written.pairs])
        assert pairs is not None, "every answer loops and ends, or does not"
        tasks.append(measure(pairs, limit, alpha, True))
    failing = holm(np.array([task.p_fail for task in tasks]))
    judged = [replace(x, verdict=verdict(x.p_pass, float(p), alpha)) for x, p in zip(tasks, failing, strict=True)]
    return tuple(
        Condition(
            name=f"rise of {task.task}",
            option=wanted.limits[task.task][0],
            limit=task.max_drop,
            observed=task.drop,
            lower=task.lower,
            upper=task.upper,
            items=task.items,
            unit=UNIT,
            verdict=task.verdict,
            base=1 - task.base,
            compressed=1 - task.compressed,
            advice=_advice(task, confidence),
        )
        for task in judged
    )


def _advice(task: TaskGate, confidence: float) -> str:
    if task.verdict != "inconclusive":
        return ""
    if (count := items_needed(task, confidence)) is None:
        return "it is too near the limit for any number of answers to decide"
    return (
        f"about {float(f'{count:.2g}'):,.0f} answers would decide it instead of {task.items:,}, if the rise stays what "
        f"it is, with probability {POWER:g}; name more --prompts, or sample more --seeds"
    )


def evaluate_behaviour(
    base: Writer,
    smaller: Writer,
    wanted: Answering | None,
    confidence: float,
    cache: Path,
    progress: Progress,
    announce: Callable[[str], None] | None = None,
    judging: Judging | None = None,
) -> Behaviour:
    """All that is wanted of two models; `announce` gets what so many answers can show, before any is loaded.

    What the base has written both models read, too, where both are checkpoints; and that alone where the smaller one
    does not fit into memory.
    """

    def tell(asked: Answering) -> None:
        if announce is not None:
            announce(shown_sentence(asked.answers, confidence))

    judging = judging or Judging()
    stock = stock_pair(base, smaller, judging)
    readings = None if stock is None else read_all(stock[0], judging)
    written, answers = None, list[tuple[Prompt, Answer]]()
    if wanted is not None:
        if judging.forced or (stock is not None and not fits_whole(stock[1].source, stock[1].dtype, stock[1].device)):
            if not judging.forced:
                logger.warning("%s does not fit into memory, so it only reads the base's answers", smaller.label)
            answers = write_base(base, wanted, cache, progress)
        else:
            written = write_both(base, smaller, wanted, confidence, cache, progress, tell)
            answers = [(pair.prompt, pair.base) for pair in written.pairs]
    found = JudgedModels()
    if stock is not None and readings is not None and (answers or readings.texts or readings.answers):
        chat = wanted is not None and wanted.chat
        found = judge_both(readings, *stock, answers, chat, confidence, progress)
    conditions = () if written is None or wanted is None else written_conditions(written, wanted, confidence)
    conditions += judged_conditions(found, judging, confidence)
    figures = found.text, found.answers, found.each
    return Behaviour(base.label, smaller.label, confidence, written, *figures, conditions)


def stock_pair(base: Writer, smaller: Writer, judging: Judging) -> tuple[StockWriter, StockWriter] | None:
    """Both models as checkpoints, which may read; None where one is a server, and nothing has to be read."""
    if isinstance(base, StockWriter) and isinstance(smaller, StockWriter):
        return base, smaller
    if judging.texts or judging.answers or judging.forced:
        raise CompressionError(
            "a server does not show what reading takes, the probabilities of all tokens; name two checkpoints, or "
            "leave out --text, --answers and --teacher-forced"
        )
    return None
