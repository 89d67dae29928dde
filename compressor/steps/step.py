"""What a step is and what it sees: the run as it stands before it, with model, text and plan."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import torch

from compressor.checkpoint.reader import INDEX_NAME
from compressor.data.batches import Calibration, TextBatches
from compressor.data.sources import TextPart
from compressor.distributed import ranks
from compressor.divergence.evaluator import Evaluator
from compressor.divergence.teacher_outputs import Distributions, read_base
from compressor.frozen import frozen
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.progress import Clock, Progress
from compressor.recipe.plan import ExpertPlan, parts_of
from compressor.recipe.step import StepOptions
from compressor.recipe.steps_plan import Decision, Plan, PlannedStep
from compressor.records import Json
from compressor.steps.job import OutputSize, make_job, untouched
from compressor.steps.section import Section, undescribed
from compressor.steps.tensors import OutputJob
from compressor.steps.workdir import CheckpointWriter, Workdir

# The run's text (None), with a part for each step that needs one, and texts of single steps, by
# number in the run.
Texts = Mapping[int | None, TextBatches]
OWN = "own"  # the part of a text that one step alone reads, wherever it lies
Value = TypeVar("Value")


@frozen
class Requirements:
    """The text, memory and disk space that a step needs."""

    text: bool = False  # calibration text
    heldout: int = 0  # sequences of it that are held out, at the least
    part: TextPart | None = None
    passes: int = 0  # of a text through the model, where one is read
    hidden_copies: int = 1  # copies of the text's hidden states in memory
    sample_bytes: int = 0  # of memory for each sampled token of an MoE layer
    sample_tokens: int | None = 0  # None: all that are read
    parameter_bytes: int = 0  # bytes of memory for each parameter of a model that it holds whole
    notes: tuple[str, ...] = ()  # sentences on what is decided before any weight is read

    @property
    def reads(self) -> bool:
        """True if it reads any text."""
        return self.text or self.part is not None


@frozen
class Result:
    """New values of stored tensors, by name, of the checkpoint before a step; figures as JSON.

    One mapping of `tensors` holds all that changes in a decoder layer.
    """

    figures: Json
    tensors: Iterator[Mapping[str, torch.Tensor]] = field(default_factory=lambda: iter(()))


StepOptionsT = TypeVar("StepOptionsT", bound=StepOptions)


@dataclass(frozen=True)
class Step(Generic[StepOptionsT]):
    """What a step with its options does: `plan` decides, `write` makes the next checkpoint.

    A method that a step doesn't need is left out. `state` is the run as the step finds it.
    """

    options: StepOptionsT

    @property
    def name(self) -> str:
        return self.options.name

    def with_options(self, **changes: Any) -> Self:
        """Return the step with some options changed."""
        return replace(self, options=self.options.model_copy(update=changes))

    def resolve(self, model: OpenModel) -> Self | None:
        """Return the step with every option resolved for the input `model`; None if nothing is to
        be done."""
        return self

    def view(self, model: OpenModel, plan: ExpertPlan | None = None) -> OpenModel:
        """Return the model as the step sees it, no weight read: experts split, another top-k.

        With its `plan`, neurons of sub-experts are those that the plan gives them.
        """
        return model

    def requirements(
        self, model: OpenModel, earlier: Sequence[StepOptions], planned: bool
    ) -> Requirements:
        """Return its needs; raise `CompressionError` for what cannot be done, before a weight is
        read.

        `earlier` steps come before it; `planned`: its decision is there already.
        """
        return Requirements()

    def experts_left(self, layers: Sequence[MoeLayer]) -> int | None:
        """Return how many experts each of these layers keeps; None: all."""
        return None

    def output_size(
        self, model: OpenModel, experts: int, changed: bool = False
    ) -> OutputSize | None:
        """Return the size of the output with this number of experts in each layer; None if it is
        stored as before.

        `changed`: other steps write experts anew, in a plain dtype.
        """
        return None

    def plan(self, state: "State") -> Decision | None:
        """Return its decision, on experts or as JSON."""
        return None

    def write(self, state: "State") -> OutputJob | Result | None:
        """Return how its checkpoint is made by `state.decision`, which may be an earlier run's.

        A step that is done `in_place` returns new tensors for the checkpoint before it, if any.
        """
        return make_job(state.model, state.expert_plan)

    def teacher_batches(self, batches: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return those of the batches [B, L] of its own text on which it needs the base's
        next-token distributions."""
        return ()

    @property
    def needs_teacher_hidden(self) -> bool:
        """Return True if it needs the base's last hidden states on them, too."""
        return False

    def describe(self, planned: PlannedStep) -> Section:
        """Return what terminal, page and card show of it, each its part; `planned` is the plan's
        entry, with options, decision and result.

        By default that is what the plan alone tells."""
        return undescribed(planned)


