"""What came of a run: the one record in an output folder, as it is written and read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from compressor.checkpoint.reader import Size
from compressor.data.sources import without_folders
from compressor.model.opened import OpenModel, advice_on, served_model
from compressor.recipe.steps_plan import Plan
from compressor.records import readable_json
from compressor.replaceable import TOOL
from compressor.run_record import versions
from compressor.serving.advice import Advice

Acceptance = Mapping[str, Mapping[str, Any]]  # of kept multi-token-prediction heads, before and after


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did, for a person or a script."""

    out: str
    plan: Plan = field(repr=False)
    experts_before: int
    experts_after: int
    before: Size
    after: Size
    seconds: Mapping[str, float]
    peak_memory: int  # bytes of anonymous memory at the highest
    left_out: tuple[str, ...] = ()  # source tensors that the stock model does not load
    zeroed_fields: tuple[str, ...] = ()  # config fields that announced them
    servers: Advice | None = field(default=None, repr=False)  # None with constants, which vLLM alone serves
    acceptance: Acceptance = field(default_factory=dict)

    @property
    def strategy(self) -> str:
        """How experts were chosen."""
        return self.plan.stage.strategy

    def result(self, name: str) -> Mapping[str, Any]:
        """What came of the last step of that name."""
        return self.plan.of(name)[-1].result or {}


def record_of(outcome: Outcome, files: Sequence[str], label: str) -> bytes:
    """compression.json: how the output was made. No timings and no folders, so that equal runs give equal bytes."""
    content = outcome.plan.to_dict()
    content["source"]["model"] = label
    if content["calibration"] is not None:
        content["calibration"] = without_folders(content["calibration"])
    for step in content["steps"]:
        if step.get("text") is not None:
            step["text"] = without_folders(step["text"])
        if (step.get("plan") or {}).get("calibration") is not None:
            step["plan"] = {**step["plan"], "calibration": without_folders(step["plan"]["calibration"])}
    before, after = outcome.before, outcome.after
    return readable_json(
        {
            "tool": TOOL,
            "versions": versions(),
            "parameters": {"before": before.parameters, "after": after.parameters},
            "bytes": {"before": before.bytes, "after": after.bytes},
            "left_out": list(outcome.left_out),
            "zeroed_fields": list(outcome.zeroed_fields),
            "files": sorted(files),
            "plan_digest": outcome.plan.digest(),
            "plan": content,
        }
    ).encode()


def outcome_of(
    out: str,
    model: OpenModel,
    plan: Plan,
    after: Size,
    seconds: Mapping[str, float] = MappingProxyType({}),
    peak_memory: int = 0,
    left_out: Sequence[str] = (),
    zeroed: Sequence[str] = (),
    acceptance: Acceptance | None = None,
    record: Mapping[str, Any] | None = None,
) -> Outcome:
    """The outcome of a run on `model`; `record` is that of an earlier run, from whose source sizes count."""
    stage = plan.stage
    layers, experts = model.architecture.layers, stage.experts or model.architecture.experts
    before = Size.of(model.checkpoint.tensors.values())
    if record is not None:
        before = Size(int(record["parameters"]["before"]), int(record["bytes"]["before"]))
    return Outcome(
        out=out,
        plan=plan,
        experts_before=stage.layers[0].experts if stage.layers else layers[0].experts,
        experts_after=experts,
        before=before,
        after=after,
        seconds=dict(seconds),
        peak_memory=peak_memory,
        left_out=tuple(left_out),
        zeroed_fields=tuple(zeroed),
        servers=None if stage.constants is not None else advice_on(served_model(model), layers, experts),
        acceptance=acceptance or {},
    )
