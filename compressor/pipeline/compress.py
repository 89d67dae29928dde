"""A whole recipe: steps, formats and gate, and the search for the smallest model that passes it.

The search bisects the number of experts. Each trial, the gate's result for one number of experts,
is stored in the user's cache at once, so that a killed search repeats none. Its key covers
everything that decides it: the request, the source's files, the tasks with their versions, margin,
confidence, and the versions of the packages that compute."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compressor.answers.stock import PACKAGES
from compressor.checkpoint.source import find_model
from compressor.distributed import held, ranks
from compressor.errors import CompressionError
from compressor.files import check_folder
from compressor.model.inspection import read_headers
from compressor.model.moe_layer import counts_below
from compressor.model.opened import OpenModel, open_checkpoint, open_model
from compressor.pipeline.formats import formats_of
from compressor.pipeline.gate import PreparedGate, prepare_gate, request_of
from compressor.pipeline.outcome import Attempt, GateFailedError, Outcome
from compressor.pipeline.resolve import content_of, sources_of
from compressor.pipeline.run import Delivery, run
from compressor.progress import Silent
from compressor.quality_gate.report import NAMES, write_gate
from compressor.quality_gate.run import GateRequest, PowerAnalysis
from compressor.quality_gate.verdict import EXIT_STATUS, GateResult, gate_from_content
from compressor.recipe.recipe import Recipe
from compressor.run_record import answers, cache_folder, read_cached, request_key, versions
from compressor.steps.prune.options import Prune

logger = logging.getLogger(__name__)


def largest_tried(recipe: Recipe, request: GateRequest) -> tuple[Recipe, GateRequest]:
    """Return the recipe of the largest model that a search may try, and its gate; only headers are
    read."""
    source, checkpoint = read_headers(str(recipe.model), recipe.revision)
    counts = possible_counts(open_checkpoint(source, checkpoint, recipe.dtype, "cpu"), recipe)
    return with_experts(recipe, counts[-1]), shared_among(request, counts)


def check_search(recipe: Recipe) -> Prune:
    """Return the step whose number of experts a search finds; raises `CompressionError` if the
    number is given, or no step takes one."""
    if recipe.gate is not None and recipe.gate.keep_failed:
        raise CompressionError("--search keeps what passes; leave out --keep-failed")
    prune = next((step for step in recipe.steps if isinstance(step, Prune)), None)
    if prune is None or prune.is_sized:
        raise CompressionError(
            "--search finds the number of experts; leave out --experts and --ratio"
        )
    return prune


def possible_counts(model: OpenModel, recipe: Recipe) -> list[int]:
    """Return the numbers of experts, counted as the source does, that every layer can be cut to;
    raises `CompressionError` as `check_search` does."""
    prune = check_search(recipe)
    layers = prune.step().resolve(model).view(model).architecture.layers
    parts = layers[0].parts
    counts = [count // parts for count in counts_below(layers) if count % parts == 0]
    if not counts:
        raise CompressionError(
            f"no number of experts below {layers[0].experts // parts} works; nothing to search"
        )
    return counts


def search_facts(model: OpenModel, recipe: Recipe) -> list[Any]:
    """Return everything that decides the models of a search, apart from the gate and the number of
    experts."""
    options = recipe.model_dump(mode="json", exclude={"steps", "model", "gate"})
    texts = [content_of(entry.source) for entry in sources_of(recipe.calibration)]
    steps = [[step.name, step.to_dict()] for step in recipe.steps]
    return [
        model.fingerprint,
        model.checkpoint.stamp(),
        str(model.partial.device),
        options,
        texts,
        steps,
    ]


def shared_among(request: GateRequest, counts: Sequence[int]) -> GateRequest:
    """Return the gate for each model of a search, at a confidence that holds for all trials
    together (Bonferroni)."""
    tries = math.ceil(math.log2(len(counts) + 1))
    confidence = 1 - (1 - request.options.confidence) / tries
    return replace(request, options=request.options.model_copy(update={"confidence": confidence}))


def with_experts(recipe: Recipe, count: int) -> Recipe:
    """Return the recipe whose first pruning keeps this number of experts."""
    steps = list(recipe.steps)
    first = next(number for number, step in enumerate(steps) if isinstance(step, Prune))
    steps[first] = steps[first].model_copy(update={"experts": count})
    return recipe.model_copy(update={"steps": tuple(steps)})


def next_count(counts: Sequence[int], attempts: Sequence[Attempt]) -> int | None:
    """Return the number of experts to try next, if any; larger models are assumed to pass if a
    smaller one does."""
    failed = max((attempt.experts for attempt in attempts if not attempt.accepted), default=0)
    passed = min(
        (attempt.experts for attempt in attempts if attempt.accepted), default=counts[-1] + 1
    )
    untried = [count for count in counts if failed < count < passed]
    return untried[len(untried) // 2] if untried else None


def try_recipe(
    recipe: Recipe, delivery: Delivery, gate: PreparedGate
) -> tuple[Attempt, Outcome | None]:
    """Carry out a recipe under a gate; return the attempt, and the outcome if the output was put in
    place."""
    try:
        outcome = run(recipe, replace(delivery, gate=gate))
    except GateFailedError as error:
        return error.attempts[-1], None
    assert outcome.gate is not None
    return Attempt(outcome.experts_after, outcome.gate, gate.accepts(outcome.gate)), outcome


def search_smallest(
    recipe: Recipe,
    delivery: Delivery,
    gate: PreparedGate,
    counts: Sequence[int],
    facts: Sequence[Any],
) -> tuple[list[Attempt], Outcome | None]:
    """Search for the smallest model that passes, and leave it in place; return all attempts and its
    outcome.

    `counts` are the numbers of experts to search, ascending; `facts` are everything else that
    decides a model."""
    formats = formats_of(recipe)
    # outputs that answer the request may replace each other
    key = request_key(facts, gate.key, formats)
    # the output in place is from this search
    is_ours = ranks().broadcast(lambda: answers(delivery.out, key))

    def trial_key(count: int) -> str:
        """Return the SHA-256 of everything that decides the result of one number of experts."""
        tasks = gate.task_versions, formats
        return request_key("trial", facts, count, gate.facts, versions(PACKAGES), tasks)

    def compress_to(count: int) -> tuple[Attempt, Outcome | None]:
        trial = trial_key(count)
        is_this = is_ours and ranks().broadcast(lambda: answers(delivery.out, trial))
        overwrite = delivery.overwrite or (is_ours and not is_this)
        changed = replace(delivery, overwrite=overwrite, requests=(key, trial))
        attempt, outcome = try_recipe(
            with_experts(recipe, count), changed, replace(gate, trial=_trial_file(trial))
        )
        return replace(attempt, experts=count), outcome

    attempts = list[Attempt]()
    outcome = None
    in_place = 0  # the outcome's number of experts
    count = next_count(counts, attempts)
    while count is not None:
        result = _cached_trial(trial_key(count))
        if result is not None:
            attempts.append(Attempt(count, result, gate.accepts(result)))
        else:
            attempt, finished = compress_to(count)
            attempts.append(attempt)
            if finished is not None:
                outcome = finished
                in_place = count
                is_ours = True
        count = next_count(counts, attempts)
    smallest = next((attempt for attempt in reversed(attempts) if attempt.accepted), None)
    if smallest is not None and smallest.experts != in_place:
        # it passed before an earlier search was killed, which may not have put it in place
        attempt, finished = compress_to(smallest.experts)
        outcome = finished or outcome
        attempts.remove(smallest)
        attempts.append(attempt)
    return attempts, outcome


def _trial_file(key: str) -> Path:
    return cache_folder("trials") / f"{key}.json"


def _cached_trial(key: str) -> GateResult | None:
    """Return the result in the cache, read by the first rank for all; None if there is none that
    can be read."""
    content = ranks().broadcast(lambda: read_cached(_trial_file(key)))
    try:
        return None if content is None else gate_from_content(content)
    except CompressionError as error:
        logger.debug("the trial %s is ignored: %s", _trial_file(key), error)
        return None


def carry_out(
    recipe: Recipe, delivery: Delivery, announce: Callable[[PowerAnalysis], None] | None = None
) -> Outcome:
    """Carry out a recipe; with a gate, put the output in place only if it passes.

    `gate.search` bisects the number of experts for the smallest model that passes. Reports of the
    gate go to OUT.gate. `announce` gets the gate's power analysis before any work. Raises
    `GateFailedError` if the gate is not passed."""
    options = recipe.gate
    if options is None:
        return run(recipe, delivery)
    if options.search:
        check_search(recipe)
    request = request_of(recipe, delivery.device)
    reports = delivery.out.with_name(f"{delivery.out.name}.gate")
    ranks().broadcast(lambda: check_folder(reports, NAMES, overwrite=True))
    source = find_model(str(recipe.model), recipe.revision, delivery.progress or Silent())
    recipe = recipe.model_copy(update={"revision": source.revision})
    counts = []
    facts = []
    if options.search:
        model = open_model(source, recipe.dtype, delivery.device)
        counts = possible_counts(model, recipe)
        facts = search_facts(model, recipe)
        request = shared_among(request, counts)
    gate = prepare_gate(source, request)
    with held(delivery.out):
        if announce is not None:
            announce(gate.power)
        if options.search:
            attempts, outcome = search_smallest(recipe, delivery, gate, counts, facts)
        else:
            attempt, outcome = try_recipe(recipe, delivery, gate)
            attempts = [attempt]
    decisive = attempts[-1]
    if outcome is not None:
        decisive = next((attempt for attempt in reversed(attempts) if attempt.accepted), decisive)
    written = write_gate(decisive.result, reports, overwrite=True) if ranks().is_first else []
    if outcome is None or not decisive.accepted:
        status = EXIT_STATUS[options.counted(decisive.result.verdict)]
        raise GateFailedError(delivery.out, attempts, status, outcome, written)
    return replace(outcome, attempts=tuple(attempts), reports=tuple(written))
