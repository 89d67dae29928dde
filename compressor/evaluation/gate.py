"""The gate: both models answer the same items, one after the other, and the paired tests judge them.

What it can show is known before any model is loaded, from the number of items, the margins and the confidence alone.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from compressor.checkpoint.source import ModelSource
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.evaluation.answers import Answer, StockWriter, Writer
from compressor.evaluation.behaviour import UNIT, Answering, stock_pair, write_base, write_both, written_conditions
from compressor.evaluation.conditions import Condition, Verdict, check_confidence
from compressor.evaluation.evaluate import ItemScores, identity_of, label_of, plan_evaluation
from compressor.evaluation.gate_statistics import MOST_ITEMS, POOLED, at_most, compare_items, judge, overall, shown_by
from compressor.evaluation.gate_verdict import GateResult
from compressor.evaluation.judging import JudgedModels, Judging, judge_both, judged_conditions, read_all
from compressor.evaluation.prompts import Prompt
from compressor.evaluation.server import Server
from compressor.evaluation.server_writer import writer_of
from compressor.evaluation.tasks import EvaluationOptions, EvaluationTask
from compressor.files import default_folder
from compressor.progress import Progress
from compressor.run_record import PACKAGES, versions

DEFAULT_TASKS = ("mmlu", "boolq", "openbookqa", "rte")  # those of Zhang et al. 2024, arXiv:2407.09590
TASK_DROPS = 3  # times the drop allowed: what one task may lose while all items together pass
DEMO_TASKS = tuple(f"moe_demo_{skill}" for skill in ("arithmetic", "sorting", "reversal", "recall", "facts"))
FLIPS = (0.0, 0.02, 0.05)  # shares of items that two models answer differently


@dataclass(frozen=True, slots=True)
class GateRequest:
    """What a compressed model has to show."""

    options: EvaluationOptions
    max_drop: float = 0.01  # of a score; of a perplexity, its relative rise
    max_task_drop: float | None = None  # of each task whose items are pooled with others'; None: 3 times max_drop
    confidence: float = 0.95
    inconclusive: Verdict = "inconclusive"  # what an undecided gate counts as
    cache: Path = field(default_factory=default_folder)  # where results of earlier runs lie
    answering: Answering | None = None  # what both models write, and what may rise in it
    judging: Judging | None = None  # what both models read, and what may rise in it

    def __post_init__(self) -> None:
        for name, drop in (("--max-drop", self.max_drop), ("--max-task-drop", self.max_task_drop)):
            if drop is not None and not (math.isfinite(drop) and drop >= 0):
                raise CompressionError(f"{name} {drop} should be a number of 0 or more, such as 0.01")
        if not self.options.tasks and self.answering is None and self.judging is None:
            raise CompressionError("no task is named; give --tasks a list such as boolq,rte, or --prompts or --text")
        check_confidence(self.confidence)

    @property
    def task_drop(self) -> float:
        return TASK_DROPS * self.max_drop if self.max_task_drop is None else self.max_task_drop

    def counted(self, verdict: Verdict) -> Verdict:
        """What a verdict counts as."""
        return self.inconclusive if verdict == "inconclusive" else verdict


@dataclass(frozen=True, slots=True)
class Prospect:
    """What the items of a task, or of all tasks together, can show."""

    task: str
    items: int
    max_drop: float  # the drop allowed
    shown: tuple[float, ...] | None  # by FLIPS: the least margin that a model without loss passes; None of perplexities


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a gate can show if all scores are of answers that are right or wrong, as those of most tasks are."""

    tasks: tuple[Prospect, ...]
    pooled: Prospect | None
    confidence: float
    flips: tuple[float, ...] = FLIPS
    refusal: str | None = None  # why not even an identical model passes, and what would do


def outlook(tasks: Sequence[EvaluationTask], gate: GateRequest) -> Outlook:
    """How many items each task has and what they can show; no model is needed."""
    alpha, limit = 1 - gate.confidence, gate.options.limit
    scored = [task for task in tasks if not task.likelihood]

    def prospect(name: str, items: int, max_drop: float, scores: bool = True) -> Prospect:
        return Prospect(name, items, max_drop, tuple(shown_by(items, x, alpha) for x in FLIPS) if scores else None)

    alone = tuple(
        prospect(task.name, task.items(limit), gate.task_drop if task in scored else gate.max_drop, task in scored)
        for task in tasks
    )
    refusal = None
    if (answering := gate.answering) is not None:
        alone += tuple(prospect(name, answering.answers, rise) for name, (_, rise) in answering.limits.items())
        refusal = _refused_answers(answering, gate)
    if not scored:
        return Outlook(alone, None, gate.confidence, refusal=refusal)
    pooled = prospect(POOLED, sum(task.items(limit) for task in scored), gate.max_drop)
    return Outlook(alone, pooled, gate.confidence, refusal=refusal or _refusal(scored, pooled.items, gate))


def _refused_answers(answering: Answering, gate: GateRequest) -> str | None:
    """Why an identical model cannot pass the conditions on answers; None if it can."""
    count, alpha = answering.answers, 1 - gate.confidence
    for option, rise in answering.limits.values():
        if gate.inconclusive != "pass" and at_most(0, 0, count, rise) >= alpha:
            needed = math.floor(math.log(alpha) / math.log1p(-rise)) + 1 if 0 < rise < 1 else MOST_ITEMS
            prompts = "" if needed >= MOST_ITEMS else f"at least {needed:,} {UNIT} (more --prompts, or more --seeds), "
            return (
                f"this gate could not even pass an identical model: {count:,} {UNIT} cannot show with confidence "
                f"{100 * gate.confidence:g}% that the rise is no more than {rise:g}; it takes {prompts}"
                f"{option} {_enough(count, alpha):g}, or --inconclusive pass"
            )
    return None


