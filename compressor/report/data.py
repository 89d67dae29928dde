"""The data of reports and model cards: the outcome in a folder, and the measurements of each layer.

Measurements on text come from `compressor.report.measuring`. E experts, N kept.
"""

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import chain, combinations
from pathlib import Path
from statistics import fmean

from compressor.checkpoint.source import ModelSource
from compressor.document.blocks import Table
from compressor.errors import CompressionError
from compressor.formatting import counted, human_bytes
from compressor.frozen import frozen
from compressor.model.opened import OpenModel, open_model, served_model
from compressor.model.serving import Served
from compressor.pipeline.outcome import Outcome, SizeRow, read_outcome, size_rows
from compressor.quality_gate.verdict import GateResult, gate_content
from compressor.recipe.hubs import Hub, read_hubs
from compressor.recipe.plan import LayerPlan, correction_of
from compressor.recipe.steps_plan import layer_to_dict
from compressor.records import Json, plain_json, read_as
from compressor.run_record import read_record
from compressor.steps.job import active_parameters

FORMAT = "moe-compressor-report/3"
ERRORS = {  # what a layer's fields are called
    "error": "error of the block",
    "heldout_error_before": "held-out error, before reconstruction",
    "heldout_error_after": "held-out error, after reconstruction",
}
NO_RECORD = "This machine has no record of the run, so its times and memory are not shown."

Matrix = tuple[tuple[float, ...], ...]


@frozen
class LayerMeasures:
    """Measurements of one MoE layer; None where one was not possible."""

    module: str
    similarity: Matrix | None = None  # [E, E] of the base's experts, 0 to 1
    similarity_label: str = ""  # how it was measured
    # [E] share of the base's routed tokens; zeros without tokens
    visits_before: tuple[float, ...] | None = None
    # [N] of the compressed model's, on its own hidden states
    visits_after: tuple[float, ...] | None = None
    # ||y' - y||^2 / ||y||^2 of the MoE block's output on the base's own inputs
    error: float | None = None

    def fields(self) -> Json:
        return {entry.name: getattr(self, entry.name) for entry in fields(LayerMeasures)}


@frozen
class Speed:
    """Inference of base and output on one machine: medians over alternating repetitions."""

    device: str
    dtype: str
    prompt_tokens: int
    new_tokens: int
    repetitions: int
    prefill: tuple[float, float]  # seconds to the first token; base, output
    decode: tuple[float, float]  # seconds of each further token
    # bytes of the weights; on an accelerator with what generation allocates
    memory: tuple[float, float]

    def table(self) -> Table:
        """The figures and their ratios; how they were measured is the caption."""
        rows = []
        for name, (base, output) in (("prefill", self.prefill), ("each new token", self.decode)):
            times = f"{1000 * base:.3g} ms", f"{1000 * output:.3g} ms"
            rows.append((name, *times, f"{base / output:.2f}x as fast"))
        base, output = self.memory
        sizes = human_bytes(int(base)), human_bytes(int(output))
        rows.append(("memory", *sizes, f"{output / base:.1%} of the base"))
        caption = (
            f"Inference on this machine ({self.device}, {self.dtype}): stock transformers, one "
            f"sequence of {self.prompt_tokens:,} tokens and {self.new_tokens} new ones, medians of "
            f"{self.repetitions} turns"
        )
        return Table(caption, ("", "base", "output", "ratio"), rows)


@frozen
class Measured:
    """Measurements of a whole output."""

    layers: tuple[LayerMeasures, ...] = ()
    tokens: int = 0  # of the calibration text that ran through both models
    text: str | None = None  # its name, without folders
    # what could not be measured, and the option that gives it, a sentence each
    missing: tuple[str, ...] = ()
    speed: Speed | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerReport(LayerMeasures):
    """One MoE layer: its plan and its measurements."""

    plan: LayerPlan
    name: str = ""  # 'Layer 3', or the module's where two have the same number
    protected: tuple[int, ...] = ()

    @property
    def heldout_error_before(self) -> float | None:
        """Error on tokens that the reconstruction did not see, before it; None where it recorded
        none."""
        return correction_of(self.plan).get("heldout_error_before")

    @property
    def heldout_error_after(self) -> float | None:
        """Error on tokens that the reconstruction did not see, after it; None where it recorded
        none."""
        return correction_of(self.plan).get("heldout_error")


