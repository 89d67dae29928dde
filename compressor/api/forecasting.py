"""The Python API that tells beforehand what a run will take: `forecast`."""

from pathlib import Path
from typing import Any

from compressor.forecasting.estimate import Forecast, forecast_compression
from compressor.planning.answering import settle
from compressor.planning.finer import prepared
from compressor.planning.request import Request
from compressor.planning.run import open_run


def forecast(
    model: str,
    request: Request | None = None,
    *,
    out: str | Path = ".",
    revision: str | None = None,
    **wanted: Any,
) -> Forecast:
    """What `compress` would take on this machine, in seconds by phase; keywords are those of `Request`.

    Measures matrix products, reading and writing into the existing folder `out` for about a second. Raises
    `CompressionError` for a request that `compress` would refuse before it reads data.
    """
    asked = Request.of(request, wanted)
    with open_run(model, revision, asked.dtype, asked.device) as run:
        asked = prepared(run, asked)
        return forecast_compression(run.model, asked, settle(run.model, asked), Path(out))
