"""The Python API that makes models smaller: `apply`, and `compress`, which plans and applies in one go."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from compressor.api.constants import constants_job
from compressor.api.placing import Place, answered, check_place, refuse_ranks, refuse_source
from compressor.api.repeating import note_request, request_key, tell_in_place
from compressor.checkpoint.headers import Size
from compressor.data.batches import Calibration
from compressor.distributed.places import held
from compressor.distributed.present import here
from compressor.forecasting.estimate import Forecast, announce_long, forecast_compression
from compressor.model.carried import check_carried
from compressor.model.opened import OpenModel
from compressor.model.served import advice_on, served_model
from compressor.planning.answering import keep_plan, kept_plan, needed_calibration, plan_request, settle
from compressor.planning.constants import settle_constants
from compressor.planning.finer import prepared
from compressor.planning.further import refuse_part
from compressor.planning.heads import Accepted, acceptance_of, accepted_by
from compressor.planning.make import Wish, correct
from compressor.planning.recipe import RECIPE, recipe_of
from compressor.planning.request import Request, request_digest
from compressor.planning.run import Run, open_run
from compressor.progress import Progress
from compressor.recipe.plan import CompressionPlan
from compressor.recipe.registry import load_exporter
from compressor.records import read_object
from compressor.report.measuring_run import Noted
from compressor.report.store import keep_measures
from compressor.run_record import COMPRESSION, RunRecord, record_run, versions
from compressor.serving.advice import Advice
from compressor.steps.distill.finished import recover_finished
from compressor.steps.routers.finished import bake_finished, refuse_references
from compressor.steps.split.opening import as_planned
from compressor.surgery.heads import check_plan
from compressor.surgery.job import left_out_of, make_job

Announce = Callable[[Forecast], None]
AFTERWARDS: Mapping[str, Callable[..., dict[str, Any]]] = {"bake": bake_finished, "recover": recover_finished}


@dataclass(frozen=True, slots=True)
class Summary:
    """What a compression did, for a person or a script."""

    out: str
    strategy: str
    experts_before: int
    experts_after: int
    before: Size
    after: Size
    seconds: Mapping[str, float]
    peak_memory: int  # bytes of anonymous memory at the highest
    left_out: tuple[str, ...]  # source tensors that the stock model does not load
    zeroed_fields: tuple[str, ...]  # config fields that announced them
    plan: CompressionPlan = field(repr=False)
    servers: Advice | None = field(repr=False)  # None with constants, which vLLM alone serves
    acceptance: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of kept heads, before and after


def apply(
    plan: CompressionPlan | str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    max_shard_bytes: int | None = None,
    command: Sequence[str] | None = None,
) -> Summary:
    """Carry out a plan (an object or a JSON file) and write the smaller checkpoint; `model` overrides its source.

    Where the output of this very plan is in place already, nothing is written.
    `command` is the command line that asked for it, for the record of the run.
    """
    loaded = plan if isinstance(plan, CompressionPlan) else CompressionPlan.load(Path(plan))
    place, noted = Place(Path(out), overwrite, max_shard_bytes, command=command), Noted()
    source, revision = (model, None) if model else (loaded.source.model, loaded.source.revision)
    dtype = (loaded.constants or loaded.correction or loaded.bake or loaded.recover or {}).get("dtype", "auto")
    deterministic = bool((loaded.correction or {}).get("deterministic"))
    with open_run(source, revision, dtype, progress=progress, deterministic=deterministic) as run:
        check_carried(run.model.source.folder)
        facts = [run.model.checkpoint.stamp(), str(run.model.partial.device)]
        place = replace(place, key=request_key(loaded.to_dict(), versions(), max_shard_bytes, *facts))
        if (found := _in_place(run, place)) is not None:
            return found
        with _working(run, place, request_key(loaded.digest(), *facts)):
            if (found := _in_place(run, place)) is not None:  # another run of it has just ended
                return found
            made = _carry_out(run, loaded, place, noted)
    _record(run.model, made, place, noted)
    return made


def compress(
    model: str,
    out: str | Path,
    request: Request | None = None,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    max_shard_bytes: int | None = None,
    accept: Callable[[Path], None] | None = None,
    terms: str | None = None,
    command: Sequence[str] | None = None,
    announce: Announce | None = None,
    **wanted: Any,
) -> Summary:
    """Plan and apply in one go; keywords are those of `Request`. An interrupted run goes on when called again.

    `accept` gets the folder of the verified output before it is put in place, and raises what speaks against that; all
    ranks ask it and must hear the same.
    Where the output of this very request is in place already, nothing is written or accepted; with `accept` that
    needs `terms`, which tell what it does.
    `command` is the command line that asked for it, for the record of the run. `announce` is told beforehand what a run
    will take that does not go on with an interrupted one, and raises what speaks against that.
    """
    asked, noted = Request.of(request, wanted), Noted()
    refuse_ranks(asked.constants, asked.bake, asked.recovers)
    place = Place(Path(out), overwrite, max_shard_bytes, accept, command=command)
    with open_run(model, revision, asked.dtype, asked.device, progress, asked.deterministic) as run:
        with run.clock.phase("open"):
            asked = prepared(run, asked)
            wish = settle_constants(run.model, asked) if asked.constants else settle(run.model, asked)
            check_carried(run.model.source.folder)
            digest = request_digest(run.model, asked)
            known = accept is None or terms is not None
            place = replace(place, key=request_key(digest, max_shard_bytes, terms) if known else None)
            if (found := _in_place(run, place)) is not None:
                return found
        with _working(run, place, digest):
            if (found := _in_place(run, place)) is not None:  # another run of it has just ended
                return found
            check_place(run.model, place, wish.experts, wish.correction.wanted)
            made, calibration = _planned(run, asked, wish if isinstance(wish, Wish) else None, noted, announce)
            done = _carry_out(run, made, place, noted, calibration)
    _record(run.model, done, place, noted)
    return done


def _planned(
    run: Run, asked: Request, wish: Wish | None, noted: Noted, announce: Announce | None
) -> tuple[CompressionPlan, Calibration | None]:
    """The plan that an interrupted run kept, or a new one, then kept too, with the calibration it was made on.

    What it will take is announced once the calibration is read: a text may be bad, or short.
    """
    calibration = None
    with run.clock.phase("plan"):
        if (made := kept_plan(run)) is not None:
            return made, None
        if wish is not None:
            calibration = needed_calibration(run.model, asked, wish)
    if wish is not None and run.folder is not None:
        told = partial(forecast_compression, run.model, asked, wish, run.folder.parent, calibration=calibration)
        announce_long(announce, told, run.model)
        if not asked.sequential:  # which sees other inputs than the source's own
            wish = replace(wish, strategy=noted.planning(wish.strategy))
    with run.clock.phase("plan"):
        made, calibration = plan_request(run, asked, wish, calibration)
        keep_plan(run, made)
    return made, calibration


@contextmanager
def _working(run: Run, place: Place, digest: str) -> Iterator[None]:
    """Give the run alone its hidden folder beside the output; a fault leaves none that could not be gone on with."""
    refuse_source(run.model, place)
    with held(place.out) as run.folder:
        run.digest = here().told(lambda: digest)
        try:
            yield
        except Exception:
            if here().is_first:
                load_exporter("safetensors").discard(place.out)
            raise


def _in_place(run: Run, place: Place) -> Summary | None:
    """What there is to say of an output that is in place and the one asked for; None if there is none such."""
    if place.key is None or place.overwrite:
        return None
    if not here().told(lambda: answered(place.out, str(place.key))):
        return None
    record = read_object(place.out / COMPRESSION)
    plan = CompressionPlan.from_dict(record["plan"], str(place.out / COMPRESSION))
    after = Size(record["parameters"]["after"], record["bytes"]["after"])
    tell_in_place(place.out)
    return _summary(run, place, plan, after, record["zeroed_fields"])


def _carry_out(
    run: Run, plan: CompressionPlan, place: Place, noted: Noted, calibration: Calibration | None = None
) -> Summary:
    """Correct what the plan says, write the output and its recipe, and put it in place once it is accepted."""
    refuse_ranks(plan.constants is not None, (plan.bake or {}).get("method"), plan.recover is not None)
    model = run.model = as_planned(run.model, plan)
    clock, cut = run.clock, run.cut
    heads = check_plan(plan, model)
    check_place(model, place, plan.experts, plan.correction is not None)
    refuse_part(plan)
    if plan.bake is not None:
        refuse_references(plan.bake)
    if plan.constants is not None:
        plan, made, zeroed = constants_job(run, plan, place.max_shard_bytes, calibration)
    else:
        if plan.correction is not None and cut is not None:
            with clock.phase("correct"):
                plan = correct(model, plan, run.progress, cut, calibration, noted.visited)
        made, zeroed = make_job(model, plan, place.max_shard_bytes, cut)
    accepted = accepted_by(plan)
    recipe = recipe_of(plan, model.source.label)

    def finish(folder: Path) -> None:
        nonlocal plan
        for name in plan.afterwards:
            assert run.folder is not None
            kept = run.folder / f"{name}-{made.digest[:16]}"
            with clock.phase(name):
                entry = AFTERWARDS[name](folder, model.whole or model, getattr(plan, name), kept, run.progress)
            done: dict[str, Any] = {name: entry}
            plan = replace(plan, **done)

    def verify(folder: Path) -> None:
        nonlocal accepted
        made.verify(folder)
        accepted = acceptance_of(plan, heads, folder, model, calibration)

    def accept(folder: Path) -> None:
        if place.accept is not None:
            place.accept(folder)
        there = replace(place, out=folder)  # a run that is killed once the output is in place has its record, too
        _record(model, _summary(run, there, plan, Size.of(made.outputs), zeroed, accepted), there, noted)
        if place.key is not None and here().is_first:
            note_request(folder, place.key)

    files = {**made.files, RECIPE: recipe}
    job = replace(made, finish=finish, verify=verify, accept=accept, files=files)
    with clock.phase("write"):
        run.progress.start("write", len(job.units))
        load_exporter("safetensors").write(
            job, place.out, place.overwrite, lambda unit, nbytes: run.progress.advance(unit or "embeddings and head")
        )
    return _summary(run, place, plan, Size.of(job.outputs), zeroed, accepted)


def _summary(
    run: Run, place: Place, plan: CompressionPlan, after: Size, zeroed: Sequence[str], accepted: Accepted | None = None
) -> Summary:
    model = run.model
    return Summary(
        out=str(place.out),
        strategy=plan.strategy,
        experts_before=model.architecture.experts,
        experts_after=plan.experts,
        before=Size.of(model.checkpoint.tensors.values()),
        after=after,
        seconds=dict(run.clock.seconds),
        peak_memory=run.peak.anonymous,
        left_out=left_out_of(model, plan),
        zeroed_fields=tuple(zeroed),
        plan=plan,
        servers=None
        if plan.constants is not None
        else advice_on(served_model(model), model.architecture.layers, plan.experts),
        acceptance=accepted_by(plan) if accepted is None else accepted,
    )


def _record(model: OpenModel, summary: Summary, place: Place, noted: Noted) -> None:
    """Leave what reports want to know of the run, and the output does not tell, in the user's cache."""
    if not here().is_first:
        return
    source, calibration = model.source, summary.plan.calibration
    words = None if place.command is None else tuple(place.command)
    known = RunRecord(
        source.name,
        source.revision,
        calibration,
        summary.seconds,
        summary.peak_memory,
        words,
        acceptance=summary.acceptance,
    )
    out = Path(summary.out)
    record_run(out, known)
    keep_measures(out, noted.measured(calibration), "run")
