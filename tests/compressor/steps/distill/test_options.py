"""Options of a recovery, its schedule, and the sequences of its steps."""

import inspect
import json
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compressor.cli.commands import recovering
from compressor.errors import CompressionError
from compressor.evaluation.teacher import Distributions
from compressor.steps.distill.options import METHODS, Recovery
from compressor.steps.distill.text import Batch, Text


@given(st.integers(1, 500), st.floats(1e-6, 1.0))
def test_the_rate_rises_to_its_highest_and_falls_on_a_line(steps: int, rate: float) -> None:
    options = Recovery(steps=steps, learning_rate=rate)
    rates = [options.rate_at(step) for step in range(steps)]
    top = rates.index(max(rates))
    assert max(rates) == pytest.approx(rate) and 0 < rates[-1] <= rate and top + 1 <= max(1, round(0.05 * steps))
    falls = [one - two for one, two in zip(rates[top:-1], rates[top + 1 :], strict=True)]
    assert falls == pytest.approx([rates[-1]] * len(falls), rel=1e-3)


def test_the_command_has_the_defaults_of_a_recovery() -> None:
    given = {name: entry.default for name, entry in inspect.signature(recovering.recover).parameters.items()}
    own = {"length" if name == "sequence_length" else name: value for name, value in given.items()}
    for entry in fields(Recovery):
        assert own[entry.name] == entry.default, entry.name


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_plan_keeps_all_of_it(method: str, stream: bool) -> None:
    options = Recovery(method, stream=stream, contrastive=0.01, learning_rate=1e-4)
    again = Recovery.from_plan(json.loads(json.dumps({**options.to_dict(), "calibration": {}, "teacher": "x"})))
    assert again.to_dict() == options.to_dict() and again.optimiser == ("adafactor" if stream else "adam")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"method": 1}, "recover.method should be text"),
        ({"steps": True}, "recover.steps should be a whole number"),
        ({"steps": "4"}, "recover.steps should be a whole number"),
        ({"learning_rate": -1.0}, "--learning-rate -1 is out of range"),
        ({"rank": 0}, "--rank 0 is out of range"),
        ({"length": 1}, "--sequence-length 1 is out of range"),
    ],
)
def test_a_plan_that_was_edited_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(CompressionError, match=message):
        Recovery.from_plan({**Recovery().to_dict(), **wrong})


@given(st.integers(1, 30), st.integers(1, 30), st.integers(0, 5))
def test_an_epoch_takes_no_sequence_twice_and_the_next_one_takes_them_anew(count: int, size: int, seed: int) -> None:
    size = min(size, count)
    rows = torch.arange(count).view(-1, 1).expand(-1, 4)
    whole = Batch(rows, Distributions(rows[..., None], rows[..., None].float(), rows.float()))
    text = Text((whole,), tuple((0, row) for row in range(count)), (), most=3)
    epoch = [text.of_step(step, size, seed) for step in range(count // size)]
    found = [batch.tokens[:, 0].tolist() for batches in epoch for batch in batches]
    taken = [row for rows in found for row in rows]
    assert len(taken) == len(set(taken)) == count // size * size and max(map(len, found)) <= 3
    for batch in (batch for batches in epoch for batch in batches):
        assert torch.equal(batch.original.others, batch.tokens.float())
    again = [batch.tokens[:, 0].tolist() for step in range(count // size) for batch in text.of_step(step, size, seed)]
    assert again == found
    if count > 12:
        later = [row for batch in text.of_step(count // size, size, seed) for row in batch.tokens[:, 0].tolist()]
        assert later != taken[:size] or size == 1
