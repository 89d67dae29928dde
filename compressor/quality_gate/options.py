"""Options of comparing two models' behaviour, and of the gate. Importing this loads no torch."""

import math
import re
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from compressor.answers.options import AnswerOptions, TaskOptions
from compressor.errors import CompressionError
from compressor.formatting import joined
from compressor.frozen import frozen
from compressor.options import one_or_several, separated

MAX_LOOP_RISE = 0.01  # default share of answers, where prompts are named and no limit
# default where prompts are named, no other limit is larger, and none is given
MAX_LENGTH_CHANGE = 0.1
FEWEST = 8  # sequences of text, under which nothing is told apart
SHORTEST = 16  # tokens of such a sequence
LENGTH = "length"  # of answers, the measure that is limited up and down
OTHER_LANGUAGE, REFUSALS = "other language", "refusals"
TASK_DROPS = 3  # default limit of a single task, as a multiple of the drop allowed over all items

# those of Zhang et al. 2024, arXiv:2407.09590
DEFAULT_TASKS = ("mmlu", "boolq", "openbookqa", "rte")
DEMO_TASKS = tuple(
    f"moe_demo_{skill}" for skill in ("arithmetic", "sorting", "reversal", "recall", "facts")
)

Limits = dict[str, tuple[str, float]]  # by measure: the option, and the rise that it allows


class BehaviourOptions(AnswerOptions):
    """Text, prompts and answers on which the behaviour of two models is compared."""

    text: tuple[str, ...] = ()
    """Text that both models read, as SOURCE or SOURCE=DOMAIN. Loss, KL and flips of each domain.
    May be repeated."""
    text_samples: int = Field(64, ge=1)
    """Sequences of each text, at most."""
    text_length: int = Field(512, ge=2)
    """Tokens of such a sequence."""
    answers: tuple[str, ...] = ()
    """Answers of the base that both models read: JSONL with prompt and answer, or with messages, as
    FILE or FILE=DOMAIN. May be repeated."""
    teacher_forced: bool = False
    """Only the base answers the prompts, and both models read its answers."""

    _one_source = field_validator("text", "answers", mode="before")(one_or_several)

    @property
    def reads(self) -> bool:
        """True if both models read text or the base's answers."""
        return bool(self.text or self.answers or self.teacher_forced)

    def check(self) -> None:
        super().check()
        if self.teacher_forced and not self.prompts:
            raise CompressionError(
                "--teacher-forced is of answers to prompts; name --prompts, or give --answers"
            )
        if self.reads and (self.text_samples < FEWEST or self.text_length < SHORTEST):
            raise CompressionError(
                f"{self.text_samples} sequences of {self.text_length} tokens tell no difference; "
                f"give --text-samples {FEWEST} and --text-length {SHORTEST} at the least"
            )


@frozen
class Expectation:
    """The score that a base should have on a task."""

    task: str
    score: str  # as it is given
    value: float
    tolerance: float | None  # None stands for the sampling error of as many items

    @classmethod
    def read(cls, text: str) -> "Expectation":
        """'gsm8k=0.78±0.02', also with +-, or without a tolerance."""
        task, _, score = text.partition("=")
        try:
            value, *tolerances = map(float, re.split(r"±|\+/?-", score, maxsplit=1))
        except ValueError:
            value, tolerances = math.nan, []
        tolerance = tolerances[0] if tolerances else None
        if not (task.strip() and math.isfinite(value) and 0 <= (tolerance or 0) < math.inf):
            raise CompressionError(
                f"--expect {text!r} should be task=score or task=score±tolerance, such as "
                "gsm8k=0.78±0.02"
            )
        return cls(task.strip(), score.strip(), value, tolerance)


