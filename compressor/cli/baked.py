"""What is printed of a bake into the routers."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from compressor.cli.terminal import tell
from compressor.document.blocks import Block, Table, Text

if TYPE_CHECKING:  # what bakes is loaded only to do so
    from compressor.api.baking import BakeSummary

PLACES = ("layer", "place", "mean", "deviation")
COLUMNS = ("round", "ridge", "step", "gain", "± standard error")


def show_bake(summary: "BakeSummary", as_json: bool) -> None:
    """What every round took, and where the result was written."""
    lists = {"steps": list(summary.steps), "layers": list(summary.layers)}
    content = {**asdict(summary), **lists, "changed": summary.changed}
    told = [*bake_blocks(summary.before, summary.after, summary.steps), *_place_blocks(summary.layers)]
    tell(as_json, content, [*told, Text(f"Written to {summary.out}")])


def bake_blocks(before: float, after: float, steps: Sequence[Mapping[str, float]]) -> tuple[Block, ...]:
    """A row for each round; divergences and gains are of held-out text, in nats per token.

    Of a bias there is one round, whose step is a multiple of the average pathway.
    """
    rows = tuple(
        (str(number), f"{step['ridge']:g}", f"{step['step']:g}", f"{step['gain']:.4f}", f"{step['error']:.4f}")
        if step["step"]
        else (str(number), "-", "none", "-", "-")
        for number, step in enumerate(steps, start=1)
    )
    what = f"The routers were moved: {before:.4f} to {after:.4f} nats per token from the original on held-out text"
    if not any(step["step"] for step in steps):
        what = f"The routers stay as they are ({before:.4f} nats per token from the original on held-out text)"
    return Table("Rounds", COLUMNS, rows, frozenset(COLUMNS)), Text(f"{what}.")


def _place_blocks(layers: Sequence[Mapping[str, Any]]) -> tuple[Block, ...]:
    """Where a bias was tried; in a router's weight it is as constant as the product with one direction is."""
    rows = tuple(
        (layer["layer"], layer["place"], f"{layer['mean']:.2f}", f"{layer['deviation']:.2f}") for layer in layers
    )
    if not rows:
        return ()
    moved = {layer["place"] for layer in layers}
    said = "A selection bias moves which experts are chosen, not their weights." if "selection bias" in moved else ""
    table = Table("Places of the bias", PLACES, rows, frozenset(PLACES[2:]))
    return (table, Text(said)) if said else (table,)
