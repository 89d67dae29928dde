"""Results of the gate made up for the tests of what shows them."""

import math
from typing import Any, Literal

from hypothesis import strategies as st

from compressor.quality_gate.statistics import overall
from compressor.quality_gate.verdict import GateResult, TaskGate

DIFFERING = ("boolq", "rte", "wikitext", "a|b *c*\n[d](e) <script>", "_x_ & `y` ~z~ $w$", "\x00\x1b bell", "mmlu_law")


def task(name: str = "boolq", verdict: str = "pass", **others: Any) -> TaskGate:
    """500 items, 12 flips of one kind and 10 of the other, unless given."""
    fields: dict[str, Any] = {
        "metric": "acc", "version": "2.0", "kind": "score", "decides": False, "items": 500, "base": 0.75,
        "compressed": 0.746, "max_drop": 0.03, "drop": 0.004, "standard_error": 0.0094, "lower": -0.0125,
        "upper": 0.0225,
        "p_pass": {"pass": 0.01, "fail": 0.999, "inconclusive": 0.26}[verdict],
        "p_fail": {"pass": 0.999, "fail": 0.01, "inconclusive": 0.8}[verdict],
        "lost": 12, "gained": 10, "mcnemar": 0.83, "detectable": 0.0233,
    }  # fmt: skip
    return TaskGate(task=name, verdict=verdict, **{**fields, **others})  # type: ignore[arg-type]


def likelihood(name: str = "wikitext", verdict: str = "pass", **others: Any) -> TaskGate:
    """A perplexity of 12 that rose by 0.5%, unless given."""
    fields: dict[str, Any] = {
        "metric": "word_perplexity", "kind": "likelihood", "decides": True, "max_drop": 0.01, "items": 62,
        "base": 12.0, "compressed": 12.06, "drop": 0.005, "standard_error": 0.001, "lower": 0.0033,
        "upper": 0.0067, "lost": 40, "gained": 22, "mcnemar": None, "detectable": 0.0025,
        "perplexity_ratio": (1.005, 1.0033, 1.0067),
    }  # fmt: skip
    return task(name, verdict, **{**fields, **others})


def pool(*tasks: TaskGate, **others: Any) -> TaskGate:
    """The pool of these tasks, of the worst of their verdicts unless it is given."""
    verdicts = {each.verdict for each in tasks}
    worst = next((each for each in ("fail", "inconclusive") if each in verdicts), "pass")
    items = sum(each.items for each in tasks)
    fields = {"verdict": worst, "decides": True, "max_drop": 0.01, "items": items, "version": "", **others}
    return task("all together", **fields)


def gate(*tasks: TaskGate, pooled: TaskGate | Literal["theirs"] | None = "theirs", **others: Any) -> GateResult:
    """These tasks and their pool under the verdict that they give, with models, options and versions around them."""
    if pooled == "theirs":
        scored = [each for each in tasks if not each.decides]
        pooled = pool(*scored) if scored else None
    fields: dict[str, Any] = {
        "verdict": overall([*tasks, *([] if pooled is None else [pooled])]), "pooled": pooled,
        "base": "org/model", "compressed": "org/smaller", "max_drop": 0.01, "max_task_drop": 0.03, "confidence": 0.95,
        "options": {"limit": 500, "batch_size": "auto", "device": "cpu", "num_fewshot": None},
        "base_identity": {"repository": "org/model", "commit": "c0ffee"},
        "compressed_identity": {"weights": [["model.safetensors", 10, 20]], "files": {"config.json": "ab"}},
        "versions": {"torch": "2.13.0", "lm-eval": "0.4.13"}, "seconds": {"base": 30.25, "compressed": 20.5},
    }  # fmt: skip
    return GateResult(tasks=tasks, **{**fields, **others})


def mixed() -> GateResult:
    """A pool that fails with one task of each verdict, and a perplexity."""
    return gate(
        task("boolq"),
        task("rte", "fail", drop=0.08, lower=0.05, upper=0.11, compressed=0.67, lost=45, gained=5),
        task("openbookqa", "inconclusive"),
        likelihood(),
    )


NUMBERS = st.one_of(st.floats(allow_nan=False), st.sampled_from([math.inf, -math.inf, 0.0, -0.0, 5e-324, 1e308]))
NAMES = st.one_of(st.sampled_from(DIFFERING), st.text(min_size=1, max_size=12))
PLAIN = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.text())


def tasks() -> st.SearchStrategy[TaskGate]:
    """A task of any figures, whether they go together or not."""
    return st.builds(
        task,
        NAMES,
        st.sampled_from(["pass", "fail", "inconclusive"]),
        metric=NAMES,
        kind=st.sampled_from(["score", "likelihood"]),
        decides=st.booleans(),
        max_drop=st.floats(0, 10),
        p_pass=st.floats(0, 1),
        p_fail=st.floats(0, 1),
        **dict.fromkeys(("base", "compressed", "drop", "standard_error", "lower", "upper", "detectable"), NUMBERS),
        **dict.fromkeys(("items", "lost", "gained"), st.integers(0, 10**7)),
        mcnemar=st.none() | NUMBERS,
        perplexity_ratio=st.none() | st.tuples(NUMBERS, NUMBERS, NUMBERS),
    )


def gates() -> st.SearchStrategy[GateResult]:
    """A result of up to four tasks and any options."""
    plain = st.dictionaries(st.text(max_size=8), PLAIN | st.lists(PLAIN, max_size=3), max_size=3)
    return st.builds(
        lambda tasks, **others: gate(*tasks, **others),
        st.lists(tasks(), max_size=4),
        pooled=st.none() | tasks(),
        base=NAMES,
        compressed=NAMES,
        max_drop=st.floats(0, 10),
        max_task_drop=st.floats(0, 10),
        confidence=st.floats(0.51, 0.999),
        options=plain,
        base_identity=plain,
        compressed_identity=plain,
        versions=st.dictionaries(NAMES, NAMES, max_size=2),
        reused_base=st.booleans(),
        streamed=st.lists(st.sampled_from(["base", "compressed"]), max_size=2, unique=True).map(tuple),
        seconds=st.dictionaries(NAMES, st.floats(0, 1e6), max_size=3),
    )
