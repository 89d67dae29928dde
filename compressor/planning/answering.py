"""The plan that answers a request, on the model that a run has opened."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from compressor.data import batches
from compressor.data.batches import Calibration
from compressor.distributed.present import here
from compressor.errors import CompressionError
from compressor.files import replacing
from compressor.model.opened import OpenModel, refuse_shared_experts, resolve_count, shared_experts
from compressor.model.served import served_model, warn_of_servers
from compressor.planning import make
from compressor.planning.afterwards import check_afterwards, with_afterwards
from compressor.planning.heads import chosen_heads, said_of_heads
from compressor.planning.make import Wish
from compressor.planning.protecting import Protected, given_protected, protect_found
from compressor.planning.request import Request
from compressor.planning.run import Run
from compressor.planning.steering import Steering
from compressor.recipe.plan import CompressionPlan
from compressor.recipe.registry import load_strategy
from compressor.records import read_object
from compressor.statistics.statistics import needs_data
from compressor.steps.correct.refit import CONSTANTS, Correction
from compressor.steps.split.dealing import check_way, dealt
from compressor.steps.split.opening import seen_as

logger = logging.getLogger(__name__)

PLAN = "plan.json"  # in a run's hidden folder
HELDOUT = 0.125  # share of the calibration sequences that judge a plan or a correction and make none


def seen(model: OpenModel, request: Request) -> OpenModel:
    """The model as it is to be compressed: split, and with the top-k that is to be written; neurons in no order yet."""
    return seen_as(model, request.split or 1, request.top_k)


def settle(model: OpenModel, request: Request) -> Wish:
    """Check count and protected experts, load the strategy, settle the correction: every refusal that needs no data."""
    for option, given in {
        "--experts-total": request.experts_total is not None,
        "--budget": request.budget is not None,
        f"--correct {request.correct}": request.correct == CONSTANTS,
    }.items():
        if given:
            raise CompressionError(f"{option} is for constants in the place of experts; pass --format mone with it")
    strategy = load_strategy(request.strategy, request.options)
    experts = resolve_count(model.architecture.layers, request.experts, request.ratio)
    given_protected(request.protect, model.architecture.layers, experts)
    method = strategy.correction if request.correct is None else request.correct
    correction = Correction(method, deterministic=request.deterministic)
    if request.sequential or request.correct not in (None, "none"):
        refuse_shared_experts(model)
    elif correction.wanted and (shared := shared_experts(model)):
        logger.warning("%s shares its experts with another layer, so nothing is corrected", shared)
        correction = Correction()
    check_afterwards(model, request)
    wish = Wish(strategy, experts, request.options, correction, chosen_heads(model, request.mtp))
    reads = wish.reads or request.protects_what_data_shows
    check_way(request.split_by, reads or not model.is_split, "choose a strategy or a correction that reads it")
    after = replace(served_model(model), experts=experts)
    warn_of_servers(served_model(model.whole or model), after, model.architecture.layers)
    return wish


def read_calibration(model: OpenModel, request: Request, heldout: bool, reserve: int = 0) -> Calibration:
    """The calibration that is asked for, a part of it held out where plans or corrections are to be judged."""
    made = batches.calibrate(
        request.sources,
        batches.load_tokenizer(model.source.folder),
        samples=request.samples,
        length=request.sequence_length,
        seed=request.seed,
        vocab=model.vocabulary,
        heldout=HELDOUT if heldout else 0.0,
        reserve=reserve,
    )
    here().agreed(made.identity["sha256"], "calibration text")
    return made


def protected_experts(request: Request, keep: int, steering: Steering) -> Protected:
    """The experts that a list names, or the hubs or central experts that the calibration shows, as was asked for."""
    layers = steering.model.architecture.layers
    if request.protects_what_data_shows:
        attribution = steering.attribution()  # by all ranks together
        return _told(lambda: protect_found(attribution, layers, keep, request.central))
    return given_protected(request.protect, layers, keep)


def _told(found: Callable[[], Protected]) -> Protected:
    """What the first rank finds."""
    said = here().told(lambda: {name: sorted(experts) for name, experts in found().items()})
    return {name: frozenset(experts) for name, experts in said.items()}


def needed_calibration(model: OpenModel, request: Request, wish: Wish) -> Calibration | None:
    """The calibration that is asked for, where anything of the wish reads it."""
    if wish.reads or request.protects_what_data_shows:
        return read_calibration(model, request, wish.holds_out)
    return None


def plan_request(
    run: Run, request: Request, wish: Wish | None = None, calibration: Calibration | None = None
) -> tuple[CompressionPlan, Calibration | None]:
    """The plan that is asked for, and the calibration that was read for it.

    `wish` is the request, if settled before, and `calibration` what it needs, if read before. The run's folder keeps
    the layers that a plan in order has cut.
    """
    if request.constants:
        from compressor.planning.constants import plan_constants  # which stands on this module

        return plan_constants(run, request)[:2]
    wish = wish or settle(run.model, request)
    if calibration is None:
        calibration = needed_calibration(run.model, request, wish)
    model = _dealt(run, request, wish, calibration)
    steering = Steering(model, calibration, run.progress, request.seed)
    protected = protected_experts(request, wish.experts, steering)
    if request.sequential and wish.reads and calibration is not None:
        made = make.make_plan_in_order(
            model, wish, calibration, wish.correction, run.progress, request.seed, protected, run.cut, steering
        )
    else:
        data = calibration if needs_data(wish.strategy.needs) else None
        made = make.make_plan(
            model,
            wish.strategy,
            wish.experts,
            request.options,
            data,
            run.progress,
            request.seed,
            protected,
            steering,
            wish.heads,
        )
    corrected = _with_correction(made, model, wish, calibration)
    return with_afterwards(corrected, model, request, calibration), calibration


def _dealt(run: Run, request: Request, wish: Wish, calibration: Calibration | None) -> OpenModel:
    """The run's model, from now on with its neurons in order where experts are split."""
    if run.model.is_split:
        kept = None if run.folder is None else run.folder / f"split-{run.digest[:16]}.safetensors"
        changed = wish.correction.wanted or request.recovers
        run.model = dealt(run.model, calibration, request.split_by, run.progress, request.seed, kept, changed)
    return run.model


