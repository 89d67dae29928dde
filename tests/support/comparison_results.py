"""Comparisons made up for the tests of what shows them."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from compressor.report.comparison_report import Comparison
from compressor.report.comparison_rows import Row, Variant

EXPERTS = 16
STRATEGIES = ("reap", "hc-smoe", "auto", "enumerate", "data-centric (merge=learned)")
CORRECTIONS = ("none", "ridge", "tune")


def row(name: str, experts: int, loss: float, **others: Any) -> Row:
    """A row whose other figures follow from these, unless given."""
    fields: dict[str, Any] = {
        "kl": abs(loss) / 3,
        "flips": min(1.0, abs(loss) / 9),
        "error": 0.4 / experts,
        "seconds": 10.25 * experts,
        "peak_memory": 123_456_789 + experts,
        **others,
    }
    way = {key: fields.pop(key) for key in ("correction", "seed") if key in fields}
    variant = Variant(
        name=name,
        strategy=name.split()[0],
        experts=experts,
        parameters=1_000_000 + 187_654 * experts,
        bytes=4_000_000 + 750_616 * experts,
        **way,
    )
    return Row(variant=variant, loss=loss, **fields)


def base(loss: float = 1.25, experts: int = EXPERTS, **others: Any) -> Row:
    """The row of the model as it is."""
    return row("base", experts, loss, **{"kl": 0.0, "flips": 0.0, "error": None, "seconds": 0.0, **others})


def comparison(rows: Sequence[Row], **others: Any) -> Comparison:
    """These rows with calibration and evaluation data around them."""
    fields: dict[str, Any] = {
        "model": "org/tiny-moe",
        "calibration": {"source": "/somewhere/wiki.txt", "tokens": 65536},
        "evaluation": {"wiki": 4096},
        "calibration_seconds": 34.56,
        "seed": 7,
        "versions": {"torch": "2.13.0"},
    }
    return Comparison(rows=tuple(rows), **{**fields, **others})


def full(counts: Sequence[int] = (12, 8), experts: int = EXPERTS) -> Comparison:
    """Fifteen lines and three random drops at each count, the increases spread over orders of magnitude."""
    rows = [base(experts=experts)]
    for count in counts:
        gone = 1 - count / experts
        for place, name in enumerate(STRATEGIES):
            for step, correction in enumerate(CORRECTIONS):
                rows.append(row(name, count, 1.25 + gone * (place + 1) / 10**step, correction=correction))
        rows += [row(f"random (seed {drop})", count, 1.25 + gone * (7 + drop), seed=drop) for drop in range(3)]
    return comparison(rows)


@st.composite
def comparisons(draw: st.DrawFn) -> Comparison:
    """A base and up to 12 rows of any order, each way of making one at most once for each count."""
    losses = st.floats(-5, 5, width=32).map(lambda loss: loss + 0.0)  # of two zeros the one without a minus
    ways = st.tuples(
        st.sampled_from(["random", *STRATEGIES]), st.sampled_from(CORRECTIONS),
        st.integers(1, EXPERTS), st.integers(0, 2),
    )  # fmt: skip
    chosen = draw(st.lists(ways, max_size=12, unique_by=lambda way: way if way[0] == "random" else way[:3]))
    rows = [base(draw(losses))]
    for name, correction, count, seed in chosen:
        drop = {"seed": seed} if name == "random" else {}
        name = f"random (seed {seed})" if name == "random" else name
        rows.append(row(name, count, draw(losses), correction=correction, **drop))
    return comparison(rows)
