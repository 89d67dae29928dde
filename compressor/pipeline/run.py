"""The one runner: a recipe's steps on a model, stage by stage, each kept as soon as it is done.

settle steps, refuse what cannot be ─► is the output in place? ─► hold the work folder ─► read text once
─► each stage: decide (plan), refit in order, write layer files ─► or change the whole model
─► assemble ─► verify ─► evaluate ─► accept (gate, formats) ─► rename into place ─► record
"""

import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from compressor.answers.lm_eval_run import REPORT
from compressor.checkpoint.reader import Size
from compressor.checkpoint.source import ModelSource, find_model
from compressor.data.sources import with_folders
from compressor.distributed import ranks
from compressor.divergence.evaluator import FEWEST, Evaluator
from compressor.errors import CompressionError, without_tokens
from compressor.files import clear, lock_output, work_folder
from compressor.formatting import joined
from compressor.memory import PeakMemory
from compressor.model.mtp import Head
from compressor.model.opened import OpenModel, open_alike, open_model
from compressor.model.substitution import AS_IT_IS, Substitution
from compressor.model.verification import check_carried
from compressor.pipeline.formats import SAFETENSORS, formats_of, write_formats
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
from compressor.pipeline.resolve import ResolvedRecipe, evaluation_text, first_state, open_run, prepare
from compressor.progress import Progress
from compressor.quality_gate.domain_divergence import DomainDivergence
from compressor.quality_gate.domains import domain_divergence
from compressor.quality_gate.report import read_gate
from compressor.quality_gate.verdict import GateResult
from compressor.recipe.plan import ExpertPlan
from compressor.recipe.recipe import RECIPE, Recipe, recipe_of_plan, recipe_yaml
from compressor.recipe.step import FORMAT, DecoderLayer, Step, Tensors
from compressor.recipe.steps_plan import Plan, PlannedStep
from compressor.records import plain_json, read_as, read_object, spelled
from compressor.run_record import (
    COMPRESSION,
    RunRecord,
    answers,
    record_request,
    record_run,
    report_in_place,
    request_key,
)
from compressor.steps.constants.step import read_constants
from compressor.steps.correct.heads import acceptance_of
from compressor.steps.cutting import through_model
from compressor.steps.job import check_plan, left_out_of, make_job
from compressor.steps.state import State
from compressor.steps.tensors import OutputJob
from compressor.steps.workdir import (
    Workdir,
    assemble,
    check_space,
    check_target,
    held,
    is_written,
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
    """The checkpoint in the making: its folder, what its files hold, and how to check them."""

    folder: Path
    job: OutputJob
    source: OpenModel  # the model that its layers were made of, as the stage saw it
    plan: ExpertPlan
    heads: tuple[Head, ...]  # multi-token-prediction heads that are kept
    model: OpenModel | None = None
    before: "WorkingCheckpoint | None" = None  # what it was made of, unless that is the run's source

    @property
    def first(self) -> "WorkingCheckpoint":
        """The stage that was made of the run's source."""
        return self if self.before is None else self.before.first

    def opened(self, like: OpenModel) -> OpenModel:
        """Return the checkpoint as it is now, computing like another model."""
        if self.model is None:
            self.model = open_alike(ModelSource(str(self.folder), None, self.folder), like)
        return self.model


def run(recipe: Recipe, delivery: Delivery, plan: Plan | None = None) -> Outcome:
    """Carry out a recipe's steps, or the `plan` that names their decisions, under the gate of the delivery.

    An interrupted run goes on when called again. Where the output of this very request is in place already, nothing is
    written. Raises `CompressionError` for everything that a user can mend, `GateFailedError` for an output that does
    not pass, and then leaves nothing behind.
    """
    formats = formats_of(recipe)
    assert recipe.model is not None
    deterministic = any(getattr(step, "deterministic", False) for step in recipe.steps)
    settings = recipe.dtype, delivery.device, delivery.progress, recipe.resident, deterministic
    with open_run(recipe.model, recipe.revision, *settings) as opened:
        model, clock = opened.model, opened.clock
        with clock.phase("open"):
            base = model
            if recipe.base is not None:
                base = open_alike(find_model(recipe.base, recipe.base_revision, delivery.progress), model)
            before = earlier_plan(model) if plan is None else None
            resolved = prepare(recipe, model, base, before, plan)
            if recipe.base is not None and before is not None and before.source.fingerprint != base.fingerprint:
                what = "%s was made of %s, whose fingerprint is not that of %s: it is compared with another model"
                logger.warning(what, model.source.label, before.source.label, base.source.label)
            check_carried(model.source.folder)
            refuse_places(delivery, (model, base))
            key = ranks().broadcast(resolved.key)
            gate_key = None if delivery.gate is None else delivery.gate.key
            place = request_key(key, recipe.output.max_shard_bytes, formats, gate_key)
        in_place = partial(_in_place, delivery, place, resolved, opened.peak)
        if (outcome := in_place()) is not None:
            return outcome
        needed = resolved.space
        with held(delivery.out) as work:
            if (outcome := in_place()) is not None:  # another run of it has just ended
                return outcome
            ranks().broadcast(lambda: check_target(delivery.out, delivery.overwrite))
            ranks().broadcast(lambda: check_space(delivery.out, needed))
            work.resume(key)
            state = first_state(resolved, opened, work)
            stage = make_all(state)
            ranks().barrier()
            outcome = _finish(resolved, state, stage, delivery, opened.peak, place)
            ranks().broadcast(lambda: publish(work, delivery.overwrite))
    return outcome


def earlier_plan(model: OpenModel) -> Plan | None:
    """Return the plan that a checkpoint of this tool was made by; None for another one."""
    path = model.source.folder / COMPRESSION
    if not path.is_file():
        return None
    content = read_object(path).get("plan")
    return Plan.from_dict(content if isinstance(content, dict) else {}, f"{path}: plan")


def refuse_places(delivery: Delivery, models: Sequence[OpenModel]) -> None:
    """Refuse an output inside a checkpoint that is read, or one that would replace it."""
    target, hint = delivery.out.resolve(), "name another output folder"
    for folder in (model.source.folder for model in models):
        if target == folder or folder in target.parents:
            raise CompressionError(f"{delivery.out} lies in the source checkpoint itself; {hint}")
        if target in folder.parents and (delivery.overwrite or not target.is_dir()):
            raise CompressionError(f"{delivery.out} holds the source checkpoint, which it would replace; {hint}")


def _in_place(delivery: Delivery, place: str, resolved: ResolvedRecipe, peak: PeakMemory) -> Outcome | None:
    """Return the outcome of an output that is in place and the one requested; None if there is none."""
    if delivery.overwrite:
        return None

    def answered() -> bool:
        with suppress(CompressionError):
            check_target(delivery.out, False)  # which tidies up after a run that was killed
        same = answers(delivery.out, place)
        with suppress(CompressionError):
            if same and work_folder(delivery.out).exists():  # of a run that was killed after the last rename
                with lock_output(delivery.out) as folder:
                    clear(folder)
        return same

    if not ranks().broadcast(answered):
        return None
    report_in_place(delivery.out)
    outcome = read_outcome(delivery.out)
    if delivery.gate is not None:
        outcome = replace(outcome, gate=read_gate(delivery.out / REPORT))
    servers = servers_of(resolved.seen, outcome.expert_plan)  # figures of this run, which did nothing, not of that one
    return replace(outcome, servers=servers, peak_memory=peak.anonymous, seconds={}, command=None, acceptance={})


def _finish(
    resolved: ResolvedRecipe, state: State, stage: WorkingCheckpoint, delivery: Delivery, peak: PeakMemory, place: str
) -> Outcome:
    work, model, first = state.work, resolved.model, stage.first
    assert work is not None
    whole, before = state.plan.expert_plan, Size.of(model.checkpoint.tensors.values())
    if resolved.before is not None:  # sizes count from the source of the first run
        record = read_object(model.source.folder / COMPRESSION)
        before = Size(int(record["parameters"]["before"]), int(record["bytes"]["before"]))
    outcome = Outcome(
        out=str(delivery.out),
        plan=state.plan,
        experts_before=(whole.layers or model.architecture.layers)[0].experts,
        experts_after=whole.experts or model.architecture.experts,
        before=before,
        after=Size.of(stage.job.outputs),
        seconds={},
        peak_memory=0,
        left_out=tuple(sorted({name for each in (first, stage) for name in left_out_of(each.source, each.plan)})),
        zeroed_fields=tuple(stage.job.zeroed),
        servers=servers_of(resolved.seen, whole),
    )
    label = model.source.label if resolved.before is None else resolved.before.source.label
    files = [name for name in stage.job.files if name != "config.json"]

    def assembled() -> None:
        own = {"model": label, "gate": resolved.recipe.gate, "output": resolved.recipe.output}  # and all steps so far
        base = {} if state.plan.base is None else {"base": state.plan.base.label}
        recipe = recipe_of_plan(state.plan).model_copy(update=own | base)
        records = {COMPRESSION: record_of(outcome, files, label), RECIPE: recipe_yaml(recipe)}
        assemble(stage.folder, work.output, records, resolved.recipe.output.max_shard_bytes)
        stage.job.verify(work.output)

    with state.clock.phase("write"):
        ranks().broadcast(assembled)
    outcome = replace(outcome, heldout=_heldout_divergence(resolved, state, work.output))
    if outcome.heldout is not None:
        ranks().broadcast(lambda: write_file(work.output / COMPRESSION, record_of(outcome, files, label)))
    fit = None if state.text is None else state.text.fit
    changed = stage is not first or any(step.order is None for step in resolved.options)
    heads = first.heads if stage.heads else ()
    acceptance = acceptance_of(first.plan, heads, work.output, first.source, fit, changed)
    formats = formats_of(resolved.recipe)
    if delivery.gate is not None or formats != (SAFETENSORS,):
        for opened in (model, state.base, state.model):  # a gate may load whole models
            opened.partial.stream()
    if delivery.gate is not None:
        outcome = replace(outcome, gate=_passed(delivery.gate, outcome, work.output, state.progress))
    ranks().broadcast(lambda: write_formats(work.output, formats, state.progress))
    outcome = replace(
        outcome,
        seconds=dict(state.clock.seconds),
        peak_memory=peak.anonymous,
        packed=is_packed(work.output),
        loader_fault=fault_of(work.output),
        acceptance=acceptance,
    )
    if ranks().is_first:  # recorded before the rename, for a run that is killed right after it
        identity = None if state.text is None else state.text.identity
        run_record = RunRecord(
            model.source.name,
            model.source.revision,
            with_folders(state.plan.calibration if identity is None else identity),
            outcome.seconds,
            outcome.peak_memory,
            None if delivery.command is None else tuple(delivery.command),
            acceptance=acceptance,
            base=None if state.base is model else state.base.source.name,
        )
        record_run(work.output, run_record)
        for key in (place, *delivery.requests):
            record_request(work.output, key)
    return outcome


def _passed(gate: PreparedGate, outcome: Outcome, folder: Path, progress: Progress) -> GateResult:
    """Return the gate's result on a finished output; raise `GateFailedError` for one that is not to be put in place."""
    out = Path(outcome.out)
    result = judge(gate, folder, out.name, progress)
    accepted = ranks().broadcast(lambda: gate.accepts(result))  # from now on a rank that rejects may clear the folder
    if not (accepted or gate.request.options.keep_failed):
        raise GateFailedError(out, [Attempt(outcome.experts_after, result, accepted=False)])
    return result


def _heldout_divergence(resolved: ResolvedRecipe, state: State, folder: Path) -> DomainDivergence | None:
    """How far the output is from the base on held-out text; None where no text is read, or without evaluation.

    What cannot be compared ends no run: a warning says why.
    """
    if not resolved.recipe.output.evaluate:
        return None
    try:
        with state.clock.phase("read text"):
            text = evaluation_text(resolved, state.texts)
        if text is None:
            return None
        evaluator = Evaluator(state.base, text.evaluation)
        if evaluator.sequences < FEWEST:
            message = f"the text leaves {evaluator.sequences} sequences to compare on, fewer than {FEWEST}"
            raise CompressionError(f"{message}; give more text, or lower --samples or --sequence-length")
        settings, variant = (state.base.dtype_name, str(state.base.partial.device)), AS_IT_IS
        if not state.plan.expert_plan.has_constants:
            output = open_model(ModelSource(str(folder), None, folder), *settings)
        else:
            output, constants = read_constants(folder, *settings)
            variant = Substitution(constants=constants)
        with state.clock.phase("evaluate"):
            (figures,) = evaluator.measure(output, [variant], progress=state.progress)
        names = map(without_tokens, evaluator.names)  # of files, which go into the record
        compared = domain_divergence(figures, dict(enumerate(names)))
    except CompressionError as error:
        logger.warning("output and base are not compared on held-out text: %s", error)
        return None
    short = [without_tokens(name) for name in evaluator.names if name in text.short]
    if short:
        few = f"{joined(short)} had too little text for this alone"
        compared = replace(compared, note=f"{few}: among its sequences are held-out ones by which steps have chosen.")
    rounded = plain_json(compared, lambda value: spelled(round(value, 6)))
    return read_as(DomainDivergence, rounded)


def make_all(state: State) -> WorkingCheckpoint:
    work, stage = state.work, None
    assert work is not None
    for numbers in state.plan.stages:
        if numbers[0] < state.first:
            continue
        state.number = numbers[0]
        for number in numbers:
            if (recorded := work.steps.get(number)) is not None:  # by a run that was killed
                entry = PlannedStep.from_dict(recorded, "journal.json")
                changes = {"decision": entry.decision, "result": entry.result, "text": entry.text}
                state.plan = state.plan.with_entry(number, **changes)
        if state.step_at(numbers[0]).options.order is not None:
            stage = _layer_stage(state, numbers, stage, work)
            continue
        if stage is None:  # the whole model is changed first: a copy of it
            stage = _written(state, numbers, work)
        if state.plan.steps[numbers[0]].result is None:
            _whole_step(state, stage, work)
    assert stage is not None
    return stage


def _layer_stage(
    state: State, numbers: Sequence[int], before: WorkingCheckpoint | None, work: Workdir
) -> WorkingCheckpoint:
    if before is not None:
        if before.before is not None:  # the last one stays until the end, for a run that goes on after a kill
            work.drop(before.before.folder)
        state.model = before.opened(state.base)
        before.model = None
    decide(state, numbers)
    steps = [state.step_at(number) for number in numbers]
    folder = work.stage(numbers[0])
    if not is_written(folder):
        for number, step in zip(numbers, steps, strict=True):
            if type(step).refit is Step.refit:
                continue
            state.number = number
            with state.clock.phase(step.name):
                refitted = step.refit(state)
            if refitted is not None and state.deciding is not None:
                state.plan = state.plan.with_entry(state.deciding, decision=refitted)
                work.record(state.deciding, state.plan.steps[state.deciding].to_dict())
    stage = _written(state, numbers, work, steps)
    stage.before = before
    return stage


def decide(state: State, numbers: Sequence[int]) -> None:
    """The decisions of these steps of a stage, in its order; those that are there already excepted."""
    for number in state.stage:
        state.model = state.step_at(number).model_view(state.model)
    for number in numbers:
        state.number, step = number, state.step_at(number)
        decision = state.plan.steps[number].decision
        if decision is None:
            with state.clock.phase("plan"):
                decision = step.decide(state)
            state.plan = state.plan.with_entry(number, decision=decision, text=state.own_text)
            if state.work is not None and decision is not None:
                state.work.record(number, state.plan.steps[number].to_dict())
        if decision is not None:
            step.apply_decision(decision, state)


def _written(state: State, numbers: Sequence[int], work: Workdir, steps: Sequence[Step[Any]] = ()) -> WorkingCheckpoint:
    folder, plan = work.stage(numbers[0]), state.expert_plan()
    heads = check_plan(plan, state.model)
    earlier = state.steps[: numbers[0] - state.first]
    packed = [step.name for step in earlier if FORMAT in step.options.changes]
    if packed and through_model(state.model.layout, plan, state.refits):
        message = f"{packed[0]} has packed experts that can only be merged, or dropped, once they are dequantised"
        raise CompressionError(f"steps[{numbers[0] - state.first}]: {message}; put {packed[0]} after it")
    job = None
    for number, step in zip(numbers, steps, strict=False):
        state.number, job = number, job or step.writer(state)
    state.number = numbers[0]
    if job is None:
        cut = state.cut() if state.refits else None
        changing = [step for step in steps if type(step).apply_layer is not Step.apply_layer]

        def change(name: str, tensors: Tensors) -> Tensors:
            """Return a decoder layer's tensors after the steps that only change tensors, in order."""
            moe_layers = [layer for layer in state.model.architecture.layers if layer.decoder_layer == name]
            current = dict(tensors)
            for step in changing:
                for key, value in (step.apply_layer(DecoderLayer(name, moe_layers, current), state) or {}).items():
                    if key not in current or value.shape != current[key].shape:
                        message = f"gives {key} of {name}, which is no tensor of that shape"
                        raise CompressionError(f"step {step.name} {message}; mend its apply_layer()")
                    current[key] = value
            return {key: value for key, value in current.items() if value is not tensors[key]}

        job = make_job(state.model, plan, cut, change if changing else None)
    if not is_written(folder):
        labels = [f"{number}-{step.name}" for number, step in zip(numbers, steps, strict=False)]
        state.progress.start("write", len(job.decoder_layers))
        with state.clock.phase("write"):
            write_stage(job, folder, labels, state.progress.advance)
        if not any(step.options.verified_by_kept for step in steps):
            work.drop_kept(numbers[0])
    return WorkingCheckpoint(folder, job, state.model, plan, heads)


def _whole_step(state: State, stage: WorkingCheckpoint, work: Workdir) -> None:
    number = state.number
    step = state.step_at(number)
    for each in (state.base, stage.source):  # passed once more at most, beside a model that may be in memory whole
        each.partial.stream()
    state.model = stage.opened(state.base)
    with state.clock.phase(step.name):
        result = step.apply_model(state)
    if result is None:
        return

    def put_all() -> None:
        for tensors in result.tensors:
            put_tensors(stage.folder, tensors, f"{number}-{step.name}")

    ranks().broadcast(put_all)
    stage.model = None  # its files are others now
    state.plan = state.plan.with_entry(number, result=dict(result.figures), text=state.own_text)
    work.record(number, state.plan.steps[number].to_dict())
    work.drop_kept(number)
