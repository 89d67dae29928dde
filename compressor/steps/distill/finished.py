"""The recovery of a finished checkpoint: what was trained is put into it, and its record says so."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.model.opened import OpenModel, open_alike
from compressor.progress import Progress
from compressor.steps.distill.options import Recovery
from compressor.steps.distill.ranks import ALONE, Ranks
from compressor.steps.distill.recover import recover_tensors, recovered
from compressor.steps.distill.text import repeated_text
from compressor.surgery.rewriting import note_result, put_into


def recover_finished(
    folder: Path,
    original: OpenModel,
    asked: Mapping[str, Any],
    place: Path,
    progress: Progress,
    text: Calibration | None = None,
    ranks: Ranks = ALONE,
) -> dict[str, Any]:
    """Train the checkpoint in `folder` as a plan asks for; returns its entry with the result.

    `place` keeps all that is made until the folder is complete, so that an interrupted run goes on. The text that the
    plan names is repeated, unless it has just been read.
    """
    if (made := recovered(place)) is None:
        smaller = open_alike(locate(str(folder)), original)
        options = Recovery.from_plan(asked)
        text = text or repeated_text(options, asked["calibration"], original)
        made = recover_tensors(smaller, original, options, text, int(asked.get("seed", 0)), place, progress, ranks)
    for tensors in made.tensors():
        put_into(folder, tensors)
    return note_result(folder, "recover", asked, made.result)
