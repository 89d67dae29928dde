"""Carry out `distill` on the checkpoint that earlier steps have made: the loop, its record, and new
stored tensors.

The loop takes steps, evaluates on held-out text, keeps the best state, and resumes a killed run. It
ends after its steps, or early: when a loss is not finite, when training diverges on held-out text,
or when several evaluations in a row bring no improvement. The best state is taken where the
evaluator accepts it."""

import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from compressor.data.emphasis import rebalanced
from compressor.distributed import ranks
from compressor.divergence.evaluator import Difference, Evaluator, require_enough
from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.progress import Progress
from compressor.records import Json, finite, read_as
from compressor.steps.distill.engines import (
    Engine,
    InMemory,
    Streamed,
    file_of,
    stored_dtypes,
    stored_tensors,
    trained_layers,
)
from compressor.steps.distill.objective import (
    NotFiniteError,
    Objective,
    TrainingText,
    training_text,
)
from compressor.steps.distill.options import Distill
from compressor.steps.step import Result, State
from compressor.tensor_cache import load_tensors, read_metadata, save_tensors

FIGURES = "figures.safetensors"  # written after all new stored tensors
STATE = "state.safetensors"
EVALUATIONS = 8  # of held-out text, if nothing else is asked for
DIVERGED = 2.0  # times the KL from the base before the first step
NOT_A_NUMBER = "a loss was no number"
APART = "the divergence from the base doubled"
NO_BETTER = "no better state came"
DONE = "all steps were taken"


@frozen
class Evaluation:
    """Figures on held-out text after this number of steps: KL from the base, loss (nats per token)
    and flips."""

    step: int
    kl: float
    loss: float
    flips: float
    # parts of the loss, mean of the steps before
    training: Mapping[str, float] = field(default_factory=dict)
    # of several sources, where these are balanced
    kl_by_source: Mapping[str, float] = field(default_factory=dict)


@dataclass
class TrainingState:
    """The progress of a distillation; `first` and `best_kl` are the KL of each held-out
    sequence."""

    curve: tuple[Evaluation, ...]
    first: tuple[float, ...]
    best_kl: tuple[float, ...]
    best: int = 0  # step of the best evaluation
    ended: str | None = None  # why there are no more steps

    @property
    def step(self) -> int:
        return self.curve[-1].step

    def result(self) -> Json:
        """Return the result as a plan has it; `changed` says if the best state is taken."""
        gained = Difference.of(self.first, self.best_kl)
        before = self.curve[0]
        step = self.best if gained.accepted else 0
        after = next(evaluation for evaluation in self.curve if evaluation.step == step)
        curve = [asdict(evaluation) for evaluation in self.curve]
        for content in curve:
            if not content["kl_by_source"]:
                del content["kl_by_source"]
        return {
            "changed": gained.accepted,
            "before": before.kl,
            "after": after.kl,
            "loss_before": before.loss,
            "loss_after": after.loss,
            "flips_before": before.flips,
            "flips_after": after.flips,
            "gain": gained.gain,
            "standard_error": finite(gained.standard_error),
            "sequences": gained.sequences,
            "best": self.best,
            "ended": self.ended,
            "curve": curve,
        }

    @property
    def balance(self) -> dict[str, float]:
        """The weights of the sources after the evaluations so far; empty if they are not
        balanced."""
        names = list(self.curve[0].kl_by_source)
        weights = torch.ones(len(names), dtype=torch.float64)
        for entry in self.curve if names else ():
            weights = rebalanced(
                weights, torch.tensor([entry.kl_by_source[name] for name in names]).double()
            )
        return dict(zip(names, weights.tolist(), strict=True))


