"""Small models in training: a model, the original it is taught by, and text; test support."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Silent
from compressor.steps.distill import memory, streamed
from compressor.steps.distill.engine import Engine
from compressor.steps.distill.memory import InMemory
from compressor.steps.distill.objective import Objective
from compressor.steps.distill.options import Recovery
from compressor.steps.distill.stored import stored_dtypes
from compressor.steps.distill.streamed import Streamed
from compressor.steps.distill.text import Text, read_original
from compressor.steps.distill.trained import trained_layers
from tests import zoo

LENGTH = 12


@dataclass(frozen=True)
class Lesson:
    """Stock models in memory, the same ones on disk, and text of which the last batch judges."""

    stock: Any
    teacher: Any
    model: OpenModel
    original: OpenModel
    tokens: tuple[Tensor, ...]
    folder: Path

    def text(self, options: Recovery) -> Text:
        calibration = Calibration(self.tokens, {"source": "x"}, heldout=frozenset({len(self.tokens) - 1}))
        return read_original(calibration, self.original, options, Silent())

    def engine(self, options: Recovery, seed: int = 0) -> Engine:
        layers = trained_layers(self.model, options)
        stored = stored_dtypes(self.model, layers)
        if options.stream:
            return Streamed(self.model, layers, stored, options, seed, self.folder / "now")
        return InMemory(self.model, layers, stored, options, seed)

    def trained(self, options: Recovery, steps: int, where: str = "state") -> dict[str, Tensor]:
        """The trained tensors after so many steps, by state-dict key."""
        engine, text = self.engine(options), self.text(options)
        for step in range(steps):
            take_step(engine, text, options, step, self.model)
        engine.save(self.folder / where)
        found = dict[str, Tensor]()
        for layer in trained_layers(self.model, options):
            values = engine.values(self.folder / where, layer.unit)
            found.update({key: value.clone() for key, value in values.items()})
        engine.close()
        return found


def take_step(engine: Engine, text: Text, options: Recovery, step: int, model: OpenModel) -> Objective:
    batches = text.of_step(step, options.sequences, seed=0)
    objective = Objective(options, batches, model, 0, step)
    engine.step(objective, options.rate_at(step))
    return objective


def lesson(name: str, folder: Path, sequences: int = 12) -> Lesson:
    """Two models of a family with other weights, so that there is much to learn."""
    teacher, stock = zoo.save(name, folder / "original"), zoo.save(name, folder / "model", seed=1)
    model, original = (open_model(locate(str(folder / part)), "float32", "cpu") for part in ("model", "original"))
    parts = zoo.tokens(stock, sequences, LENGTH, seed=5).split(4)
    return Lesson(stock, teacher, model, original, parts, folder)


def options(**more: Any) -> Recovery:
    return Recovery(**{"steps": 4, "tokens_per_step": 4 * LENGTH, "length": LENGTH, "rank": 2, **more})


def note_gradients(monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """A mapping that is filled with every master's gradient, while nothing is updated any more."""
    found: dict[str, Tensor] = {}

    def note(state: Any, gradients: dict[str, Tensor], *others: Any) -> None:
        found.update({name: value.clone() for name, value in gradients.items()})

    for module in (memory, streamed):
        monkeypatch.setattr(module, "update", note)
    return found


def close(found: Any, expected: Any, share: float = 1e-4) -> None:
    """Every tensor is as expected, to a share of its largest entry."""
    assert found.keys() == expected.keys() and found
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-3, atol=share * float(value.abs().max()) + 1e-9, msg=name
        )


def joined(batches: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(batches))
