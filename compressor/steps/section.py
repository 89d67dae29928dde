"""What a step says about its options, decision and result.

The summary is shown everywhere, facts on page and card, blocks on page and terminal, limits on the
card."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any, Literal

from compressor.document.blocks import Block, Text, Words
from compressor.errors import CompressionError
from compressor.formatting import counted, setting, short
from compressor.frozen import frozen
from compressor.recipe.plan import LayerPlan, correction_of
from compressor.recipe.recipe import make_step
from compressor.recipe.steps_plan import QUANTIZE, Plan, PlannedStep
from compressor.records import Json

logger = logging.getLogger(__name__)


@frozen
class Section:
    """What a step says, for all media."""

    name: str  # the step's
    summary: str  # what was done and what came of it: a sentence without its full stop
    ways: Sequence[str] = ()  # what changed the model, in words
    # what was fitted: single layers toward the base's, or the model as a whole
    tuned: Literal["", "layers", "model", "unknown"] = ""
    facts: Mapping[str, Words] = field(default_factory=dict)  # options and decisions
    blocks: Sequence[Block] = ()  # sentences and tables on the result
    limits: Sequence[str] = ()  # sentences on what that does not mean

    def shown(self) -> list[Block]:
        """Return the summary with the blocks."""
        return [Text(f"{self.summary}."), *self.blocks]


def sections(plan: Plan, packed: bool = True) -> Iterator[Section]:
    """Yield what each step says that has decided or done something; of one that isn't installed, or
    not with these options, what the plan says.

    Of quantising, the last time is shown, and only if weights are still `packed`."""
    for planned in plan.steps:
        undone = planned.name == QUANTIZE and not (packed and planned is plan.of(QUANTIZE)[-1])
        if undone or (planned.decision is None and planned.result is None):
            continue
        try:
            yield make_step(planned.name, planned.options).step().describe(planned)
        except CompressionError as error:
            logger.debug("the step %s cannot describe its result: %s", planned.name, error)
            yield undescribed(planned)


def undescribed(planned: PlannedStep) -> Section:
    """Return what a plan alone tells of a step: its name and options, and that it may have changed
    the model in any way, unless its result says by `changed` that it didn't."""
    options = planned.options
    changed = (planned.result or {}).get("changed", True)
    facts = dict[str, Words]()
    if "strategy" in options and options.get("ratio") != 0:  # else all experts stay
        facts = {"Strategy": setting(options["strategy"])}
        facts["Options"] = setting(options["options"]) if options.get("options") else ""
    ways = [planned.name] if changed else []
    section = Section(planned.name, planned.name, ways=ways, facts=facts)
    if planned.expert_plan is not None and isinstance(options.get("correct"), Mapping):
        section = with_reconstruction(section, planned, planned.expert_plan.layers)
    return replace(section, tuned="unknown") if changed else section


def with_reconstruction(
    section: Section, planned: PlannedStep, layers: Sequence[LayerPlan]
) -> Section:
    """Return a step's section with the correction of its layers, and what that does not mean."""
    correct: Json = planned.options.get("correct") or {}
    method = correct.get("method", "none")
    if method == "none":
        return replace(section, facts={**section.facts, "Reconstruction": "none"})
    better = sum(correction_of(layer).get("kept") not in (None, "none") for layer in layers)
    limit = (
        f"Reconstruction ({method}) refitted the remaining experts to each layer's base output on "
        f"the calibration text and was kept in {better} of {counted(len(layers), 'layer')}; the "
        "errors before and after are those of single layers and say nothing about accuracy."
    )
    return replace(
        section,
        ways=[*section.ways, "reconstruction"],
        tuned="layers",
        facts={**section.facts, "Reconstruction": setting(correct)},
        limits=[limit, *section.limits],
    )


def is_changed(planned: PlannedStep) -> bool:
    """Return True if a step on the whole model changed it: by its own record, or else if its
    held-out KL fell."""
    result = planned.result or {}
    if "changed" in result:
        return bool(result["changed"])
    return "before" not in result or bool(result["after"] < result["before"])


def divergence(result: Json, changed: bool) -> str:
    """Return KL from the base, loss and flips (other greedy tokens) on held-out text, before and
    after."""
    parts = []
    for name, key in (("KL", ""), ("loss", "loss_"), ("flips", "flips_")):
        before = result.get(f"{key}before")
        if before is None and name != "KL":
            continue
        shown = flips if name == "flips" else short
        later = f" to {shown(result.get(f'{key}after'))}" if changed else ""
        unit = " nats per token from the base on held-out text" if name == "KL" else ""
        parts.append(f"{name} {shown(before)}{later}{unit}")
    return ", ".join(parts)


def flips(share: Any) -> str:
    """Return a share of positions in percent, with three digits."""
    return f"{100 * share:.3g}%"
