"""Whether a GGUF model was converted from a plan's source, as far as its routers tell."""

import logging
from pathlib import Path

import numpy as np

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.gguf_files.blocks import FINGERPRINT, GATE, Blocks
from compressor.gguf_files.imatrix import Numbers
from compressor.gguf_files.parts import Gguf
from compressor.gguf_files.scores import dequantised
from compressor.model.opened import OpenModel, open_model
from compressor.recipe.plan import Source

logger = logging.getLogger(__name__)

ROUNDING = 2.0**-7  # of the largest entry: a router that was stored in bfloat16
SAME = "The routers are those of the plan's source"
DIFFERENT = (
    "The routers are not those of the plan's source: {} differs by {:.2g} of its largest entry, so the plan may keep "
    "the wrong experts"
)
UNCHECKED = (
    "A plan made on a checkpoint does not tell its weights, and that checkpoint is not at hand, so only layers, "
    "experts and top-k were held against the file: make sure that it was converted from the plan's source"
)


def compare_routers(planned: Source, model: Gguf, blocks: Blocks) -> str:
    """What a reader should know of the match; empty for a plan that was made on a GGUF file, and is checked already.

    Where the plan's source is a folder of this machine, and still what it was, its routers are compared: [E, hidden].
    A difference is told, and no fault, for a model that was trained on may serve the plan as well.
    """
    if planned.fingerprint.startswith(FINGERPRINT):
        return ""
    if (source := _opened(planned)) is None:
        return UNCHECKED
    largest, worst = 0.0, ""
    for layer in source.architecture.layers:
        name = GATE.format(layer.index)
        if (wanted := _router(source, layer.name)) is None:
            return UNCHECKED
        found = dequantised(model.tensors[name], model.read(name)).astype(np.float64)
        if found.shape != wanted.shape:
            raise CompressionError(
                f"{name} has the shape {list(found.shape)}, the plan's source {list(wanted.shape)}; apply the plan to "
                "the GGUF file of the same model"
            )
        difference = float(np.abs(found - wanted).max() / max(np.abs(wanted).max(), 1e-30))
        if not difference <= largest:
            largest, worst = difference, name
    return SAME if largest <= ROUNDING else DIFFERENT.format(worst, largest)


def _opened(planned: Source) -> OpenModel | None:
    """The checkpoint that a plan was made on, if it lies here unchanged."""
    if planned.revision is not None or not Path(planned.model).is_dir():
        return None
    try:
        source = open_model(locate(planned.model), device="cpu")
        return source if source.fingerprint == planned.fingerprint else None
    except CompressionError as error:
        logger.debug("the plan's source cannot be read: %s", error)
        return None


def _router(source: OpenModel, layer: str) -> Numbers | None:
    """The weight by which a layer's router scores the experts; None where several tensors have its shape."""
    roles = source.layout.roles.items()
    names = [name for name, role in roles if role.is_router and role.layer == layer]
    found = [name for name in names if len(source.checkpoint.tensors[name].shape) == 2]
    if len(found) != 1:
        return None
    return np.asarray(source.checkpoint.read(found[0]).double().numpy(), np.float64)