def kept_plan(run: Run) -> CompressionPlan | None:
    """The plan that an interrupted run of the same request kept, if there is one."""
    assert run.folder is not None
    kept = run.folder / PLAN
    resumed = here().told(lambda: _resumed(kept, run.digest))
    return None if resumed is None else CompressionPlan.from_dict(resumed, str(kept))


def keep_plan(run: Run, made: CompressionPlan) -> None:
    """Keep a plan for a run that goes on with this one."""
    assert run.folder is not None
    run.folder.mkdir(exist_ok=True)
    if here().is_first:
        kept = run.folder / PLAN
        with replacing(kept, kept.with_suffix(".new")) as fresh:
            fresh.write_text(json.dumps({"request": run.digest, "plan": made.to_dict()}), encoding="utf-8")


def _resumed(kept: Path, digest: str) -> dict[str, Any] | None:
    """The plan of this request as an interrupted run has kept it; None where there is none that can be read."""
    if kept.is_file():
        try:
            content = read_object(kept)
            if content.get("request") == digest:
                return CompressionPlan.from_dict(content["plan"], str(kept)).to_dict()
        except (OSError, KeyError, CompressionError):
            pass  # an unreadable leftover is no reason to fail: plan again
    return None


def refuse_per_source(request: Request) -> None:
    """Refuse plans for each source alone where there is one source only, or where each would need its own pass."""
    if request.constants:
        raise CompressionError("--format mone makes one plan for all calibration sources; leave out --per-source")
    if len(request.sources) < 2:
        raise CompressionError("--per-source needs several calibration sources; repeat --calibration for each")
    if request.sequential:
        raise CompressionError(
            "--per-source plans from one pass and --sequential needs one for each plan; leave out one of them, or plan "
            "with --sequential for each source in turn"
        )


def refuse_unjudged_sources(calibration: Calibration) -> None:
    """Refuse to plan for each source alone where one is too short to have any tokens held out."""
    judged = {calibration.source_of(batch) for batch in calibration.heldout}
    for number, name in enumerate(calibration.source_names):
        if number not in judged:
            raise CompressionError(
                f"calibration source {name} has too few sequences to hold some out and be planned for alone; raise "
                "--samples, give it a larger weight or more text, or leave out --per-source"
            )


def plan_sources(run: Run, request: Request) -> list[CompressionPlan]:
    """From one pass the plan for all calibration sources together, then one for each source alone, in their order.

    Attribution is run once, on all sources: its hubs are protected in every plan, and every plan heeds its figures.
    """
    wish = settle(run.model, request)
    if not wish.reads:
        raise CompressionError(
            f"strategy {request.strategy!r} reads no calibration data, so all sources would get the same plan; leave "
            "out --per-source"
        )
    calibration = read_calibration(run.model, request, wish.holds_out)
    model = _dealt(run, request, wish, calibration)
    if wish.holds_out:
        refuse_unjudged_sources(calibration)
    steering = Steering(model, calibration, run.progress, request.seed)
    protected = protected_experts(request, wish.experts, steering)
    reads = needs_data(wish.strategy.needs)
    data = calibration if reads else None
    made = make.make_plans(model, [wish], data, run.progress, request.seed, protected, True, steering, wish.heads)
    alone = [calibration.only(number) for number in range(len(request.sources))]
    plans = [planned.plan for planned in made] if reads else [made[0].plan] * (1 + len(alone))
    return [
        with_afterwards(_with_correction(plan, model, wish, data), model, request, calibration)
        for plan, data in zip(plans, [calibration, *alone], strict=True)
    ]


def _with_correction(
    plan: CompressionPlan, model: OpenModel, wish: Wish, calibration: Calibration | None
) -> CompressionPlan:
    """The plan, naming the data that was read, and asking for a correction in the dtype that the model is open in.

    It says, too, what is done with multi-token-prediction heads.
    """
    plan, correction = replace(plan, mtp=said_of_heads(model, wish.heads)), wish.correction
    if calibration is None:
        return plan
    named = replace(plan, calibration=plan.calibration or calibration.identity)
    if not correction.wanted:
        return named
    asked = {**correction.to_dict(), "dtype": model.dtype_name}
    return replace(named, correction=asked)
