"""Small models in training: a model, its base, and text; test support."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import compressor
from compressor.checkpoint.source import locate
from compressor.divergence.teacher_outputs import read_base
from compressor.model.opened import OpenModel, open_model
from compressor.progress import Silent
from compressor.steps.distill.engines import Engine, InMemory, Streamed, trained_layers
from compressor.steps.distill.objective import Objective, TrainingText, training_text
from compressor.steps.distill.options import Distill
from tests.support import small, zoo

LENGTH = 12


@dataclass(frozen=True)
class Lesson:
    """Stock models in memory, the same ones on disk, and text."""

    stock: Any
    stock_base: Any
    model: OpenModel
    base: OpenModel
    tokens: tuple[Tensor, ...]
    folder: Path

    def text(self, options: Distill) -> TrainingText:
        hidden = ["text"] if options.hidden_states else []
        answers = read_base(self.base, {"text": self.tokens}, None, Silent(), self.folder / "kept", hidden)["text"]
        return training_text(self.tokens, answers, options, self.base)

    def engine(self, options: Distill, seed: int = 0) -> Engine:
        if options.stream:
            return Streamed(self.model, options, seed, self.folder / "now")
        return InMemory(self.model, options, seed)

    def trained(self, options: Distill, steps: int) -> dict[str, Tensor]:
        """The trained tensors after so many steps, by state-dict key."""
        engine, text = self.engine(options), self.text(options)
        for step in range(steps):
            take_step(engine, text, options, step, self.model)
        engine.save(self.folder / "state")
        found = dict[str, Tensor]()
        for layer in trained_layers(self.model, options):
            values = engine.values(self.folder / "state", layer.decoder_layer)
            found.update({key: value.clone() for key, value in values.items()})
        engine.model.partial.release("")
        return found


def take_step(engine: Engine, text: TrainingText, options: Distill, step: int, model: OpenModel) -> Objective:
    batches = text.of_step(step, options.sequences, seed=0)
    objective = Objective(options, batches, model)
    engine.step(objective, options.rate_at(step))
    return objective


def lesson(name: str, folder: Path, sequences: int = 12) -> Lesson:
    """Two models of a family with other weights, so that there is much to learn."""
    stock_base, stock = zoo.save(name, folder / "base"), zoo.save(name, folder / "model", seed=1)
    model, base = (open_model(locate(str(folder / part)), "float32", "cpu") for part in ("model", "base"))
    parts = zoo.tokens(stock, sequences, LENGTH, seed=5).split(4)
    return Lesson(stock, stock_base, model, base, parts, folder)


def smaller(folder: Path, sentences: int = 200) -> Path:
    """The folder with a model, its copy of four experts, and text of so many sentences."""
    small.save(folder / "model")
    text = "\n\n".join(f"Sentence {number} says {'so ' * (number % 7)}and {number**2}." for number in range(sentences))
    small.text_file(folder, text)
    plain: dict[str, Any] = {"strategy": "model-centric", "correct": "none"}
    compressor.compress(str(folder / "model"), folder / "smaller", experts=4, **plain)
    return folder


def options(**more: Any) -> Distill:
    return Distill(**{"steps": 4, "tokens_per_step": 4 * LENGTH, "sequence_length": LENGTH, "rank": 2, **more})


def close(found: Any, expected: Any, share: float = 1e-4) -> None:
    """Every tensor is as expected, to a share of its largest entry."""
    assert found.keys() == expected.keys() and found
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-3, atol=share * float(value.abs().max()) + 1e-9, msg=name
        )
