"""The Python API that trains back what a smaller model has lost: `recover`."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from compressor.api.rewriting import open_original, plan_of, write_anew
from compressor.data.sources import parse_sources
from compressor.forecasting.estimate import Forecast, announce_long, forecast_recovery
from compressor.model.opened import OpenModel
from compressor.planning.run import open_run
from compressor.progress import Progress
from compressor.records import read_object
from compressor.run_record import COMPRESSION
from compressor.steps.distill.finished import recover_finished
from compressor.steps.distill.options import Recovery
from compressor.steps.distill.ranks import present
from compressor.steps.distill.recover import check_recovery, help_recover
from compressor.steps.distill.text import recovery_text

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RecoverySummary:
    """What a recovery did; divergences from the original and losses are of held-out text, in nats per token."""

    out: str
    teacher: str
    method: str
    changed: bool  # whether held-out text came nearer to the original, by more than its standard error
    before: float
    after: float
    loss_before: float
    loss_after: float
    best: int  # the step whose state was taken, or would have been
    ended: str
    curve: tuple[Mapping[str, Any], ...]  # of each evaluation: step, kl, loss, and the parts of the loss in training
    seconds: Mapping[str, float]


def recover(
    checkpoint: str,
    out: str | Path,
    *,
    teacher: str,
    data: str | Sequence[str],
    options: Recovery | None = None,
    seed: int = 0,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    overwrite: bool = False,
    progress: Progress | None = None,
    command: Sequence[str] | None = None,
    announce: Callable[[Forecast], None] | None = None,
    **wanted: Any,
) -> RecoverySummary:
    """Write `checkpoint` anew, trained toward the `teacher` it was made of (`revision` is the teacher's).

    `options` are a `compressor.steps.distill.options.Recovery`, or its fields are given by name: `method="experts"`,
    `steps=400` and so on. Where the output of this very request is in place already, nothing is written. Raises
    `CompressionError` for options out of range, a teacher of another vocabulary or tokenizer, text too short for a
    step, tensors that are stored quantised, and with `stream` for an architecture through which no gradients go layer
    by layer. Of several processes that a launcher has started, each takes its share of every step. `announce` is told
    beforehand what the training will take at most.
    """
    if options is not None and wanted:
        raise TypeError("give a Recovery or its fields, not both")
    wish, place, ranks = options or Recovery(**wanted), Path(out), present(device)
    sources = parse_sources([data] if isinstance(data, str) else data)
    with open_run(checkpoint, None, dtype, ranks.device if ranks.count > 1 else device, progress) as run:
        with run.clock.phase("open"):
            original = open_original(run, teacher, revision, place)
            check_recovery(run.model, original, wish, ranks)
            _warn_of_another_source(run.model, original)
            text = recovery_text(wish, sources, original, seed)
            if ranks.count == 1:
                announce_long(announce, partial(forecast_recovery, run.model, wish), run.model)
        asked = {**wish.to_dict(), "seed": seed, "dtype": original.dtype_name, "calibration": text.identity}

        def change(written: Path, kept: Path) -> dict[str, Any]:
            return recover_finished(written, original, asked, kept, run.progress, text, ranks)

        if ranks.first:
            done = write_anew(run, original, ("recover", asked), change, place, overwrite, command)["result"]
            ranks.dismiss()
        else:
            found = help_recover(run.model, original, wish, text, seed, ranks)
            done = found or read_object(place / COMPRESSION)["plan"]["recover"]["result"]
        told = {name: done[name] for name in ("changed", "before", "after", "loss_before", "loss_after", "best")}
        return RecoverySummary(
            str(out),
            original.source.label,
            wish.method,
            **told,
            ended=done["ended"],
            curve=tuple(done["curve"]),
            seconds=dict(run.clock.seconds),
        )


def _warn_of_another_source(smaller: OpenModel, original: OpenModel) -> None:
    """Say so where a checkpoint's own record names another model than the teacher."""
    source = plan_of(smaller).source
    if source.fingerprint not in (original.fingerprint, smaller.fingerprint):
        logger.warning(
            "%s was made of %s, whose fingerprint is not that of %s: it is taught by another model",
            smaller.source.label,
            Path(source.model).name,
            original.source.label,
        )
