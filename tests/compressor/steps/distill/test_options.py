"""Options of a distillation, its schedule, the sequences of its steps, and when it ends."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.divergence.evaluator import Figures
from compressor.divergence.teacher_outputs import Distributions
from compressor.errors import CompressionError
from compressor.progress import Silent
from compressor.recipe.recipe import make_step
from compressor.steps.distill.objective import Batch, NotFiniteError, TrainingText
from compressor.steps.distill.options import Distill
from compressor.steps.distill.training import APART, DONE, NO_BETTER, NOT_A_NUMBER, Training


@given(st.integers(1, 500), st.floats(1e-6, 1.0))
def test_the_rate_rises_to_its_highest_and_falls_on_a_line(steps: int, rate: float) -> None:
    options = Distill(steps=steps, learning_rate=rate)
    rates = [options.rate_at(step) for step in range(steps)]
    top = rates.index(max(rates))
    assert max(rates) == pytest.approx(rate) and 0 < rates[-1] <= rate and top + 1 <= max(1, round(0.05 * steps))
    falls = [one - two for one, two in zip(rates[top:-1], rates[top + 1 :], strict=True)]
    assert falls == pytest.approx([rates[-1]] * len(falls), rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kl": 0}, "distill: nothing is learnt of no loss; give kl, cross_entropy or hidden_states a weight"),
        ({"tokens_per_step": 100}, "distill: tokens_per_step 100 is less than one sequence of 512 tokens; raise it"),
        ({"step": 4}, "step distill has no option 'step'; did you mean 'steps'"),
    ],
)
def test_impossible_options_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(CompressionError, match=message):
        make_step("distill", {**Distill().to_dict(), **wrong})


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 5))
def test_an_epoch_takes_no_sequence_twice_and_the_next_one_takes_them_anew(count: int, size: int, seed: int) -> None:
    size = min(size, count)
    rows = torch.arange(count).view(-1, 1).expand(-1, 4)
    whole = Batch(rows, Distributions(rows[..., None], rows[..., None].float(), rows.float()), rows.float())
    text = TrainingText((whole,), tuple((0, row) for row in range(count)), most=3)
    epoch = [text.of_step(step, size, seed) for step in range(count // size)]
    found = [batch.tokens[:, 0].tolist() for batches in epoch for batch in batches]
    taken = [row for rows in found for row in rows]
    assert len(taken) == len(set(taken)) == count // size * size and max(map(len, found)) <= 3
    for batch in (batch for batches in epoch for batch in batches):
        assert torch.equal(batch.base.others, batch.tokens.float())
    again = [batch.tokens[:, 0].tolist() for step in range(count // size) for batch in text.of_step(step, size, seed)]
    assert again == found
    if count > 12:
        later = [row for batch in text.of_step(count // size, size, seed) for row in batch.tokens[:, 0].tolist()]
        assert later != taken[:size] or size == 1


class Scripted:
    """An engine whose evaluations follow a curve, and whose loss is no number at step `broken`."""

    options = Distill(steps=6, patience=3, tokens_per_step=64, sequence_length=32)
    layers: tuple[str, ...] = ()
    model, seed = None, 0

    def __init__(self, curve: list[float], broken: int | None) -> None:
        self.curve, self.broken, self.taken = iter(curve), broken, 0

    def step(self, objective: Any, rate: float) -> None:
        if self.taken == self.broken:
            raise NotFiniteError
        self.taken += 1

    def evaluated(self, evaluator: Any) -> Figures:
        kl = next(self.curve) + 0.01 * torch.arange(8).double()
        return Figures(kl, kl, kl / 9, torch.full((8,), 31), torch.zeros(8, dtype=torch.int64))

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True)


@pytest.mark.parametrize(
    ("curve", "broken", "ended", "best", "evaluations"),
    [
        ([1.0, 0.9, 0.8, 0.85, 0.81, 0.9], None, NO_BETTER, 2, 6),
        ([1.0, 0.9, 0.8, 0.7, 0.6], 4, NOT_A_NUMBER, 4, 5),
        ([1.0], 0, NOT_A_NUMBER, 0, 1),
        ([1.0, 0.9, math.nan], None, NOT_A_NUMBER, 1, 2),
        ([1.0, 0.9, 2.5], None, APART, 1, 3),
        ([1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.55], None, DONE, 5, 7),
    ],
)
def test_why_it_ends_and_which_state_is_the_best(
    curve: list[float], broken: int | None, ended: str, best: int, evaluations: int, tmp_path: Path
) -> None:
    engine: Any = Scripted(curve, broken)
    text: Any = SimpleNamespace(of_step=lambda *_: [])
    evaluator: Any = None
    training = Training(engine, text, evaluator, tmp_path / "steps", Silent())
    state = training.run()
    assert (state.ended, state.best, len(state.curve)) == (ended, best, evaluations)
    assert state.result()["changed"] == (best > 0)
    assert best == 0 or training.folder(best).is_dir()
