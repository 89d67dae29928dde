"""Everything that a report or a model card shows of a compressed model, as plain data that JSON can hold.

`report_data` puts it together from the output folder; what was measured on text comes from
`compressor.report.measuring`. E experts, N kept.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

from compressor.errors import CompressionError
from compressor.gates.report import read_gate_of
from compressor.gates.verdict import GateResult, gate_content
from compressor.recipe.plan import CompressionPlan, LayerPlan, correction_of, parts_of
from compressor.recipe.steps_plan import Plan
from compressor.records import plain_json, read_as, read_json
from compressor.run_record import COMPRESSION, read_record

FORMAT = "moe-compressor-report/2"
DIGITS = 4  # of a matrix's entries

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Load:
    """How evenly the visits spread over experts."""

    maximum_to_mean: float  # 1: all alike; the number of experts: one takes all
    entropy: float  # of the shares, over that of equal shares: 1: all alike; 0: one takes all


def load_of(visits: tuple[float, ...] | None) -> Load | None:
    """How evenly shares [E] that sum to 1 are spread; None where there are no visits or no experts to choose from."""
    total = sum(visits or ())
    if not visits or total <= 0:
        return None
    shares = [visit / total for visit in visits]
    entropy = -sum(share * math.log(share) for share in shares if share > 0)
    return Load(max(shares) * len(shares), entropy / math.log(len(shares)) if len(shares) > 1 else 1.0)


@dataclass(frozen=True, slots=True)
class LayerMeasures:
    """What was measured of one MoE layer; None where it could not be."""

    module: str
    similarity: Matrix | None = None  # [E, E] of the source's experts, 0 to 1
    similarity_label: str = ""  # how it was measured
    visits_before: tuple[float, ...] | None = None  # [E] share of the source's routed tokens; zeros without tokens
    visits_after: tuple[float, ...] | None = None  # [N] of the compressed model's, on its own hidden states
    error: float | None = None  # ||y' - y||^2 / ||y||^2 of the MoE block's output on the source's own inputs
    cosine: float | None = None  # of y' and y, the mean over tokens
    stream_error: float | None = None  # the same of the decoder layer's output, each model run on its own
    stream_cosine: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a whole output."""

    layers: tuple[LayerMeasures, ...]
    tokens: int = 0  # of the calibration text that ran through both models
    text: str | None = None  # its name, without folders
    missing: tuple[str, ...] = ()  # what could not be measured, and the option that gives it, a sentence each

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        content: dict[str, Any] = plain_json(asdict(self))
        return content

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> Self:
        """What `to_dict` made; raises `CompressionError` for anything else."""
        return read_as(cls, content)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport(LayerMeasures):
    """One MoE layer: what the plan did to it, and what was measured of it."""

    layer: int
    experts: int
    kept: int
    groups: tuple[tuple[int, ...], ...]  # members of slot n
    dropped: tuple[int, ...]
    protected: tuple[int, ...]
    decided_by: str
    heldout_error_before: float | None = None  # of the correction, on tokens that it did not see
    heldout_error_after: float | None = None
    figures: Mapping[str, Any] = field(default_factory=dict)
    rescaled: tuple[int, ...] = ()  # experts alone in their group, but not as they were

    @property
    def load_before(self) -> Load | None:
        """How evenly the source's visits spread."""
        return load_of(self.visits_before)

    @property
    def load_after(self) -> Load | None:
        """How evenly the compressed model's visits spread."""
        return load_of(self.visits_after)


@dataclass(frozen=True, slots=True)
class ReportData:
    """All that a page or a card shows of one compressed model."""

    title: str
    source: str  # the Hub id, or the folder's name
    revision: str | None
    strategy: str
    options: Mapping[str, Any]
    correction: Mapping[str, Any] | None
    sequential: bool
    experts_before: int
    experts_after: int
    top_k: int
    parameters: tuple[int, int]  # before and after
    nbytes: tuple[int, int]
    calibration: Mapping[str, Any] | None  # without folders
    versions: Mapping[str, str]
    plan_digest: str
    layers: tuple[LayerReport, ...]
    seconds: Mapping[str, float] = field(default_factory=dict)  # by phase; empty without a record of the run
    peak_memory: int | None = None  # bytes
    command: tuple[str, ...] | None = None
    gate: GateResult | None = None
    hubs: tuple[Mapping[str, Any], ...] = ()
    missing: tuple[str, ...] = ()  # what is not shown, and the option that gives it
    left_out: tuple[str, ...] = ()
    zeroed_fields: tuple[str, ...] = ()
    measured_tokens: int = 0
    measured_text: str | None = None
    steps: tuple[Mapping[str, Any], ...] = ()  # those on the whole model, in order, as the plan has them
    split: Mapping[str, Any] | None = None  # how each of the source's experts became several

    def to_json(self) -> str:
        """All of it as JSON."""
        gate = None if self.gate is None else gate_content(self.gate)
        content = {"format": FORMAT, **plain_json(replace(self, gate=None)), "gate": gate}
        return json.dumps(content, ensure_ascii=False, allow_nan=False)


