"""Router calibration in words and rows, for terminal, report and card; `entry` is the plan's and may be incomplete."""

from collections.abc import Mapping
from typing import Any

from compressor.document.blocks import Block, Table, Text
from compressor.recipe.document import changed, divergence, entries, figure, option, result_of

ROUNDS = ("round", "ridge", "step", "gain", "± standard error")
FIGURES = ("ridge", "step", "gain", "standard_error")
PLACES = ("layer", "place", "mean", "deviation")


def blocks(entry: Mapping[str, Any]) -> tuple[Block, ...]:
    """The method, KL before and after, a row for each round, and a bias's places; gains are in nats per token."""
    result, moved = result_of(entry), changed(entry)
    took = f", took {result['taken']}" if "taken" in result else ""
    outcome = f"{'' if moved else 'the routers stay as they are; '}{divergence(result, moved)}"
    rounds = tuple(
        (str(number), *(figure(step.get(name)) if step.get("step") else "-" for name in FIGURES))
        for number, step in enumerate(entries(result.get("steps")), 1)
    )
    layers = entries(result.get("layers"))
    places = tuple(
        (*(str(layer.get(name, "-")) for name in PLACES[:2]), *(figure(layer.get(name)) for name in PLACES[2:]))
        for layer in layers
    )
    selection = any(layer.get("place") == "selection bias" for layer in layers)
    return (
        Text(f"Router calibration ({option(entry, 'method') or 'router'}{took}): {outcome}."),
        *([Table("Rounds of the router calibration", ROUNDS, rounds)] if rounds else []),
        *([Table("Places of the bias", PLACES, places, frozenset(PLACES[:2]))] if places else []),
        *([Text("A selection bias moves which experts are chosen, not their weights.")] if selection else []),
    )
