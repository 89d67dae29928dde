"""What a user asks for, and the plan that answers it."""

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compressor.calibration.sources import DEFAULT_SOURCE, WeightedSource, is_file, parse_sources, short_names
from compressor.correction.refit import METHODS, Correction
from compressor.errors import CompressionError
from compressor.files import replacing
from compressor.plans.plan import CompressionPlan
from compressor.progress import Progress

if TYPE_CHECKING:
    from compressor.calibration.batches import Calibration
    from compressor.model.opened import OpenModel
    from compressor.planning.protecting import Protected
    from compressor.planning.registry import Strategy
    from compressor.surgery.cutting import CutFiles

logger = logging.getLogger(__name__)

DEFAULT_STRATEGY = "auto"
DEFAULT_SAMPLES, DEFAULT_LENGTH = 128, 512
HELDOUT = 0.125  # share of the calibration sequences that judge a plan or a correction and make none


@dataclass(frozen=True, slots=True)
class Request:
    """What to plan, apart from the model: everything that decides the result."""

    experts: int | None = None
    ratio: float | None = None
    strategy: str = DEFAULT_STRATEGY
    options: Mapping[str, Any] = field(default_factory=dict)
    calibration: str | Sequence[str] | None = None  # SOURCE, or several of SOURCE or SOURCE=WEIGHT
    samples: int = DEFAULT_SAMPLES
    sequence_length: int = DEFAULT_LENGTH
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    correct: str | None = None  # none, ridge or tune; None: as the strategy would
    sequential: bool = False  # plan each layer on what the compressed earlier ones put out
    protect: str | None = None  # experts that stay as they are: a JSON file that lists them, or auto: the routing hubs

    def __post_init__(self) -> None:
        if self.correct is not None and self.correct not in METHODS:
            raise CompressionError(f"there is no correction {self.correct!r}; known are {', '.join(METHODS)}")
        if not 0 <= self.seed < 2**63:
            raise CompressionError(f"--seed {self.seed} is out of range; give a number from 0 to 2**63 - 1")

    @property
    def sources(self) -> "tuple[WeightedSource, ...]":
        """The calibration sources with their weights."""
        given = self.calibration
        return parse_sources([DEFAULT_SOURCE] if given is None else [given] if isinstance(given, str) else given)

    @property
    def source_names(self) -> tuple[str, ...]:
        """A short name for each calibration source, without folders."""
        return short_names([entry.source for entry in self.sources])


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a request comes to on a model as far as no data decides."""

    experts: int
    strategy: "Strategy"
    correction: Correction
    protected: "Protected"  # those that a file names

    @property
    def reads(self) -> bool:
        """Whether strategy or correction need calibration data."""
        from compressor.calibration.statistics import needs_data

        return needs_data(self.strategy.needs) or self.correction.wanted

    @property
    def holds_out(self) -> bool:
        """Whether strategy or correction need a part of it held out."""
        from compressor.calibration.statistics import needs_heldout

        return needs_heldout(self.strategy.needs) or self.correction.wanted


def prepare(model: "OpenModel", request: Request) -> Prepared:
    """Check count and protected experts, load the strategy, settle the correction: every refusal that needs no data."""
    from compressor.model.opened import refuse_shared_experts, resolve_count, shared_experts
    from compressor.planning.protecting import given_protected
    from compressor.planning.registry import load_strategy

    strategy = load_strategy(request.strategy, request.options)
    experts = resolve_count(model.architecture.layers, request.experts, request.ratio)
    protected = given_protected(request.protect, model.architecture.layers, experts)
    correction = Correction(strategy.correction if request.correct is None else request.correct)
    if request.sequential or request.correct not in (None, "none"):
        refuse_shared_experts(model)
    elif correction.wanted and (shared := shared_experts(model)):
        logger.warning("%s shares its experts with another layer, so nothing is corrected", shared)
        correction = Correction()
    return Prepared(experts, strategy, correction, protected)


def read_calibration(model: "OpenModel", request: Request, heldout: bool, reserve: int = 0) -> "Calibration":
    """The calibration that is asked for, a part of it held out where plans or corrections are to be judged."""
    from compressor.calibration.batches import calibrate, load_tokenizer

    return calibrate(
        request.sources,
        load_tokenizer(model.source.folder),
        samples=request.samples,
        length=request.sequence_length,
        seed=request.seed,
        vocab=model.vocabulary,
        heldout=HELDOUT if heldout else 0.0,
        reserve=reserve,
    )


def protected_experts(
    model: "OpenModel", request: Request, given: "Protected", keep: int, calibration: "Calibration", progress: Progress
) -> "Protected":
    """The experts that were given, or the hubs that the calibration shows if that was asked for."""
    from compressor.planning.protecting import AUTO, protect_hubs

    return protect_hubs(model, calibration, keep, progress, request.seed) if request.protect == AUTO else given


def plan_request(model: "OpenModel", request: Request, progress: Progress) -> CompressionPlan:
    """Plan what is asked for."""
    return plan_prepared(model, request, prepare(model, request), progress)[0]


def plan_prepared(
    model: "OpenModel", request: Request, prepared: Prepared, progress: Progress, files: "CutFiles | None" = None
) -> "tuple[CompressionPlan, Calibration | None]":
    """The plan and the calibration that was read for it; `files` keeps the layers that a plan in order has cut."""
    from compressor.calibration.statistics import needs_data
    from compressor.planning.make import Wish, make_plan, make_plan_in_order
    from compressor.planning.protecting import AUTO

    strategy, experts, protected = prepared.strategy, prepared.experts, prepared.protected
    calibration = None
    if prepared.reads or request.protect == AUTO:
        calibration = read_calibration(model, request, prepared.holds_out)
        protected = protected_experts(model, request, protected, experts, calibration, progress)
    if request.sequential and prepared.reads and calibration is not None:
        wish = Wish(strategy, experts, request.options)
        made = make_plan_in_order(
            model, wish, calibration, prepared.correction, progress, request.seed, protected, files
        )
    else:
        data = calibration if needs_data(strategy.needs) else None
        made = make_plan(model, strategy, experts, request.options, data, progress, request.seed, protected)
    return with_correction(made, model, prepared.correction, calibration), calibration


def plan_or_resume(
    model: "OpenModel",
    request: Request,
    prepared: Prepared,
    progress: Progress,
    folder: Path,
    digest: str,
    files: "CutFiles",
) -> "tuple[CompressionPlan, Calibration | None]":
    """The plan of an interrupted run of the same request, or a new one, kept in the work folder for the next try.

    A new one comes with the calibration that was read for it.
    """
    kept = folder / "plan.json"
    if kept.is_file():
        try:
            content = json.loads(kept.read_text(encoding="utf-8"))
            if content.get("request") == digest:
                return CompressionPlan.from_dict(content["plan"], str(kept)), None
        except (ValueError, KeyError, CompressionError):
            pass  # an unreadable leftover is no reason to fail: plan again
    made, calibration = plan_prepared(model, request, prepared, progress, files)
    folder.mkdir(exist_ok=True)
    with replacing(kept, kept.with_suffix(".new")) as fresh:
        fresh.write_text(json.dumps({"request": digest, "plan": made.to_dict()}), encoding="utf-8")
    return made, calibration


def refuse_per_source(request: Request) -> None:
    """Refuse plans for each source alone where there is one source only, or where each would need its own pass."""
    if len(request.sources) < 2:
        raise CompressionError("--per-source needs several calibration sources; repeat --calibration for each")
    if request.sequential:
        raise CompressionError(
            "--per-source plans from one pass and --sequential needs one for each plan; leave out one of them, or plan "
            "with --sequential for each source in turn"
        )


def refuse_unjudged_sources(calibration: "Calibration") -> None:
    """Refuse to plan for each source alone where one is too short to have any tokens held out."""
    judged = {calibration.source_of(batch) for batch in calibration.heldout}
    for number, name in enumerate(calibration.source_names):
        if number not in judged:
            raise CompressionError(
                f"calibration source {name} has too few sequences to hold some out and be planned for alone; raise "
                "--samples, give it a larger weight or more text, or leave out --per-source"
            )


def plan_sources(model: "OpenModel", request: Request, progress: Progress) -> list[CompressionPlan]:
    """From one pass the plan for all calibration sources together, then one for each source alone, in their order.

    Hubs are found once, on all sources, and protected in every plan.
    """
    from compressor.calibration.statistics import needs_data
    from compressor.planning.make import Wish, make_plans

    refuse_per_source(request)
    prepared = prepare(model, request)
    experts, strategy, correction = prepared.experts, prepared.strategy, prepared.correction
    reads = needs_data(strategy.needs)
    if not prepared.reads:
        raise CompressionError(
            f"strategy {request.strategy!r} reads no calibration data, so all sources would get the same plan; leave "
            "out --per-source"
        )
    calibration = read_calibration(model, request, prepared.holds_out)
    if prepared.holds_out:
        refuse_unjudged_sources(calibration)
    protected = protected_experts(model, request, prepared.protected, experts, calibration, progress)
    wish, data = Wish(strategy, experts, request.options), calibration if reads else None
    made = make_plans(model, [wish], data, progress, request.seed, protected, per_source=True)
    alone = [calibration.only(number) for number in range(len(request.sources))]
    plans = [planned.plan for planned in made] if reads else [made[0].plan] * (1 + len(alone))
    return [
        with_correction(plan, model, correction, data) for plan, data in zip(plans, [calibration, *alone], strict=True)
    ]


def with_correction(
    plan: CompressionPlan, model: "OpenModel", correction: Correction, calibration: "Calibration | None"
) -> CompressionPlan:
    """The plan, naming the data that was read, and asking for a correction in the dtype that the model is open in."""
    if calibration is None:
        return plan
    named = replace(plan, calibration=plan.calibration or calibration.identity)
    if not correction.wanted:
        return named
    asked = {**correction.to_dict(), "dtype": str(model.partial.dtype).removeprefix("torch.")}
    return replace(named, correction=asked)


def _content(name: str) -> str:
    """The SHA-256 of a file; what names none stands for itself."""
    return hashlib.sha256(Path(name).read_bytes()).hexdigest() if is_file(name) else name


def request_digest(model: "OpenModel", request: Request) -> str:
    """SHA-256 of everything that decides the plan, calibration text and protected experts included."""
    from compressor.planning.protecting import AUTO
    from compressor.run_record import versions

    data = [(_content(entry.source), entry.weight) for entry in request.sources]
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
        request.correct,
        request.sequential,
        request.protect if request.protect in (None, AUTO) else _content(request.protect),
        str(model.partial.device),
        str(model.partial.dtype),
        versions(),
    ]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()
