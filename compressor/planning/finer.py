"""Whether `auto` splits experts where nobody said: it loses less at the same size, wherever it costs nothing else."""

from dataclasses import replace

from compressor.errors import CompressionError
from compressor.model.architecture import build_meta
from compressor.model.opened import OpenModel, resolve_count
from compressor.model.served import served_model
from compressor.planning.answering import seen
from compressor.planning.request import AUTO, Request
from compressor.planning.run import Run
from compressor.serving.advice import broken
from compressor.steps.split.opening import seen_as
from compressor.steps.split.shape import widths

PARTS = 2
WIDTH = 64  # neurons: parts of a multiple of it suit kernels


def with_parts(model: OpenModel, request: Request) -> Request:
    """The request with the number of parts said, for the stored `model`; `experts` then counts parts.

    Where it was left open, `auto` splits experts in two if that is exact, in the dtype that is stored, with parts of a
    multiple of 64 neurons, without a multi-token-prediction head that it would leave out, and if no server does worse.
    """
    if request.split is not None:
        return request
    if request.strategy != AUTO or request.constants or request.top_k is not None or not _may_split(model, request):
        return replace(request, split=1)
    return replace(request, split=PARTS, experts=None if request.experts is None else PARTS * request.experts)


def prepared(run: Run, request: Request) -> Request:
    """The request with the number of parts said; the run's model is from now on seen as it is to be compressed."""
    asked = with_parts(run.model, request)
    run.model = seen(run.model, asked)
    return asked


def _may_split(model: OpenModel, request: Request) -> bool:
    layers, layout = model.architecture.layers, model.layout
    if layout.quantized or layout.left_out:
        return False
    if any(width % (PARTS * WIDTH) for width in widths(build_meta(model.config)).values()):
        return False
    try:
        finer = seen_as(model, PARTS)
        searched = request.experts is None and request.ratio is None
        kept = layers[0].experts if searched else resolve_count(layers, request.experts, request.ratio)
    except CompressionError:
        return False  # the reason is told where a split is asked for, or the number checked
    before, after = served_model(model), served_model(finer)
    known = {(rule.server, rule.needs) for rule in broken(replace(before, experts=kept))}
    return all((rule.server, rule.needs) in known for rule in broken(replace(after, experts=PARTS * kept)))
