"""From a request to a plan with constants: `--format mone`."""

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from compressor.data.batches import Calibration
from compressor.errors import CompressionError
from compressor.model.constant_experts import number_in
from compressor.model.layout import expert_prefixes
from compressor.model.opened import OpenModel, left_by, refuse_shared_experts
from compressor.planning.answering import protected_experts, read_calibration
from compressor.planning.protecting import given_protected
from compressor.planning.request import AUTO, BUDGETS, KEEP_HEADS, MONE, Request
from compressor.planning.run import Run
from compressor.planning.steering import Steering
from compressor.recipe.layer import LayerPlan
from compressor.recipe.plan import CompressionPlan, Source
from compressor.run_record import versions
from compressor.steps.constants.budget import even_numbers
from compressor.steps.constants.measure import LayerConstants, measure
from compressor.steps.constants.uneven import divide, spare
from compressor.steps.correct.refit import CONSTANTS, Correction

STRATEGY = "constants"
EVEN, UNEVEN = BUDGETS

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Terms:
    """What a request for constants comes to on a model, everything checked that needs no data."""

    kept: int  # over all layers
    budget: str
    correction: Correction

    experts: int  # in each, their mean rounded down

    def to_dict(self) -> dict[str, Any]:
        """What a plan says of it."""
        return {"format": MONE, "budget": self.budget, "experts_total": self.kept}


