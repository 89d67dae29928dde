"""Which experts constants stand for: from the options of `constants` to a plan of every layer."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from compressor.errors import CompressionError
from compressor.evaluation.evaluator import FEWEST
from compressor.model.constant_experts import number_in
from compressor.model.layout import expert_prefixes
from compressor.model.opened import OpenModel, left_by
from compressor.recipe.plan import LayerPlan
from compressor.recipe.step import Needs, Step
from compressor.recipe.steps_plan import layer_to_dict
from compressor.steps.constants.budget import EVEN, UNEVEN, divide, even_numbers, spare
from compressor.steps.constants.measure import LayerConstants, measure
from compressor.steps.constants.step import Constants
from compressor.steps.correct.step import CONSTANTS
from compressor.steps.prune.planning import planner_of, protected_experts
from compressor.steps.prune.protecting import given_protected
from compressor.steps.state import State

MONE = "mone"  # the format in which constants stand for experts

logger = logging.getLogger(__name__)


def budget_of(asked: Constants) -> str:
    """How the experts that stay are divided over layers."""
    return asked.budget or (EVEN if asked.experts_total is None else UNEVEN)


def needs_of(asked: Constants, model: OpenModel, steps: Sequence[Step]) -> Needs:
    """Check model, numbers and what follows; raises `CompressionError` for what this format cannot do."""
    refuse_model(model)
    kept, budget = _kept(model, asked), budget_of(asked)
    correct: Any = next((step for step in steps if step.name == "correct"), None)
    if correct is not None and correct.method != CONSTANTS and model.layout.quantized:
        raise CompressionError(
            f"--correct {correct.method} changes experts, which stay quantised with --format mone; pass --correct "
            f"{CONSTANTS} or none"
        )
    if model.layout.quantized:
        logger.warning("vLLM serves constants only beside experts that are not quantised, and these stay quantised")
    given_protected(asked.protect, model.architecture.layers, kept // len(model.architecture.layers))
    heldout = FEWEST if budget == UNEVEN else int(correct is not None)
    return Needs(True, heldout, experts=kept // len(model.architecture.layers))


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


def _kept(model: OpenModel, request: Constants) -> int:
    """Experts to keep over all layers."""
    layers, budget = model.architecture.layers, budget_of(request)
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


def measured_constants(state: State) -> dict[str, LayerConstants]:
    """The constants of all layers; a run that was killed finds them in its work folder."""
    assert state.text is not None
    number = state.number_of("constants")
    kept = None if state.work is None or number is None else state.work.kept(number, "measured")
    return measure(state.model, state.text.fit, state.progress, state.seed, kept)


def plan_stage(asked: Constants, state: State) -> Mapping[str, Any]:
    """Which experts constants stand for in each layer."""
    assert state.text is not None
    model, calibration, total = state.model, state.text.fit, _kept(state.model, asked)
    layers = model.architecture.layers
    protected = protected_experts(asked.protect, total // len(layers), planner_of(state))
    constants = measured_constants(state)
    removed = sum(layer.experts for layer in layers) - total
    most = [spare(layer, protected) for layer in layers]
    if sum(most) < removed:
        raise CompressionError(f"--protect leaves {sum(most)} experts to replace, fewer than {removed}; keep more")
    numbers, figures = even_numbers(removed, most), dict[str, Any]()
    if budget_of(asked) == UNEVEN:
        numbers, figures = divide(model, constants, removed, protected, calibration.heldout_batches, state.progress)
    guarded = {name: sorted(experts) for name, experts in protected.items() if experts}
    plans = []
    for layer, number in zip(layers, numbers, strict=True):
        missed = constants[layer.name].missed
        replaced = constants[layer.name].replaceable(number, protected.get(layer.name, frozenset()))
        share = float(missed[list(replaced)].sum() / missed.sum().clamp(min=1e-300)) if replaced else 0.0
        plans.append(
            LayerPlan.keep(
                layer,
                [expert for expert in range(layer.experts) if expert not in replaced],
                constants=replaced,
                decided_by="sum g^2 ||o - c||^2",
                figures={"missed": [round(value, 6) for value in missed.tolist()], "share_missed": round(share, 6)},
            )
        )
    return {
        "experts": total // len(layers),
        "format": MONE,
        "budget": budget_of(asked),
        "experts_total": total,
        "figures": figures,
        **({"protected": guarded} if guarded else {}),
        "layers": [layer_to_dict(plan) for plan in plans],
    }
