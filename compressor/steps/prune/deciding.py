"""From the options of `prune` to a plan of every layer, on the model that a run has opened."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from compressor.data.batches import Calibration
from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel, refuse_shared_experts, resolve_count, served_model, warn_of_servers
from compressor.recipe.registry import load_strategy
from compressor.recipe.step import Needs, Step
from compressor.recipe.steps_plan import Plan, decisions
from compressor.statistics.statistics import needs_data, needs_heldout
from compressor.steps.correct.heads import chosen_heads, said_of_heads
from compressor.steps.prune.planning import Planner, Wish
from compressor.steps.prune.protecting import Protected, given_protected, protect_found
from compressor.steps.prune.step import Prune, central_of, found_on_data
from compressor.steps.split.opening import check_way
from compressor.steps.state import State


def kept_count(prune: Prune, model: OpenModel, parts: int = 1) -> int:
    """How many experts each layer keeps; `prune.experts` count `parts` each."""
    if prune.experts is None and prune.ratio is None:
        raise CompressionError("say how many experts to keep: either --experts N or --ratio R")
    asked = None if prune.experts is None else prune.experts * parts
    return resolve_count(model.architecture.layers, asked, prune.ratio)


def settle(prune: Prune, model: OpenModel, parts: int = 1) -> Wish:
    """Check count, protected experts and strategy: every refusal that needs no data. `experts` count `parts` each."""
    strategy = load_strategy(prune.strategy, prune.options)
    experts = kept_count(prune, model, parts)
    given_protected(prune.protect, model.architecture.layers, experts)
    return Wish(strategy, experts, prune.options, heads=chosen_heads(model, prune.mtp))


def needs_of(prune: Prune, model: OpenModel, steps: Sequence[Step], planned: bool) -> Needs:
    """What a prune step reads; raises `CompressionError` for what cannot be done."""
    split: Any = next((step for step in steps if step.name == "split"), None)
    parts = 1 if split is None else int(split.parts)
    if prune.sequential:
        refuse_shared_experts(model)
    wish = None if planned else settle(prune, model, parts)  # a plan's strategy need not be installed
    experts = kept_count(prune, model, parts)
    after = replace(served_model(model), experts=experts)
    warn_of_servers(served_model(model.whole or model), after, model.architecture.layers)
    if wish is None:
        return Needs(experts=experts)
    needs = wish.strategy.needs
    reads = needs_data(needs) or found_on_data(prune.protect)
    if split is not None:
        corrected = any(step.name == "correct" for step in steps)
        check_way(split.by, reads or corrected, "choose a strategy or a correction that reads it")
    return Needs(text=reads, heldout=int(needs_heldout(needs)), experts=experts)


def protected_experts(protect: Any, keep: int, planner: Planner) -> Protected:
    """The experts that a list names, or the hubs or central experts that the calibration shows."""
    layers = planner.model.architecture.layers
    if not found_on_data(protect):
        return given_protected(protect, layers, keep)
    attribution = planner.attribution()  # by all processes together
    found: Protected = here().broadcast(lambda: protect_found(attribution, layers, keep, central_of(protect)))
    return found


def planner_of(state: State) -> Planner:
    """The planner of the stage's model, whose routing attribution is run once for all steps."""
    key = f"planner {state.stage[0]}"
    if key not in state.shared:
        calibration = None if state.text is None else state.text.fit
        state.shared[key] = Planner(state.model, calibration, state.progress, state.seed)
    planner: Planner = state.shared[key]
    return planner


def plan_stage(prune: Prune, state: State, per_source: bool = False) -> list[dict[str, Any]]:
    """Decide for every layer, from one pass over the model, or in order where each layer sees the compressed ones.

    With `per_source` the decisions for all calibration sources together are followed by those for each source alone.
    """
    model, planner = state.model, planner_of(state)
    wish = settle(prune, model, state.parts)
    protected = protected_experts(prune.protect, wish.experts, planner)
    correct, reads = state.step_of("correct"), needs_data(wish.strategy.needs)
    if prune.sequential and planner.calibration is not None and (reads or correct is not None):
        files = None if state.work is None else state.cut()
        plans = [planner.plan_in_order(wish, correct, protected, files)]
    else:
        if state.observer is not None and not prune.sequential:  # which sees other inputs than the source's own
            wish = replace(wish, strategy=state.observer.planning(wish.strategy))
        if not reads:
            planner = replace(planner, calibration=None)
        plans = [planned.plan for planned in planner.plans([wish], protected, per_source, wish.heads)]
    return [decisions(replace(plan, mtp=said_of_heads(model, wish.heads))) for plan in plans]


def refuse_per_source(steps: Sequence[Step], sources: Sequence[str]) -> None:
    """Refuse plans for each source alone where there is one source only, or where each would need its own pass."""
    prune: Any = next((step for step in steps if step.name == "prune"), None)
    if prune is None:
        raise CompressionError("--per-source plans what a strategy prunes, and these steps do not; leave it out")
    if len(sources) < 2:
        raise CompressionError("--per-source needs several calibration sources; repeat --calibration for each")
    if prune.sequential:
        raise CompressionError(
            "--per-source plans from one pass and --sequential needs one for each plan; leave out one of them, or plan "
            "with --sequential for each source in turn"
        )


def refuse_sources_without_heldout(calibration: Calibration) -> None:
    """Refuse to plan for each source alone where one is too short to have any tokens held out."""
    held = {calibration.source_of(batch) for batch in calibration.heldout}
    for number, name in enumerate(calibration.source_names):
        if number not in held:
            raise CompressionError(
                f"calibration source {name} has too few sequences to hold some out and be planned for alone; raise "
                "--samples, give it a larger weight or more text, or leave out --per-source"
            )


def plan_sources(state: State) -> list[Plan]:
    """From one pass the plan for all calibration sources together, then one for each source alone, in their order.

    Attribution is run once, on all sources: its hubs are protected in every plan, and every plan heeds its figures.
    """
    text, number, prune = state.text, state.number_of("prune"), state.step_of("prune")
    assert text is not None and number is not None
    if text.identity.get("heldout"):
        refuse_sources_without_heldout(text.fit)
    sources = range(len(text.fit.weights))
    plans = plan_stage(prune, state, per_source=True)
    if len(plans) == 1:  # of a strategy that reads no text
        plans *= 1 + len(sources)
    identities = [text.identity, *(text.only(source).identity for source in sources)]
    return [
        replace(state.plan.with_entry(number, plan=plan), calibration=identity)
        for plan, identity in zip(plans, identities, strict=True)
    ]
