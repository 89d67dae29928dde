"""The gate's result: the record, plain JSON, and the table of its conditions.

n items of a task; both models answer each of them, so every test is paired.
"""

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, Literal, NamedTuple, Self

from compressor.document.blocks import Table, Tone, Toned, Words
from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.quality_gate.domain_divergence import DomainDivergence
from compressor.records import Json, plain_json, read_as

FORMAT = "moe-compressor-gate/2"

EXIT_STATUS: Mapping[str, int] = {"pass": 0, "fail": 1, "inconclusive": 3}
Verdict = Literal["pass", "fail", "inconclusive"]
Side = Literal["base", "compressed"]
Asked = Mapping[str, Json]  # by task: the form of its questions
SIGNS: Mapping[Verdict, tuple[Tone, str]] = {
    "pass": ("good", "✓"),
    "fail": ("bad", "✗"),
    "inconclusive": ("unsure", "?"),
}


@frozen
class TaskGate:
    """Result of the paired test of one task, or of the pool. A drop is base less compressed, so
    worse is positive.

    Of a likelihood task the drop is the relative rise of perplexity, and base and compressed are
    perplexities."""

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
    # of a drop this small if the true one were the margin; corrected over tasks (Holm)
    p_pass: float
    # of a drop this large if the true one were the margin; corrected over tasks (Holm)
    p_fail: float
    verdict: Verdict
    # items that the base got right and the compressed model wrong; changes for the worse of other
    # scores
    lost: int
    gained: int
    # exact two-sided p of as uneven flips by chance; None unless scores are 0 or 1
    mcnemar: float | None
    detectable: float  # the smallest true drop that a sample like this shows with probability 0.8
    # compressed / base with bounds, of a likelihood task
    perplexity_ratio: tuple[float, float, float] | None = None
    equivalent: bool = False  # both bounds are nearer to 0 than the drop allowed
    # shares of answers that reached the token limit: base, compressed
    cut: tuple[float, float] | None = None


# fields that a test and a condition have in common
SHARED = ("lower", "upper", "items", "verdict", "base", "compressed")


class Judgement(NamedTuple):
    """The tests of tasks, and of the pool of all items that are answered right or wrong, if there
    are any."""

    tasks: tuple[TaskGate, ...]
    pooled: TaskGate | None

    @property
    def rows(self) -> tuple[TaskGate, ...]:
        """The tasks, and below them the pool."""
        return self.tasks if self.pooled is None else (*self.tasks, self.pooled)


@frozen
class GateCondition:
    """One figure with a limit: its upper bound within the limit passes, its lower bound beyond it
    fails."""

    name: str  # such as "loops", or "flips on code"
    option: str  # that sets the limit
    limit: float
    observed: float  # what the limit is for, such as the rise of a rate
    lower: float  # one-sided confidence bounds of it
    upper: float
    items: int
    unit: str  # of the items, in the plural
    verdict: Verdict
    base: float | None = None  # the figure of either model, where each has one
    compressed: float | None = None
    advice: str = ""  # what would decide it, where it is inconclusive

    @classmethod
    def of(cls, test: TaskGate, **fields: Any) -> Self:
        """Return the condition that a test of a drop, or of a rise, makes; `fields` are its own or
        override the test's."""
        figures = {name: getattr(test, name) for name in SHARED}
        return cls(**{**figures, "limit": test.max_drop, "observed": test.drop, **fields})

    @property
    def sentence(self) -> str:
        """The name, figure, bounds and limit."""
        figure = f"{self.observed:+.4f} (at least {self.lower:+.4f}, at most {self.upper:+.4f})"
        return (
            f"the {self.name} is {figure} on {self.items:,} {self.unit}; {self.limit:g} is "
            f"allowed by {self.option}"
        )


@frozen
class Anomaly:
    """A sign that a model was asked in the wrong form, so that comparing the two shows nothing."""

    task: str
    sentence: str
    p: float  # of what was tested; corrected over all tests (Holm)


@frozen
class GateResult:
    """The result of a gate."""

    verdict: Verdict
    base: str
    compressed: str
    max_drop: float  # of the pool, and of each task outside it
    max_task_drop: float  # of each task in the pool
    confidence: float
    # the items of all tasks that are answered right or wrong; None without such a task
    pooled: TaskGate | None
    tasks: tuple[TaskGate, ...]
    # limit, batch size, few-shot examples, dtype, device
    options: Json = field(default_factory=dict)
    base_identity: Json = field(default_factory=dict)  # of the model's files
    compressed_identity: Json = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    asked: Asked = field(default_factory=dict)  # by task: the form of its questions
    # by task: id on the Hub, and task there
    benchmarks: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    # by model, without loading it
    items_per_second: Mapping[str, float] = field(default_factory=dict)
    reused_base: bool = False  # the base's results were stored by an earlier run
    streamed: tuple[Side, ...] = ()  # those that answered with one layer in memory at a time
    conditions: tuple[GateCondition, ...] = ()  # on behaviour, each of which has to pass
    text: DomainDivergence | None = None  # read by both models
    answers: DomainDivergence | None = None  # the base's, read by both
    anomalies: tuple[Anomaly, ...] = ()  # with which nothing passes
    notes: tuple[str, ...] = ()  # what was not compared

    @property
    def rows(self) -> tuple[TaskGate, ...]:
        """The tasks, and below them the pool."""
        return Judgement(self.tasks, self.pooled).rows


def gate_content(result: GateResult) -> Json:
    """Return the result as plain JSON types; infinity and NaN are text."""
    return {"format": FORMAT, **plain_json(result)}


def gate_from_content(content: Any) -> GateResult:
    """Return the result from its `gate_content`; further fields are ignored."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CompressionError(f"it is no report of the gate in the format {FORMAT}")
    result = read_as(GateResult, content)
    check_confidence(result.confidence)
    return result


def check_confidence(confidence: float) -> None:
    """Refuse a confidence that no bound has."""
    if not 0.5 < confidence < 1:
        raise CompressionError(
            f"--confidence {confidence} should lie between 0.5 and 1, such as 0.95"
        )


def conditions_table(conditions: Sequence[GateCondition]) -> Table:
    """Return a table with a row for each condition."""

    columns = (
        "condition",
        "of",
        "base",
        "compressed",
        "allowed",
        "rise",
        "at least",
        "at most",
        "verdict",
    )
    rows = list[tuple[Words, ...]]()
    for condition in conditions:
        figures = (condition.base, condition.compressed)
        shown = ["-" if figure is None else f"{figure:.4f}" for figure in figures]
        rises = (condition.observed, condition.lower, condition.upper)
        row = (
            condition.name,
            f"{condition.items:,} {condition.unit}",
            *shown,
            f"{condition.limit:g}",
            *[f"{rise:+.4f}" for rise in rises],
        )
        rows.append((*row, Toned(condition.verdict, *SIGNS[condition.verdict])))
    return Table("Conditions", columns, rows, {"of", "verdict"}, ("of", "at least"))
