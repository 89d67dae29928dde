"""The Python API that decides what to do with every expert and writes nothing: `plan` and `plan_per_source`."""

from collections.abc import Callable
from functools import partial
from typing import Any

from compressor.forecasting.estimate import Forecast, announce_long, forecast_plan
from compressor.planning.answering import needed_calibration, plan_request, plan_sources, refuse_per_source, settle
from compressor.planning.finer import prepared
from compressor.planning.request import Request
from compressor.planning.run import open_run
from compressor.progress import Progress
from compressor.recipe.plan import CompressionPlan


def plan(
    model: str,
    request: Request | None = None,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
    announce: Callable[[Forecast], None] | None = None,
    **wanted: Any,
) -> CompressionPlan:
    """Plan the compression of a model without writing anything; keywords are those of `Request`, which may be given.

    `announce` is told beforehand what it will take, and raises what speaks against that.
    """
    asked = Request.of(request, wanted)
    with open_run(model, revision, asked.dtype, asked.device, progress, asked.deterministic) as run:
        if asked.constants:
            return plan_request(run, asked)[0]
        asked = prepared(run, asked)
        wish = settle(run.model, asked)
        calibration = needed_calibration(run.model, asked, wish)
        announce_long(announce, partial(forecast_plan, run.model, asked, wish, calibration=calibration), run.model)
        return plan_request(run, asked, wish, calibration)[0]


def plan_per_source(
    model: str,
    request: Request | None = None,
    *,
    revision: str | None = None,
    progress: Progress | None = None,
    **wanted: Any,
) -> list[CompressionPlan]:
    """The plan for all calibration sources together, then one for each alone, from one pass; nothing is written."""
    asked = Request.of(request, wanted)
    refuse_per_source(asked)
    with open_run(model, revision, asked.dtype, asked.device, progress, asked.deterministic) as run:
        asked = prepared(run, asked)
        return plan_sources(run, asked)
