"""What a plan has done to the finished output: the bake into the routers, and the recovery."""

from dataclasses import replace

from compressor.data.batches import Calibration
from compressor.model.opened import OpenModel
from compressor.planning.request import Request
from compressor.recipe.plan import CompressionPlan
from compressor.steps.distill.options import Recovery
from compressor.steps.distill.stored import stored_dtypes
from compressor.steps.distill.text import recovery_text
from compressor.steps.distill.trained import trained_layers
from compressor.steps.routers.bake import Bake, bake_text, stored_routers


def check_afterwards(model: OpenModel, request: Request) -> None:
    """Refuse what the model is not fit for, as far as its own storage tells."""
    if request.bakes:
        stored_routers(model)
    if request.recovers:
        layers = trained_layers(model, _recovery(request))
        if not model.layout.quantized:  # which a merge or a correction would dequantise first
            stored_dtypes(model, layers)


def with_afterwards(
    plan: CompressionPlan, model: OpenModel, request: Request, calibration: Calibration | None
) -> CompressionPlan:
    """The plan, asking for both; they are judged on text that lies behind what the plan was made with."""
    used = 0 if calibration is None else request.samples * request.sequence_length
    if request.bakes:
        bake = Bake(str(request.bake), request.bake_rounds, request.bake_sequences)
        text = bake_text(bake, request.sources, model, request.seed, used)
        plan = replace(plan, bake=bake.to_dict(model, text))
    if request.recovers:
        options = _recovery(request)
        text = recovery_text(options, request.sources, model, request.seed, used)
        asked = {**options.to_dict(), "seed": request.seed, "dtype": model.dtype_name, "calibration": text.identity}
        plan = replace(plan, recover=asked)
    return plan


def _recovery(request: Request) -> Recovery:
    return Recovery(str(request.recover), steps=request.recover_steps, stream=request.recover_stream)
