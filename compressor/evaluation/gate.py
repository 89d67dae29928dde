"""The gate: both models answer the same items, one after the other, and the paired tests judge them.

What it can show is known before any model is loaded, from the number of items, the margins and the confidence alone.
"""

import math
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from compressor.checkpoint.source import ModelSource
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.evaluation.answers import StockGenerator, TextGenerator
from compressor.evaluation.behaviour import UNIT, Answering, evaluate_behaviour, stock_pair
from compressor.evaluation.conditions import Verdict
from compressor.evaluation.evaluate import identity_of, label_of, plan_evaluation
from compressor.evaluation.gate_statistics import MOST_ITEMS, POOLED, at_most, compare_items, judge, overall, shown_by
from compressor.evaluation.gate_verdict import GateResult
from compressor.evaluation.judging import Judging, read_all
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
    refusal = None
    if (answering := gate.answering) is not None:
        for name, (_, rise) in answering.limits.items():
            prospects.append(prospect(name, answering.answers, rise))
        refusal = _refused_answers(answering, gate)
    pooled = None
    if scored:
        pooled = prospect(POOLED, sum(task.items(limit) for task in scored), gate.max_drop)
        refusal = refusal or _refused_items(scored, pooled.items, gate)
    return Outlook(tuple(prospects), pooled, gate.confidence, refusal=refusal)


def _refused_answers(answering: Answering, gate: GateRequest) -> str | None:
    """Why an identical model cannot pass the conditions on answers; None if it can."""
    for option, rise in answering.limits.values():
        refusal = _refusal(gate, answering.answers, UNIT, option, rise, lambda _: "more --prompts, or more --seeds")
        if refusal is not None:
            return refusal
    return None


def _refused_items(tasks: Sequence[EvaluationTask], items: int, gate: GateRequest) -> str | None:
    """Why an identical model cannot pass the pool of these tasks; None if it can."""

    def items_at(limit: int | None) -> int:
        return sum(task.items(limit) for task in tasks)

    def how(needed: int) -> str:
        if gate.options.limit is None or items_at(None) < needed:
            return "name more tasks"
        return f"--limit {bisect_left(range(needed), needed, key=items_at)}"

    return _refusal(gate, items, "items", "--max-drop", gate.max_drop, how)


def _refusal(
    gate: GateRequest, count: int, unit: str, option: str, margin: float, how: Callable[[int], str]
) -> str | None:
    """Why so many items without a flip do not show a margin, and how many, or which margin, would do."""
    alpha = 1 - gate.confidence
    if gate.inconclusive == "pass" or at_most(0, 0, count, margin) < alpha:
        return None
    remedies = [f"{option} {_shown_margin(count, alpha):g}", "--inconclusive pass"]
    needed = math.log(alpha) / math.log1p(-margin) if margin > 0 else math.inf  # without a flip it is the binomial test
    if needed < MOST_ITEMS:
        enough = math.floor(needed) + 1
        remedies.insert(0, f"at least {enough:,} {unit} ({how(enough)})")
    return (
        f"this gate could not even pass an identical model: {count:,} {unit} cannot show with confidence "
        f"{100 * gate.confidence:g}% a loss of no more than {margin:g}; it takes {', or '.join(remedies)}"
    )


def _shown_margin(items: int, alpha: float) -> float:
    """The margin, rounded up, that so many items without a flip show: (1 - margin)^items is below alpha."""
    margin = -math.expm1(math.log(alpha) / items)
    digits = 10.0 ** (1 - math.floor(math.log10(margin)))
    return math.ceil(margin * digits) / digits


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
    writers = _writer(base, gate, base_server), _writer(compressed, gate, server)
    if gate.judging is not None:  # what cannot be read is refused before tasks are answered for hours
        stock_pair(*writers, gate.judging)
        check_readings(base, gate)
    identity = ranks().broadcast(lambda: identity_of(compressed, server, digests=True))
    content = {name: value for name, value in identity.items() if name != "weights"}  # of a model made again, too
    base_evaluation = plan_evaluation(base, tasks, gate.options, gate.cache, base_server)
    evaluation = plan_evaluation(compressed, tasks, gate.options, gate.cache, server, content)
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

    def check(usable: Answering) -> None:  # some prompts may not do for these models
        if (refusal := _refused_answers(usable, gate)) is not None:
            raise CompressionError(refusal)

    behaviour = evaluate_behaviour(
        *writers,
        gate.answering,
        gate.judging,
        gate.confidence,
        gate.cache,
        progress,
        check,
        reads_written=False,
    )
    facts = gate.options.facts()
    if (written := behaviour.written) is not None:
        facts |= {"prompts": written.prompts, "seeds": written.seeds, **written.options}
    return GateResult(
        verdict=overall([*judged, *([] if pooled is None else [pooled])], behaviour.conditions),
        base=label_of(base, base_server),
        compressed=label or label_of(compressed, server),
        max_drop=gate.max_drop,
        max_task_drop=gate.task_drop,
        confidence=gate.confidence,
        pooled=pooled,
        tasks=judged,
        options=facts,
        base_identity=identity_of(base, base_server),
        compressed_identity=identity,
        versions=versions((*PACKAGES, "lm-eval")),
        seconds={"base": between - begin, "compressed": done - between},
        reused_base=bool(tasks) and not base_evaluation.missing,
        streamed=tuple(streamed),
        conditions=behaviour.conditions,
        text=behaviour.text,
        answers=behaviour.answers,
    )


def _writer(source: ModelSource, gate: GateRequest, server: Server | None) -> TextGenerator:
    options = gate.options
    rows = options.batch_size if isinstance(options.batch_size, int) else None
    return writer_of(source, server, rows, options.device, options.dtype)


def check_readings(base: ModelSource, gate: GateRequest) -> None:
    """Refuse text and answers that a gate's base cannot take."""
    if gate.judging is not None:
        read_all(StockGenerator(base, gate.options.device, gate.options.dtype), gate.judging)
