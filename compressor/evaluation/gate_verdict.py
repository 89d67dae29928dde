"""The gate's verdict on what compression cost, as data and as plain JSON.

n items of a task; both models answer each of them, so every test is paired.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from compressor.errors import CompressionError
from compressor.evaluation.conditions import GateCondition, Verdict, check_confidence
from compressor.evaluation.judged import Judged
from compressor.records import plain_json, read_as

FORMAT = "moe-compressor-gate/2"

EXIT_STATUS: Mapping[str, int] = {"pass": 0, "fail": 1, "inconclusive": 3}


@dataclass(frozen=True, slots=True)
class TaskGate:
    """Result of the paired test of one task, or of the pool. A drop is base less compressed, so worse is positive.

    Of a likelihood task the drop is the relative rise of perplexity, and base and compressed are perplexities.
    """

    task: str
    metric: str
    version: str
    kind: Literal["score", "likelihood"]
    decides: bool  # False for a task in the pool, which can only fail by itself
    items: int
    base: float
    compressed: float
    max_drop: float  # the drop allowed
    drop: float
    standard_error: float
    lower: float  # one-sided confidence bounds of the drop
    upper: float
    p_pass: float  # of a drop this small if the true one were the margin; corrected over tasks (Holm)
    p_fail: float  # of a drop this large if the true one were the margin; corrected over tasks (Holm)
    verdict: Verdict
    lost: int  # items that the base got right and the compressed model wrong; changes for the worse of other scores
    gained: int
    mcnemar: float | None  # exact two-sided p of as uneven flips by chance; None unless scores are 0 or 1
    detectable: float  # the smallest true drop that a sample like this shows with probability 0.8
    perplexity_ratio: tuple[float, float, float] | None = None  # compressed / base with bounds, of a likelihood task


@dataclass(frozen=True, slots=True)
class GateResult:
    """The whole gate."""

    verdict: Verdict
    base: str
    compressed: str
    max_drop: float  # of the pool, and of each task outside it
    max_task_drop: float  # of each task in the pool
    confidence: float
    pooled: TaskGate | None  # the items of all tasks that are answered right or wrong; None without such a task
    tasks: tuple[TaskGate, ...]
    options: Mapping[str, Any] = field(default_factory=dict)  # limit, batch size, few-shot examples, dtype, device
    base_identity: Mapping[str, Any] = field(default_factory=dict)  # of the model's files
    compressed_identity: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    reused_base: bool = False  # the base's results were stored by an earlier run
    streamed: tuple[Literal["base", "compressed"], ...] = ()  # those that answered with one layer in memory at a time
    conditions: tuple[GateCondition, ...] = ()  # on behaviour, each of which has to pass
    text: Judged | None = None  # read by both models
    answers: Judged | None = None  # the base's, read by both

    @property
    def rows(self) -> tuple[TaskGate, ...]:
        """The tasks, and below them the pool."""
        return self.tasks if self.pooled is None else (*self.tasks, self.pooled)


def gate_content(result: GateResult) -> dict[str, Any]:
    """Everything in the result as plain JSON types; what JSON has no number for is text."""
    return {"format": FORMAT, **plain_json(result)}


def gate_from_content(content: Any) -> GateResult:
    """The result that `gate_content` was made of; further fields are left aside."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CompressionError(f"it is no report of the gate in the format {FORMAT}")
    result = read_as(GateResult, content)
    check_confidence(result.confidence)
    return result
