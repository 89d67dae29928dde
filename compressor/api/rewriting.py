"""A checkpoint written anew with some of its tensors changed: what `calibrate-router` and `recover` have in common."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from compressor.api.repeating import answers, note_request, request_key, tell_in_place
from compressor.data.sources import without_folders
from compressor.distributed.places import held
from compressor.distributed.present import here
from compressor.errors import CompressionError
from compressor.model.carried import check_carried
from compressor.model.opened import OpenModel, open_alike
from compressor.mtp.head import known_heads
from compressor.planning.recipe import RECIPE, recipe_of
from compressor.planning.run import Run, find_model
from compressor.recipe.plan import CompressionPlan, LayerPlan
from compressor.recipe.plan_json import readable_json
from compressor.recipe.registry import load_exporter
from compressor.recipe.whole import whole_plan
from compressor.records import read_object
from compressor.run_record import COMPRESSION, RunRecord, record_run, versions
from compressor.surgery.job import make_job

Change = Callable[[Path, Path], dict[str, Any]]  # (written folder, where work is kept) -> the entry with its result


def open_original(run: Run, teacher: str, revision: str | None, out: Path) -> OpenModel:
    """The original, computing as the smaller model of the run does; refuses places that cannot be written from it."""
    original = open_alike(find_model(teacher, revision, run.progress), run.model)
    check_carried(run.model.source.folder)
    refuse_places(out, (run.model, original))
    return original


def write_anew(
    run: Run,
    original: OpenModel,
    entry: tuple[str, Mapping[str, Any]],
    change: Change,
    out: Path,
    overwrite: bool,
    command: Sequence[str] | None,
) -> dict[str, Any]:
    """Write the run's checkpoint to `out` with what `change` does to it; returns the plan's entry with its result.

    `entry` is the plan's field and what it says of the change. Where the output of this very request is in place
    already, nothing is written.
    """
    name, asked = entry
    smaller, writer = run.model, load_exporter("safetensors")
    own = plan_of(smaller)
    asked = {**asked, "teacher": original.source.label, **({"after": [*own.afterwards]} if own.afterwards else {})}
    changed: dict[str, Any] = {name: asked}
    plan = replace(own, **changed)
    facts = [smaller.checkpoint.stamp(), original.checkpoint.stamp(), str(smaller.partial.device)]
    key = here().told(lambda: request_key(name, plan.to_dict(), versions(), *facts))
    with held(out) as folder:
        if here().told(lambda: not overwrite and answers(out, key)):
            tell_in_place(out)
            found: dict[str, Any] = read_object(out / COMPRESSION)["plan"][name]
            return found
        whole = whole_plan(smaller, smaller.architecture)
        heads = tuple(LayerPlan.keep(head.named, range(whole.experts)) for head in known_heads(smaller))
        made, _ = make_job(smaller, replace(whole, layers=(*whole.layers, *heads)))
        done: dict[str, Any] = {}

        def finish(written: Path) -> None:
            with run.clock.phase(name):
                done.update(change(written, folder / f"{name}-{made.digest[:16]}-{key[:16]}"))

        def verify(written: Path) -> None:
            made.verify(written)
            note_request(written, key)

        record = _record(smaller, plan, name, made.files[COMPRESSION])
        files = {**made.files, COMPRESSION: record, RECIPE: recipe_of(plan, plan.source.model)}
        job = replace(made, digest=request_key(made.digest, key), finish=finish, verify=verify, files=files)
        with run.clock.phase("write"):
            run.progress.start("copy", len(job.units))
            writer.write(job, out, overwrite, lambda unit, nbytes: run.progress.advance(unit or "the rest"))
    words, seconds = None if command is None else tuple(command), dict(run.clock.seconds)
    if here().is_first:
        record_run(out, RunRecord(smaller.source.name, None, asked["calibration"], seconds, run.peak.anonymous, words))
    return done


def plan_of(model: OpenModel) -> CompressionPlan:
    """The plan that a checkpoint of this tool was made by; of another one, the plan that keeps everything."""
    path = model.source.folder / COMPRESSION
    if not path.is_file():
        return whole_plan(model, model.architecture)
    return CompressionPlan.from_dict(read_object(path).get("plan") or {}, str(path))


def refuse_places(out: Path, models: Sequence[OpenModel]) -> None:
    """Refuse an output in a checkpoint that is read, or one that would replace it."""
    target = out.resolve()
    for model in models:
        if target == model.source.folder or target in model.source.folder.parents:
            raise CompressionError(f"{out} holds {model.source.label}, which is read; name another output folder")
        if model.source.folder in target.parents:
            raise CompressionError(f"{out} lies in the checkpoint {model.source.label}; name another output folder")


def _record(model: OpenModel, plan: CompressionPlan, name: str, made: bytes | Path) -> bytes:
    """compression.json of the output: that of the checkpoint if it has one, with what the plan's entry says."""
    assert isinstance(made, bytes)
    fresh, path = json.loads(made), model.source.folder / COMPRESSION
    own = read_object(path) if path.is_file() else {}
    content = plan.to_dict()
    content["source"]["model"] = Path(plan.source.model).name if path.is_file() else model.source.label
    content[name] = {**content[name], "calibration": without_folders(content[name]["calibration"])}
    told = {field: fresh[field] for field in ("tool", "versions", "files") if field in fresh}
    return readable_json({**fresh, **own, **told, "plan_digest": plan.digest(), "plan": content}).encode()
