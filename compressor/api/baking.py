"""The Python API that moves the routers of a smaller model toward its original: `calibrate_router`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from compressor.api.repeating import answers, note_request, request_key, tell_in_place
from compressor.calibration.sources import parse_sources, without_folders
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.locking import alone
from compressor.model.carried import check_carried
from compressor.model.opened import OpenModel, open_model
from compressor.model.tokenizer import load_tokenizer
from compressor.pathways.bake import OWN_ANSWER, Bake, bake_text, check_pair
from compressor.pathways.finished import bake_finished
from compressor.pathways.reference import ReferenceSet, read_reference, reference_digest
from compressor.planning.recipe import RECIPE, recipe_of
from compressor.planning.registry import load_exporter
from compressor.planning.run import open_run
from compressor.plans.json import readable_json
from compressor.plans.plan import CompressionPlan, LayerPlan, Source
from compressor.progress import Progress
from compressor.records import read_object
from compressor.run_record import COMPRESSION, RunRecord, record_run, versions
from compressor.surgery.job import make_job

KEPT_WHOLE = "none"  # the strategy of a checkpoint that no plan of ours has made smaller


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

    See `compressor.pathways.bake_weights` and `bake_bias`. The pathways of a bias are those of the `reference` set,
    made with `checkpoint`, or of items taken from the text, as the `optimizer` moves them. Where the output of this
    very request is in place already, nothing is written. Raises `CompressionError` for a teacher of another vocabulary
    or tokenizer, for a reference set of another model, for routers whose logits cannot be moved, and for an
    architecture through which no gradients go layer by layer.
    """
    found = _reference(bake, reference)
    digest = "" if reference is None else reference_digest(Path(reference))
    wish = Bake(bake, rounds, sequences, sequence_length, optimizer, digest)
    place = Path(out)
    sources = parse_sources([calibration] if isinstance(calibration, str) else calibration)
    with open_run(checkpoint, None, dtype, device, progress) as run:
        smaller, partial = run.model, run.model.partial
        with run.clock.phase("open"):
            original = open_model(
                locate(teacher, revision, progress), str(partial.dtype).removeprefix("torch."), str(partial.device)
            )
            check_pair(smaller, original)
            if found is not None:
                found.check(smaller, load_tokenizer(smaller.source.folder))
            check_carried(smaller.source.folder)
            _refuse_places(place, (smaller, original))
            text = bake_text(wish, sources, original, seed)
        asked = {**wish.to_dict(original, text), "teacher": original.source.label}
        plan = replace(_plan(smaller), bake=asked)
        facts = [smaller.checkpoint.stamp(), original.checkpoint.stamp(), str(partial.device)]
        key = request_key("bake", plan.to_dict(), versions(), *facts)
        writer = load_exporter("safetensors")
        with alone(place) as folder:
            if not overwrite and answers(place, key):
                tell_in_place(place)
                return _summary(place, read_object(place / COMPRESSION)["plan"]["bake"], {})
            made, _ = make_job(smaller, _whole(smaller))
            done: dict[str, Any] = {}

            def verify(written: Path) -> None:
                with run.clock.phase("bake"):
                    kept = folder / f"bake-{made.digest[:16]}-{key[:16]}"
                    done.update(bake_finished(written, original, asked, kept, run.progress, text, found))
                made.verify(written)
                note_request(written, key)

            record = _record(smaller, plan, made.files[COMPRESSION])
            files = {**made.files, COMPRESSION: record, RECIPE: recipe_of(plan, plan.source.model)}
            job = replace(made, digest=request_key(made.digest, key), verify=verify, files=files)
            with run.clock.phase("write"):
                run.progress.start("copy", len(job.units))
                writer.write(job, place, overwrite, lambda unit, nbytes: run.progress.advance(unit or "the rest"))
        summary = _summary(place, done, run.clock.seconds)
        words = None if command is None else tuple(command)
        record_run(
            place, RunRecord(smaller.source.name, None, text.identity, summary.seconds, run.peak.anonymous, words)
        )
    return summary


def _reference(bake: str, folder: str | Path | None) -> ReferenceSet | None:
    """The reference set whose pathways are averaged, if one is given."""
    if folder is None:
        return None
    if bake == "router":
        raise CompressionError("--reference is for --bake bias and --bake auto; name one of them, or leave it out")
    return read_reference(Path(folder))


def _refuse_places(out: Path, models: Sequence[OpenModel]) -> None:
    """Refuse an output in a checkpoint that is read, or one that would replace it."""
    target = out.resolve()
    for model in models:
        if target == model.source.folder or target in model.source.folder.parents:
            raise CompressionError(f"{out} holds {model.source.label}, which is read; name another output folder")
        if model.source.folder in target.parents:
            raise CompressionError(f"{out} lies in the checkpoint {model.source.label}; name another output folder")


def _whole(model: OpenModel) -> CompressionPlan:
    """The plan that keeps everything as it is."""
    layers = tuple(LayerPlan.keep(layer, range(layer.experts)) for layer in model.architecture.layers)
    source = Source(model.source.name, model.source.revision, model.fingerprint)
    experts = model.architecture.experts
    return CompressionPlan(source, experts, KEPT_WHOLE, {}, None, layers, versions=versions())


def _plan(model: OpenModel) -> CompressionPlan:
    """The plan that a checkpoint of this tool was made by; of another one, the plan that keeps everything."""
    path = model.source.folder / COMPRESSION
    if not path.is_file():
        return _whole(model)
    return CompressionPlan.from_dict(read_object(path).get("plan") or {}, str(path))


def _record(model: OpenModel, plan: CompressionPlan, made: bytes | Path) -> bytes:
    """compression.json of the output: that of the checkpoint if it has one, with what is baked in."""
    assert isinstance(made, bytes)
    fresh, path = json.loads(made), model.source.folder / COMPRESSION
    own = read_object(path) if path.is_file() else {}
    content = plan.to_dict()
    content["source"]["model"] = Path(plan.source.model).name if path.is_file() else model.source.label
    content["bake"] = {**content["bake"], "calibration": without_folders(content["bake"]["calibration"])}
    told = {name: fresh[name] for name in ("tool", "versions", "files") if name in fresh}
    return readable_json({**fresh, **own, **told, "plan_digest": plan.digest(), "plan": content}).encode()


def _summary(out: Path, bake: Mapping[str, Any], seconds: Mapping[str, float]) -> BakeSummary:
    result = bake["result"]
    taken = result.get("taken", bake["method"] if result["after"] < result["before"] else "none")
    return BakeSummary(
        str(out), str(bake.get("teacher")), result["before"], result["after"], tuple(result["steps"]), taken,
        tuple(result.get("layers", ())), dict(seconds),
    )
