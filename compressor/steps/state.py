"""The state between steps: the model as it is now, its base, the text, the plan so far and the work
folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from compressor.data.batches import Calibration, TextBatches
from compressor.divergence.evaluator import Evaluator
from compressor.divergence.teacher_outputs import Distributions, read_base
from compressor.model.mtp import fitting_heads
from compressor.model.opened import OpenModel
from compressor.progress import Clock, Progress
from compressor.recipe.plan import ExpertPlan, LayerPlan
from compressor.recipe.step import CONSTANTS, EXPERTS, Step, StepOptionsT
from compressor.recipe.steps_plan import Plan
from compressor.steps.correct.options import Correct
from compressor.steps.cutting import CutFiles
from compressor.steps.workdir import Workdir

# The run's text (None), with a part for each step that needs one, and texts of single steps, by
# number in the run.
Texts = Mapping[int | None, TextBatches]


@dataclass(slots=True)
class State:
    """The state of a run before the step `number`."""

    source: OpenModel  # the run's input, as it is stored
    base: OpenModel  # the result is compared with it: the source, unless another one is named
    # the step's input: split, with another top-k, or the checkpoint of earlier stages
    model: OpenModel
    steps: tuple[Step[Any], ...]
    plan: Plan
    progress: Progress
    clock: Clock
    texts: Texts
    work: Workdir | None = None  # None if nothing is written
    number: int = 0
    # number of the first of these steps in the plan: earlier ones were done by earlier runs
    first: int = 0
    parts: int = 1  # sub-experts of each of the source's experts
    shared: dict[str, Any] = field(default_factory=dict)  # values that steps compute once
    # of the output; a pass over the base lets it keep the base's answers
    evaluator: Evaluator | None = None
    # that write this stage's layers while they are loaded, where that is possible
    stage_files: CutFiles | None = None

    @property
    def text(self) -> TextBatches | None:
        """The step's own text, or that of the run."""
        return self.texts.get(self.number - self.first, self.texts.get(None))

    @property
    def fit(self) -> Calibration | None:
        """The batches of that text that are fitted to; None where steps only train on it."""
        return self.text.fit if self.text is not None and self.text.fit.batches else None

    def step_at(self, number: int) -> Step[Any]:
        """Return the step of that number in the plan."""
        return self.steps[number - self.first]

    @property
    def own_text(self) -> Mapping[str, Any] | None:
        """Identity of the step's own text; None if it reads that of the run."""
        own = self.step_at(self.number).options.calibration is not None
        return self.text.identity if own and self.text is not None else None

    @property
    def part(self) -> str:
        """The name of the text's part for this step."""
        return part_name(self.number - self.first) if self.own_text is None else OWN

    @property
    def seed(self) -> int:
        """The seed of all random draws."""
        return self.plan.seed

    @property
    def stage(self) -> tuple[int, ...]:
        """Numbers of the steps that are done together with this one."""
        return next(numbers for numbers in self.plan.stages if self.number in numbers)

    def options_of(self, kind: type[StepOptionsT]) -> StepOptionsT | None:
        """Options of this kind in this stage; None if it has no such step."""
        options = [self.step_at(number).options for number in self.stage]
        return next((option for option in options if isinstance(option, kind)), None)

    @property
    def stage_label(self) -> list[str]:
        """Names of this stage's steps, as its files' headers have them."""
        return [f"{number}-{self.step_at(number).name}" for number in self.stage]

    @property
    def deciding(self) -> int | None:
        """The number of the step that decides in this stage which experts stay; None if there is
        none."""
        numbers = [
            number
            for number in self.stage
            if {EXPERTS, CONSTANTS} & self.step_at(number).options.changes
        ]
        return numbers[0] if numbers else None

    @property
    def refits(self) -> bool:
        """Return True if experts of this stage are refitted, so that whole layers wait to be
        written."""
        return self.options_of(Correct) is not None

    def expert_plan(self) -> ExpertPlan:
        """The plan of this stage for every expert; all stay unless a step has decided otherwise."""
        decided = None if self.deciding is None else self.plan.steps[self.deciding].expert_plan
        return untouched(self.model) if decided is None else decided

    def kept(self, name: str) -> Path:
        """Return the path of work that a resumed run need not repeat."""
        assert self.work is not None
        return self.work.kept(self.number, name)

    def cut(self) -> CutFiles:
        """Return the files of this stage's refitted layers, which are written at once or wait to
        be."""
        assert self.work is not None
        if self.stage_files is not None and self.refits:
            return self.stage_files
        return CutFiles(self.work.kept(self.stage[0], "layers"))

    def teacher_outputs(self) -> tuple[Sequence[torch.Tensor], list[Distributions], Evaluator]:
        """Return the batches of this step's text, the base's outputs on them, and an evaluator on
        held-out text.

        The base runs once for all steps that share a text: one pass, which processes share.
        """
        text = self.text
        assert text is not None
        sha256 = str(text.identity["sha256"])
        if sha256 not in self.shared:
            self.shared[sha256] = self._run_teacher(text, self.number - self.first)
        evaluator, batches, outputs = self.shared[sha256]
        return batches[self.part], outputs[self.part], evaluator

    def _run_teacher(
        self, text: TextBatches, first: int
    ) -> tuple[Evaluator, dict[str, Sequence[torch.Tensor]], dict[str, list[Distributions]]]:
        """Run the base on the batches of all steps from `first` on that read this text, and on its
        held-out part."""
        assert self.work is not None
        evaluator = Evaluator(self.base, text.heldout)
        batches = {}
        hidden = []
        for number, step in enumerate(self.steps[first:], first):
            name = OWN if OWN in text.parts else part_name(number)
            if name in text.parts and name not in batches:
                batches[name] = step.teacher_batches(text.parts[name])
                if step.needs_teacher_hidden:
                    hidden.append(name)
        folder = self.work.folder / "kept" / f"base-{str(text.identity['sha256'])[:16]}"
        return (
            evaluator,
            batches,
            read_base(self.base, batches, evaluator, self.progress, folder, hidden),
        )


def untouched(model: OpenModel) -> ExpertPlan:
    """Return the plan that keeps every expert, those of multi-token-prediction heads too."""
    whole = ExpertPlan.whole(model)
    if model.is_split:
        return whole
    heads = (
        LayerPlan.keep(head.named, range(whole.experts))
        for head in fitting_heads(model, whole.experts)
    )
    return replace(whole, layers=(*whole.layers, *heads))


OWN = "own"  # the part of a text that one step alone reads, wherever it lies


def part_name(number: int) -> str:
    """Return the name of the text of a step's own, by its number among the run's steps."""
    return f"step {number}"
