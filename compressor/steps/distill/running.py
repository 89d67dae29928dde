"""The loop of a recovery: steps, evaluations on held-out text, the best state kept, and a killed run gone on with.

It ends after its steps, or early: when a loss is no number, when held-out text says that the rate diverges, and when
several evaluations bring nothing better.
"""

import json
import math
import shutil
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from compressor.errors import CompressionError
from compressor.files import write_whole
from compressor.progress import Progress
from compressor.records import read_as, read_json
from compressor.steps.distill.engine import Engine, Judgement
from compressor.steps.distill.objective import Objective
from compressor.steps.distill.options import Recovery
from compressor.steps.distill.text import Text
from compressor.steps.distill.updating import NotFiniteError, file_of
from compressor.surgery.kept import told_of

STATE = "state.json"
DIVERGED = 2.0  # times the divergence from the original before the first step
NOT_A_NUMBER, APART, NO_BETTER, DONE = (
    "a loss was no number",
    "the divergence from the original doubled",
    "no better state came",
    "all steps were taken",
)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out text after so many steps: divergence from the original and next-token loss, in nats per token."""

    step: int
    kl: float
    loss: float
    training: Mapping[str, float] = field(default_factory=dict)  # parts of the loss, mean of the steps before


@dataclass(slots=True)
class State:
    """How far a recovery has come; `first` and `best_kl` are the divergences of each held-out sequence."""

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
    def gain(self) -> tuple[float, float]:
        """By how much the best state is nearer to the original, with its standard error over held-out sequences."""
        gains = torch.tensor(self.first, dtype=torch.float64) - torch.tensor(self.best_kl, dtype=torch.float64)
        error = float(gains.std()) / math.sqrt(len(gains)) if len(gains) > 1 else math.inf
        return float(gains.mean()), error

    @property
    def better(self) -> bool:
        """Whether that is more than its standard error."""
        gain, error = self.gain
        return gain > error


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


def train(engine: Engine, text: Text, options: Recovery, seed: int, place: Path, progress: Progress) -> State:
    """Train what the engine holds, or go on where a killed run has stopped; the best state is left in `place`."""
    progress.start("recover", options.steps)
    state: State | None = engine.ranks.told(kept(place, engine.layers))
    if state is None:
        if engine.ranks.first:
            shutil.rmtree(place, ignore_errors=True)
        judged = _judged(engine, text)
        first = tuple(judged.kl.tolist())
        state = State((Evaluation(0, float(judged.kl.mean()), float(judged.loss.mean())),), first, first)
    elif state.step:
        engine.load(folder_of(place, state.step))
    for _ in range(state.step):
        progress.advance("step")
    while state.ended is None:
        state = _evaluated(engine, text, options, seed, place, progress, state)
    return state


def _evaluated(
    engine: Engine, text: Text, options: Recovery, seed: int, place: Path, progress: Progress, state: State
) -> State:
    """The steps up to the next evaluation, that one, and the state kept; or the end of it all."""
    end, sums = min(state.step + options.every, options.steps), dict[str, float]()
    for step in range(state.step, end):
        batches = text.of_step(step, options.sequences, seed)
        objective = Objective(options, batches, engine.model, seed, step, engine.ranks)
        try:
            engine.step(objective, options.rate_at(step))
        except NotFiniteError:
            return _kept_with(engine, place, state, ended=NOT_A_NUMBER)
        for name, value in objective.parts.items():
            sums[name] = sums.get(name, 0.0) + value / (end - state.step)
        progress.advance("step")
    judged = _judged(engine, text)
    found = Evaluation(end, float(judged.kl.mean()), float(judged.loss.mean()), sums)
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
    if engine.ranks.first:
        engine.save(folder_of(place, end))
    best_kl = tuple(judged.kl.tolist()) if best is found else state.best_kl
    return _kept_with(engine, place, State(curve, state.first, best_kl, best.step, ended))


def _judged(engine: Engine, text: Text) -> Judgement:
    """How held-out text judges the model now: the first process says it for all."""
    judged: Judgement = engine.ranks.told(engine.judged(text.heldout) if engine.ranks.first else None)
    return judged


def _kept_with(engine: Engine, place: Path, state: State, ended: str | None = None) -> State:
    """Write how far it has come, then remove the states that are of no more use."""
    state.ended = ended or state.ended
    if not engine.ranks.first:
        return state
    place.mkdir(parents=True, exist_ok=True)
    write_whole(place / STATE, json.dumps(asdict(state)))
    used = {folder_of(place, step).name for step in (state.best, state.step)}
    for folder in place.glob("step-*"):
        if folder.name not in used:
            shutil.rmtree(folder)
    return state


def result(state: State, changed: bool) -> dict[str, Any]:
    """What a plan tells of a recovery."""
    gain, error = state.gain
    return {
        "changed": changed,
        "before": state.curve[0].kl,
        "after": _at(state, state.best if changed else 0).kl,
        "loss_before": state.curve[0].loss,
        "loss_after": _at(state, state.best if changed else 0).loss,
        "gain": gain,
        "error": error if math.isfinite(error) else None,
        "best": state.best,
        "ended": state.ended,
        "curve": [asdict(entry) for entry in state.curve],
    }


def _at(state: State, step: int) -> Evaluation:
    return next(entry for entry in state.curve if entry.step == step)
