"""The gate: both models answer the same items, one after the other, and the paired tests judge them.

What it can show is known before any model is loaded, from the number of items, the margins and the confidence alone.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from compressor.answers.generation import Answering, StockGenerator, writer_of
from compressor.answers.lm_eval_run import identity, plan_evaluation
from compressor.answers.server import Server
from compressor.answers.tasks import EvaluationOptions, EvaluationTask
from compressor.checkpoint.source import ModelSource
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.files import default_folder
from compressor.progress import Progress
from compressor.quality_gate.behaviour import UNIT, evaluate_behaviour, stock_pair
from compressor.quality_gate.statistics import MOST_ITEMS, POOLED, at_most, compare_items, judge, overall, shown_by
from compressor.quality_gate.teacher_forced import Judging, read_all
from compressor.quality_gate.verdict import GateResult, Verdict
from compressor.run_record import PACKAGES, versions

DEFAULT_TASKS = ("mmlu", "boolq", "openbookqa", "rte")  # those of Zhang et al. 2024, arXiv:2407.09590
TASK_DROPS = 3  # times the drop allowed: what one task may lose while all items together pass
DEMO_TASKS = tuple(f"moe_demo_{skill}" for skill in ("arithmetic", "sorting", "reversal", "recall", "facts"))
FLIPS = (0.0, 0.02, 0.05)  # shares of items that two models answer differently


@dataclass(frozen=True, slots=True)
class GateRequest:
    """Tasks, texts and margins by which a compressed model is judged."""

    options: EvaluationOptions
    max_drop: float = 0.01  # of a score; of a perplexity, its relative rise
    max_task_drop: float | None = None  # of each task whose items are pooled with others'; None: 3 times max_drop
    confidence: float = 0.95
    inconclusive: Verdict = "inconclusive"  # what an undecided gate counts as
    cache: Path = field(default_factory=default_folder)  # where results of earlier runs lie
    answering: Answering | None = None  # what both models write, and what may rise in it
    judging: Judging | None = None  # what both models read, and what may rise in it

    def __post_init__(self) -> None:
        if not self.options.tasks and self.answering is None and self.judging is None:
            raise CompressionError("no task is named; give --tasks a list such as boolq,rte, or --prompts or --text")

    @property
    def task_drop(self) -> float:
        return TASK_DROPS * self.max_drop if self.max_task_drop is None else self.max_task_drop

    def counted(self, verdict: Verdict) -> Verdict:
        """Count an inconclusive verdict as the request says."""
        return self.inconclusive if verdict == "inconclusive" else verdict


@dataclass(frozen=True, slots=True)
class Prospect:
    """Margins that the items of a task, or of all tasks together, can show."""

    task: str
    items: int
    max_drop: float  # the drop allowed
    shown: tuple[float, ...] | None  # by FLIPS: the least margin that a model without loss passes; None of perplexities


@dataclass(frozen=True, slots=True)
class Outlook:
    """Margins that a gate can show if all scores are of answers that are right or wrong, as those of most tasks are."""

    tasks: tuple[Prospect, ...]
    pooled: Prospect | None
    confidence: float
    flips: tuple[float, ...] = FLIPS
    refusal: str | None = None  # why not even an identical model passes, and what would do


def outlook(tasks: Sequence[EvaluationTask], gate: GateRequest) -> Outlook:
    """How many items each task has and what they can show; no model is needed."""
    alpha = 1 - gate.confidence
    limit = gate.options.limit

    def prospect(name: str, items: int, max_drop: float) -> Prospect:
        return Prospect(name, items, max_drop, tuple(shown_by(items, flips, alpha) for flips in FLIPS))

    prospects = []
    scored = [task for task in tasks if not task.likelihood]
    for task in tasks:
        if task.likelihood:
            prospects.append(Prospect(task.name, task.items(limit), gate.max_drop, None))
        else:
            prospects.append(prospect(task.name, task.items(limit), gate.task_drop))
    refusals = []
    if (answering := gate.answering) is not None:
        for name, (option, rise) in answering.limits.items():
            prospects.append(prospect(name, answering.answers, rise))
            refusals.append(_refusal(gate, answering.answers, UNIT, option, rise))
    pooled = None
    if scored:
        pooled = prospect(POOLED, sum(task.items(limit) for task in scored), gate.max_drop)
        refusals.append(_refusal(gate, pooled.items, "items", "--max-drop", gate.max_drop, scored))
    return Outlook(tuple(prospects), pooled, gate.confidence, refusal=next(filter(None, refusals), None))


def _refusal(
    gate: GateRequest, count: int, unit: str, option: str, margin: float, tasks: Sequence[EvaluationTask] = ()
) -> str | None:
    """Why so many items of tasks, or answers, without a flip do not show a margin, and what would do."""
    alpha = 1 - gate.confidence
    if gate.inconclusive == "pass" or at_most(0, 0, count, margin) < alpha:
        return None
    shown = shown_by(count, 0.0, alpha)
    digits = 10.0 ** (1 - math.floor(math.log10(shown)))
    remedies = [f"{option} {math.ceil(shown * digits) / digits:g}", "--inconclusive pass"]
    needed = math.log(alpha) / math.log1p(-margin) if margin > 0 else math.inf  # without a flip it is the binomial test
    if needed < MOST_ITEMS:
        enough = math.floor(needed) + 1
        how = "name more tasks" if tasks else "more --prompts, or more --seeds"

        def items_at(limit: int | None) -> int:
            return sum(task.items(limit) for task in tasks)

        if gate.options.limit is not None and items_at(None) >= enough:
            how = f"--limit {bisect_left(range(enough), enough, key=items_at)}"
        remedies.insert(0, f"at least {enough:,} {unit} ({how})")
    return (
        f"this gate could not even pass an identical model: {count:,} {unit} cannot show with confidence "
        f"{100 * gate.confidence:g}% a loss of no more than {margin:g}; it takes {', or '.join(remedies)}"
    )


def passable(prospects: Outlook) -> Outlook:
    """Refuse a gate that not even an identical model passes."""
    if prospects.refusal is not None:
        raise CompressionError(prospects.refusal)
    return prospects


def run_gate(
    base: ModelSource,
    compressed: ModelSource,
    tasks: Sequence[EvaluationTask],
    gate: GateRequest,
    progress: Progress,
    label: str | None = None,
    server: Server | None = None,
    base_server: Server | None = None,
) -> GateResult:
    """Evaluate what is not stored, pair the items and judge; `label` names the compressed model in the result.

    With a `server` the compressed model answers there, and with a `base_server` the base.

    Raises `CompressionError` if a model cannot be evaluated or the two did not answer the same items.
    """
    options = gate.options
    rows = options.batch_size if isinstance(options.batch_size, int) else None
    base_writer = writer_of(base, base_server, rows, options.device, options.dtype)
    writer = writer_of(compressed, server, rows, options.device, options.dtype)
    if gate.judging is not None:  # what cannot be read is refused before tasks are answered for hours
        stock_pair(base_writer, writer, gate.judging)
        check_readings(base, gate)
    compressed_identity = ranks().broadcast(lambda: identity(compressed, server, digests=True))
    content = dict(compressed_identity)
    content.pop("weights", None)  # whose times of change differ in a model made again
    base_evaluation = plan_evaluation(base, tasks, options, gate.cache, base_server)
    evaluation = plan_evaluation(compressed, tasks, options, gate.cache, server, content)
    begin = time.perf_counter()
    base_scores = base_evaluation.run(progress)  # without tasks, nothing
    between = time.perf_counter()
    scores = evaluation.run(progress)
    done = time.perf_counter()
    pairs = [compare_items(base_scores[task.name], scores[task.name]) for task in tasks]
    judged, pooled = judge(pairs, gate.max_drop, gate.task_drop, gate.confidence)
    streamed: list[Literal["base", "compressed"]] = []
    if any(task.streamed for task in base_scores.values()):
        streamed.append("base")
    if any(task.streamed for task in scores.values()):
        streamed.append("compressed")
    behaviour = evaluate_behaviour(
        base_writer,
        writer,
        gate.answering,
        gate.judging,
        gate.confidence,
        gate.cache,
        progress,
        # some prompts may not do for these models
        lambda usable: passable(outlook(tasks, replace(gate, answering=usable))),
        reads_written=False,
    )
    facts = options.facts()
    if (written := behaviour.written) is not None:
        facts |= {"prompts": written.prompts, "seeds": written.seeds, **written.options}
    return GateResult(
        verdict=overall([*judged, *([] if pooled is None else [pooled])], behaviour.conditions),
        base=base_writer.label,
        compressed=label or writer.label,
        max_drop=gate.max_drop,
        max_task_drop=gate.task_drop,
        confidence=gate.confidence,
        pooled=pooled,
        tasks=judged,
        options=facts,
        base_identity=identity(base, base_server),
        compressed_identity=compressed_identity,
        versions=versions((*PACKAGES, "lm-eval")),
        seconds={"base": between - begin, "compressed": done - between},
        reused_base=bool(tasks) and not base_evaluation.missing,
        streamed=tuple(streamed),
        conditions=behaviour.conditions,
        text=behaviour.text,
        answers=behaviour.answers,
    )


def check_readings(base: ModelSource, gate: GateRequest) -> None:
    """Refuse text and answers that a gate's base cannot take."""
    if gate.judging is not None:
        read_all(StockGenerator(base, gate.options.device, gate.options.dtype), gate.judging)
