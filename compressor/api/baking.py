"""The Python API that moves the routers of a smaller model toward its original: `calibrate_router`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.api.placing import refuse_ranks
from compressor.api.rewriting import open_original, write_anew
from compressor.data.sources import parse_sources
from compressor.distributed.present import here
from compressor.errors import CompressionError
from compressor.model.tokenizer import load_tokenizer
from compressor.pathways.answering import trusted_reference
from compressor.pathways.options import Routing
from compressor.pathways.reference import ReferenceSet, reference_digest
from compressor.planning.run import open_run
from compressor.progress import Progress
from compressor.steps.routers.bake import OWN_ANSWER, Bake, bake_text, check_pair
from compressor.steps.routers.finished import bake_finished


@dataclass(frozen=True, slots=True)
class BakeSummary:
    """What a bake did; the divergences from the original are of held-out text, in nats per token."""

    out: str
    teacher: str
    before: float
    after: float
    steps: tuple[Mapping[str, float], ...]  # of each round: ridge, step, gain and the gain's standard error
    taken: str  # what was baked: router, bias or none
    layers: tuple[Mapping[str, Any], ...]  # of a bias: where it went, and how constant it is there
    seconds: Mapping[str, float]

    @property
    def changed(self) -> bool:
        """Whether held-out text liked any change."""
        return any(step["step"] for step in self.steps)


def calibrate_router(
    checkpoint: str,
    out: str | Path,
    *,
    teacher: str,
    calibration: str | Sequence[str],
    bake: str = "router",
    reference: str | Path | None = None,
    optimizer: str = OWN_ANSWER,
    rounds: int = 4,
    sequences: int = 400,
    sequence_length: int = 256,
    seed: int = 0,
    revision: str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    overwrite: bool = False,
    progress: Progress | None = None,
    command: Sequence[str] | None = None,
) -> BakeSummary:
    """Write `checkpoint` anew with routers moved toward the `teacher` it was made of (`revision` is the teacher's).

    See `compressor.steps.routers.bake_weights` and `bake_bias`. The pathways of a bias are those of the `reference`
    set, made with `checkpoint`, or of items taken from the text, as the `optimizer` moves them. Where the output of
    this very request is in place already, nothing is written. Raises `CompressionError` for a teacher of another
    vocabulary or tokenizer, for a reference set of another model, for routers whose logits cannot be moved, and for an
    architecture through which no gradients go layer by layer.
    """
    refuse_ranks(False, bake, False)
    found = _reference(bake, reference)
    digest = "" if reference is None else reference_digest(Path(reference))
    wish = Bake(bake, rounds, sequences, sequence_length, optimizer, digest)
    place = Path(out)
    sources = parse_sources([calibration] if isinstance(calibration, str) else calibration)
    with open_run(checkpoint, None, dtype, device, progress) as run:
        with run.clock.phase("open"):
            original = open_original(run, teacher, revision, place)
            check_pair(run.model, original)
            if found is not None:
                found.check(run.model, load_tokenizer(run.model.source.folder))
            text = bake_text(wish, sources, original, seed)
            here().agreed(text.identity["sha256"], "text")
        asked = wish.to_dict(original, text)

        def change(written: Path, kept: Path) -> dict[str, Any]:
            return bake_finished(written, original, asked, kept, run.progress, text, found)

        done = write_anew(run, original, ("bake", asked), change, place, overwrite, command)
        result = done["result"]
        taken = result.get("taken", bake if result["after"] < result["before"] else "none")
        return BakeSummary(
            str(out),
            original.source.label,
            result["before"],
            result["after"],
            tuple(result["steps"]),
            taken,
            tuple(result.get("layers", ())),
            dict(run.clock.seconds),
        )


def _reference(bake: str, folder: str | Path | None) -> ReferenceSet | None:
    """The reference set whose pathways are averaged, if one is given; refused if it names a model to embed with."""
    if folder is None:
        return None
    if bake == "router":
        raise CompressionError("--reference is for --bake bias and --bake auto; name one of them, or leave it out")
    return trusted_reference(Routing(folder))
