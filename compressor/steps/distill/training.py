"""The loop of a distillation: steps, evaluations on held-out text, the best state kept, and a killed run gone on with.

It ends after its steps, or early: when a loss is no number, when held-out text says that the rate diverges, and when
several evaluations bring nothing better. The best state is taken where the evaluator accepts it.
"""

import json
import math
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.evaluation.evaluator import Difference, Evaluator, Figures
from compressor.files import write_whole
from compressor.kept import told_of
from compressor.model.loading import set_tensor
from compressor.model.opened import OpenModel
from compressor.progress import Progress
from compressor.records import read_as, read_json
from compressor.steps.distill.objective import Objective
from compressor.steps.distill.step import Distill
from compressor.steps.distill.text import Text
from compressor.steps.distill.trained import TrainedLayer
from compressor.steps.distill.updating import NotFiniteError, file_of

STATE = "state.json"
DIVERGED = 2.0  # times the KL from the base before the first step
NOT_A_NUMBER, APART, NO_BETTER, DONE = (
    "a loss was no number",
    "the divergence from the base doubled",
    "no better state came",
    "all steps were taken",
)


Values = Mapping[str, Tensor]
Evaluate = Callable[[], tuple[tuple[float, float, float], tuple[float, ...]]]


class Engine(Protocol):
    """A model in training, in memory or layer by layer."""

    model: OpenModel
    layers: Mapping[str, TrainedLayer]  # by decoder layer

    def step(self, objective: Objective, rate: float) -> None:
        """Take one step on the objective's batches. Raises `NotFiniteError` where a loss or a gradient is no number."""

    def evaluated(self, evaluator: Evaluator) -> Figures:
        """Figures of the model as it would be stored now."""

    def save(self, folder: Path) -> None:
        """Keep the state of all layers in a new folder."""

    def load(self, folder: Path) -> None:
        """Go back to a state that was kept."""

    def values(self, folder: Path, unit: str) -> Values:
        """A layer's trained tensors in float32 in a kept state, by state-dict key."""

    def close(self) -> None:
        """Nothing stays loaded."""


def put_values(model: OpenModel, values: Values, trainable: bool = False) -> None:
    """Put values in the place of loaded tensors, in the dtype in which the model computes; maybe asking for gradients.

    What is loaded may be the checkpoint's own file, mapped: it is replaced, never written.
    """
    whole = model.partial.model
    for key, value in values.items():
        own = model.partial.empty[key]
        made = nn.Parameter(value.detach().to(model.partial.device, own.dtype), requires_grad=trainable)
        set_tensor(whole, key, made)


def rounded(values: Values, stored: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """Values as they are when they have been written and read again."""
    return {key: value.to(stored[key]).float() for key, value in values.items()}


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


def train(
    engine: Engine,
    text: Text,
    evaluator: Evaluator,
    options: Distill,
    seed: int,
    place: Path,
    progress: Progress,
) -> State:
    """Train what the engine holds, or go on where a killed run has stopped; the best state is left in `place`."""

    def evaluate() -> tuple[tuple[float, float, float], tuple[float, ...]]:
        """KL, loss and flips of the model now, and the KL of each sequence; all processes measure together."""
        figures = engine.evaluated(evaluator)
        means = figures.means
        return (means["kl"], means["loss"], means["flips"]), tuple(figures.kl.tolist())

    progress.start("distill", options.steps)
    state = kept(place, engine.layers)
    here().assert_same_on_all(state and state.step, f"training in {place}")
    if state is None:
        if here().is_first:
            shutil.rmtree(place, ignore_errors=True)
        means, first = evaluate()
        state = State((Evaluation(0, *means),), first, first)
    elif state.step:
        engine.load(folder_of(place, state.step))
    for _ in range(state.step):
        progress.advance("step")
    while state.ended is None:
        state = _next(engine, text, evaluate, options, seed, place, progress, state)
    return state


def _next(
    engine: Engine,
    text: Text,
    evaluate: Evaluate,
    options: Distill,
    seed: int,
    place: Path,
    progress: Progress,
    state: State,
) -> State:
    """The steps up to the next evaluation, that one, and the state kept; or the end of it all."""
    end, sums = min(state.step + options.every, options.steps), dict[str, float]()
    for step in range(state.step, end):
        batches = text.of_step(step, options.sequences, seed)
        objective = Objective(options, batches, engine.model, seed, step)
        try:
            engine.step(objective, options.rate_at(step))
        except NotFiniteError:
            return _kept_with(engine, place, state, ended=NOT_A_NUMBER)
        for name, value in objective.parts.items():
            sums[name] = sums.get(name, 0.0) + value / (end - state.step)
        progress.advance("step")
    means, kl = evaluate()
    found = Evaluation(end, *means, sums)
    if not (math.isfinite(found.kl) and math.isfinite(found.loss)):
        return _kept_with(engine, place, state, ended=NOT_A_NUMBER)
    curve = (*state.curve, found)
    best = min(curve, key=lambda entry: entry.kl)
    ended = (
        APART
        if found.kl > DIVERGED * state.curve[0].kl
        else DONE
        if end == options.steps
        else NO_BETTER
        if sum(entry.step > best.step for entry in curve) >= options.patience
        else None
    )
    if here().is_first:
        engine.save(folder_of(place, end))
    best_kl = kl if best is found else state.best_kl
    return _kept_with(engine, place, State(curve, state.first, best_kl, best.step, ended))


def _kept_with(engine: Engine, place: Path, state: State, ended: str | None = None) -> State:
    """Write how far it has come, then remove the states that are of no more use."""
    state.ended = ended or state.ended
    if not here().is_first:
        return state
    place.mkdir(parents=True, exist_ok=True)
    write_whole(place / STATE, json.dumps(asdict(state)))
    used = {folder_of(place, step).name for step in (state.best, state.step)}
    for folder in place.glob("step-*"):
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
