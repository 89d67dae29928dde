"""The one runner: it carries out a recipe stage by stage, and keeps each stage as soon as it is
done.

resolve and check the steps ─► is the output in place? ─► lock the work folder ─► read the text once
─► each stage: decide (plan), refit in order, write layer files ─► or change the whole model
─► assemble ─► verify ─► evaluate ─► accept (gate, formats) ─► record ─► rename into place
"""

import json
import logging
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from compressor.answers.scores import REPORT
from compressor.checkpoint.digests import write_digests
from compressor.checkpoint.reader import CONFIG, Size
from compressor.checkpoint.source import ModelSource, find_model
from compressor.data.sources import with_folders
from compressor.distributed import ranks
from compressor.divergence.evaluator import FEWEST, Evaluator
from compressor.errors import CompressionError, reason_of, without_tokens
from compressor.files import GOLDEN, clear, lock_output, work_folder
from compressor.formatting import joined
from compressor.golden.answers import GoldenAnswers, golden_json
from compressor.golden.measure import make_golden
from compressor.memory import PeakMemory
from compressor.model.opened import OpenModel, open_alike, open_model
from compressor.model.substitution import AS_IT_IS, Substitution
from compressor.model.verification import check_carried
from compressor.pipeline.formats import formats_of, write_formats
from compressor.pipeline.gate import PreparedGate, judge
from compressor.pipeline.outcome import (
    Attempt,
    GateFailedError,
    Outcome,
    fault_of,
    is_packed,
    read_outcome,
    record_of,
    servers_of,
)
from compressor.pipeline.resolve import (
    ResolvedRecipe,
    begin,
    evaluation_text,
    open_run,
    prepare,
)
from compressor.progress import Progress
from compressor.prompt_date import dated
from compressor.quality_gate.domain_divergence import DomainDivergence
from compressor.quality_gate.domains import domain_divergence
from compressor.quality_gate.report import read_gate
from compressor.quality_gate.verdict import GateResult
from compressor.recipe.plan import KEPT_WHOLE, ExpertPlan
from compressor.recipe.recipe import RECIPE, SAFETENSORS, Recipe, recipe_of_plan, recipe_yaml
from compressor.recipe.steps_plan import Plan, PlannedStep
from compressor.records import plain_json, read_as, read_object
from compressor.run_record import (
    COMPRESSION,
    RunRecord,
    answers,
    record_request,
    record_run,
    report_in_place,
    request_key,
)
from compressor.steps.configuration import changed_fields
from compressor.steps.constants.step import read_constants
from compressor.steps.correct.heads import acceptance_of
from compressor.steps.job import copy_job
from compressor.steps.step import Result, Run, State
from compressor.steps.tensors import OutputJob
from compressor.steps.workdir import (
    CheckpointWriter,
    assemble,
    check_space,
    check_target,
    drop_tensors,
    open_workdir,
    publish,
    put_tensors,
    write_checkpoint,
    write_file,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Delivery:
    """The output's folder and options, and the gate that it has to pass."""

    out: Path
    overwrite: bool = False
    device: str = "auto"
    progress: Progress | None = None
    command: Sequence[str] | None = None  # the command line, for the record of the run
    gate: PreparedGate | None = None
    requests: tuple[str, ...] = ()  # keys of further requests that the output answers


@dataclass(slots=True)
class WrittenCheckpoint:
    """The checkpoint that a step has written: its folder, and the job that says what is in it."""

    folder: Path
    job: OutputJob
    model: OpenModel | None = None

    def opened(self, like: OpenModel) -> OpenModel:
        """Return the checkpoint as it is now, opened with the dtype and device of another model."""
        if self.model is None:
            self.model = open_alike(ModelSource(str(self.folder), None, self.folder), like)
        return self.model


def run(recipe: Recipe, delivery: Delivery, plan: Plan | None = None) -> Outcome:
    """Carry out a recipe's steps, or the `plan` with their decisions, under the delivery's gate.

    An interrupted run resumes when it is called again. If the output of this very request is in
    place already, nothing is written. Raises `CompressionError` for everything that a user can
    mend, and `GateFailedError` for an output that does not pass; neither leaves anything behind.
    """
    formats = formats_of(recipe)
    assert recipe.model is not None
    corrections = [getattr(step, "correct", None) for step in recipe.steps]
    deterministic = any(correct.deterministic for correct in corrections if correct is not None)
    settings = recipe.dtype, delivery.device, delivery.progress, recipe.resident, deterministic
    with open_run(recipe.model, recipe.revision, *settings) as session:
        model = session.model
        with session.clock.phase("open"):
            base = model
            if recipe.base is not None:
                base = open_alike(
                    find_model(recipe.base, recipe.base_revision, delivery.progress), model
                )
            earlier = earlier_plan(model) if plan is None else None
            resolved = prepare(recipe, model, base, earlier, plan)
            if (
                recipe.base is not None
                and earlier is not None
                and earlier.source.fingerprint != base.fingerprint
            ):
                logger.warning(
                    "%s was made of %s, whose fingerprint is not that of %s: it is compared with "
                    "another model",
                    model.source.label,
                    earlier.source.label,
                    base.source.label,
                )
            check_carried(model.source.folder)
            refuse_output(delivery, (model, base))
            key = ranks().broadcast(resolved.key)
            gate_key = None if delivery.gate is None else delivery.gate.key
            request = request_key(key, recipe.output.max_shard_bytes, formats, gate_key)
        in_place = partial(_in_place, delivery, request, resolved, session.peak)
        outcome = in_place()
        if outcome is not None:
            return outcome
        needed = resolved.space
        with open_workdir(delivery.out) as work:
            outcome = in_place()
            if outcome is not None:  # a run of the same request has just ended
                return outcome
            ranks().broadcast(lambda: check_target(delivery.out, delivery.overwrite))
            ranks().broadcast(lambda: check_space(delivery.out, needed))
            work.resume(key)
            with dated(work.journal["date"]):
                state = begin(resolved, session, work)
                if resolved.recipe.output.evaluate and state.texts:
                    text = next(iter(state.texts.values()))
                    # without a head, of which a warning is due in the end
                    with suppress(CompressionError):
                        state.evaluator = Evaluator(base, text.evaluation, waits=True)
                checkpoints = run_steps(state)
                ranks().barrier()
                outcome = _finish(resolved, state, checkpoints, delivery, session.peak, request)
            ranks().broadcast(lambda: publish(work, delivery.overwrite))
    return outcome


def earlier_plan(model: OpenModel) -> Plan | None:
    """Return the plan that a checkpoint of this tool was made by; None for any other checkpoint."""
    path = model.source.folder / COMPRESSION
    if not path.is_file():
        return None
    content = read_object(path).get("plan")
    return Plan.from_dict(content if isinstance(content, dict) else {}, f"{path}: plan")


def refuse_output(delivery: Delivery, models: Sequence[OpenModel]) -> None:
    """Refuse an output inside a checkpoint that is read, or one that would replace it."""
    target = delivery.out.resolve()
    hint = "name another output folder"
    for model in models:
        folder = model.source.folder
        if target == folder or folder in target.parents:
            raise CompressionError(f"{delivery.out} lies in the source checkpoint itself; {hint}")
        if target in folder.parents and (delivery.overwrite or not target.is_dir()):
            raise CompressionError(
                f"{delivery.out} holds the source checkpoint, which it would replace; {hint}"
            )


def _in_place(
    delivery: Delivery, request: str, resolved: ResolvedRecipe, peak: PeakMemory
) -> Outcome | None:
    """Return the outcome of an output that is in place and answers the request; None if there is
    none."""
    if delivery.overwrite:
        return None

    def answered() -> bool:
        with suppress(CompressionError):
            check_target(delivery.out, False)  # this also tidies up after a killed run
        is_answer = answers(delivery.out, request)
        with suppress(CompressionError):
            # left by a run that was killed after its last rename
            if is_answer and work_folder(delivery.out).exists():
                with lock_output(delivery.out) as folder:
                    clear(folder)
        return is_answer

    if not ranks().broadcast(answered):
        return None
    report_in_place(delivery.out)
    outcome = read_outcome(delivery.out)
    if delivery.gate is not None:
        outcome = replace(outcome, gate=read_gate(delivery.out / REPORT))
    servers = servers_of(resolved.view, outcome.expert_plan)
    # times, memory and command are those of this run, which did nothing
    return replace(
        outcome,
        servers=servers,
        peak_memory=peak.anonymous,
        seconds={},
        command=None,
        acceptance={},
    )


def _finish(
    resolved: ResolvedRecipe,
    state: Run,
    checkpoints: Sequence[WrittenCheckpoint],
    delivery: Delivery,
    peak: PeakMemory,
    request: str,
) -> Outcome:
    """Assemble the output, verify, evaluate and gate it, export its formats, and record the run;
    return its outcome."""
    work = state.work
    assert work is not None
    model = resolved.model
    first, checkpoint = checkpoints[0], checkpoints[-1]
    experts = state.plan.expert_plan
    label = model.source.label
    before = model.architecture.experts
    if experts.layers and state.plan.strategy != KEPT_WHOLE:
        before = experts.layers[0].experts
    # the plan is of the first run's input, sizes are of what was read
    if resolved.earlier is not None:
        label = resolved.earlier.source.label
        before = model.architecture.experts
    left_out = {name for written in checkpoints for name in written.job.left_out}
    outcome = Outcome(
        out=str(delivery.out),
        plan=state.plan,
        experts_before=before,
        experts_after=experts.experts or model.architecture.experts,
        before=Size.of(model.checkpoint.tensors.values()),
        after=Size.of(checkpoint.job.outputs),
        seconds={},
        peak_memory=0,
        left_out=tuple(sorted(left_out)),
        zeroed_fields=tuple(checkpoint.job.zeroed),
        config_fields=changed_fields(
            model.checkpoint.raw_config, read_object(checkpoint.folder / CONFIG)
        ),
        servers=servers_of(resolved.view, experts),
    )
    files = [name for name in checkpoint.job.files if name != "config.json"]

    def assemble_output() -> None:
        changes = {"model": label, "gate": resolved.recipe.gate, "output": resolved.recipe.output}
        if state.plan.base is not None:
            changes["base"] = state.plan.base.label
        # with the steps of earlier runs
        recipe = recipe_of_plan(state.plan).model_copy(update=changes)
        assemble(checkpoint.folder, work.output, resolved.recipe.output.max_shard_bytes)
        write_file(work.output / RECIPE, recipe_yaml(recipe))
        checkpoint.job.verify(work.output)

    with state.clock.phase("write"):
        ranks().broadcast(assemble_output)
    outcome = replace(outcome, heldout=_heldout_divergence(resolved, state, work.output))
    ranks().broadcast(
        lambda: write_file(work.output / COMPRESSION, record_of(outcome, files, label))
    )
    text = next(iter(state.texts.values()), None)
    calibration = None if text is None else text.fit
    heads = first.job.heads if checkpoint.job.heads else ()
    decided = state.plan.steps[state.first].expert_plan or ExpertPlan(0, ())
    is_changed = len(state.steps) > 1
    acceptance = acceptance_of(decided, heads, work.output, model, calibration, is_changed)
    formats = formats_of(resolved.recipe)
    if delivery.gate is not None or formats != (SAFETENSORS,):
        # a gate or an exporter may load whole models
        for opened in (model, state.base, checkpoint.model):
            if opened is not None:
                opened.partial.stream()
    if delivery.gate is not None:
        outcome = replace(
            outcome, gate=_passed(delivery.gate, outcome, work.output, state.progress)
        )
    golden = ranks().broadcast(lambda: _golden_answers(resolved, state, work.output))
    ranks().broadcast(lambda: write_formats(work.output, formats, state.progress))
    # not what an exporter of another kind has made of it
    is_model = (work.output / CONFIG).is_file()
    if golden is not None and is_model and ranks().is_first:
        (work.output / GOLDEN).write_text(golden_json(golden), encoding="utf-8")
    if is_model:
        with state.clock.phase("write"):
            ranks().broadcast(lambda: write_digests(work.output))
    outcome = replace(
        outcome,
        seconds=dict(state.clock.seconds),
        peak_memory=peak.anonymous,
        packed=is_packed(work.output),
        loader_fault=fault_of(work.output),
        acceptance=acceptance,
    )
    if ranks().is_first:  # recorded before the rename, for a run that is killed right after it
        run_record = RunRecord(
            model.source.name,
            model.source.revision,
            with_folders(state.plan.calibration if text is None else text.identity),
            outcome.seconds,
            outcome.peak_memory,
            None if delivery.command is None else tuple(delivery.command),
            acceptance=acceptance,
            base=None if state.base is model else state.base.source.name,
        )
        record_run(work.output, run_record)
        for key in (request, *delivery.requests):
            record_request(work.output, key)
    return outcome


def _passed(gate: PreparedGate, outcome: Outcome, folder: Path, progress: Progress) -> GateResult:
    """Return the gate's result on a finished output; raise `GateFailedError` if it must not be put
    in place."""
    out = Path(outcome.out)
    result = judge(gate, folder, out.name, progress)
    # all ranks have finished with the folder once this returns: the first one to raise clears it
    accepted = ranks().broadcast(lambda: gate.accepts(result))
    if not (accepted or gate.request.options.keep_failed):
        raise GateFailedError(out, [Attempt(outcome.experts_after, result, accepted=False)])
    return result


def _golden_answers(resolved: ResolvedRecipe, state: Run, folder: Path) -> GoldenAnswers | None:
    """Return the output's golden answers; None where they are not wanted, or cannot be had, which
    ends no run."""
    if not resolved.recipe.output.golden_answers:
        return None
    source = ModelSource(str(folder), None, folder)
    try:
        with state.clock.phase("golden answers"):
            return make_golden(source, str(state.base.partial.device), state.progress)
    except Exception as error:  # of models that take no plain text
        logger.warning("no golden answers are kept: %s", reason_of(error))
        return None


def _heldout_divergence(
    resolved: ResolvedRecipe, state: Run, folder: Path
) -> DomainDivergence | None:
    """Return the output's divergence from the base on held-out text; None without text or
    evaluation.

    A failed comparison does not end the run: a warning says why it failed.
    """
    if not resolved.recipe.output.evaluate:
        return None
    try:
        with state.clock.phase("read text"):
            text = evaluation_text(resolved, state.texts)
        if text is None:
            return None
        evaluator = state.evaluator or Evaluator(state.base, text.evaluation)
        if evaluator.sequences < FEWEST:
            message = (
                f"the text leaves {evaluator.sequences} sequences to compare on, fewer than "
                f"{FEWEST}"
            )
            raise CompressionError(
                f"{message}; give more text, or lower --samples or --sequence-length"
            )
        settings = state.base.dtype_name, str(state.base.partial.device)
        variant = AS_IT_IS
        if not state.plan.expert_plan.has_constants:
            output = open_model(ModelSource(str(folder), None, folder), *settings)
        else:
            output, constants = read_constants(folder, *settings)
            variant = Substitution(constants=constants)
        with state.clock.phase("evaluate"):
            (figures,) = evaluator.measure(output, [variant], progress=state.progress)
        divergence = domain_divergence(
            figures, dict(enumerate(map(without_tokens, evaluator.names)))
        )
    except CompressionError as error:
        logger.warning("output and base are not compared on held-out text: %s", error)
        return None
    short = [without_tokens(name) for name in evaluator.names if name in text.short]
    if short:
        few = f"{joined(short)} had too little text for this alone"
        note = f"{few}: among its sequences are held-out ones by which steps have chosen."
        divergence = replace(divergence, note=note)
    content = json.dumps(plain_json(divergence))
    rounded = json.loads(content, parse_float=lambda number: round(float(number), 6))
    return read_as(DomainDivergence, rounded)


def run_steps(run: Run) -> list[WrittenCheckpoint]:
    """Carry out all steps; return the checkpoints that they have written, in order."""
    work = run.work
    assert work is not None
    checkpoints = list[WrittenCheckpoint]()
    model = run.source
    for number, step in enumerate(run.steps, run.first):
        recorded = work.recorded(number)
        if recorded is not None:  # by a run that was killed
            entry = PlannedStep.from_dict(recorded, "journal.json")
            changes = {"decision": entry.decision, "result": entry.result, "text": entry.text}
            run.plan = run.plan.with_entry(number, **changes)
        if checkpoints:
            model = checkpoints[-1].opened(run.base)
        state = State(run, number, model)
        if step.options.in_place:
            if not checkpoints:  # it works on a copy of the input
                checkpoints.append(_write_checkpoint(state, copy_job(model), []))
                state = replace(state, model=checkpoints[-1].opened(run.base))
            _change_checkpoint(state, checkpoints[-1])
            continue
        if ranks().is_first:  # what no later step reads
            for earlier in checkpoints[:-1]:
                drop_tensors(earlier.folder)
            for earlier_number in range(number):
                shutil.rmtree(work.kept(earlier_number), ignore_errors=True)
        if checkpoints:
            checkpoints[-1].model = None
        with CheckpointWriter(state.folder, [state.label]) as writer:
            state = replace(state, writer=writer)
            decide(state)
            job = step.write(state)
            assert isinstance(job, OutputJob), step.name
        checkpoints.append(_write_checkpoint(state, job, [state.label]))
    return checkpoints


def decide(state: State) -> None:
    """Take the decision of a step and record it, unless it is there."""
    if state.decision is None:
        with state.run.clock.phase("plan"):
            decision = state.step.plan(state)
        if decision is not None:
            state.run.record(state.number, decision=decision, text=state.own_text)


def _write_checkpoint(state: State, job: OutputJob, labels: Sequence[str]) -> WrittenCheckpoint:
    """Write the files of a job that are not there yet, layer by layer."""
    if not state.is_written:
        state.progress.start("write", len(job.decoder_layers))
        with state.run.clock.phase("write"):
            write_checkpoint(job, state.folder, labels, state.progress.advance)
    return WrittenCheckpoint(state.folder, job)


def _change_checkpoint(state: State, checkpoint: WrittenCheckpoint) -> None:
    """Have a step give new tensors for the files of a checkpoint."""
    run = state.run
    if run.plan.steps[state.number].result is not None:
        return
    for model in (run.source, run.base):  # the step may need the memory for a whole model
        model.partial.stream()
    with run.clock.phase(state.step.name):
        result = state.step.write(state)
    if result is None:
        return
    assert isinstance(result, Result), state.step.name

    def write_tensors() -> None:
        for tensors in result.tensors:
            put_tensors(checkpoint.folder, tensors, state.label)

    ranks().broadcast(write_tensors)
    checkpoint.model = None  # it was opened with the old tensors
    run.record(state.number, result=dict(result.figures), text=state.own_text)
    if ranks().is_first:
        shutil.rmtree(state.kept(""), ignore_errors=True)