def _enough(items: int, alpha: float) -> float:
    """The margin, rounded up, that so many items without a flip show: (1 - margin)^items is below alpha."""
    margin = -math.expm1(math.log(alpha) / items)
    digits = 10.0 ** (1 - math.floor(math.log10(margin)))
    return math.ceil(margin * digits) / digits


def _refusal(tasks: Sequence[EvaluationTask], items: int, gate: GateRequest) -> str | None:
    """Why an identical model cannot pass, and how many items or which margin would do; None if it can."""
    alpha, limit = 1 - gate.confidence, gate.options.limit
    if gate.inconclusive == "pass" or at_most(0, 0, items, gate.max_drop) < alpha:
        return None
    needed = math.inf  # without a flip it is the binomial test
    if gate.max_drop:
        needed = math.log(alpha) / math.log1p(-gate.max_drop)
    remedies = [f"--max-drop {_enough(items, alpha):g}", "--inconclusive pass"]
    if needed < MOST_ITEMS:
        count, how = math.floor(needed) + 1, "name more tasks"
        if limit is not None and sum(task.items(None) for task in tasks) >= count:
            least = bisect_left(range(count), count, key=lambda most: sum(task.items(most) for task in tasks))
            how = f"--limit {least}"
        remedies.insert(0, f"at least {count:,} items ({how})")
    return (
        f"this gate could not even pass an identical model: {items:,} items cannot show with confidence "
        f"{100 * gate.confidence:g}% that no more than {gate.max_drop:g} was lost; it takes {', or '.join(remedies)}"
    )


def passable(found: Outlook) -> Outlook:
    """Refuse a gate that not even an identical model passes."""
    if found.refusal is not None:
        raise CompressionError(found.refusal)
    return found


def run_gate(
    base: ModelSource,
    compressed: ModelSource,
    tasks: Sequence[EvaluationTask],
    wanted: GateRequest,
    progress: Progress,
    label: str | None = None,
    server: Server | None = None,
    base_server: Server | None = None,
) -> GateResult:
    """Evaluate what is not stored, pair the items and judge; `label` names the compressed model in the result.

    With a `server` the compressed model answers there, and with a `base_server` the base.

    Raises `CompressionError` if a model cannot be evaluated or the two did not answer the same items.
    """
    writers = _writer(base, wanted, base_server), _writer(compressed, wanted, server)
    judging = wanted.judging
    stock = None if judging is None else stock_pair(*writers, judging)
    readings = None if judging is None or stock is None else read_all(stock[0], judging)
    judged_files = ranks().broadcast(lambda: identity_of(compressed, server, digests=True))
    larger = plan_evaluation(base, tasks, wanted.options, wanted.cache, base_server)
    content = {name: value for name, value in judged_files.items() if name != "weights"}  # of a model made again, too
    smaller = plan_evaluation(compressed, tasks, wanted.options, wanted.cache, server, content)
    begin = time.perf_counter()
    before = larger.run(progress)  # without tasks, nothing
    between = time.perf_counter()
    after = smaller.run(progress)
    done = time.perf_counter()
    pairs = [compare_items(before[task.name], after[task.name]) for task in tasks]
    judged, pooled = judge(pairs, wanted.max_drop, wanted.task_drop, wanted.confidence)
    answers: dict[Literal["base", "compressed"], list[ItemScores]]
    answers = {"base": [*before.values()], "compressed": [*after.values()]}
    conditions: tuple[Condition, ...] = ()
    facts, read = wanted.options.facts(), list[tuple[Prompt, Answer]]()
    if (answering := wanted.answering) is not None and judging is not None and judging.forced:
        read = write_base(writers[0], answering, wanted.cache, progress)
    elif answering is not None:

        def check(asked: Answering) -> None:  # some prompts may not do for these models
            if (refusal := _refused_answers(asked, wanted)) is not None:
                raise CompressionError(refusal)

        written = write_both(writers[0], writers[1], answering, wanted.confidence, wanted.cache, progress, check)
        conditions = written_conditions(written, answering, wanted.confidence)
        facts |= {"prompts": written.prompts, "seeds": written.seeds, **written.options}
    found = JudgedModels()
    if judging is not None and readings is not None and stock is not None:
        chat = answering is not None and answering.chat
        found = judge_both(readings, *stock, read, chat, wanted.confidence, progress)
        conditions += judged_conditions(found, judging, wanted.confidence)
    return GateResult(
        verdict=overall([*judged, *([] if pooled is None else [pooled])], conditions),
        base=label_of(base, base_server),
        compressed=label or label_of(compressed, server),
        max_drop=wanted.max_drop,
        max_task_drop=wanted.task_drop,
        confidence=wanted.confidence,
        pooled=pooled,
        tasks=judged,
        options=facts,
        base_identity=identity_of(base, base_server),
        compressed_identity=judged_files,
        versions=versions((*PACKAGES, "lm-eval")),
        seconds={"base": between - begin, "compressed": done - between},
        reused_base=bool(tasks) and not larger.missing,
        streamed=tuple(name for name, scores in answers.items() if any(each.streamed for each in scores)),
        conditions=conditions,
        text=found.text,
        answers=found.answers,
    )


def _writer(source: ModelSource, wanted: GateRequest, server: Server | None = None) -> Writer:
    options = wanted.options
    rows = options.batch_size if isinstance(options.batch_size, int) else None
    return writer_of(source, server, rows, options.device, options.dtype)


def check_readings(base: ModelSource, wanted: GateRequest) -> None:
    """Refuse text and answers that a gate's base cannot take."""
    if wanted.judging is not None:
        read_all(StockWriter(base, wanted.options.device, wanted.options.dtype), wanted.judging)
