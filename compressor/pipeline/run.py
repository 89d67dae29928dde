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
from pathlib import Path

from compressor.answers.scores import REPORT
from compressor.checkpoint.digests import write_digests
from compressor.checkpoint.reader import CONFIG, Size
from compressor.checkpoint.source import ModelSource, find_model
from compressor.data.sources import with_folders
from compressor.distributed import ranks
from compressor.divergence.evaluator import FEWEST, Evaluator
from compressor.errors import CompressionError, reason_of, without_tokens
from compressor.files import GOLDEN, RECEIPT, clear, work_folder
from compressor.formatting import joined
from compressor.golden.answers import GoldenAnswers, golden_json
from compressor.golden.measure import make_golden
from compressor.memory import PeakMemory
from compressor.model.opened import OpenModel, open_alike, served_model
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
from compressor.pipeline.receipt import Receipt, make_receipt, measure_output
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
from compressor.recipe.plan import KEPT_WHOLE, ExpertPlan
from compressor.recipe.recipe import RECIPE, SAFETENSORS, Recipe, recipe_of_plan, recipe_yaml
from compressor.recipe.steps_plan import Plan, PlannedStep
from compressor.records import plain_json, read_as, read_object, readable_json
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

        # before the lock, which storage that cannot be written does not give
        def is_done() -> bool:
            return not work_folder(delivery.out).exists() and answers(delivery.out, request)

        if not delivery.overwrite and ranks().broadcast(is_done):
            return _in_place(resolved, delivery, session.peak)
        needed = resolved.space
        with open_workdir(delivery.out) as work:
            if not delivery.overwrite and ranks().broadcast(lambda: answers(delivery.out, request)):
                if ranks().is_first:  # left by a run that was killed after its last rename
                    clear(work.folder)
                return _in_place(resolved, delivery, session.peak)
            ranks().broadcast(lambda: check_target(delivery.out, delivery.overwrite))
            ranks().broadcast(lambda: check_space(delivery.out, needed))
            work.resume(key)
            with dated(work.journal["date"]):
                state = begin(resolved, session, work)
                if resolved.recipe.output.evaluate and state.texts:
                    text = next(iter(state.texts.values()))
                    # without a head, of which a warning is due in the end
                    with suppress(CompressionError):
                        state.evaluator = Evaluator(
                            base, text.evaluation, waits=True, by_token=True
                        )
                jobs, folder = run_steps(state)
                ranks().barrier()
                outcome = _finish(resolved, state, jobs, folder, delivery, session.peak, request)
            ranks().barrier()  # until all have read the output where it is
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


def _in_place(resolved: ResolvedRecipe, delivery: Delivery, peak: PeakMemory) -> Outcome:
    """Return the outcome of an output that is in place and answers the request."""
    report_in_place(delivery.out)
    outcome = read_outcome(delivery.out)
    if delivery.gate is not None:
        outcome = replace(outcome, gate=read_gate(delivery.out / REPORT))
    # times, memory and command are those of this run, which did nothing
    return replace(
        outcome,
        servers=servers_of(resolved.view, outcome.expert_plan),
        peak_memory=peak.anonymous,
        seconds={},
        command=None,
        acceptance={},
    )