@dataclass
class Run:
    """What all steps of a run share."""

    source: OpenModel  # the run's input, as it is stored
    base: OpenModel  # the result is compared with it: the source, unless another one is named
    steps: tuple[Step[Any], ...]
    plan: Plan
    progress: Progress
    clock: Clock
    texts: Texts
    work: Workdir | None = None  # None if nothing is written
    evaluator: Evaluator | None = None  # of the output; a pass over the base fills it
    # the base's outputs on each text, by its digest
    teacher: dict[str, Any] = field(default_factory=dict)

    @property
    def first(self) -> int:
        """The number of the first of these steps in the plan; earlier runs did those before it."""
        return len(self.plan.steps) - len(self.steps)

    def record(self, number: int, **changes: Any) -> None:
        """Put a step's decision or result into the plan, and keep it for a run that resumes."""
        self.plan = self.plan.with_entry(number, **changes)
        if self.work is not None:
            self.work.record(number, self.plan.steps[number].to_dict())


@dataclass(frozen=True)
class State:
    """A run as the step `number` of its plan finds it."""

    run: Run
    number: int
    model: OpenModel  # the step's input: that of the run, or the checkpoint of earlier steps
    writer: CheckpointWriter | None = None  # of layers that are written while they are loaded
    cached: dict[str, Any] = field(default_factory=dict)  # values of this step that are made once

    @property
    def position(self) -> int:
        """The step's number among those of the run."""
        return self.number - self.run.first

    @property
    def step(self) -> Step[Any]:
        return self.run.steps[self.position]

    @property
    def earlier(self) -> tuple[StepOptions, ...]:
        """Options of the steps of this run that come before it."""
        return tuple(step.options for step in self.run.steps[: self.position])

    @property
    def label(self) -> str:
        """The step's name in the headers of the files that it makes."""
        return f"{self.number}-{self.step.name}"

    @property
    def base(self) -> OpenModel:
        return self.run.base

    @property
    def progress(self) -> Progress:
        return self.run.progress

    @property
    def seed(self) -> int:
        """The seed of all random draws."""
        return self.run.plan.seed

    @property
    def decision(self) -> Decision | None:
        return self.run.plan.steps[self.number].decision

    @property
    def expert_plan(self) -> ExpertPlan:
        """The step's plan for every expert; all stay unless it has decided otherwise."""
        decision = self.decision
        return decision if isinstance(decision, ExpertPlan) else untouched(self.model)

    @property
    def parts(self) -> int:
        """Sub-experts of each of the source's experts after the earlier steps of this run."""
        plans = (entry.expert_plan for entry in self.run.plan.steps[self.run.first : self.number])
        return math.prod(parts_of(plan.split) for plan in plans if plan is not None)

    @property
    def text(self) -> TextBatches | None:
        """The step's own text, or that of the run."""
        return self.run.texts.get(self.position, self.run.texts.get(None))

    @property
    def fit(self) -> Calibration | None:
        """The batches of that text that are fitted to; None where steps only train on it."""
        return self.text.fit if self.text is not None and self.text.fit.batches else None

    @property
    def own_text(self) -> Json | None:
        """Identity of the step's own text; None if it reads that of the run."""
        own = self.step.options.calibration is not None
        return self.text.identity if own and self.text is not None else None

    @property
    def part(self) -> str:
        """The name of the text's part for this step."""
        return part_name(self.position) if self.own_text is None else OWN

    @property
    def folder(self) -> Path:
        """The folder of the step's checkpoint."""
        assert self.run.work is not None
        return self.run.work.checkpoint(self.number)

    @property
    def is_written(self) -> bool:
        """True if the step's checkpoint is complete, as an earlier run may have left it: its index
        is written last."""
        return self.run.work is not None and ranks().broadcast((self.folder / INDEX_NAME).exists)

    def kept(self, name: str) -> Path:
        """Return the path of work that a resumed run need not repeat."""
        assert self.run.work is not None
        return self.run.work.kept(self.number, name)

    def once(self, name: str, make: Callable[[], Value]) -> Value:
        """Return a value that is made once for this step."""
        if name not in self.cached:
            self.cached[name] = make()
        value: Value = self.cached[name]
        return value

    def teacher_outputs(
        self,
    ) -> tuple[Sequence[torch.Tensor], list[Distributions], Evaluator]:
        """Return the batches of this step's text, the base's outputs on them, and an evaluator on
        held-out text.

        The base runs once for all steps that share a text: one pass, which processes share.
        """
        run = self.run
        text = self.text
        assert text is not None and run.work is not None
        sha256 = str(text.identity["sha256"])
        if sha256 not in run.teacher:
            evaluator = Evaluator(run.base, text.heldout)
            batches = dict[str, Sequence[torch.Tensor]]()
            hidden = []
            for position, step in enumerate(run.steps[self.position :], self.position):
                part = OWN if OWN in text.parts else part_name(position)
                if part in text.parts and part not in batches:
                    batches[part] = step.teacher_batches(text.parts[part])
                    if step.needs_teacher_hidden:
                        hidden.append(part)
            folder = run.work.folder / "kept" / f"base-{sha256[:16]}"
            outputs = read_base(run.base, batches, evaluator, run.progress, folder, hidden)
            run.teacher[sha256] = evaluator, batches, outputs
        evaluator, batches, outputs = run.teacher[sha256]
        return batches[self.part], outputs[self.part], evaluator


def part_name(position: int) -> str:
    """Return the name of the text of a step's own, by its number among the run's steps."""
    return f"step {position}"
