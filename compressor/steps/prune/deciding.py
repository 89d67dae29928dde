"""From the options of `prune` to a plan of every layer, on the model that a run has opened."""

from collections.abc import Callable, Mapping, Sequence
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
from compressor.steps.prune.attributed import Steering
from compressor.steps.prune.planning import Wish, make_plan_in_order, make_plans
from compressor.steps.prune.protecting import Protected, given_protected, protect_found
from compressor.steps.prune.step import Prune
from compressor.steps.split.dealing import check_way
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
    layers = model.architecture.layers
    experts = kept_count(prune, model, parts)
    given_protected(prune.protect, layers, experts)
    return Wish(strategy, experts, prune.options, heads=chosen_heads(model, prune.mtp))


def needs_of(prune: Prune, model: OpenModel, steps: Sequence[Step], planned: bool) -> Needs:
    """What a prune step reads; raises `CompressionError` for what cannot be done."""
    parts = next((int(getattr(step, "parts", 1)) for step in steps if step.name == "split"), 1)
    if prune.sequential:
        refuse_shared_experts(model)
    wish = None if planned else settle(prune, model, parts)  # a plan's strategy need not be installed
    experts = kept_count(prune, model, parts)
    after = replace(served_model(model), experts=experts)
    warn_of_servers(served_model(model.whole or model), after, model.architecture.layers)
    if wish is None:
        return Needs(experts=experts)
    needs = wish.strategy.needs
    reads = needs_data(needs) or prune.protects_what_data_shows
    split: Any = next((step for step in steps if step.name == "split"), None)
    if split is not None:
        corrected = any(step.name == "correct" for step in steps)
        check_way(split.by, reads or corrected, "choose a strategy or a correction that reads it")
    return Needs(text=reads, heldout=int(needs_heldout(needs)), experts=experts)


def protected_experts(prune: Prune, keep: int, steering: Steering) -> Protected:
    """The experts that a list names, or the hubs or central experts that the calibration shows."""
    layers = steering.model.architecture.layers
    if prune.protects_what_data_shows:
        attribution = steering.attribution()  # by all processes together
        return _of_first(lambda: protect_found(attribution, layers, keep, prune.central))
    return given_protected(prune.protect, layers, keep)


def _of_first(found: Callable[[], Protected]) -> Protected:
    said = here().broadcast(lambda: {name: sorted(experts) for name, experts in found().items()})
    return {name: frozenset(experts) for name, experts in said.items()}


def attributed(state: State, calibration: Calibration | None) -> Steering:
    """The routing attribution of the stage's model, run when it is first asked for."""
    key = f"attribution {state.stage[0]}"
    if key not in state.shared:
        state.shared[key] = Steering(state.model, calibration, state.progress, state.seed)
    found: Steering = state.shared[key]
    return found


def plan_stage(prune: Prune, state: State) -> Mapping[str, Any]:
    """Decide for every layer, from one pass over the model, or in order where each layer sees the compressed ones."""
    model, calibration = state.model, None if state.text is None else state.text.fit
    wish = settle(prune, model, state.parts)
    steering = attributed(state, calibration)
    protected = protected_experts(prune, wish.experts, steering)
    correct = state.step_of("correct")
    if prune.sequential and calibration is not None and (needs_data(wish.strategy.needs) or correct is not None):
        made = make_plan_in_order(
            model,
            wish,
            calibration,
            correct,
            state.progress,
            state.seed,
            protected,
            None if state.work is None else state.cut(),
            steering,
        )
    else:
        if state.observer is not None and not prune.sequential:  # which sees other inputs than the source's own
            wish = replace(wish, strategy=state.observer.planning(wish.strategy))
        data = calibration if needs_data(wish.strategy.needs) else None
        found = make_plans(model, [wish], data, state.progress, state.seed, protected, False, steering, wish.heads)
        made = found[0].plan
    return decisions(replace(made, mtp=said_of_heads(model, wish.heads)))


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
    text, number = state.text, state.number_of("prune")
    assert number is not None
    prune = state.step_of("prune")
    if text is None:
        raise CompressionError(
            f"strategy {prune.strategy!r} reads no calibration data, so all sources would get the same plan; leave "
            "out --per-source"
        )
    before = [each for each in state.stage if each < number]
    for each in state.stage:
        state.model = state.steps[each - state.first].view(state.model)
    for each in before:
        state.number = each
        decided = dict(state.steps[each - state.first].plan(state))
        state.plan = state.plan.with_entry(each, plan=decided)
        state.steps[each - state.first].take(decided, state)
    calibration, model = text.fit, state.model
    wish = settle(prune, model, state.parts)
    if text.identity.get("heldout"):
        refuse_sources_without_heldout(calibration)
    steering = attributed(state, calibration)
    protected = protected_experts(prune, wish.experts, steering)
    data = calibration if needs_data(wish.strategy.needs) else None
    made = make_plans(model, [wish], data, state.progress, state.seed, protected, True, steering, wish.heads)
    alone = range(len(text.fit.weights))
    if data is None:
        made = [made[0]] * (1 + len(alone))
    identities = [text.identity, *(text.only(source).identity for source in alone)]
    return [
        replace(
            state.plan.with_entry(number, plan=decisions(replace(planned.plan, mtp=said_of_heads(model, wish.heads)))),
            calibration=identity,
        )
        for planned, identity in zip(made, identities, strict=True)
    ]
