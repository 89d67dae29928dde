"""Carry out `distill` on the checkpoint that earlier steps have made: the loop, its record, and new stored tensors.

The loop takes steps, evaluates on held-out text, keeps the best state, and goes on with a killed run. It ends after its
steps, or early: when a loss is no number, when held-out text says that the rate diverges, and when
several evaluations bring nothing better. The best state is taken where the evaluator accepts it.
"""

import json
import math
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.evaluation.evaluator import Difference, Evaluator, require_enough
from compressor.files import write_whole
from compressor.kept import keep_tensors, kept_tensors, told_of
from compressor.model.opened import OpenModel
from compressor.progress import Progress
from compressor.recipe.step import Result, Step
from compressor.records import read_as, read_json
from compressor.steps.distill.engines import (
    Engine,
    InMemory,
    Streamed,
    file_of,
    stored_dtypes,
    stored_tensors,
    trained_layers,
)
from compressor.steps.distill.objective import NotFiniteError, Objective, Text, refuse_too_few, training_text
from compressor.steps.distill.step import Distill
from compressor.steps.state import State as Run

FIGURES = "figures.safetensors"  # there once all new stored tensors are
STATE = "state.json"
DIVERGED = 2.0  # times the KL from the base before the first step
NOT_A_NUMBER, APART, NO_BETTER, DONE = (
    "a loss was no number",
    "the divergence from the base doubled",
    "no better state came",
    "all steps were taken",
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Figures on held-out text after so many steps: KL from the base and loss in nats per token, and flips."""

    step: int
    kl: float
    loss: float
    flips: float
    training: Mapping[str, float] = field(default_factory=dict)  # parts of the loss, mean of the steps before


@dataclass(slots=True)
class State:
    """How far a distillation has come; `first` and `best_kl` are the KL of each held-out sequence."""

    curve: tuple[Evaluation, ...]
    first: tuple[float, ...]
    best_kl: tuple[float, ...]
    best: int = 0  # step of the best evaluation
    ended: str | None = None  # why there are no more steps

    @property
    def step(self) -> int:
        """The step of the last evaluation."""
        return self.curve[-1].step

    @property
    def gained(self) -> Difference:
        """What the best state does to the distance from the base."""
        return Difference.of(self.first, self.best_kl)


def folder_of(place: Path, step: int) -> Path:
    """Where the state after so many steps is kept."""
    return place / f"step-{step:07d}"


def kept(place: Path, units: Collection[str]) -> State | None:
    """How far an earlier run has come; None if there is none that can be gone on with, of these layers."""
    try:
        found = read_as(State, read_json(place / STATE, "run again"))
    except (OSError, CompressionError):
        return None
    files = [file_of(folder_of(place, step), unit) for step in {found.step, found.best} - {0} for unit in units]
    return found if all(told_of(path) is not None for path in files) else None


@dataclass(frozen=True, slots=True)
class Training:
    """Trains what the engine holds, or goes on where a killed run has stopped; the best state is left in `place`."""

    engine: Engine
    text: Text
    evaluator: Evaluator
    options: Distill
    seed: int
    place: Path
    progress: Progress

    def run(self) -> State:
        """All steps, or as many as there are until it ends early."""
        self.progress.start("distill", self.options.steps)
        state = kept(self.place, self.engine.layers)
        here().assert_same_on_all(state and state.step, f"training in {self.place}")
        if state is None:
            if here().is_first:
                shutil.rmtree(self.place, ignore_errors=True)
            first, kl = self._evaluate(0)
            state = State((first,), kl, kl)
        elif state.step:
            self.engine.load(folder_of(self.place, state.step))
        for _ in range(state.step):
            self.progress.advance("step")
        while state.ended is None:
            state = self._next(state)
        return state

    def _evaluate(self, step: int, **parts: float) -> tuple[Evaluation, tuple[float, ...]]:
        """Figures of the model now, and the KL of each sequence; all processes measure together."""
        figures = self.engine.evaluated(self.evaluator)
        means = figures.means
        return Evaluation(step, means["kl"], means["loss"], means["flips"], parts), tuple(figures.kl.tolist())

    def _next(self, state: State) -> State:
        """The steps up to the next evaluation, that one, and the state kept; or the end of it all."""
        options, sums = self.options, dict[str, float]()
        end = min(state.step + options.every, options.steps)
        for step in range(state.step, end):
            batches = self.text.of_step(step, options.sequences, self.seed)
            objective = Objective(options, batches, self.engine.model, self.seed, step)
            try:
                self.engine.step(objective, options.rate_at(step))
            except NotFiniteError:
                return self._kept(replace(state, ended=NOT_A_NUMBER))
            for name, value in objective.parts.items():
                sums[name] = sums.get(name, 0.0) + value / (end - state.step)
            self.progress.advance("step")
        found, kl = self._evaluate(end, **sums)
        if not (math.isfinite(found.kl) and math.isfinite(found.loss)):
            return self._kept(replace(state, ended=NOT_A_NUMBER))
        curve = (*state.curve, found)
        best = min(curve, key=lambda entry: entry.kl)
        ended = None
        if found.kl > DIVERGED * state.curve[0].kl:
            ended = APART
        elif end == options.steps:
            ended = DONE
        elif sum(entry.step > best.step for entry in curve) >= options.patience:
            ended = NO_BETTER
        if here().is_first:
            self.engine.save(folder_of(self.place, end))
        return self._kept(State(curve, state.first, kl if best is found else state.best_kl, best.step, ended))

    def _kept(self, state: State) -> State:
        """Write how far it has come, then remove the states that are of no more use."""
        if not here().is_first:
            return state
        self.place.mkdir(parents=True, exist_ok=True)
        write_whole(self.place / STATE, json.dumps(asdict(state)))
        used = {folder_of(self.place, step).name for step in (state.best, state.step)}
        for folder in self.place.glob("step-*"):
            if folder.name not in used:
                shutil.rmtree(folder)
        return state


def result(state: State) -> dict[str, Any]:
    """What a plan tells of a distillation."""
    gained = state.gained
    at = {entry.step: entry for entry in state.curve}
    before, after = state.curve[0], at[state.best if gained.accepted else 0]
    return {
        "changed": gained.accepted,
        "before": before.kl,
        "after": after.kl,
        **{
            f"{name}_{when}": getattr(entry, name)
            for name in ("loss", "flips")
            for when, entry in (("before", before), ("after", after))
        },
        "gain": gained.gain,
        "standard_error": gained.standard_error if math.isfinite(gained.standard_error) else None,
        "sequences": gained.sequences,
        "best": state.best,
        "ended": state.ended,
        "curve": [asdict(entry) for entry in state.curve],
    }


def refuse_model(asked: Distill, model: OpenModel, steps: Sequence[Step]) -> None:
    """Refuse what the model is not fit for, as far as its own storage tells."""
    layers = trained_layers(model, asked)
    if not model.layout.quantized or not steps:  # merging and correcting dequantise first
        stored_dtypes(model, layers)


def distill(asked: Distill, run: Run) -> Result:
    """Train toward the base, and give the stored tensors of the best state if held-out text is nearer to the base.

    Each process takes its share of every step's sequences. All that a killed run needs to go on is kept. Raises
    `CompressionError` for tensors that cannot be trained as they are stored, for what a way of training cannot do, for
    fewer than eight held-out sequences, and for an architecture through which no gradients go layer by layer if they
    are to.
    """
    place = run.kept("distill")
    assert place is not None
    made = place / "made"
    if (figures := told_of(made / FIGURES)) is None:  # else of an earlier run
        if asked.stream and not here().is_alone:
            raise CompressionError(f"distill: stream trains in one process, and {here().size} were started; start one")
        if asked.contrastive:
            refuse_too_few(run.model)
        stored_dtypes(run.model, trained_layers(run.model, asked))
        figures = _train(asked, run, place, made)
    return Result(figures, map(kept_tensors, sorted(made.glob("layer-*.safetensors"))))


def _train(asked: Distill, run: Run, place: Path, made: Path) -> dict[str, Any]:
    """Train, and leave what is to be stored of each layer in the folder `made`; nothing if it is not accepted."""
    batches, answers, evaluator = run.base_answers()
    require_enough(evaluator.sequences, "distill")
    text = training_text(batches, answers, asked, run.base)
    now, steps, seed = place / "now", place / "steps", run.seed
    engine = Streamed(run.model, asked, seed, now) if asked.stream else InMemory(run.model, asked, seed)
    try:
        state = Training(engine, text, evaluator, asked, seed, steps, run.progress).run()
        figures = result(state)
        if not here().is_first:
            return figures
        shutil.rmtree(made, ignore_errors=True)
        for number, unit in enumerate(engine.layers if state.gained.accepted else ()):
            values = engine.values(folder_of(steps, state.best), unit)
            tensors = stored_tensors(run.model, values, engine.stored)
            keep_tensors(made / f"layer-{number:05d}.safetensors", tensors, {"unit": unit})
    finally:
        engine.close()
    keep_tensors(made / FIGURES, {}, figures)
    for folder in (now, steps):
        shutil.rmtree(folder, ignore_errors=True)
    return figures
