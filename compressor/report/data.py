"""What a report or a model card shows: the outcome in a folder, and what was measured of each layer.

What was measured on text comes from `compressor.report.measuring`. E experts, N kept.
"""

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain, combinations
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from compressor.attribution.hubs import Hub
from compressor.document.blocks import Table
from compressor.errors import CompressionError
from compressor.evaluation.gate_verdict import GateResult, gate_content
from compressor.formatting import counted, joined, one_line, ranges
from compressor.pipeline.outcome import Outcome, read_outcome
from compressor.recipe.plan import ExpertPlan, LayerPlan, correction_of
from compressor.recipe.steps_plan import layer_to_dict
from compressor.records import plain_json, read_json, value_as

FORMAT = "moe-compressor-report/3"
NO_RECORD = "This machine has no record of the run, so its times and memory are not shown."

Matrix = tuple[tuple[float, ...], ...]


class Load(NamedTuple):
    """How evenly routed tokens spread over experts."""

    maximum_to_mean: float  # 1: all alike; the number of experts: one takes all
    entropy: float  # of the shares, over that of equal shares: 1: all alike; 0: one takes all


def load_of(shares: Sequence[float] | None) -> Load | None:
    """How evenly shares [E] that sum to 1 are spread; None where there are none or no experts to choose from."""
    total = sum(shares or ())
    if not shares or total <= 0:
        return None
    parts = [share / total for share in shares]
    entropy = -sum(part * math.log(part) for part in parts if part > 0)
    return Load(max(parts) * len(parts), entropy / math.log(len(parts)) if len(parts) > 1 else 1.0)


@dataclass(frozen=True, slots=True)
class LayerMeasures:
    """What was measured of one MoE layer; None where it could not be."""

    module: str
    similarity: Matrix | None = None  # [E, E] of the base's experts, 0 to 1
    similarity_label: str = ""  # how it was measured
    visits_before: tuple[float, ...] | None = None  # [E] share of the base's routed tokens; zeros without tokens
    visits_after: tuple[float, ...] | None = None  # [N] of the compressed model's, on its own hidden states
    error: float | None = None  # ||y' - y||^2 / ||y||^2 of the MoE block's output on the base's own inputs
    cosine: float | None = None  # of y' and y, the mean over tokens
    stream_error: float | None = None  # the same of the decoder layer's output, each model run on its own
    stream_cosine: float | None = None

    def fields(self) -> dict[str, Any]:
        return {entry.name: getattr(self, entry.name) for entry in fields(LayerMeasures)}


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a whole output."""

    layers: tuple[LayerMeasures, ...] = ()
    tokens: int = 0  # of the calibration text that ran through both models
    text: str | None = None  # its name, without folders
    missing: tuple[str, ...] = ()  # what could not be measured, and the option that gives it, a sentence each


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport(LayerMeasures):
    """One MoE layer: what the plan does to it, and what was measured of it."""

    plan: LayerPlan
    name: str = ""  # 'Layer 3', or the module's where two have the same number
    protected: tuple[int, ...] = ()

    @property
    def heldout_error_before(self) -> float | None:
        """Error on tokens that the reconstruction did not see, before it."""
        return heldout_error(self.plan, "heldout_error_before")

    @property
    def heldout_error_after(self) -> float | None:
        """Error on tokens that the reconstruction did not see, after it."""
        return heldout_error(self.plan, "heldout_error")


def heldout_error(layer: LayerPlan, name: str) -> float | None:
    """Return an error that a layer's reconstruction recorded; None where it recorded none."""
    error: float | None = correction_of(layer).get(name)
    return error


@dataclass(frozen=True)
class Report(Outcome):
    """An outcome, and all that was measured of it."""

    layers: tuple[LayerReport, ...] = ()
    hubs: tuple[Hub, ...] = ()
    missing: tuple[str, ...] = ()  # what is not shown, and the option that gives it
    measured_tokens: int = 0
    measured_text: str | None = None

    def to_json(self) -> str:
        """All of it as JSON."""
        layers = [
            {**layer.fields(), **layer_to_dict(layer.plan), "protected": layer.protected} for layer in self.layers
        ]
        own = {name: getattr(self, name) for name in ("hubs", "missing", "measured_tokens", "measured_text")}
        steps = [{name: each for name, each in step.to_dict().items() if name != "plan"} for step in self.plan.steps]
        content = plain_json({**self.to_dict(), "output": self.title, "steps": steps, **own, "layers": layers})
        gate = None if self.gate is None else gate_content(self.gate)
        return json.dumps({"format": FORMAT, **content, "gate": gate}, ensure_ascii=False, allow_nan=False)

    @property
    def measured_on(self) -> str:
        """'16,384 tokens of texts.jsonl'."""
        return counted(self.measured_tokens, "token") + (f" of {self.measured_text}" if self.measured_text else "")


def report_data(
    folder: Path,
    measured: Measured | None = None,
    hubs: Path | None = None,
    gate: Path | GateResult | None = None,
) -> Report:
    """What an output folder says of itself, and what was `measured` of it.

    `hubs` is a hubs.json, `gate` a gate.json (by default the folder's own); one about other files is refused.
    """
    outcome, measured = read_outcome(folder, gate), measured or Measured()
    expert_plan, measures = outcome.expert_plan, {layer.module: layer for layer in measured.layers}
    return Report(
        **{entry.name: getattr(outcome, entry.name) for entry in fields(Outcome)},
        layers=named(
            LayerReport(
                **measures.get(layer.module, LayerMeasures(layer.module)).fields(),
                plan=layer,
                protected=tuple(expert_plan.protected.get(layer.module, ())),
            )
            for layer in expert_plan.layers
        ),
        hubs=() if hubs is None else _read_hubs(hubs),
        missing=measured.missing if outcome.seconds else (*measured.missing, NO_RECORD),
        measured_tokens=measured.tokens,
        measured_text=measured.text,
    )