class GateOptions(BehaviourOptions, TaskOptions):
    """Conditions that an output has to meet before it is put in place."""

    baseline: Path | None = None
    """Compare with the base's answers in this file of gate baseline. Tasks and settings default to
    the file's."""
    expect: tuple[str, ...] = ()
    """Score that the base should have, such as gsm8k=0.78±0.02; another one is anomalous. May be
    repeated."""
    max_loop_rise: float | None = Field(None, ge=0, le=1)
    """Rise of loops, as a share of answers, that passes (default with prompts: 0.01)."""
    max_missed_rise: float | None = Field(None, ge=0, le=1)
    """The same of answers that do not end by themselves (default: as of loops)."""
    max_language_rise: float | None = Field(None, ge=0, le=1)
    """Rise of answers in another language than the prompt's or the one it asks for, as a share of
    those whose language is clear, that passes."""
    max_refusal_rise: float | None = Field(None, ge=0, le=1)
    """The same of answers that open with a refusal."""
    max_length_change: float | None = Field(None, gt=0)
    """Relative change of the mean length of answers that passes, up or down (default with prompts:
    0.1, or the largest limit of loops and missed ends)."""
    max_flips: float | None = Field(None, gt=0, le=1)
    """Share of tokens with another argmax than the base's that passes, in each domain."""
    max_loss_rise: float | None = Field(None, gt=0)
    """Rise of the loss in nats per token that passes, in each domain of text."""
    max_drop: float = Field(0.01, ge=0)
    """Largest drop over all items that passes. Of a perplexity, its rise."""
    max_task_drop: float | None = Field(None, ge=0)
    """Largest drop of a single task (default: 3 x max_drop). A clear loss beyond it fails."""
    confidence: float = Field(0.95, gt=0.5, lt=1)
    """Confidence of the verdict."""
    inconclusive: Literal["pass", "fail"] | None = None
    """Count an undecided gate as pass or fail (default: exit status 3)."""
    keep_failed: bool = False
    """Leave the output in place even if it fails."""
    search: bool = Field(False, exclude=True)  # of a command, not of its output
    """Find the smallest number of experts that passes."""

    _split_expect = field_validator("expect", mode="before")(separated)

    @model_validator(mode="after")
    def _has_conditions(self) -> Self:
        has_tasks = self.tasks or not self.baseline  # else they are the baseline's
        for task in self.expectations:
            if has_tasks and task not in self.tasks:
                asked = f"asked are {joined(self.tasks)}" if self.tasks else "no task is asked"
                raise CompressionError(
                    f"--expect names the task {task!r}, which is not asked; {asked}"
                )
        if not (self.tasks or self.prompts or self.text or self.answers or self.baseline):
            raise ValueError("a gate judges tasks, answers or text; name tasks, prompts or text")
        return self

    @property
    def expectations(self) -> dict[str, Expectation]:
        """The base's expected scores by task; of two of one task the last."""
        expected = map(Expectation.read, self.expect)
        return {entry.task: entry for entry in expected}

    @property
    def task_drop(self) -> float:
        """Drop allowed of a task whose items are pooled with others'."""
        return TASK_DROPS * self.max_drop if self.max_task_drop is None else self.max_task_drop

    @property
    def answer_limits(self) -> Limits:
        """Limits on written answers."""
        if self.teacher_forced or not self.prompts:
            return {}
        loop_rise = self.max_loop_rise
        missed_rise = self.max_missed_rise
        if loop_rise is None and missed_rise is None:
            loop_rise = MAX_LOOP_RISE
        if missed_rise is None:
            missed_rise = loop_rise
        limits: Limits = {}
        if loop_rise is not None:
            limits["loops"] = ("--max-loop-rise", loop_rise)
        if missed_rise is not None and missed_rise != 1:
            limits["missed ends"] = ("--max-missed-rise", missed_rise)
        usual = max([MAX_LENGTH_CHANGE, *(rise for _, rise in limits.values())])
        if self.max_language_rise is not None:
            limits[OTHER_LANGUAGE] = ("--max-language-rise", self.max_language_rise)
        if self.max_refusal_rise is not None:
            limits[REFUSALS] = ("--max-refusal-rise", self.max_refusal_rise)
        limits[LENGTH] = ("--max-length-change", self.max_length_change or usual)
        return limits

    @property
    def divergence_limits(self) -> Limits:
        """Limits on each domain of text and of the base's answers."""
        limits: Limits = {}
        if self.max_flips is not None:
            limits["flips"] = ("--max-flips", self.max_flips)
        if self.max_loss_rise is not None:
            limits["loss"] = ("--max-loss-rise", self.max_loss_rise)
        return limits

    def check(self) -> None:
        super().check()
        if self.baseline is not None and (self.prompts or self.reads):
            raise CompressionError(
                "--baseline has the base's answers to tasks alone; leave out --prompts, --text and "
                "--answers, or name the base instead"
            )
        names = (
            *("max_loop_rise", "max_missed_rise", "max_length_change"),
            *("max_language_rise", "max_refusal_rise"),
        )
        given = [f"--{name.replace('_', '-')}" for name in names if getattr(self, name) is not None]
        if given and (self.teacher_forced or not self.prompts):
            remedy = "leave out --teacher-forced" if self.teacher_forced else "name --prompts"
            raise CompressionError(f"{joined(given)} judge answers of both models; {remedy}")
        if bool(self.divergence_limits) != self.reads:
            raise CompressionError(
                "--text and --answers are judged by --max-flips or --max-loss-rise; give one of "
                "each"
            )

    def counted(self, verdict: str) -> str:
        """Return the verdict, or the one that an inconclusive verdict counts as."""
        return self.inconclusive or verdict if verdict == "inconclusive" else verdict