@dataclass(frozen=True)
class Report(Outcome):
    """An outcome with all its measurements."""

    layers: tuple[LayerReport, ...] = ()
    hubs: tuple[Hub, ...] = ()
    missing: tuple[str, ...] = ()  # what is not shown, and the option that gives it
    measured_tokens: int = 0
    measured_text: str | None = None
    speed: Speed | None = None
    # parameters that a token uses, before and after, and the output as servers see it; None where
    # the stock model isn't known, or where only an export lies
    active: tuple[int, int] | None = None
    served: Served | None = None

    def sizes(self) -> list[SizeRow]:
        sizes = (self.experts_before, self.experts_after), self.before, self.after
        return size_rows(*sizes, self.active)

    def to_json(self) -> str:
        """Return all of it as JSON."""
        steps = [step.to_dict() for step in self.plan.steps]
        for step in steps:
            step.pop("plan", None)
        layers = [
            {**layer.fields(), **layer_to_dict(layer.plan), "protected": layer.protected}
            for layer in self.layers
        ]
        content = {
            **self.to_dict(),
            "output": self.title,
            "steps": steps,
            "hubs": self.hubs,
            "missing": self.missing,
            "measured_tokens": self.measured_tokens,
            "measured_text": self.measured_text,
            "speed": self.speed,
            "layers": layers,
        }
        gate = None if self.gate is None else gate_content(self.gate)
        return json.dumps(
            {"format": FORMAT, **plain_json(content), "gate": gate},
            ensure_ascii=False,
            allow_nan=False,
        )

    @property
    def measured_on(self) -> str:
        """'16,384 tokens of texts.jsonl'."""
        text = f" of {self.measured_text}" if self.measured_text else ""
        return counted(self.measured_tokens, "token") + text


def report_data(
    folder: Path,
    measured: Measured | None = None,
    hubs: Path | None = None,
    gate: Path | GateResult | None = None,
) -> Report:
    """Return what an output folder records, and what was `measured` of it.

    `hubs` is a hubs.json, `gate` a gate.json (by default the folder's own); one about other files
    is refused."""
    outcome = read_outcome(folder, gate)
    measured = measured or Measured()
    record = read_record(folder)
    # by an earlier report
    recorded = read_as(Speed, record.speed) if record and record.speed else None
    by_module = {measures.module: measures for measures in measured.layers}
    layers = []
    for plan in outcome.expert_plan.layers:
        measures = by_module.get(plan.module, LayerMeasures(plan.module))
        protected = tuple(outcome.expert_plan.protected.get(plan.module, ()))
        layers.append(LayerReport(**measures.fields(), plan=plan, protected=protected))
    active = served = None
    with suppress(CompressionError):  # as for constants
        model = open_model(ModelSource.of(folder), device="cpu")
        served = served_model(model)
        active = _active(outcome, model)
    return Report(
        **vars(outcome),
        layers=named(layers),
        hubs=() if hubs is None else read_hubs(hubs),
        missing=measured.missing if outcome.seconds else (*measured.missing, NO_RECORD),
        measured_tokens=measured.tokens,
        measured_text=measured.text,
        speed=measured.speed or recorded,
        active=active,
        served=served,
    )


def _active(outcome: Outcome, model: OpenModel) -> tuple[int, int] | None:
    """Return active parameters of base and output; 0 of a base with another top-k."""
    plan = outcome.expert_plan
    layers = model.architecture.layers
    if {layer.name for layer in layers} != {layer.module for layer in plan.layers}:
        return None
    experts = plan.layers[0].experts
    before = active_parameters(model, experts, outcome.before.parameters)
    after = active_parameters(model, model.architecture.experts, outcome.after.parameters)
    if before is None or after is None:
        return None
    return before if plan.top_k is None else 0, after


def named(layers: Sequence[LayerReport]) -> tuple[LayerReport, ...]:
    """Return the layers with their names."""
    count = Counter(layer.plan.layer for layer in layers)
    result = []
    for layer in layers:
        number = layer.plan.layer
        name = f"Layer {number}" if count[number] == 1 else layer.module
        result.append(replace(layer, name=name))
    return tuple(result)


def order(plan: LayerPlan) -> tuple[int, ...]:
    """Return all experts [E]: merged groups first, the largest first, then those alone, then the
    dropped."""
    alone = (group.members for group in plan.groups if len(group.members) == 1)
    return tuple(chain(*sorted(plan.merged, key=len, reverse=True), *alone, plan.dropped))


def within(layer: LayerReport, group: Sequence[int] | None = None) -> list[float]:
    """Return similarities of a group's pairs, by default of all experts; none without a matrix."""
    if layer.similarity is None:
        return []
    members = range(layer.plan.experts) if group is None else group
    return [layer.similarity[first][second] for first, second in combinations(members, 2)]


def mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
