"""From a settled recipe to the finished checkpoint: stage by stage in the work folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from compressor.checkpoint.source import ModelSource
from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer
from compressor.model.opened import OpenModel, open_alike
from compressor.mtp.head import Head
from compressor.recipe.plan import CompressionPlan
from compressor.recipe.step import LayerAt, Step, Tensors
from compressor.recipe.steps_plan import PlannedStep
from compressor.records import read_as
from compressor.steps.state import State
from compressor.surgery.conversion import LayerChange
from compressor.surgery.job import check_plan, make_job
from compressor.surgery.tensors import OutputJob
from compressor.workdir.workdir import Workdir, put_tensors, write_stage


@dataclass(slots=True)
class Stage:
    """The checkpoint in the making: its folder, what its files hold, and how to check them."""

    folder: Path
    job: OutputJob
    source: OpenModel  # the model that its layers were made of, as the stage saw it
    plan: CompressionPlan
    heads: tuple[Head, ...]  # multi-token-prediction heads that are kept
    model: OpenModel | None = None

    def opened(self, like: OpenModel) -> OpenModel:
        """The checkpoint as it is now, computing like another model."""
        if self.model is None:
            self.model = open_alike(ModelSource(str(self.folder), None, self.folder), like)
        return self.model


def make_all(state: State) -> Stage:
    """Carry out what is not done."""
    work, stage = state.work, None
    assert work is not None
    for numbers in [each for each in state.plan.stages if each[0] >= state.first]:
        state.number = numbers[0]
        for number in numbers:
            if (noted := work.steps.get(number)) is not None:  # by a run that was killed
                entry = read_as(PlannedStep, noted, "journal.json")
                state.plan = state.plan.with_entry(number, plan=entry.plan, result=entry.result, text=entry.text)
        if state.step_at(numbers[0]).order is not None:
            stage = _layer_stage(state, numbers, stage, work)
            continue
        if stage is None:  # the whole model is changed first: a copy of it
            stage = _written(state, numbers, work, None)
        if state.plan.steps[numbers[0]].result is None:
            _whole_step(state, stage, work)
    assert stage is not None
    return stage


def _layer_stage(state: State, numbers: Sequence[int], before: Stage | None, work: Workdir) -> Stage:
    """Decide, refit in order and write the layers of one stage."""
    if before is not None:
        state.model = before.opened(state.base)
        before.model = None
    decide(state, numbers)
    steps = [state.step_at(number) for number in numbers]
    folder = work.stage(numbers[0])
    if folder.name not in work.written:
        for number, step in zip(numbers, steps, strict=True):
            if type(step).refit is Step.refit:
                continue
            state.number = number
            with state.clock.phase(step.name):
                for changed, decided in step.refit(state).items():
                    state.plan = state.plan.with_entry(changed, plan=dict(decided))
                    work.record(changed, state.plan.steps[changed].to_dict())
    stage = _written(state, numbers, work, steps)
    if before is not None:
        work.drop(before.folder)
    return stage


def decide(state: State, numbers: Sequence[int]) -> None:
    """The decisions of these steps of a stage, in its order; those that are there already excepted."""
    for number in state.stage:
        state.model = state.step_at(number).view(state.model)
    for number in numbers:
        state.number, step = number, state.step_at(number)
        decided = state.plan.steps[number].plan
        if decided is None:
            with state.clock.phase("plan"):
                decided = dict(step.plan(state))
            state.plan = state.plan.with_entry(number, plan=decided or None, text=state.own_text)
            if state.work is not None and decided:
                state.work.record(number, state.plan.steps[number].to_dict())
        step.take(decided, state)


def _written(state: State, numbers: Sequence[int], work: Workdir, steps: Sequence[Step] | None) -> Stage:
    """The stage's layer files, written where they are not there yet."""
    folder, plan = work.stage(numbers[0]), state.stage_plan()
    heads = check_plan(plan, state.model)
    job = None
    for number, step in zip(numbers, steps or (), strict=False):
        state.number, job = number, job or step.job(state)
    state.number = numbers[0]
    if job is None:
        cut = state.cut() if state.step_of("correct") is not None else None
        job = make_job(state.model, plan, cut, _change(state, steps or ()))
    if folder.name not in work.written:
        labels = [f"{number}-{step.name}" for number, step in zip(numbers, steps or (), strict=False)]
        state.progress.start("write", len(job.units))
        with state.clock.phase("write"):
            write_stage(job, folder, labels, state.progress.advance)
        work.mark_written(folder)
        if not any(step.verified_by_kept for step in steps or ()):
            work.drop_kept(numbers[0])
    return Stage(folder, job, state.model, plan, heads)


def _change(state: State, steps: Sequence[Step]) -> LayerChange | None:
    """What steps that only change tensors do to each decoder layer, one after the other."""
    changing = [step for step in steps if type(step).layer is not Step.layer]
    if not changing:
        return None
    by_layer: dict[str, list[MoeLayer]] = {}
    for layer in state.model.architecture.layers:
        by_layer.setdefault(layer.unit, []).append(layer)

    def change(name: str, tensors: Tensors) -> Tensors:
        found = dict(tensors)
        for step in changing:
            made = step.layer(LayerAt(name, by_layer.get(name, []), found), state) or {}
            for key, value in made.items():
                if key not in found or value.shape != found[key].shape:
                    raise CompressionError(
                        f"step {step.name} gives {key} of {name}, which is no tensor of that shape; mend its layer()"
                    )
            found |= made
        return {key: value for key, value in found.items() if value is not tensors[key]}

    return change


def _whole_step(state: State, stage: Stage, work: Workdir) -> None:
    """Have a step change the checkpoint as it is now, and note what came of it."""
    number = state.number
    step = state.step_at(number)
    state.model = stage.opened(state.base)
    with state.clock.phase(step.name):
        made = step.whole(state)
    if made is None:
        return

    def put_all() -> None:
        for tensors in made.tensors:
            put_tensors(stage.folder, tensors, f"{number}-{step.name}")

    here().broadcast(put_all)
    stage.model = None  # its files are others now
    state.plan = state.plan.with_entry(number, result=dict(made.figures), text=state.own_text)
    work.record(number, state.plan.steps[number].to_dict())
    work.drop_kept(number)
