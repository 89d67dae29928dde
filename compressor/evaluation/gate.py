"""The gate: both models answer the same items, one after the other, and the paired test judges them."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from compressor.checkpoint.source import ModelSource
from compressor.distributed import here
from compressor.errors import CompressionError
from compressor.evaluation.evaluate import Answerer, ItemScores, identity, plan_evaluation
from compressor.evaluation.gate_statistics import compare_items, judge, overall
from compressor.evaluation.gate_verdict import GateResult, RoutedBy
from compressor.evaluation.tasks import EvaluationOptions, EvaluationTask
from compressor.files import default_folder
from compressor.progress import Progress
from compressor.run_record import PACKAGES, versions

DEFAULT_TASKS = ("mmlu", "boolq", "openbookqa", "rte")  # those of Zhang et al. 2024, arXiv:2407.09590
DEMO_TASKS = tuple(f"moe_demo_{skill}" for skill in ("arithmetic", "sorting", "reversal", "recall", "facts"))


@dataclass(frozen=True, slots=True)
class GateRequest:
    """What a compressed model has to show."""

    options: EvaluationOptions
    max_drop: float = 0.01  # of a score; of a perplexity, its relative rise
    confidence: float = 0.95
    cache: Path = field(default_factory=default_folder)  # where results of earlier runs lie

    def __post_init__(self) -> None:
        if not (math.isfinite(self.max_drop) and self.max_drop >= 0):
            raise CompressionError(f"--max-drop {self.max_drop} should be a number of 0 or more, such as 0.01")
        if not 0.5 < self.confidence < 1:
            raise CompressionError(f"--confidence {self.confidence} should lie between 0.5 and 1, such as 0.95")


def run_gate(
    base: ModelSource,
    compressed: ModelSource,
    tasks: Sequence[EvaluationTask],
    wanted: GateRequest,
    progress: Progress,
    label: str | None = None,
    answerer: Answerer | None = None,
) -> GateResult:
    """Evaluate what is not stored, pair the items and judge; `label` names the compressed model in the result.

    With an `answerer` the compressed model's answers are that one's; the base answers as it is.

    Raises `CompressionError` if a model cannot be evaluated or the two did not answer the same items.
    """
    judged_files = here().broadcast(lambda: identity(compressed, digests=True))
    larger = plan_evaluation(base, tasks, wanted.options, wanted.cache)
    content = {name: value for name, value in judged_files.items() if name != "weights"}  # of a model made again, too
    smaller = plan_evaluation(compressed, tasks, wanted.options, wanted.cache, answerer, content)
    begin = time.perf_counter()
    before = larger.run(progress)
    between = time.perf_counter()
    after = smaller.run(progress)
    done = time.perf_counter()
    judged = judge(
        [compare_items(before[task.name], after[task.name]) for task in tasks], wanted.max_drop, wanted.confidence
    )
    answers: dict[Literal["base", "compressed"], list[ItemScores]]
    answers = {"base": [*before.values()], "compressed": [*after.values()]}
    routing = None
    if answerer is not None:
        spent = [scores.spent for scores in after.values() if scores.spent is not None]
        plain = sum(each.plain_work for each in spent)
        cost = sum(each.work for each in spent) / plain if plain else 1.0
        routing = RoutedBy(**answerer.facts, cost=cost, left_plain=sum(each.left_plain for each in spent))
    return GateResult(
        verdict=overall(judged),
        base=base.label,
        compressed=label or compressed.label,
        max_drop=wanted.max_drop,
        confidence=wanted.confidence,
        tasks=judged,
        options=wanted.options.facts(),
        base_identity=identity(base),
        compressed_identity=judged_files,
        versions=versions((*PACKAGES, "lm-eval")),
        seconds={"base": between - begin, "compressed": done - between},
        reused_base=not larger.missing,
        routing=routing,
        streamed=tuple(name for name, scores in answers.items() if any(each.streamed for each in scores)),
    )
