"""What stock models in memory answer, without the exporter's streaming."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from exporters.onnx.reference import Case, Reference, model_inputs, per_token, questions

Answer = Callable[[Case], Tensor]


@torch.no_grad()
def answer(model: Any, asked: Case) -> Tensor:
    """Logits [B, S, V] of the whole question at once."""
    output = model(**model_inputs(model, asked.tokens, 0, asked.mask), use_cache=False)
    return per_token(model, asked.tokens, output.logits)


def observe(model: Any, past: bool, tokens: int = 64) -> Reference:
    """The answers to everything that a graph is asked; no sensitivity."""
    asked = questions(model, past, tokens)
    cases = tuple(Case(each.name, each.tokens, each.mask, each.chunks, answer(model, each)) for each in asked)
    return Reference(type(model).__name__, cases)


def answers(reference: Reference, wrong: Callable[[Case, Tensor], Tensor]) -> Iterator[Tensor]:
    """The reference's own logits, changed by `wrong`."""
    return (wrong(case, case.logits.clone()) for case in reference.cases)
