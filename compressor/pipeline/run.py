"""The one runner: it carries out a recipe stage by stage, and keeps each stage as soon as it is
done.

resolve and check the steps ─► is the output in place? ─► lock the work folder ─► read the text once
─► each stage: decide (plan), refit in order, write layer files ─► or change the whole model
─► assemble ─► verify ─► evaluate ─► accept (gate, formats) ─► record ─► rename into place
"""

import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

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
from compressor.model.mtp import Head
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
    evaluation_text,
    first_state,
    open_run,
    prepare,
)
from compressor.progress import Progress
from compressor.prompt_date import dated
from compressor.quality_gate.domain_divergence import DomainDivergence
from compressor.quality_gate.domains import domain_divergence
from compressor.quality_gate.report import read_gate
from compressor.quality_gate.verdict import GateResult
from compressor.recipe.plan import ExpertPlan
from compressor.recipe.recipe import RECIPE, SAFETENSORS, Recipe, recipe_of_plan, recipe_yaml
from compressor.recipe.step import FORMAT, Step
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
from compressor.steps.cutting import through_model
from compressor.steps.job import check_plan, left_out_of, make_job
from compressor.steps.stage_files import stage_files
from compressor.steps.state import State
from compressor.steps.tensors import OutputJob
from compressor.steps.workdir import (
    LayerWriter,
    Workdir,
    assemble,
    check_space,
    check_target,
    is_written,
    open_workdir,
    publish,
    put_tensors,
    write_file,
    write_stage,
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
class WorkingCheckpoint:
    """The checkpoint after a stage: its folder, what its files hold, and how to check them."""

    folder: Path
    job: OutputJob
    source: OpenModel  # the model that its layers were made of, as the stage saw it
    plan: ExpertPlan
    heads: tuple[Head, ...]  # multi-token-prediction heads that are kept
    model: OpenModel | None = None
    # the checkpoint it was made of; None for the run's input
    previous: "WorkingCheckpoint | None" = None

    @property
    def first(self) -> "WorkingCheckpoint":
        """The checkpoint that was made of the run's input."""
        return self if self.previous is None else self.previous.first

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
    deterministic = any(getattr(step, "deterministic", False) for step in recipe.steps)
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
            with dated(work.date):
                state = first_state(resolved, session, work)
                if resolved.recipe.output.evaluate and state.texts:
                    text = next(iter(state.texts.values()))
                    # without a head, of which a warning is due in the end
                    with suppress(CompressionError):
                        state.evaluator = Evaluator(base, text.evaluation, waits=True)
                checkpoint = run_stages(state)
                ranks().barrier()
                outcome = _finish(resolved, state, checkpoint, delivery, session.peak, request)
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
    state: State,
    checkpoint: WorkingCheckpoint,
    delivery: Delivery,
    peak: PeakMemory,
    request: str,
) -> Outcome:
    """Assemble the output, verify, evaluate and gate it, export its formats, and record the run;
    return its outcome."""
    work = state.work
    assert work is not None
    model = resolved.model
    first = checkpoint.first
    experts = state.plan.expert_plan
    label = model.source.label
    before = (experts.layers or model.architecture.layers)[0].experts
    # the plan is of the first run's input, sizes are of what was read
    if resolved.earlier is not None:
        label = resolved.earlier.source.label
        before = model.architecture.experts
    left_out = {
        *left_out_of(first.source, first.plan),
        *left_out_of(checkpoint.source, checkpoint.plan),
    }
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
    calibration = None if state.text is None else state.text.fit
    is_changed = checkpoint is not first or any(step.order is None for step in resolved.options)
    heads = first.heads if checkpoint.heads else ()
    acceptance = acceptance_of(
        first.plan, heads, work.output, first.source, calibration, is_changed
    )
    formats = formats_of(resolved.recipe)
    if delivery.gate is not None or formats != (SAFETENSORS,):
        # a gate or an exporter may load whole models
        for opened in (model, state.base, state.model):
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
            with_folders(state.plan.calibration if state.text is None else state.text.identity),
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


def _golden_answers(resolved: ResolvedRecipe, state: State, folder: Path) -> GoldenAnswers | None:
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
    resolved: ResolvedRecipe, state: State, folder: Path
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


def run_stages(state: State) -> WorkingCheckpoint:
    """Carry out all stages, and return the checkpoint after the last one."""
    work = state.work
    assert work is not None
    checkpoint = None
    for numbers in state.plan.stages:
        if numbers[0] < state.first:
            continue
        state.number = numbers[0]
        for number in numbers:
            if number in work.steps:  # recorded by a run that was killed
                entry = PlannedStep.from_dict(work.steps[number], "journal.json")
                changes = {"decision": entry.decision, "result": entry.result, "text": entry.text}
                state.plan = state.plan.with_entry(number, **changes)
        if state.step_at(numbers[0]).options.order is not None:
            checkpoint = _layerwise_stage(state, numbers, checkpoint, work)
            continue
        # the first step changes the whole model: it works on a copy of the input
        if checkpoint is None:
            checkpoint = _written(state, numbers, work)
        if state.plan.steps[numbers[0]].result is None:
            _whole_model_step(state, checkpoint, work)
    assert checkpoint is not None
    return checkpoint


