"""The one runner: a recipe's steps on a model, stage by stage, each kept as soon as it is done.

settle steps, refuse what cannot be ─► is the output in place? ─► hold the work folder ─► read text once
─► each stage: decide (plan), refit in order, write layer files ─► or change the whole model
─► assemble ─► verify ─► accept (gate, formats) ─► rename into place ─► record
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from compressor.checkpoint.reader import Size
from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.files import alone, clear, work_folder
from compressor.memory import PeakMemory
from compressor.model.opened import OpenModel, open_alike
from compressor.model.verification import check_carried
from compressor.pipeline.making import Stage, make_all
from compressor.pipeline.outcome import Outcome, read_outcome, record_of, servers_of
from compressor.pipeline.run_context import find_model, open_run
from compressor.pipeline.task import Task, filled, first_state, prepare
from compressor.progress import Progress
from compressor.recipe.recipe import RECIPE, Recipe, recipe_yaml
from compressor.recipe.steps_plan import Plan
from compressor.records import read_object
from compressor.run_record import COMPRESSION, RunRecord, answers, note_request, record_run, request_key, tell_in_place
from compressor.steps.correct.heads import acceptance_of
from compressor.steps.state import Observer, State
from compressor.surgery.job import left_out_of, output_size
from compressor.workdir.workdir import assemble, check_space, check_target, held, publish

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Terms:
    """Where an output goes and what it has to stand up to."""

    out: Path
    overwrite: bool = False
    accept: Callable[[Path], None] | None = None  # gets the verified output; raises what speaks against it
    terms: str | None = None  # what `accept` does, in words that change when that does; None: not known
    command: Sequence[str] | None = None  # the command line, for the record of the run


def run(
    recipe: Recipe,
    terms: Terms,
    *,
    plan: Plan | None = None,
    device: str = "auto",
    progress: Progress | None = None,
    observer: Observer | None = None,
) -> Outcome:
    """Carry out a recipe, or the `plan` that names its decisions; an interrupted run goes on when called again.

    Where the output of this very request is in place already, nothing is written. Raises `CompressionError` for
    everything that a user can mend, and then leaves nothing behind.
    """
    assert recipe.model is not None
    deterministic = any(getattr(step, "deterministic", False) for step in recipe.steps)
    with open_run(recipe.model, recipe.revision, recipe.dtype, device, progress, deterministic) as opened:
        model, clock = opened.model, opened.clock
        with clock.phase("open"):
            base = model
            if recipe.base is not None:
                base = open_alike(find_model(recipe.base, recipe.base_revision, progress), model)
            before = earlier_plan(model) if plan is None else None
            task = prepare(recipe, model, base, before, plan)
            if recipe.base is not None and before is not None and before.source.fingerprint != base.fingerprint:
                logger.warning(
                    "%s was made of %s, whose fingerprint is not that of %s: it is compared with another model",
                    model.source.label, before.source.label, base.source.label,
                )  # fmt: skip
            check_carried(model.source.folder)
            refuse_places(terms, (model, base))
            key = here().broadcast(task.key)
            known = terms.accept is None or terms.terms is not None
            place = request_key(key, recipe.output.max_shard_bytes, terms.terms) if known else None
            if (found := _in_place(terms, place, task, opened.peak)) is not None:
                return found
        with held(terms.out) as work:
            if (found := _in_place(terms, place, task, opened.peak)) is not None:  # another run of it has just ended
                return found
            here().broadcast(lambda: _check_place(task, terms))
            work.resume(key)
            state = first_state(task, opened, work, observer)
            stage = make_all(state)
            here().barrier()
            outcome = _finish(task, state, stage, terms, opened.peak, place)
            here().broadcast(lambda: publish(work, terms.overwrite))
    return outcome


def earlier_plan(model: OpenModel) -> Plan | None:
    """The plan that a checkpoint of this tool was made by; None for another one."""
    path = model.source.folder / COMPRESSION
    if not path.is_file():
        return None
    content = read_object(path).get("plan")
    return Plan.from_dict(content if isinstance(content, dict) else {}, f"{path}: plan")


def refuse_places(terms: Terms, models: Sequence[OpenModel]) -> None:
    """Refuse an output in a checkpoint that is read, or one that would replace it."""
    target = terms.out.resolve()
    for model in models:
        folder = model.source.folder
        if target == folder or folder in target.parents:
            raise CompressionError(f"{terms.out} lies in the source checkpoint itself; name another output folder")
        if target in folder.parents and (terms.overwrite or not target.is_dir()):
            raise CompressionError(
                f"{terms.out} holds the source checkpoint, which it would replace; name another output folder"
            )


def _check_place(task: Task, terms: Terms) -> None:
    """Refuse an output place that cannot work, before anything expensive is done; refitted layers wait there too."""
    check_target(terms.out, terms.overwrite)
    needed = output_size(task.seen, task.experts).bytes
    check_space(terms.out, 2 * needed if any(step.name == "correct" for step in task.steps) else needed)


def _in_place(terms: Terms, place: str | None, task: Task, peak: PeakMemory) -> Outcome | None:
    """What there is to say of an output that is in place and the one asked for; None if there is none such."""
    if place is None or terms.overwrite:
        return None

    def answered() -> bool:
        with suppress(CompressionError):
            check_target(terms.out, False)  # which tidies up after a run that was killed
        found = answers(terms.out, place)
        with suppress(CompressionError):
            if found and work_folder(terms.out).exists():  # of a run that was killed after the last rename
                with alone(terms.out) as folder:
                    clear(folder)
        return found

    if not here().broadcast(answered):
        return None
    tell_in_place(terms.out)
    outcome = read_outcome(terms.out)
    servers = servers_of(task.model, outcome.stage)  # figures of this run, which did nothing, in place of that one's
    return replace(outcome, servers=servers, peak_memory=peak.anonymous, seconds={}, command=None, acceptance={})


def _finish(task: Task, state: State, stage: Stage, terms: Terms, peak: PeakMemory, place: str | None) -> Outcome:
    """Assemble the output, verify it and have it accepted."""
    work, model = state.work, task.model
    assert work is not None
    whole, before = state.plan.stage, Size.of(model.checkpoint.tensors.values())
    if task.before is not None:  # sizes count from the source of the first run
        record = read_object(model.source.folder / COMPRESSION)
        before = Size(int(record["parameters"]["before"]), int(record["bytes"]["before"]))
    outcome = Outcome(
        out=str(terms.out),
        plan=state.plan,
        experts_before=(whole.layers or model.architecture.layers)[0].experts,
        experts_after=whole.experts or model.architecture.experts,
        before=before,
        after=Size.of(stage.job.outputs),
        seconds={},
        peak_memory=0,
        left_out=tuple(left_out_of(stage.source, stage.plan)),
        zeroed_fields=tuple(stage.job.zeroed),
        servers=servers_of(model, whole),
    )
    label = model.source.label if task.before is None else task.before.source.label

    def assembled() -> None:
        files = [name for name in stage.job.files if name != "config.json"]
        made = {COMPRESSION: record_of(outcome, files, label), RECIPE: recipe_yaml(filled(task, state.plan, label))}
        assemble(stage.folder, work.output, made, task.recipe.output.max_shard_bytes)
        stage.job.verify(work.output)

    with state.clock.phase("write"):
        here().broadcast(assembled)
    fit = None if state.text is None else state.text.fit
    changed = any(step.order is None for step in task.steps)
    acceptance = acceptance_of(stage.plan, stage.heads, work.output, stage.source, fit, changed)
    if terms.accept is not None:
        terms.accept(work.output)
    outcome = replace(outcome, seconds=dict(state.clock.seconds), peak_memory=peak.anonymous, acceptance=acceptance)
    _record(state, outcome, terms, work.output)  # a run that is killed once the output is in place has it, too
    if place is not None and here().is_first:
        note_request(work.output, place)
    return outcome


def _record(state: State, outcome: Outcome, terms: Terms, folder: Path) -> None:
    """Leave what reports want to know of the run, and the output does not say, in the user's cache."""
    if not here().is_first:
        return
    source, words = state.source.source, None if terms.command is None else tuple(terms.command)
    known = RunRecord(
        source.name,
        source.revision,
        state.plan.calibration if state.text is None else state.text.identity,
        outcome.seconds,
        outcome.peak_memory,
        words,
        acceptance=outcome.acceptance,
        base=None if state.plan.base is None else state.base.source.name,
    )
    record_run(folder, known)
    if state.observer is not None:
        state.observer.keep(folder, None if state.text is None else state.text.identity)
