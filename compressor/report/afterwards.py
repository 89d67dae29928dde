"""A report's section and figure of what was done to the finished output: the bake's rounds, the recovery's curve.

All figures are of held-out text, in nats per token; a record that anybody may have edited is shown as far as it is one.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

from compressor.document.blocks import Block, Figure, Table, Text
from compressor.drawing.lines import Line, draw_lines, spaced
from compressor.drawing.palette import ROLES
from compressor.drawing.picture import Drawing
from compressor.report.data import ReportData
from compressor.words import counted, short

if TYPE_CHECKING:
    from matplotlib.figure import FigureBase

SIZE = (3.6, 2.2)  # inches
FARTHEST = 1e30  # divergences beyond it are drawn there
MOST = 1_000  # rounds or evaluations, each with a row
Evaluation = tuple[int, float, float]  # step, divergence from the original, next-token loss


def afterwards(data: ReportData) -> list[Block]:
    """What each round of a bake took, and every evaluation of a recovery."""
    found = [*_bake(data.bake), *_recovery(data.recover)]
    return found or [Text("Nothing was baked into the routers, and nothing was trained end to end.")]


def result_of(entry: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """What came of a plan's bake or recovery; empty where nothing is told."""
    result = (entry or {}).get("result")
    return result if isinstance(result, Mapping) else {}


def bake_line(asked: Mapping[str, Any]) -> str:
    """What was baked, and what held-out text said of it."""
    result, how = result_of(asked), str(asked.get("method"))
    if not moved(asked):
        return f"{how}; the routers stay as they are"
    taken = f", taken: {result['taken']}" if "taken" in result else ""
    before, after = (_figure(result.get(name)) for name in ("before", "after"))
    return f"{how}{taken}; from the original on held-out text {before} to {after} nats per token"


def moved(asked: Mapping[str, Any] | None) -> bool:
    """Whether a bake has changed the routers."""
    before, after = (result_of(asked).get(name) for name in ("before", "after"))
    return _is_number(before) and _is_number(after) and after < before


def trained(asked: Mapping[str, Any] | None) -> bool:
    """Whether a recovery has changed anything."""
    return result_of(asked).get("changed") is True


def evaluations(recover: Mapping[str, Any] | None) -> list[Evaluation]:
    """The recovery's held-out curve, in the order of its steps."""
    found = []
    for entry in _entries(result_of(recover).get("curve")):
        step, apart, loss = (entry.get(name) for name in ("step", "kl", "loss"))
        if type(step) is int and abs(step) < 2**53 and _is_number(apart) and _is_number(loss):
            found.append((step, float(apart), float(loss)))
    return sorted(found)


def recovery(data: ReportData) -> Figure | None:
    """The held-out curve with the state that was taken; none where there are not two evaluations."""
    if len(curve := evaluations(data.recover)) < 2 or data.recover is None:
        return None
    result = result_of(data.recover)
    best = next((entry for entry in curve if entry[0] == result.get("best")), None)
    taken = best if trained(data.recover) else None
    (first, before, _), (last, after, _) = curve[0], curve[-1]
    chosen = f"the state after {taken[0]} was taken, at {short(taken[1])}" if taken else "nothing was changed"
    ends = f"{short(before)} after {first} steps, {short(after)} after {last}"
    alt = f"{counted(len(curve), 'evaluation')}: {ends}; {chosen}."
    drawing = Drawing("Divergence from the original", alt, SIZE, partial(_draw, curve=curve, taken=taken))
    caption = (
        "KL divergence from the original's next-token distributions, on text that the recovery did not train on, the "
        "dashed line where it began" + ("; the ring is the state that was taken." if taken else ".")
    )
    return Figure("recovery", "Held-out text during the recovery", caption, (drawing,))


def _draw(canvas: "FigureBase", curve: Sequence[Evaluation], taken: Evaluation | None) -> None:
    axes = canvas.add_subplot()
    steps = [step for step, *_ in curve]
    apart = [min(max(value, -FARTHEST), FARTHEST) for _, value, _ in curve]
    axes.axhline(apart[0], color=ROLES["muted"], linewidth=0.8, linestyle="dashed")
    draw_lines(axes, [Line("held out", steps, apart, ROLES["after"], marker="o")], first_is_start=False)
    if taken is not None:
        place = min(max(taken[1], -FARTHEST), FARTHEST)
        axes.plot([taken[0]], [place], marker="o", markersize=11, markerfacecolor="none", color=ROLES["good"])
    axes.set_xticks(spaced(steps))
    axes.set_xlabel("steps")
    axes.set_ylabel("nats per token from the original")
    axes.grid(axis="y")


def _bake(asked: Mapping[str, Any] | None) -> list[Block]:
    if asked is None:
        return []
    columns = ("round", "ridge", "step", "gain", "its standard error")
    rows = tuple(
        (
            str(number),
            *(_figure(step.get(name)) if step.get("step") else "-" for name in ("ridge", "step", "gain", "error")),
        )
        for number, step in enumerate(_entries(result_of(asked).get("steps")), 1)
    )
    said = Text(f"Baked into the routers: {bake_line(asked)}.")
    return [said, Table("Rounds of the bake", columns, rows)] if rows else [said]


def _recovery(asked: Mapping[str, Any] | None) -> list[Block]:
    if asked is None:
        return []
    columns = ("steps", "from the original", "loss")
    rows = tuple((f"{step:,}", f"{apart:.5g}", f"{loss:.5g}") for step, apart, loss in evaluations(asked))
    said = Text(f"Trained end to end: {recovery_line(asked)}.")
    return [said, Table("Held-out text during the recovery, in numbers", columns, rows)] if rows else [said]


def recovery_line(asked: Mapping[str, Any]) -> str:
    """What was trained, how long, and what held-out text said of it."""
    result = result_of(asked)
    how = f"{asked.get('method')}, {asked.get('steps')} steps of {asked.get('tokens_per_step')} tokens at most"
    if not trained(asked):
        return f"{how}; nothing was changed"
    before, after = (_figure(result.get(name)) for name in ("before", "after"))
    return f"{how}; from the original on held-out text {before} to {after} nats per token, after {result.get('best')}"


def _entries(value: Any) -> list[Mapping[str, Any]]:
    listed = value[:MOST] if isinstance(value, list | tuple) else []
    return [entry for entry in listed if isinstance(entry, Mapping)]


def _figure(value: Any) -> str:
    return short(value) if _is_number(value) else "-"


def _is_number(value: Any) -> TypeGuard[float]:
    """Whether it can be shown and drawn; JSON has whole numbers beyond all floats."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e308