def _layerwise_stage(
    state: State, numbers: Sequence[int], previous: WorkingCheckpoint | None, work: Workdir
) -> WorkingCheckpoint:
    """Decide, refit and write a stage of layerwise steps, on the checkpoint of the previous
    stage."""
    if previous is not None:
        # a resumed run still needs the previous stage, but none before it
        if previous.previous is not None:
            work.drop(previous.previous.folder)
        state.model = previous.opened(state.base)
        previous.model = None
    steps = [state.step_at(number) for number in numbers]
    with LayerWriter() as writer:
        is_open = not is_written(work.stage(numbers[0]))
        state.stage_files = stage_files(state, writer) if is_open else None
        decide(state, numbers)
        for number, step in zip(numbers, steps, strict=True):
            if type(step).refit is Step.refit or not is_open:
                continue
            state.number = number
            with state.clock.phase(step.name):
                refitted = step.refit(state)
            if refitted is not None and state.deciding is not None:
                _record(state, work, state.deciding, decision=refitted)
    checkpoint = _written(state, numbers, work, steps)
    checkpoint.previous = previous
    return checkpoint


def _record(state: State, work: Workdir | None, number: int, **changes: Any) -> None:
    """Put a step's decision or result into the plan, and keep it for a run that resumes this
    one."""
    state.plan = state.plan.with_entry(number, **changes)
    if work is not None:
        work.record(number, state.plan.steps[number].to_dict())


def decide(state: State, numbers: Sequence[int]) -> None:
    """Take and apply the decisions of these steps of a stage, in order; known decisions are only
    applied."""
    for number in state.stage:
        state.model = state.step_at(number).model_view(state.model)
    for number in numbers:
        state.number = number
        step = state.step_at(number)
        decision = state.plan.steps[number].decision
        if decision is None:
            with state.clock.phase("plan"):
                decision = step.decide(state)
            work = None if decision is None else state.work
            _record(state, work, number, decision=decision, text=state.own_text)
        if decision is not None:
            step.apply_decision(decision, state)


def _written(
    state: State, numbers: Sequence[int], work: Workdir, steps: Sequence[Step[Any]] = ()
) -> WorkingCheckpoint:
    """Write the checkpoint of a stage, layer by layer; without `steps`, a copy of the model as it
    is."""
    folder = work.stage(numbers[0])
    plan = state.expert_plan()
    heads = check_plan(plan, state.model)
    position = numbers[0] - state.first
    packed = [step.name for step in state.steps[:position] if FORMAT in step.options.changes]
    if packed and through_model(state.model.layout, plan, state.refits):
        message = (
            f"{packed[0]} has packed experts that can only be merged, or dropped, once they "
            "are dequantised"
        )
        raise CompressionError(f"steps[{position}]: {message}; put {packed[0]} after it")
    job = None
    for number, step in zip(numbers, steps, strict=False):
        state.number = number
        job = job or step.writer(state)
    state.number = numbers[0]
    if job is None:
        cut = state.cut() if state.refits else None
        job = make_job(state.model, plan, cut)
    if not is_written(folder):
        labels = state.stage_label if steps else []
        state.progress.start("write", len(job.decoder_layers))
        with state.clock.phase("write"):
            write_stage(job, folder, labels, state.progress.advance)
        if not any(step.options.verified_by_kept for step in steps):
            work.drop_kept(numbers[0])
    return WorkingCheckpoint(folder, job, state.model, plan, heads)


def _whole_model_step(state: State, checkpoint: WorkingCheckpoint, work: Workdir) -> None:
    """Have a step change the whole model: it gives new tensors for the checkpoint's files."""
    number = state.number
    step = state.step_at(number)
    for model in (state.base, checkpoint.source):  # the step may need the memory for a whole model
        model.partial.stream()
    state.model = checkpoint.opened(state.base)
    with state.clock.phase(step.name):
        result = step.apply_model(state)
    if result is None:
        return

    def write_tensors() -> None:
        for tensors in result.tensors:
            put_tensors(checkpoint.folder, tensors, f"{number}-{step.name}")

    ranks().broadcast(write_tensors)
    checkpoint.model = None  # it was opened with the old tensors
    _record(state, work, number, result=dict(result.figures), text=state.own_text)
    work.drop_kept(number)