@frozen
class Training:
    """Trains the engine's layers, or resumes a killed run; the best state is left in `place`."""

    engine: Engine
    text: TrainingText
    evaluator: Evaluator
    place: Path
    progress: Progress

    def run(self) -> TrainingState:
        """Return all steps, or as many as there are until it ends early."""
        self.progress.start("distill", self.engine.options.steps)
        # of an earlier run that was killed, if there is one
        kept = read_metadata(self.place / STATE)
        state = None if kept is None else read_as(TrainingState, kept)
        for step in {state.step, state.best} - {0} if state else ():
            files = [file_of(self.folder(step), layer) for layer in self.engine.layers]
            if any(read_metadata(file) is None for file in files):
                state = None  # a loss of power has cut a file short
        ranks().assert_same_on_all(state and state.step, f"training in {self.place}")
        if state is None:
            if ranks().is_first:
                shutil.rmtree(self.place, ignore_errors=True)
            first, kl = self._evaluate(0)
            state = TrainingState((first,), kl, kl)
        elif state.step:
            self.engine.load(self.folder(state.step))
        for _ in range(state.step):
            self.progress.advance("step")
        while state.ended is None:
            state = self._next(state)
            # write the progress, then remove the states that are no longer needed
            if ranks().is_first:
                save_tensors(self.place / STATE, {}, asdict(state))
                needed = (self.folder(state.best), self.folder(state.step))
                for folder in self.place.glob("step-*"):
                    if folder not in needed:
                        shutil.rmtree(folder)
        return state

    def folder(self, step: int) -> Path:
        return self.place / f"step-{step:07d}"

    def _evaluate(self, step: int, **parts: float) -> tuple[Evaluation, tuple[float, ...]]:
        """Return the figures of the model now, and the KL of each sequence; all processes measure
        together."""
        figures = self.engine.evaluated(self.evaluator)
        means = figures.means
        by_source = {}
        if self.engine.options.balance == "worst" and len(self.evaluator.names) > 1:
            by_source = {
                name: figures.of({number}).means["kl"]
                for number, name in enumerate(self.evaluator.names)
            }
        evaluation = Evaluation(step, means["kl"], means["loss"], means["flips"], parts, by_source)
        return evaluation, tuple(figures.kl.tolist())

    def _next(self, state: TrainingState) -> TrainingState:
        """Take the steps up to the next evaluation, and evaluate; or end it all."""
        engine = self.engine
        options = engine.options
        sums = dict[str, float]()
        balance = state.balance
        every = options.evaluate_every or math.ceil(options.steps / EVALUATIONS)
        end = min(state.step + every, options.steps)
        for step in range(state.step, end):
            batches = self.text.of_step(step, options.sequences, engine.seed, balance)
            objective = Objective(options, batches, engine.model)
            try:
                engine.step(objective, options.rate_at(step))
            except NotFiniteError:
                return replace(state, ended=NOT_A_NUMBER)
            for name, value in objective.parts.items():
                sums[name] = sums.get(name, 0.0) + value / (end - state.step)
            self.progress.advance("step")
        evaluation, kl = self._evaluate(end, **sums)
        if not (math.isfinite(evaluation.kl) and math.isfinite(evaluation.loss)):
            return replace(state, ended=NOT_A_NUMBER)
        curve = (*state.curve, evaluation)
        # of balanced sources the largest KL counts
        best = min(curve, key=lambda entry: max(entry.kl_by_source.values(), default=entry.kl))
        ended = None
        if evaluation.kl > DIVERGED * state.curve[0].kl:
            ended = APART
        elif end == options.steps:
            ended = DONE
        elif sum(entry.step > best.step for entry in curve) >= options.patience:
            ended = NO_BETTER
        if ranks().is_first:
            engine.save(self.folder(end))
        return TrainingState(
            curve, state.first, kl if best is evaluation else state.best_kl, best.step, ended
        )


def distill(options: Distill, run: State) -> Result:
    """Train toward the base, and return the stored tensors of the best state if its KL on held-out
    text is lower.

    Each process takes its share of every step's sequences. All that a killed run needs to go on is
    kept. Raises `CompressionError` for tensors that cannot be trained as they are stored, for fewer
    than eight held-out sequences, and where `stream` meets several processes or an architecture
    without gradients layer by layer."""
    folder = run.kept("distill")
    trained = folder / "made"
    figures = read_metadata(trained / FIGURES)
    if figures is not None:  # of an earlier run
        return Result(figures, map(load_tensors, sorted(trained.glob("layer-*.safetensors"))))
    model = run.model
    if options.stream and not ranks().is_alone:
        raise CompressionError(
            f"distill: stream trains in one process, and {ranks().size} were started; start one"
        )
    stored_dtypes(model, trained_layers(model, options))
    batches, answers, evaluator = run.teacher_outputs()
    require_enough(evaluator.sequences, "distill")
    assert run.text is not None
    sources = run.text.part_sources[run.part]
    text = training_text(batches, answers, options, run.base, run.text.emphasis, sources)
    current = folder / "now"
    steps = folder / "steps"
    if options.stream:
        engine: Engine = Streamed(model, options, run.seed, current)
    else:
        engine = InMemory(model, options, run.seed)
    try:
        training = Training(engine, text, evaluator, steps, run.progress)
        state = training.run()
        figures = state.result()
        if ranks().is_first:
            shutil.rmtree(trained, ignore_errors=True)
            for number, decoder_layer in enumerate(engine.layers if figures["changed"] else ()):
                values = engine.values(training.folder(state.best), decoder_layer)
                tensors = stored_tensors(model, values, engine.stored)
                facts = {"decoder_layer": decoder_layer}
                save_tensors(trained / f"layer-{number:05d}.safetensors", tensors, facts)
    finally:
        model.partial.release("")
    if ranks().is_first:
        save_tensors(trained / FIGURES, {}, figures)
        for path in (current, steps):
            shutil.rmtree(path, ignore_errors=True)
    return Result(figures, map(load_tensors, sorted(trained.glob("layer-*.safetensors"))))
