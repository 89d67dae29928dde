"""Compressing under a gate: the output is put in place only if it passes, alone or as the smallest that does.

What a search has tried is kept in the user's cache at once, so that one that was killed tries nothing twice. A trial is
the gate's result of one number of experts. It is found again only by all that decides it: the request, the source's
files, the tasks with their versions, margin, confidence, and the versions of the packages that compute.
"""

import logging
import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from compressor.api import compress
from compressor.checkpoint.source import ModelSource, find_model
from compressor.data.sources import domain_of
from compressor.distributed import held, ranks
from compressor.errors import CompressionError, RejectedError
from compressor.evaluation.evaluate import PACKAGES, REPORT, plan_evaluation
from compressor.evaluation.gate import GateRequest, Outlook, check_readings, outlook, passable, run_gate
from compressor.evaluation.gate_report import LONE_HALVES, gate_json, read_gate
from compressor.evaluation.gate_verdict import GateResult, gate_content, gate_from_content
from compressor.evaluation.tasks import EvaluationTask, resolve_tasks
from compressor.model.inspection import read_headers
from compressor.model.moe_layer import counts_below
from compressor.model.opened import OpenModel, open_checkpoint, open_model
from compressor.pipeline.outcome import Outcome
from compressor.pipeline.task import content_of, of_stage, sources_of
from compressor.progress import Progress, Silent
from compressor.recipe.recipe import Recipe
from compressor.recipe.steps_plan import Plan
from compressor.records import read_object
from compressor.run_record import (
    COMPRESSION,
    answers,
    cache_folder,
    read_cached,
    record_request,
    request_key,
    versions,
    write_cached,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One model that went through the gate."""

    experts: int
    result: GateResult
    accepted: bool


@dataclass(frozen=True, slots=True)
class Gated:
    """What came of it: the outcome of the output that was left in place, if one was, and all attempts in order."""

    outcome: Outcome | None
    attempts: tuple[Attempt, ...]

    @property
    def decisive(self) -> Attempt:
        """The attempt whose model is in place; the last one if none is."""
        accepted = [attempt for attempt in self.attempts if attempt.accepted]
        return accepted[-1] if accepted else self.attempts[-1]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is known before anything is compressed."""

    recipe: Recipe
    source: ModelSource
    gate: GateRequest  # of a search, with the confidence of each model that it tries
    tasks: tuple[EvaluationTask, ...]
    outlook: Outlook  # what the gate can show
    opened: OpenModel | None  # of a search
    counts: Sequence[int]  # numbers of experts to search in


def prepare_gate(
    recipe: Recipe,
    gate: GateRequest,
    *,
    search: bool = False,
    device: str = "auto",
    progress: Progress | None = None,
) -> Prepared:
    """Look up model, tasks, numbers of experts and what the gate can show.

    Raises `CompressionError` for a gate that not even an identical model passes, and for what the base cannot answer.
    """
    if search:
        check_search(recipe)
    source = find_model(str(recipe.model), recipe.revision, progress or Silent())
    recipe = recipe.model_copy(update={"revision": source.revision})
    tasks = ranks().first_before_others(lambda: resolve_tasks(gate.options))
    opened = open_model(source, recipe.dtype, device) if search else None
    counts = [] if opened is None else possible_counts(opened, recipe)
    gate = shared_among(gate, counts) if counts else gate
    found = passable(outlook(tasks, gate))
    plan_evaluation(source, tasks, gate.options, gate.cache)
    check_readings(source, gate)
    return Prepared(recipe, source, gate, tasks, found, opened, counts)


def largest_tried(recipe: Recipe, gate: GateRequest) -> tuple[Recipe, GateRequest]:
    """The largest model that a search may try and the gate that it has to pass, from headers alone: for a dry run."""
    check_search(recipe)
    source, checkpoint = read_headers(str(recipe.model), recipe.revision)
    counts = possible_counts(open_checkpoint(source, checkpoint, recipe.dtype, "cpu"), recipe)
    return with_experts(recipe, counts[-1]), shared_among(gate, counts)


def check_search(recipe: Recipe) -> None:
    """Refuse a search for a number of experts that is given, or that no step takes."""
    prune: Any = next((step for step in recipe.steps if step.name == "prune"), None)
    if prune is None or prune.experts is not None or prune.ratio is not None:
        raise CompressionError("--search finds the number of experts; leave out --experts and --ratio")


def shared_among(gate: GateRequest, counts: Sequence[int]) -> GateRequest:
    """The gate of each model of a search, whose confidence holds for all that it tries together (Bonferroni)."""
    return replace(gate, confidence=1 - (1 - gate.confidence) / math.ceil(math.log2(len(counts) + 1)))


def with_experts(recipe: Recipe, count: int) -> Recipe:
    """The recipe with this number of experts."""
    steps = (step.model_copy(update={"experts": count}) if step.name == "prune" else step for step in recipe.steps)
    return recipe.model_copy(update={"steps": tuple(steps)})


def compress_gated(
    recipe: Recipe,
    out: str | Path,
    gate: GateRequest,
    *,
    keep_failed: bool = False,
    search: bool = False,
    overwrite: bool = False,
    progress: Progress | None = None,
    device: str = "auto",
    after: Callable[[Path], None] | None = None,
    terms: str | None = None,
    command: Sequence[str] | None = None,
    announce: Callable[[Outlook], None] | None = None,
) -> Gated:
    """Compress, gate, and leave the output in place only if it passes.

    `announce` gets what the gate can show, before any work. `after` may add to an output that is about to be put in
    place; with `terms`, which say what it adds, an output of this very request that is in place already is taken as it
    is.
    With `search` the number of experts is bisected for the smallest model that passes. What it has tried is remembered,
    so that one which was killed tries nothing twice.
    """
    if search and keep_failed:
        raise CompressionError("--search keeps what passes; leave out --keep-failed")
    listener, target = progress or Silent(), Path(out)
    ready = prepare_gate(recipe, gate, search=search, device=device, progress=listener)
    recipe, source, gate, tasks = ready.recipe, ready.source, ready.gate, ready.tasks
    known = after is None or terms is not None
    of_tasks = [(task.name, task.version) for task in tasks]
    judged = [_gate_facts(gate), of_tasks, gate.inconclusive, keep_failed, terms]
    whole, begun = "", False  # key of a search, whose outputs may replace each other; whether one is in place
    attempts: list[Attempt] = []
    outcomes: dict[int, Outcome] = {}  # by experts, 0 without a search; the last one is in place

    def accepts(result: GateResult) -> bool:
        return gate.counted(result.verdict) == "pass"

    def passes(tried: Recipe, count: int = 0, trial: str = "") -> bool:
        """Compress and gate; with a search, `count` experts under the key `trial`."""

        def judge(folder: Path) -> None:
            result = run_gate(source, ModelSource(str(folder), None, folder), tasks, gate, listener, label=target.name)
            experts = Plan.from_dict(read_object(folder / COMPRESSION)["plan"]).expert_plan.experts
            # from here on a rank that rejects may clear the folder
            accepted = ranks().broadcast(lambda: accepts(result))
            attempts.append(Attempt(count or experts, result, accepted))
            if ranks().is_first:
                (folder / REPORT).write_text(gate_json(result), encoding="utf-8", errors=LONE_HALVES)
                if trial:  # where it can't be cached, a killed search merely tries it again
                    write_cached(_trial_file(trial), gate_content(result))
            if not (keep_failed or accepted):
                raise RejectedError(f"{target} did not pass the gate ({result.verdict}) and was not written")
            if after is not None:
                after(folder)
            if trial and ranks().is_first:
                record_request(folder, whole)
                record_request(folder, trial)

        before, again = len(attempts), begun and ranks().broadcast(lambda: answers(target, trial))
        with suppress(RejectedError):
            outcome = compress(
                tried,
                out,
                overwrite=overwrite or (not again and (begun or bool(outcomes))),
                progress=listener,
                device=device,
                accept=judge,
                terms=request_key(judged) if known else None,
                command=command,
            )
            outcomes.pop(count, None)
            outcomes[count] = outcome
            if len(attempts) == before:  # it is in place since an earlier run of this command, and was judged then
                result = read_gate(target / REPORT)
                attempts.append(Attempt(count or outcome.experts_after, result, accepts(result)))
        return attempts[-1].accepted

    with held(target):
        if announce is not None:
            announce(ready.outlook)
        if (opened := ready.opened) is None:
            passes(recipe)
            return Gated(outcomes.get(0), tuple(attempts))
        plain = recipe.model_dump(mode="json", exclude={"steps", "model", "gate"})
        texts = [content_of(entry.source) for entry in sources_of(recipe.calibration)]
        of_recipe = [plain, texts, [[step.name, step.to_dict()] for step in recipe.steps]]
        facts = [opened.fingerprint, opened.checkpoint.stamp(), str(opened.partial.device), of_recipe]
        whole = request_key(facts, judged)
        begun = known and ranks().broadcast(lambda: answers(target, whole))

        def trial_of(count: int) -> str:
            return request_key("trial", [*facts, count], _gate_facts(gate), versions(PACKAGES), (of_tasks, terms))

        def tries(count: int) -> bool:
            if (cached := _cached_trial(trial_of(count))) is None:
                return passes(with_experts(recipe, count), count, trial_of(count))
            attempts.append(Attempt(count, cached, accepts(cached)))
            return attempts[-1].accepted

        least = smallest(ready.counts, tries)
        if least is not None and least != next(reversed(outcomes), None):
            # it passed before the search was killed, and may not have come into its place
            attempts[:] = [attempt for attempt in attempts if attempt.experts != least]
            passes(with_experts(recipe, least), least, trial_of(least))
    return Gated(outcomes[next(reversed(outcomes))] if outcomes else None, tuple(attempts))


def _gate_facts(gate: GateRequest) -> dict[str, Any]:
    """What decides a verdict beside models and tasks; streaming does not, nor where results are kept."""
    plain = replace(gate, options=replace(gate.options, stream=None))
    facts = {name: value for name, value in asdict(plain).items() if name not in ("cache", "inconclusive")}
    reads = () if gate.judging is None else (*gate.judging.texts, *gate.judging.answers)
    return {**facts, "read": [content_of(domain_of(each)[0]) for each in reads]}


def _trial_file(key: str) -> Path:
    return cache_folder("trials") / f"{key}.json"


def _cached_trial(key: str) -> GateResult | None:
    """The result in the cache, read by the first rank for all; None if there is none that can be read."""
    content = ranks().broadcast(lambda: read_cached(_trial_file(key)))
    try:
        return None if content is None else gate_from_content(content)
    except CompressionError as error:
        logger.debug("the trial %s is ignored: %s", _trial_file(key), error)
        return None


def smallest(counts: Sequence[int], passes: Callable[[int], bool]) -> int | None:
    """The smallest of ascending `counts` that passes, if larger ones do whenever a smaller one does; None if none."""
    first = bisect_left(counts, True, key=passes)
    return counts[first] if first < len(counts) else None


def possible_counts(model: OpenModel, recipe: Recipe) -> list[int]:
    """Numbers of the source's experts that every layer can be cut to."""
    seen, parts = model, 1
    stage = of_stage(recipe.steps, 0)
    for step in stage:
        resolved = step.step().resolve(model, stage)
        if resolved is not None:
            seen, parts = resolved.model_view(seen), parts * int(getattr(resolved, "parts", 1))
    layers = seen.architecture.layers
    counts = [count // parts for count in counts_below(layers) if count % parts == 0]
    if not counts:
        raise CompressionError(f"no number of experts below {layers[0].experts // parts} works; nothing to search")
    return counts