def settle_constants(model: OpenModel, request: Request) -> Terms:
    """Check model, numbers and options; raises `CompressionError` for what this format cannot do."""
    refuse_options(request)
    refuse_model(model)
    budget = request.budget or (EVEN if request.experts_total is None else UNEVEN)
    kept = _kept(model, request, budget)
    correction = Correction(request.correct or "none")
    if correction.wanted:
        refuse_shared_experts(model)
    if correction.method not in ("none", CONSTANTS) and model.layout.quantized:
        raise CompressionError(
            f"--correct {correction.method} changes experts, which stay quantised with --format mone; pass --correct "
            f"{CONSTANTS} or none"
        )
    if model.layout.quantized:
        logger.warning("vLLM serves constants only beside experts that are not quantised, and these stay quantised")
    given_protected(request.protect, model.architecture.layers, kept // len(model.architecture.layers))
    return Terms(kept, budget, correction, kept // len(model.architecture.layers))


def refuse_options(request: Request) -> None:
    """Refuse what this format does not have."""
    faults = {
        f"--strategy {request.strategy}": request.strategy not in (AUTO, STRATEGY),
        "an option of a strategy": bool(request.options),
        "--sequential": request.sequential,
        "--bake": request.bakes,
        "--recover": request.recovers,
        "--split": (request.split or 1) > 1,
        "--top-k": request.top_k is not None,
        "--mtp keep": request.mtp == KEEP_HEADS,
    }
    for option, given in faults.items():
        if given:
            raise CompressionError(
                f"--format mone does not go with {option}: it replaces the experts that a constant misses least of; "
                "leave it out"
            )


def refuse_model(model: OpenModel) -> None:
    """Refuse a model of which single experts cannot be left out, or whose layers vLLM would not tell apart."""
    layout = model.layout
    fused = next((name for name, role in layout.roles.items() if role.kind == "fused" and not role.is_router), None)
    if fused is not None or not layout.regular:
        raise CompressionError(
            f"--format mone leaves out single experts, but {model.architecture.family} checkpoints store all experts "
            f"of a layer together{'' if fused is None else f' ({fused})'}; compress without --format mone"
        )
    for layer in model.architecture.layers:
        prefixes = expert_prefixes(layout, layer)
        shared = {prefix.rpartition(".")[0] for prefix in prefixes.values()}
        if len(prefixes) < layer.experts or len(shared) > 1 or number_in(min(shared)) != layer.index:
            raise CompressionError(
                f"{layer.name}: vLLM finds constants by names such as layers.3.experts.7, and this checkpoint's are "
                f"others ({min(shared, default='none')}); compress without --format mone"
            )


def _kept(model: OpenModel, request: Request, budget: str) -> int:
    """Experts to keep over all layers."""
    layers = model.architecture.layers
    total, count = sum(layer.experts for layer in layers), len(layers)
    given = [value for value in (request.experts, request.ratio, request.experts_total) if value is not None]
    if len(given) != 1:
        raise CompressionError("say how many experts to keep: one of --experts N, --ratio R and --experts-total N")
    if request.ratio is not None:
        uneven = budget == UNEVEN
        kept = left_by(total, request.ratio) if uneven else left_by(total // count, request.ratio) * count
    else:
        kept = request.experts * count if request.experts is not None else int(request.experts_total or 0)
    if budget == EVEN and kept % count:
        raise CompressionError(
            f"--experts-total {kept} does not divide over {count} layers; pass --budget uneven or a multiple of {count}"
        )
    least = sum(max(layer.top_k, 1) for layer in layers)
    if not least <= kept <= total:
        raise CompressionError(
            f"{kept} experts in all cannot be kept: the {count} layers have {total}, and need {least} for their top-k"
        )
    return kept


def measured_key(calibration: Mapping[str, Any], seed: int, model: OpenModel) -> str:
    """A short name for what constants are measured on."""
    data = [calibration.get(name) for name in ("sha256", "heldout", "only")]
    facts = [*data, seed, model.fingerprint, model.dtype_name, str(model.partial.device), versions()]
    return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:16]


def measured_constants(run: Run, calibration: Calibration, seed: int) -> dict[str, LayerConstants]:
    """The constants of all layers; a run that was killed finds them in its folder."""
    key = measured_key(calibration.identity, seed, run.model)
    kept = None if run.folder is None else run.folder / f"constants-{key}"
    return measure(run.model, calibration, run.progress, seed, kept)


def plan_constants(
    run: Run, request: Request, terms: Terms | None = None
) -> tuple[CompressionPlan, Calibration, dict[str, LayerConstants]]:
    """The plan that is asked for, the calibration that was read for it, and the constants of all experts."""
    model, terms = run.model, terms or settle_constants(run.model, request)
    layers = model.architecture.layers
    calibration = read_calibration(model, request, terms.budget == UNEVEN or terms.correction.wanted)
    steering = Steering(model, calibration, run.progress, request.seed)
    protected = protected_experts(request, terms.kept // len(layers), steering) or {}
    constants = measured_constants(run, calibration, request.seed)
    removed = sum(layer.experts for layer in layers) - terms.kept
    most = [spare(layer, protected) for layer in layers]
    if sum(most) < removed:
        raise CompressionError(f"--protect leaves {sum(most)} experts to replace, fewer than {removed}; keep more")
    figures: Mapping[str, Any] = {}
    if terms.budget == UNEVEN:
        division = divide(model, constants, removed, protected, calibration.heldout_batches, run.progress)
        numbers, figures = [division.numbers[layer.name] for layer in layers], division.figures
    else:
        numbers = even_numbers(removed, most)
    made = CompressionPlan(
        source=Source(model.source.name, model.source.revision, model.fingerprint),
        experts=terms.kept // len(layers),
        strategy=STRATEGY,
        options={},
        calibration=calibration.identity,
        layers=tuple(
            _layer_plan(model, place, constants[layer.name], number, protected.get(layer.name, frozenset()))
            for place, (layer, number) in enumerate(zip(layers, numbers, strict=True))
        ),
        seed=request.seed,
        versions=versions(),
        protected={name: tuple(sorted(experts)) for name, experts in protected.items() if experts},
        constants={**terms.to_dict(), "dtype": model.dtype_name, **figures},
    )
    if terms.correction.wanted:
        made = replace(made, correction={**terms.correction.to_dict(), "dtype": model.dtype_name})
    return made, calibration, constants


def _layer_plan(
    model: OpenModel, place: int, found: LayerConstants, number: int, protected: frozenset[int]
) -> LayerPlan:
    layer = model.architecture.layers[place]
    replaced = found.replaceable(number, protected)
    kept = [expert for expert in range(layer.experts) if expert not in replaced]
    share = float(found.missed[list(replaced)].sum() / found.missed.sum().clamp(min=1e-300)) if replaced else 0.0
    return LayerPlan.keep(
        layer,
        kept,
        constants=replaced,
        decided_by="sum g^2 ||o - c||^2",
        figures={"missed": [round(value, 6) for value in found.missed.tolist()], "share_missed": round(share, 6)},
    )
