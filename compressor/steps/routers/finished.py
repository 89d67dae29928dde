"""The bake of a finished checkpoint: what moves its routers toward the original, kept until it is in place."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration
from compressor.distributed.present import here
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel, open_alike
from compressor.pathways.reference import ReferenceSet
from compressor.progress import Progress
from compressor.steps.routers.bake import Bake, repeated_text
from compressor.steps.routers.bake_routers import bake_routers
from compressor.steps.routers.keeping import keep, kept
from compressor.surgery.rewriting import note_result, put_into


def refuse_references(asked: Mapping[str, Any]) -> None:
    """Refuse a plan whose bake is of a reference set: a plan names such a set, but does not hold it."""
    if Bake.from_plan(asked).reference:
        raise CompressionError(
            'the plan\'s bake is of a reference set, which it does not hold; remove "bake" from it, and run '
            "`moe-compress calibrate-router OUTPUT --reference DIR` afterwards"
        )


def bake_finished(
    folder: Path,
    original: OpenModel,
    asked: Mapping[str, Any],
    place: Path,
    progress: Progress,
    text: Calibration | None = None,
    reference: ReferenceSet | None = None,
) -> dict[str, Any]:
    """Bake into the routers of the checkpoint in `folder` what a plan asks for; returns its entry with the result.

    `place` keeps the new routers until the folder is complete, so that an interrupted run does not repeat the work.
    The text that the plan names is repeated, unless it has just been read; `reference` is the set that it names.
    Several ranks do it together; the first one writes.
    """
    baked = kept(place) if here().is_first else None
    if not here().told(lambda: baked is not None):
        smaller = open_alike(locate(str(folder)), original)
        bake = Bake.from_plan(asked)
        text = text or repeated_text(bake, asked["calibration"], original)
        baked = bake_routers(smaller, original, bake, text, progress, reference)
        if here().is_first:
            keep(place, baked)

    def put() -> dict[str, Any]:
        assert baked is not None
        put_into(folder, baked.tensors)
        return note_result(folder, "bake", asked, baked.result)

    return dict(here().told(put))
