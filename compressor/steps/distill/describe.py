"""Distillation in words and rows, for terminal, report and card; `entry` is the plan's and may be incomplete."""

from collections.abc import Mapping
from typing import Any

from compressor.document.blocks import Block, Table, Text
from compressor.recipe.document import changed, divergence, entries, figure, is_number, option, result_of
from compressor.steps.distill.step import Distill

COLUMNS = ("step", "KL", "loss", "flips", "training")
NUMBERS = ("kl", "loss")
Evaluation = tuple[int, float, float]  # step, KL from the base, next-token loss


def curve(entry: Mapping[str, Any]) -> list[Evaluation]:
    """The evaluations on held-out text, in the order of their steps."""
    return [(each["step"], float(each["kl"]), float(each["loss"])) for each in _evaluations(entry)]


def _evaluations(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    evaluations = [
        each
        for each in entries(result_of(entry).get("curve"))
        if type(each.get("step")) is int and abs(each["step"]) < 2**53 and all(map(is_number, map(each.get, NUMBERS)))
    ]
    return sorted(evaluations, key=lambda each: each["step"])


def blocks(entry: Mapping[str, Any]) -> tuple[Block, ...]:
    """What was trained for how long, KL before and after, and a row for each evaluation with its training losses."""
    result = result_of(entry)
    fields = Distill.model_fields
    train, steps, tokens = (
        fields[name].default if (own := option(entry, name)) is None else own
        for name in ("train", "steps", "tokens_per_step")
    )
    outcome = f"{divergence(result, True)}, after {result.get('best')} steps"
    if not changed(entry):
        outcome = f"nothing was changed; {divergence(result, False)}"
    rows = tuple(
        (
            f"{each['step']:,}",
            *(f"{each[name]:.5g}" for name in NUMBERS),
            f"{100 * each['flips']:.3g}%" if is_number(each.get("flips")) else "-",
            _parts(each.get("training")),
        )
        for each in _evaluations(entry)
    )
    return (
        Text(f"Distillation ({train}, at most {steps} steps of {tokens} tokens): {outcome}."),
        *([Text(f"Training ended: {ended}.")] if (ended := result.get("ended")) else []),
        *([Table("Held-out text during the distillation", COLUMNS, rows, frozenset(COLUMNS[4:]))] if rows else []),
    )


def _parts(training: Any) -> str:
    parts = list(training.items())[:10] if isinstance(training, Mapping) else []
    return ", ".join(f"{name} {figure(value)}".replace("_", " ") for name, value in parts) or "-"
