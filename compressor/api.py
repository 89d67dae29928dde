"""The Python API: `inspect`, `plan`, `apply` and `compress`, the last being the two before it in one go."""

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.checkpoint import Size
from compressor.errors import CompressionError
from compressor.limits import check_against
from compressor.plan import CompressionPlan
from compressor.progress import Progress, Silent
from compressor.source import locate

if TYPE_CHECKING:
    from compressor.inspection import Inspection
    from compressor.model import OpenModel

DEFAULT_STRATEGY = "count-guided"
DEFAULT_SAMPLES, DEFAULT_LENGTH = 128, 512


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


@dataclass(frozen=True, slots=True)
class Request:
    """What to plan, apart from the model: everything that decides the result."""

    experts: int | None = None
    ratio: float | None = None
    strategy: str = DEFAULT_STRATEGY
    options: Mapping[str, Any] = field(default_factory=dict)
    calibration: str | None = None
    samples: int = DEFAULT_SAMPLES
    sequence_length: int = DEFAULT_LENGTH
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise CompressionError(f"--seed {self.seed} is out of range; give a number from 0 to 2**63 - 1")


def inspect(model: str, revision: str | None = None, experts: int | None = None) -> "Inspection":
    """What a model is made of and what compressing it would take, from its config and safetensors headers alone."""
    from compressor.inspection import inspect_model

    return inspect_model(model, revision, experts)


def plan(
    model: str, *, revision: str | None = None, progress: Progress | None = None, **request: Any
) -> CompressionPlan:
    """Plan the compression of a model without writing anything; keywords are those of `Request`."""
    from compressor.model import open_model

    wanted = Request(**request)
    listener = progress or Silent()
    return _plan(open_model(locate(model, revision), wanted.dtype, wanted.device), wanted, listener)


def _prepare(model: "OpenModel", request: Request) -> tuple[int, Any]:
    """Check the count and load the strategy: every refusal that needs no data."""
    from compressor.model import resolve_count
    from compressor.registry import load_strategy

    strategy = load_strategy(request.strategy, request.options)
    return resolve_count(model.architecture.layers, request.experts, request.ratio), strategy


def _plan(model: "OpenModel", request: Request, progress: Progress) -> CompressionPlan:
    from compressor.calibration import DEFAULT_SOURCE, calibrate, load_tokenizer
    from compressor.planning import make_plan
    from compressor.statistics import needs_data

    experts, strategy = _prepare(model, request)
    calibration = None
    if needs_data(strategy.needs):
        calibration = calibrate(
            DEFAULT_SOURCE if request.calibration is None else request.calibration,
            load_tokenizer(model.source.folder),
            samples=request.samples,
            length=request.sequence_length,
            seed=request.seed,
            vocab=model.vocabulary,
        )
    return make_plan(model, strategy, experts, request.options, calibration, progress, request.seed)


def apply(
    plan: CompressionPlan | str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    max_shard_bytes: int | None = None,
) -> Summary:
    """Carry out a plan (an object or a JSON file) and write the smaller checkpoint; `model` overrides its source."""
    from compressor.memory import PeakMemory
    from compressor.model import open_model

    loaded = plan if isinstance(plan, CompressionPlan) else CompressionPlan.load(Path(plan))
    clock = _Clock()
    with PeakMemory() as peak:
        with clock.phase("open"):
            source = locate(model or loaded.source.model, None if model else loaded.source.revision)
            opened = open_model(source)
        return _apply(opened, loaded, Path(out), overwrite, progress or Silent(), clock, peak, max_shard_bytes)


def compress(
    model: str,
    out: str | Path,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    max_shard_bytes: int | None = None,
    **request: Any,
) -> Summary:
    """Plan and apply in one go; keywords are those of `Request`. An interrupted run goes on when called again."""
    from compressor.memory import PeakMemory
    from compressor.model import open_model

    wanted, target, clock = Request(**request), Path(out), _Clock()
    with PeakMemory() as peak:
        with clock.phase("open"):
            opened = open_model(locate(model, revision), wanted.dtype, wanted.device)
            experts, _ = _prepare(opened, wanted)
            _check_target(opened, target, overwrite, experts)
        try:
            with clock.phase("plan"):
                made = _resumed_plan(opened, wanted, target, progress or Silent())
            return _apply(opened, made, target, overwrite, progress or Silent(), clock, peak, max_shard_bytes)
        except Exception:
            _exporter().discard(target)
            raise


def _exporter() -> Any:
    from compressor.registry import load_exporter

    return load_exporter("safetensors")


def _check_target(model: "OpenModel", out: Path, overwrite: bool, experts: int) -> None:
    """Refuse an output place that cannot work, before anything expensive is done."""
    from compressor.inspection import stored_bytes_with

    exporter = _exporter()
    place, source = out.resolve(), model.source.folder
    if place == source or source in place.parents:
        raise CompressionError(f"{out} lies in the source checkpoint itself; name another output folder")
    if place in source.parents and (overwrite or not place.is_dir()):
        raise CompressionError(f"{out} holds the source checkpoint, which it would replace; name another output folder")
    exporter.check_target(out, overwrite)
    exporter.check_space(out, stored_bytes_with(model.checkpoint.tensors, model.layout, model.architecture, experts))


def _request_digest(model: "OpenModel", request: Request) -> str:
    from compressor.planning import versions

    path = Path(request.calibration) if request.calibration else None
    data = hashlib.sha256(path.read_bytes()).hexdigest() if path and path.is_file() else request.calibration
    facts = [
        model.fingerprint,
        model.checkpoint.stamp(),
        request.experts,
        request.ratio,
        request.strategy,
        sorted(request.options.items()),
        data,
        request.samples,
        request.sequence_length,
        request.seed,
        str(model.partial.device),
        str(model.partial.dtype),
        versions(),
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def _resumed_plan(model: "OpenModel", request: Request, out: Path, progress: Progress) -> CompressionPlan:
    """The plan of an interrupted run of the same request, or a new one, kept in the work folder for the next try."""
    folder = _exporter().work_folder(out)
    kept, digest = folder / "plan.json", _request_digest(model, request)
    if kept.is_file():
        try:
            content = json.loads(kept.read_text(encoding="utf-8"))
            if content.get("request") == digest:
                return CompressionPlan.from_dict(content["plan"], str(kept))
        except (ValueError, KeyError, CompressionError):
            pass  # an unreadable leftover is no reason to fail: plan again
    made = _plan(model, request, progress)
    folder.mkdir(exist_ok=True)
    fresh = kept.with_suffix(".new")
    fresh.write_text(json.dumps({"request": digest, "plan": made.to_dict()}), encoding="utf-8")
    fresh.replace(kept)
    return made


def _apply(
    model: "OpenModel",
    plan: CompressionPlan,
    out: Path,
    overwrite: bool,
    progress: Progress,
    clock: _Clock,
    peak: Any,
    max_shard_bytes: int | None,
) -> Summary:
    from compressor.job import make_job

    check_against(plan, model.architecture.layers, model.fingerprint)
    _check_target(model, out, overwrite, plan.experts)
    job, zeroed = make_job(model, plan, max_shard_bytes)
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
