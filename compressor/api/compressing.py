"""The Python API that makes models smaller: `plan`, `apply`, and `compress`, which is both in one go."""

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.checkpoint.headers import Size
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.planning.request import (
    Request,
    plan_or_resume,
    plan_request,
    plan_sources,
    prepare,
    refuse_per_source,
    request_digest,
)
from compressor.plans.plan import CompressionPlan, check_against
from compressor.progress import Progress, Silent

if TYPE_CHECKING:
    from compressor.calibration.batches import Calibration
    from compressor.model.opened import OpenModel
    from compressor.surgery.cutting import CutFiles


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


class _Clock:
    """Seconds per named phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin


def plan(
    model: str, *, revision: str | None = None, progress: Progress | None = None, **request: Any
) -> CompressionPlan:
    """Plan the compression of a model without writing anything; keywords are those of `Request`."""
    from compressor.model.opened import open_model

    wanted = Request(**request)
    listener = progress or Silent()
    return plan_request(open_model(locate(model, revision, listener), wanted.dtype, wanted.device), wanted, listener)


def plan_per_source(
    model: str, *, revision: str | None = None, progress: Progress | None = None, **request: Any
) -> list[CompressionPlan]:
    """The plan for all calibration sources together, then one for each alone, from one pass; nothing is written."""
    from compressor.model.opened import open_model

    wanted = Request(**request)
    refuse_per_source(wanted)
    listener = progress or Silent()
    return plan_sources(open_model(locate(model, revision, listener), wanted.dtype, wanted.device), wanted, listener)


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

    `command` is the command line that asked for it, for the record of the run.
    """
    from compressor.memory import PeakMemory
    from compressor.model.opened import open_model

    loaded = plan if isinstance(plan, CompressionPlan) else CompressionPlan.load(Path(plan))
    clock = _Clock()
    with PeakMemory() as peak:
        with clock.phase("open"):
            source = locate(model or loaded.source.model, None if model else loaded.source.revision, progress)
            opened = open_model(source, (loaded.correction or {}).get("dtype", "auto"))
        target = Path(out)
        facts = [loaded.digest(), opened.checkpoint.stamp(), str(opened.partial.device)]
        cut = _cut_files(target, hashlib.sha256(json.dumps(facts).encode()).hexdigest())
        try:
            made = _apply(opened, loaded, target, overwrite, progress or Silent(), clock, peak, max_shard_bytes, cut)
        except Exception:
            _exporter().discard(target)
            raise
    _record(opened, made, command)
    return made


def compress(
    model: str,
    out: str | Path,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    max_shard_bytes: int | None = None,
    accept: Callable[[Path], None] | None = None,
    command: Sequence[str] | None = None,
    **request: Any,
) -> Summary:
    """Plan and apply in one go; keywords are those of `Request`. An interrupted run goes on when called again.

    `accept` gets the folder of the verified output before it is put in place, and raises what speaks against that.
    `command` is the command line that asked for it, for the record of the run.
    """
    from compressor.memory import PeakMemory
    from compressor.model.opened import open_model

    wanted, target, clock = Request(**request), Path(out), _Clock()
    with PeakMemory() as peak:
        with clock.phase("open"):
            opened = open_model(locate(model, revision, progress), wanted.dtype, wanted.device)
            prepared = prepare(opened, wanted)
            _check_target(opened, target, overwrite, prepared.experts, prepared.correction.wanted)
        try:
            digest = request_digest(opened, wanted)
            cut = _cut_files(target, digest)
            with clock.phase("plan"):
                folder = _exporter().work_folder(target)
                made, data = plan_or_resume(opened, wanted, prepared, progress or Silent(), folder, digest, cut)
            done = _apply(
                opened, made, target, overwrite, progress or Silent(), clock, peak, max_shard_bytes, cut, data, accept
            )
        except Exception:
            _exporter().discard(target)
            raise
    _record(opened, done, command)
    return done


def _record(model: "OpenModel", summary: Summary, command: Sequence[str] | None) -> None:
    """Leave what reports want to know of the run, and the output does not tell, in the user's cache."""
    from compressor.run_record import record_run

    source, calibration = model.source, summary.plan.calibration
    record_run(
        Path(summary.out), source.name, source.revision, calibration, summary.seconds, summary.peak_memory, command
    )


def _exporter() -> Any:
    from compressor.planning.registry import load_exporter

    return load_exporter("safetensors")


def _cut_files(out: Path, digest: str) -> "CutFiles":
    """Where corrected layers wait to be written, in the work folder of the output."""
    from compressor.surgery.cutting import CutFiles

    return CutFiles(_exporter().work_folder(out) / f"cut-{digest[:16]}")


def _check_target(model: "OpenModel", out: Path, overwrite: bool, experts: int, corrected: bool) -> None:
    """Refuse an output place that cannot work, before anything expensive is done; corrected layers wait there too."""
    from compressor.model.inspection import stored_with

    exporter = _exporter()
    place, source = out.resolve(), model.source.folder
    if place == source or source in place.parents:
        raise CompressionError(f"{out} lies in the source checkpoint itself; name another output folder")
    if place in source.parents and (overwrite or not place.is_dir()):
        raise CompressionError(f"{out} holds the source checkpoint, which it would replace; name another output folder")
    exporter.check_target(out, overwrite)
    needed = stored_with(model.checkpoint.tensors, model.layout, model.architecture, experts).bytes
    exporter.check_space(out, 2 * needed if corrected else needed)


def _apply(
    model: "OpenModel",
    plan: CompressionPlan,
    out: Path,
    overwrite: bool,
    progress: Progress,
    clock: _Clock,
    peak: Any,
    max_shard_bytes: int | None,
    cut: "CutFiles",
    calibration: "Calibration | None" = None,
    accept: Callable[[Path], None] | None = None,
) -> Summary:
    from compressor.planning.make import correct
    from compressor.surgery.job import make_job

    check_against(plan, model.architecture.layers, model.fingerprint)
    _check_target(model, out, overwrite, plan.experts, plan.correction is not None)
    if plan.correction is not None:
        with clock.phase("correct"):
            plan = correct(model, plan, progress, cut, calibration)
    job, zeroed = make_job(model, plan, max_shard_bytes, cut)
    if accept is not None:
        job = replace(job, verify=_both(job.verify, accept))
    with clock.phase("write"):
        progress.start("write", len(job.units))
        _exporter().write(job, out, overwrite, lambda unit, nbytes: progress.advance(unit or "embeddings and head"))
    return Summary(
        out=str(out),
        strategy=plan.strategy,
        experts_before=model.architecture.experts,
        experts_after=plan.experts,
        before=Size.of(model.checkpoint.tensors.values()),
        after=Size.of(job.outputs),
        seconds=dict(clock.seconds),
        peak_memory=peak.anonymous,
        left_out=model.layout.left_out,
        zeroed_fields=tuple(zeroed),
        plan=plan,
    )


def _both(first: Callable[[Path], None], second: Callable[[Path], None]) -> Callable[[Path], None]:
    def check(folder: Path) -> None:
        first(folder)
        second(folder)

    return check
