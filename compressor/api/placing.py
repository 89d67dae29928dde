"""Where an output of `compress` and `apply` goes: on what terms, and what speaks against it beforehand."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from compressor.api.repeating import answers
from compressor.distributed.present import here, refuse_several
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel
from compressor.recipe.registry import load_exporter
from compressor.surgery.job import output_size


@dataclass(frozen=True, slots=True)
class Place:
    """Where an output goes, and on what terms."""

    out: Path
    overwrite: bool
    max_shard_bytes: int | None
    accept: Callable[[Path], None] | None = None
    key: str | None = None  # of the request, by which an output that is in place is known again
    command: Sequence[str] | None = None  # for the record of the run


def refuse_ranks(constants: bool, bake: object, recovers: bool) -> None:
    """Refuse several ranks for what one process does: constants, a recovery, and any `bake` but that of weights."""
    baked = bake not in (None, "none", "router")
    for option, given in {"--format mone": constants, f"--bake {bake}": baked, "--recover": recovers}.items():
        if given:
            instead = "pass --bake router" if baked and option.startswith("--bake") else "leave it out"
            refuse_several(option, f"{instead}, or start the command without torchrun")


def answered(out: Path, key: str) -> bool:
    """Whether the output of this very request is in place."""
    with suppress(CompressionError):
        load_exporter("safetensors").check_target(out, False)  # which tidies up after a run that was killed
    return answers(out, key)


def refuse_source(model: OpenModel, place: Place) -> None:
    """Refuse an output in the source checkpoint, or one that would replace it."""
    out, source = place.out, model.source.folder
    target = out.resolve()
    if target == source or source in target.parents:
        raise CompressionError(f"{out} lies in the source checkpoint itself; name another output folder")
    if target in source.parents and (place.overwrite or not target.is_dir()):
        raise CompressionError(f"{out} holds the source checkpoint, which it would replace; name another output folder")


def check_place(model: OpenModel, place: Place, experts: int, corrected: bool) -> None:
    """Refuse an output place that cannot work, before anything expensive is done; corrected layers wait there too."""
    out, writer = place.out, load_exporter("safetensors")
    needed = output_size(model, experts).bytes

    def check() -> None:
        writer.check_target(out, place.overwrite)
        writer.check_space(out, 2 * needed if corrected else needed)

    here().first_alone(check)