def _finish(
    resolved: ResolvedRecipe,
    state: Run,
    jobs: Sequence[OutputJob],
    folder: Path,
    delivery: Delivery,
    peak: PeakMemory,
    request: str,
) -> Outcome:
    """Assemble the output of the last checkpoint's `folder`, verify, evaluate and gate it, export
    its formats, and record the run; return its outcome."""
    assert state.work is not None
    output = state.work.output
    model = resolved.model
    recipe = resolved.recipe
    job = jobs[-1]
    experts = state.plan.expert_plan
    label = model.source.label
    before = model.architecture.experts
    if resolved.earlier is not None:
        # the plan is of the first run's input, sizes are of what was read
        label = resolved.earlier.source.label
    elif experts.layers and state.plan.strategy != KEPT_WHOLE:
        before = experts.layers[0].experts

    def assemble_output() -> None:
        changes = {"model": label, "gate": recipe.gate, "output": recipe.output}
        if state.plan.base is not None:
            changes["base"] = state.plan.base.label
        # with the steps of earlier runs
        repeated = recipe_of_plan(state.plan).model_copy(update=changes)
        assemble(folder, output, recipe.output.max_shard_bytes)
        write_file(output / RECIPE, recipe_yaml(repeated))
        job.verify(output)

    with state.clock.phase("write"):
        ranks().broadcast(assemble_output)
    heldout, receipt = _heldout_divergence(resolved, state, output)
    outcome = Outcome(
        out=str(delivery.out),
        plan=state.plan,
        experts_before=before,
        experts_after=experts.experts or model.architecture.experts,
        before=Size.of(model.checkpoint.tensors.values()),
        after=Size.of(job.outputs),
        seconds={},
        peak_memory=0,
        left_out=tuple(sorted({name for job in jobs for name in job.left_out})),
        zeroed_fields=job.zeroed,
        config_fields=changed_fields(model.checkpoint.raw_config, read_object(folder / CONFIG)),
        servers=servers_of(resolved.view, experts),
        heldout=heldout,
        receipt=receipt,
    )
    files = [name for name in job.files if name != CONFIG]
    aligned = experts.has_constants or served_model(resolved.view).aligned
    ranks().broadcast(
        lambda: write_file(output / COMPRESSION, record_of(outcome, files, label, aligned))
    )
    text = next(iter(state.texts.values()), None)
    acceptance = acceptance_of(
        state.plan.steps[state.first].expert_plan or ExpertPlan(0, ()),
        jobs[0].heads if job.heads else (),
        output,
        model,
        None if text is None else text.fit,
        changed=len(state.steps) > 1,
    )
    formats = formats_of(recipe)
    gate = delivery.gate
    if gate is not None or formats != (SAFETENSORS,):
        for opened in (model, state.base):  # a gate or an exporter may load whole models
            opened.partial.stream()
    result = None
    if gate is not None:
        result = judge(gate, output, delivery.out.name, state.progress)
        # all ranks have finished with the folder here: the first one to raise clears it
        accepted = ranks().broadcast(lambda: gate.accepts(result))
        if not (accepted or gate.request.options.keep_failed):
            attempt = Attempt(outcome.experts_after, result, accepted=False)
            raise GateFailedError(delivery.out, [attempt])
    golden = ranks().broadcast(lambda: _golden_answers(resolved, state, output))
    ranks().broadcast(lambda: write_formats(output, formats, state.progress))
    # not what an exporter of another kind has made of it
    if (output / CONFIG).is_file():
        if golden is not None and ranks().is_first:
            (output / GOLDEN).write_text(golden_json(golden), encoding="utf-8")
        if receipt is not None and ranks().is_first:
            content = readable_json(plain_json(receipt))
            (output / RECEIPT).write_text(content, encoding="utf-8")
        with state.clock.phase("write"):
            ranks().broadcast(lambda: write_digests(output))
    outcome = replace(
        outcome,
        seconds=dict(state.clock.seconds),
        peak_memory=peak.anonymous,
        packed=is_packed(output),
        loader_fault=fault_of(output),
        acceptance=acceptance,
        gate=result,
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
        record_run(output, run_record)
        for key in (request, *delivery.requests):
            record_request(output, key)
    return outcome


def _golden_answers(resolved: ResolvedRecipe, state: Run, folder: Path) -> GoldenAnswers | None:
    """Return the output's golden answers; None where they are not wanted, or cannot be had, which
    ends no run."""
    if not resolved.recipe.output.golden_answers:
        return None
    source = ModelSource(str(folder), None, folder)
    try:
        with state.clock.phase("golden answers"):
            partial = state.base.partial
            return make_golden(source, str(partial.device), state.progress, partial.resident)
    except Exception as error:  # of models that take no plain text
        logger.warning("no golden answers are kept: %s", reason_of(error))
        return None


def _heldout_divergence(
    resolved: ResolvedRecipe, state: Run, folder: Path
) -> tuple[DomainDivergence | None, Receipt | None]:
    """Return the output's divergence from the base on held-out text, and the receipt of it; None
    without text or evaluation.

    A failed comparison does not end the run: a warning says why it failed.
    """
    if not resolved.recipe.output.evaluate:
        return None, None
    try:
        with state.clock.phase("read text"):
            text = evaluation_text(resolved, state.texts)
        if text is None:
            return None, None
        evaluator = state.evaluator or Evaluator(state.base, text.evaluation, by_token=True)
        if evaluator.sequences < FEWEST:
            message = (
                f"the text leaves {evaluator.sequences} sequences to compare on, fewer than "
                f"{FEWEST}"
            )
            raise CompressionError(
                f"{message}; give more text, or lower --samples or --sequence-length"
            )
        with state.clock.phase("evaluate"):
            figures, moved = measure_output(evaluator, folder, state.progress)
            divergence = domain_divergence(
                figures, dict(enumerate(map(without_tokens, evaluator.names)))
            )
            receipt = ranks().broadcast(lambda: make_receipt(evaluator, figures, moved, folder))
    except CompressionError as error:
        logger.warning("output and base are not compared on held-out text: %s", error)
        return None, None
    short = [without_tokens(name) for name in evaluator.names if name in text.short]
    if short:
        few = f"{joined(short)} had too little text for this alone"
        note = f"{few}: among its sequences are held-out ones by which steps have chosen."
        divergence = replace(divergence, note=note)
    content = json.dumps(plain_json(divergence))
    rounded = json.loads(content, parse_float=lambda number: round(float(number), 6))
    return read_as(DomainDivergence, rounded), receipt


def run_steps(run: Run) -> tuple[list[OutputJob], Path]:
    """Carry out all steps; return the jobs of the checkpoints that they have written, in order, and
    the folder of the last one."""
    work = run.work
    assert work is not None
    jobs = list[OutputJob]()
    folders = list[Path]()
    for number, step in enumerate(run.steps, run.first):
        recorded = work.recorded(number)
        if recorded is not None:  # by a run that was killed
            entry = PlannedStep.from_dict(recorded, "journal.json")
            changes = {"decision": entry.decision, "result": entry.result, "text": entry.text}
            run.plan = run.plan.with_entry(number, **changes)
        model = run.source
        in_place = step.options.in_place
        if in_place and not folders:  # it works on a copy of the input
            state = State(run, number, model)
            jobs.append(_written(state, copy_job(model), []))
            folders.append(state.folder)
        if folders:
            model = open_alike(ModelSource(str(folders[-1]), None, folders[-1]), run.base)
        state = State(run, number, model)
        if in_place:
            if run.plan.steps[number].result is None:
                _change_checkpoint(state, folders[-1])
            continue
        if ranks().is_first:  # what no later step reads
            for folder in folders[-2:-1]:  # earlier ones are free already
                drop_tensors(folder)
            for earlier in range(number):
                shutil.rmtree(work.kept(earlier), ignore_errors=True)
        with CheckpointWriter(state.folder, [state.label]) as writer:
            state = replace(state, writer=writer)
            decide(state)
            job = step.write(state)
            assert isinstance(job, OutputJob), step.name
        jobs.append(_written(state, job, [state.label]))
        folders.append(state.folder)
    return jobs, folders[-1]


def decide(state: State) -> None:
    """Take the decision of a step and record it, unless it is there."""
    if state.decision is None:
        with state.run.clock.phase("plan"):
            decision = state.step.plan(state)
        if decision is not None:
            state.run.record(state.number, decision=decision, text=state.own_text)


def _written(state: State, job: OutputJob, labels: Sequence[str]) -> OutputJob:
    """Return a job whose files are written, layer by layer, where they are not there yet."""
    if not state.is_written:
        state.progress.start("write", len(job.decoder_layers))
        with state.run.clock.phase("write"):
            write_checkpoint(job, state.folder, labels, state.progress.advance)
    return job


def _change_checkpoint(state: State, folder: Path) -> None:
    """Have a step give new tensors for the files of a checkpoint."""
    run = state.run
    for model in (run.source, run.base):  # the step may need the memory for a whole model
        model.partial.stream()
    with run.clock.phase(state.step.name):
        result = state.step.write(state)
    if result is None:
        return
    assert isinstance(result, Result), state.step.name

    def write_tensors() -> None:
        for tensors in result.tensors:
            put_tensors(folder, tensors, state.label)

    ranks().broadcast(write_tensors)
    run.record(state.number, result=dict(result.figures), text=state.own_text)
    if ranks().is_first:
        shutil.rmtree(state.kept(""), ignore_errors=True)
