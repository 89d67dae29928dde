"""Plans as the tests make them: by options, by hand, edited as somebody might edit the file. Test support."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import compressor
from compressor import run_record
from compressor.api import make_recipe
from compressor.data.batches import Calibration
from compressor.model.opened import OpenModel
from compressor.progress import Progress
from compressor.recipe.plan import ExpertPlan, LayerPlan, Source
from compressor.recipe.recipe import Recipe, default_steps
from compressor.recipe.registry import Strategy
from compressor.recipe.steps_plan import Plan, PlannedStep, decision_to_dict
from compressor.steps.prune.planning import Planner, Protected, PruneSpec


@dataclass(frozen=True)
class Decided:
    """A decision on experts with what a plan says of it: by whom it was made, on which model, text and split."""

    source: Source
    experts: int
    strategy: str
    options: Mapping[str, Any]
    calibration: Mapping[str, Any] | None
    layers: tuple[LayerPlan, ...]
    seed: int = 0
    correction: Mapping[str, Any] | None = None
    protected: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    split: Mapping[str, Any] | None = None
    top_k: int | None = None
    mtp: str | None = None
    has_constants = False

    @property
    def expert_plan(self) -> ExpertPlan:
        """The decision alone."""
        return ExpertPlan(self.experts, self.layers, self.protected, self.top_k, self.mtp)

    @property
    def strategy_options(self) -> Mapping[str, Any]:
        """Options of the strategy, as a plan has them."""
        return self.options

    @property
    def is_drop(self) -> bool:
        """True if nothing is merged."""
        return self.expert_plan.is_drop

    @property
    def reorders(self) -> bool:
        """True if neurons change their places."""
        return self.expert_plan.reorders

    def to_dict(self) -> dict[str, Any]:
        """The decision as JSON."""
        return decision_to_dict(self.expert_plan)


OF_RECIPE = ("calibration", "samples", "sequence_length", "seed", "revision", "dtype")


def recipe_of(model: str | Path, **options: Any) -> Recipe:
    """The recipe of `compress` with these options."""
    more = {name: options.pop(name) for name in OF_RECIPE if name in options}
    return make_recipe(str(model), default_steps(**options), **more)


def plan_of(model: str | Path, device: str = "cpu", **options: Any) -> Plan:
    """What `plan` makes of these options."""
    return compressor.plan(recipe_of(model, **options), device=device)


def make_plan(
    model: OpenModel,
    strategy: Strategy,
    experts: int,
    options: dict[str, Any],
    calibration: Calibration | None,
    progress: Progress,
    seed: int = 0,
    protected: Protected | None = None,
) -> Decided:
    """Every layer planned with one strategy on the original model."""
    planner = Planner(model, calibration, progress, seed)
    plan = planner.plans([PruneSpec(strategy, experts)], protected)[0].plan
    text = None if calibration is None else calibration.identity
    return Decided(
        Source.of(model), plan.experts, strategy.name, options, text, plan.layers, seed, protected=plan.protected,
        split=model.split, top_k=plan.top_k, mtp=plan.mtp,
    )  # fmt: skip


def by_hand(made: Decided) -> Plan:
    """A plan of a decision that was put together by hand."""
    correction = {name: value for name, value in (made.correction or {}).items() if name != "dtype"}
    options = {"strategy": made.strategy, "experts": made.experts, "options": dict(made.options)}
    if made.split is not None:
        options["experts"] //= made.split["parts"]
    if made.correction is not None:
        options["correct"] = correction
    plan = replace(made.expert_plan, split=None if made.split is None else dict(made.split))
    steps = [PlannedStep("prune", options, plan)]
    dtype = str((made.correction or {}).get("dtype", "auto"))
    return Plan(made.source, tuple(steps), made.calibration, made.seed, dtype, run_record.versions())


def pruned(content: dict[str, Any]) -> dict[str, Any]:
    """What `prune` decided, in the JSON of a plan: experts, layers and so on; changing it changes the plan."""
    found: dict[str, Any] = next(step["plan"] for step in content["steps"] if step["name"] == "prune")
    return found


def disposition(plan: Plan) -> dict[str, Any]:
    """What a plan's stages do to every expert, as JSON: experts, layers and so on."""
    found: dict[str, Any] = json.loads(json.dumps(decision_to_dict(plan.expert_plan)))
    return found


def edited(plan: Plan, change: Callable[[dict[str, Any]], object]) -> Plan:
    """The plan with its pruning changed as JSON and read back."""
    content = json.loads(plan.to_json())
    change(pruned(content))
    return Plan.from_dict(content)


def kept(plan: LayerPlan) -> list[int]:
    """The experts that a dropping plan of a layer keeps."""
    assert plan.is_drop
    return [group.members[0] for group in plan.groups]