def rounded(value: float) -> float:
    """An entry of a matrix, as short as it is stored."""
    return round(float(value), DIGITS)


def read_compression(folder: Path) -> tuple[Mapping[str, Any], Plan]:
    """An output's compression.json and the plan in it; raises `CompressionError` if there is none or it is damaged."""
    path, remedy = folder / COMPRESSION, "name a folder that moe-compress has written"
    content = read_json(path, remedy, remedy)
    if not isinstance(content, dict) or not isinstance(content.get("plan"), dict):
        raise CompressionError(f"{path} holds no plan; {remedy}")
    return content, Plan.from_dict(content["plan"], f"{path}: plan")


def experts_of(folder: Path, stage: CompressionPlan) -> tuple[int, int]:
    """Experts of a layer before and after; where no step has chosen any, those of the output itself."""
    if stage.layers:
        return max(layer.experts for layer in stage.layers), stage.experts
    config = read_json(folder / "config.json", "restore it", "restore it")
    inner = [config, *(value for value in config.values() if isinstance(value, dict))]
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    after = next((entry[name] for entry in inner for name in names if isinstance(entry.get(name), int)), 0)
    return after // parts_of(stage.split), after


def read_hubs(path: Path | None, most: int) -> tuple[Mapping[str, Any], ...]:
    """The rows of a hubs.json, the strongest first, of a model with `most` experts; none without a path."""
    if path is None:
        return ()
    remedy = "name a hubs.json that moe-compress attribute has written"
    content = read_json(path, remedy, remedy)
    if not isinstance(content, list) or not all(isinstance(entry, dict) and "expert" in entry for entry in content):
        raise CompressionError(f"{path} should hold a list of experts; {remedy}")
    if len(content) > most:
        raise CompressionError(f"{path} names {len(content):,} experts of a model that has {most:,}; {remedy}")
    return tuple(content)


def report_data(
    folder: Path, measured: Measured | None = None, hubs: Path | None = None, gate: Path | None = None
) -> ReportData:
    """What an output folder says of itself, and what was `measured` of it.

    `hubs` is a hubs.json, `gate` a gate.json (by default the folder's own); one about other files is refused.
    """
    (content, plan), record, measured = read_compression(folder), read_record(folder), measured or Measured(())
    measures = {layer.module: layer for layer in measured.layers}
    stage = plan.stage
    rows = read_hubs(hubs, sum(layer.experts for layer in stage.layers))
    unknown = () if record else ("This machine has no record of the run, so its times and memory are not shown.",)
    layers = [_layer(layer, stage, measures.get(layer.module, LayerMeasures(layer.module))) for layer in stage.layers]
    experts_before, experts_after = experts_of(folder, stage)
    try:
        return ReportData(
            title=Path(folder).resolve().name,
            source=plan.source.model,
            revision=plan.source.revision,
            strategy=stage.strategy,
            options=stage.options,
            correction=stage.correction,
            sequential=stage.sequential,
            steps=tuple(step.to_dict() for step in plan.steps if step.result is not None),
            split=stage.split,
            experts_before=experts_before,
            experts_after=experts_after,
            top_k=max((layer.top_k for layer in stage.layers), default=0),
            parameters=_before_after(content["parameters"]),
            nbytes=_before_after(content["bytes"]),
            calibration=plan.calibration,
            versions=dict(content.get("versions") or plan.versions),
            layers=tuple(layers),
            plan_digest=str(content["plan_digest"]),
            gate=read_gate_of(folder, gate),
            hubs=rows,
            seconds=record.seconds if record else {},
            peak_memory=record.peak_memory if record else None,
            command=record.command if record else None,
            missing=(*measured.missing, *unknown),
            left_out=tuple(content.get("left_out") or ()),
            zeroed_fields=tuple(content.get("zeroed_fields") or ()),
            measured_tokens=measured.tokens,
            measured_text=measured.text,
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise CompressionError(f"{folder / COMPRESSION} is damaged ({error!r}); compress again") from error


def _before_after(entry: Mapping[str, Any]) -> tuple[int, int]:
    return int(entry["before"]), int(entry["after"])


def _figure(value: Any) -> float | None:
    return value if isinstance(value, int | float) else None


def _layer(layer: LayerPlan, plan: CompressionPlan, found: LayerMeasures) -> LayerReport:
    corrected, measured = correction_of(layer), {entry.name: getattr(found, entry.name) for entry in fields(found)}
    return LayerReport(
        **measured,
        layer=layer.layer,
        experts=layer.experts,
        kept=len(layer.groups),
        groups=tuple(group.members for group in layer.groups),
        dropped=layer.dropped,
        protected=tuple(plan.protected.get(layer.module, ())),
        rescaled=tuple(group.members[0] for group in layer.groups if len(group.members) == 1 and not group.untouched),
        decided_by=layer.decided_by,
        heldout_error_before=_figure(corrected.get("heldout_error_before")),
        heldout_error_after=_figure(corrected.get("heldout_error")),
        figures=layer.figures,
    )