def _read_hubs(path: Path) -> tuple[Hub, ...]:
    remedy = "name a hubs.json that moe-compress attribute has written"
    content = read_json(path, remedy, remedy)
    try:
        hubs: tuple[Hub, ...] = value_as(content, tuple[Hub, ...], "the list of hubs")
    except CompressionError as error:
        raise CompressionError(f"{path}: {error}; {remedy}") from error
    return hubs


def named(layers: Iterable[LayerReport]) -> tuple[LayerReport, ...]:
    """The layers with their names."""
    layers = tuple(layers)
    often = Counter(layer.plan.layer for layer in layers)
    return tuple(
        replace(each, name=f"Layer {each.plan.layer}" if often[each.plan.layer] == 1 else each.module)
        for each in layers
    )


def order(plan: LayerPlan) -> tuple[int, ...]:
    """All experts [E]: merged groups first, the largest before the others, then those alone, then the dropped."""
    alone = (group.members for group in plan.groups if len(group.members) == 1)
    return tuple(chain(*sorted(plan.merged, key=len, reverse=True), *alone, plan.dropped))


def dispositions(layer: LayerReport) -> dict[int, str]:
    """What became of each expert, in words."""
    gone = "replaced by a constant" if layer.plan.constants else "dropped"
    found = dict.fromkeys(range(layer.plan.experts), gone)
    for slot, group in enumerate(layer.plan.groups):
        (first, *others) = group.members
        alone = "protected" if first in layer.protected else "kept" if group.untouched else "rescaled"
        said = f"merged into slot {slot}" if others else f"{alone} as slot {slot}"
        found.update(dict.fromkeys(group.members, said))
    return found


def roles(layer: LayerReport) -> list[str]:
    """Kept, merged or dropped, also for a constant: [E]."""
    words = {"merged": "merged", "dropped": "dropped", "replaced": "dropped"}
    return [words.get(disposition.split()[0], "kept") for disposition in dispositions(layer).values()]


def gone(layers: Iterable[LayerPlan]) -> str:
    """What became of experts that are in no group."""
    return "replaced by constants" if any(layer.constants for layer in layers) else "dropped"


def all_dispositions(layers: Sequence[LayerPlan]) -> str:
    """'40 experts kept, 24 merged into 8 and 8 dropped': the experts of all layers."""
    groups = [group for layer in layers for group in layer.groups]
    kept, merged = sum(group.untouched for group in groups), [group for layer in layers for group in layer.merged]
    counts = {
        f"{counted(kept, 'expert')} kept": kept,
        f"{len(groups) - len(merged) - kept:,} rescaled": len(groups) - len(merged) - kept,
        f"{sum(map(len, merged)):,} merged into {len(merged):,}": len(merged),
        f"{sum(len(layer.dropped) for layer in layers):,} {gone(layers)}": sum(len(layer.dropped) for layer in layers),
    }
    return joined([words for words, count in counts.items() if count])


def experts_table(plan: ExpertPlan, caption: str = "") -> Table:
    """What became of each expert, a row for each layer; names of modules where a decoder layer has several.

    An expert that stands alone among the merged ones was rescaled.
    """
    often = Counter(layer.layer for layer in plan.layers)
    is_corrected = any(map(correction_of, plan.layers))
    gone = "constants" if plan.has_constants else "dropped"
    columns = ["layer", "kept", "merged", gone, *(["protected"] if plan.protected else []), "decided by"]
    columns += ["held-out error"] if is_corrected else []
    rows = []
    for layer in plan.layers:
        changed = ["+".join(map(str, sorted(group.members))) for group in layer.groups if not group.untouched]
        won = layer.figures.get("won")  # where several strategies were tried, or one in the name of `auto`
        tried = isinstance(won, str) and won != layer.decided_by
        decided_by = f"{layer.decided_by}: {won}" if tried else layer.decided_by
        before, after = heldout_error(layer, "heldout_error_before"), heldout_error(layer, "heldout_error")
        kept, error = correction_of(layer).get("kept"), "-"
        if before is not None and after is not None:
            error = f"{before:.4g}, not corrected" if kept == "none" else f"{before:.4g} to {after:.4g} ({kept})"
        cells = {
            "layer": f"{layer.layer} ({one_line(layer.module)})" if often[layer.layer] > 1 else str(layer.layer),
            "kept": ranges(group.members[0] for group in layer.groups if group.untouched),
            "merged": ", ".join(changed) or "-",
            gone: ranges(layer.dropped),
            "protected": ranges(plan.protected.get(layer.module, ())),
            "decided by": one_line(decided_by or "-"),
            "held-out error": error,
        }
        rows.append(tuple(cells[name] for name in columns))
    return Table(caption, tuple(columns), tuple(rows), frozenset(columns))


def within(layer: LayerReport, group: Sequence[int]) -> list[float]:
    """Similarities of a group's pairs; none without a matrix."""
    return [layer.similarity[a][b] for a, b in combinations(group, 2)] if layer.similarity is not None else []


def mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
