"""Whether `auto` splits experts where nobody said: it loses less at the same size, wherever it costs nothing else."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from compressor.errors import CompressionError
from compressor.model.architecture import build_meta
from compressor.model.opened import OpenModel, resolve_count, served_model
from compressor.recipe.plan import MOST_PARTS
from compressor.recipe.step import Step
from compressor.serving.advice import broken
from compressor.steps.split.opening import seen_as
from compressor.steps.split.shape import widths
from compressor.steps.split.step import Split

PARTS = 2
WIDTH = 64  # neurons: sub-experts of a multiple of it suit kernels


def resolved_parts(split: Split, model: OpenModel, steps: Sequence[Step]) -> int:
    """The number of parts for the stored `model`; `steps` are all of the stage.

    Where it is left open, the strategy `auto` splits experts in two if that is exact, in the dtype that is stored, with
    sub-experts of a multiple of 64 neurons, without a multi-token-prediction head that it would leave out, and if no
    server does worse.
    """
    if split.parts != "auto":
        if not 1 <= split.parts <= MOST_PARTS:
            raise CompressionError(f"--split {split.parts} is not 1 to {MOST_PARTS}; give another number of parts")
        return split.parts
    prune: Any = next((step for step in steps if step.name == "prune"), None)
    if prune is None or prune.strategy != "auto" or prune.top_k is not None:
        return 1
    return PARTS if _may_split(model, prune) else 1


def _may_split(model: OpenModel, prune: Any) -> bool:
    layers, layout = model.architecture.layers, model.layout
    if layout.quantized or layout.left_out:
        return False
    if any(width % (PARTS * WIDTH) for width in widths(build_meta(model.config)).values()):
        return False
    try:
        finer = seen_as(model, PARTS)
        searched = prune.experts is None and prune.ratio is None
        kept = layers[0].experts if searched else resolve_count(layers, prune.experts, prune.ratio)
    except CompressionError:
        return False  # the reason is given where a split is asked for, or the number checked
    before, after = served_model(model), served_model(finer)
    known = {(rule.server, rule.needs) for rule in broken(replace(before, experts=kept))}
    return all((rule.server, rule.needs) in known for rule in broken(replace(after, experts=PARTS * kept)))
