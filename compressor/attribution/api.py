"""`compressor.attribute`: routing attribution of a model by name, or of one in memory."""

from collections.abc import Sequence
from typing import Any, Unpack

from compressor.api import Calibrating, ModelLike, text_options
from compressor.attribution import measure
from compressor.attribution.figures import Attribution
from compressor.model.loaded import given
from compressor.pipeline.resolve import Computing, open_run, read_calibration


def attribute(
    model: ModelLike,
    *,
    tokenizer: Any = None,
    calibration: Calibrating = None,
    keys: int = 0,
    top: int = 10,
    edges_kept: int = 0,
    without: Sequence[str] = (),
    seed: int = 0,
    **computing: Unpack[Computing],
) -> Attribution:
    """Measure how every component shapes the routing of later layers.

    On the first `keys` sequences the `top` most influential attention heads are split by key token,
    too. The `edges_kept` strongest edges to single experts' scores are kept. Routers choose no
    expert that `without` names, as in ["L1E9", "L4E14"]."""
    text = text_options(calibration)
    with open_run(given(model, tokenizer), **computing) as run:
        data = read_calibration(run, text, seed)
        return measure.attribute(
            run.model, data, run.progress, seed, keys, top, edges_kept, without
        )
