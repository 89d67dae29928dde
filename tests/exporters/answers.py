"""What stock models in memory answer, without the exporter's streaming, and graphs in ONNX Runtime call by call."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import Tensor

from compressor.model.architecture import experts_modules
from exporters.onnx.reference import Case, Reference, model_inputs, per_token, questions
from tests import zoo

Answer = Callable[[Case], Tensor]
KINDS = {"tensor(float)": np.float32, "tensor(float16)": np.float16}


@torch.no_grad()
def answer(model: Any, case: Case) -> Tensor:
    """Logits [B, S, V] of the whole case at once."""
    output = model(**model_inputs(model, case.tokens, 0, case.mask), use_cache=False)
    return per_token(model, case.tokens, output.logits)


def observe(model: Any, past: bool, tokens: int = 64) -> Reference:
    """The answers to all cases of a graph; no sensitivity."""
    cases = questions(model, past, tokens)
    answered = (Case(each.name, each.tokens, each.mask, each.chunks, answer(model, each)) for each in cases)
    return Reference(type(model).__name__, tuple(answered))


def answers(reference: Reference, wrong: Callable[[Case, Tensor], Tensor]) -> Iterator[Tensor]:
    """The reference's own logits, changed by `wrong`."""
    return (wrong(case, case.logits.clone()) for case in reference.cases)


def experts_of(name: str, **overrides: Any) -> Any:
    """The first experts module of a tiny model."""
    return next(iter(experts_modules(zoo.build(name, **overrides))))[1]


def session_of(folder: Path) -> Any:
    """The exported graph in one thread of ONNX Runtime."""
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(folder / "model.onnx"), settings, ["CPUExecutionProvider"])


class Runner:
    """Calls a graph by the names of its inputs and outputs alone, and keeps its cache tensors as the past."""

    def __init__(self, session: Any, rows: int) -> None:
        sizes = {"batch": rows, "past": 0}
        self.session, self.length = session, 0
        self.past = {
            entry.name: np.zeros([sizes.get(side, side) for side in entry.shape], KINDS[entry.type])
            for entry in session.get_inputs()
            if entry.name.startswith("past_key_values.")
        }

    def __call__(self, tokens: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """[B, S] after the tokens of earlier calls -> [B, S, V]."""
        rows, count = tokens.shape
        if mask is None:
            mask = torch.ones(rows, self.length + count, dtype=torch.long)
        if positions is None:
            positions = torch.arange(self.length, self.length + count).expand(rows, -1)
        feed = {"input_ids": tokens, "attention_mask": mask, "position_ids": positions}
        names = [entry.name for entry in self.session.get_outputs()]
        inputs = {name: value.contiguous().numpy() for name, value in feed.items()} | self.past
        outputs = dict(zip(names, self.session.run(None, inputs), strict=True))
        self.past = {name: outputs[name.replace("past_key_values", "present")] for name in self.past}
        self.length += count
        return torch.from_numpy(outputs["logits"])
