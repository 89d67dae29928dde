"""The Python API that looks at models and changes none: `inspect`, `compare`, `attribute` and `gate`."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from compressor.api.placing import refuse_ranks
from compressor.attribution import measure
from compressor.attribution.figures import Attribution
from compressor.comparison.measure import Contender, Variant, compare_models, parse_contender, random_drop
from compressor.comparison.rows import Comparison
from compressor.data.batches import evaluation_sets, load_tokenizer
from compressor.distributed.present import here, refuse_several
from compressor.errors import CompressionError
from compressor.evaluation.tasks import resolve_tasks
from compressor.forecasting.cost import Text
from compressor.forecasting.estimate import Forecast, announce_long, forecast_attribution
from compressor.gates.run import GateRequest, run_gate
from compressor.gates.verdict import GateResult
from compressor.model.inspection import Inspection, inspect_model
from compressor.model.opened import OpenModel, resolve_count, shared_experts
from compressor.pathways.answering import trusted_reference
from compressor.pathways.options import Routing
from compressor.pathways.routing import refuse_other_tasks, routed_answerer
from compressor.planning.answering import (
    protected_experts,
    read_calibration,
    refuse_per_source,
    refuse_unjudged_sources,
)
from compressor.planning.constants import refuse_model
from compressor.planning.protecting import given_protected
from compressor.planning.request import Request
from compressor.planning.run import find_model, open_run
from compressor.planning.steering import Steering
from compressor.progress import Progress, Silent
from compressor.recipe.registry import working_strategies
from compressor.recipe.split import ENERGY
from compressor.statistics.statistics import needs_attribution
from compressor.steps.correct.refit import CONSTANTS, Correction
from compressor.steps.split.dealing import check_way, dealt
from compressor.steps.split.opening import seen_as, with_top_k

logger = logging.getLogger(__name__)


def inspect(model: str, revision: str | None = None, experts: int | None = None) -> Inspection:
    """What a model is made of and what compressing it would take, from its config and safetensors headers alone."""
    return inspect_model(model, revision, experts)


def compare(
    model: str,
    request: Request | None = None,
    *,
    experts: Sequence[int] = (),
    ratios: Sequence[float] = (),
    splits: Sequence[int] = (1,),
    split_by: str = ENERGY,
    top_ks: Sequence[int] = (),
    strategies: Sequence[str] | None = None,
    evaluate: Sequence[str] = (),
    corrections: Sequence[str] | None = None,
    random_seeds: int = 3,
    evaluation_samples: int = 64,
    per_source: bool = False,
    revision: str | None = None,
    progress: Progress | None = None,
    **wanted: Any,
) -> Comparison:
    """What each strategy costs on this model and data; keywords are those of `Request`, counts and options excepted.

    `strategies` are names, or name:option=value; by default all that are installed. `corrections` are tried with each;
    by default each strategy's own beside none. With several `splits` and `top_ks` there is a row for each of them;
    what is kept is then said by `ratios`, for `experts` counts the parts of one split. With `constants`, rows in which
    constants stand for experts follow, even and uneven; `corrections` may name `constants` then. Without `evaluate` the
    text is taken from the calibration's sources, beyond what any plan or correction sees.
    """
    asked = Request.of(request, wanted)
    if per_source:
        refuse_per_source(asked)
    refuse_ranks(asked.constants, None, False)
    if bool(experts) == bool(ratios) or (experts and len(splits) > 1):
        raise CompressionError(
            "say how many experts to keep by --experts or --ratio; with several --split by --ratio, for --experts "
            "counts parts"
        )
    if asked.constants and (top_ks or 1 not in splits):
        raise CompressionError(
            "constants stand for whole experts, and top-k stays; leave out --top-k, and name 1 among --split"
        )
    check_way(split_by, True, "")
    stock = corrections
    if asked.constants and corrections is not None:  # of which one is for constants alone
        stock = [method for method in corrections if method != CONSTANTS] or ["none"]
    contenders = _contenders(strategies, stock, random_seeds)
    methods = tuple(map(Correction, corrections or ("none", CONSTANTS))) if asked.constants else ()
    with open_run(model, revision, asked.dtype, asked.device, progress) as run:
        opened = run.model
        seen = [seen_as(opened, parts) for parts in dict.fromkeys(splits)]
        wanted_top_ks: list[int | None] = [*dict.fromkeys(top_ks)] or [None]
        counts = {
            (number, top_k): _counts(with_top_k(each, top_k), experts, ratios, asked)
            for number, each in enumerate(seen)
            for top_k in wanted_top_ks
        }
        if methods:
            refuse_model(opened)
        reserve = 0 if evaluate else evaluation_samples
        given = (
            evaluation_sets(
                evaluate,
                load_tokenizer(opened.source.folder),
                length=asked.sequence_length,
                seed=asked.seed,
                vocab=opened.vocabulary,
                most=evaluation_samples,
            )
            if evaluate
            else ()
        )
        calibration = read_calibration(opened, asked, heldout=True, reserve=reserve)
        if per_source:
            refuse_unjudged_sources(calibration)
        changed = any(method.wanted for contender in contenders for method in contender.corrections)
        ready = [
            dealt(each, calibration, split_by, run.progress, asked.seed, changed=changed) if each.is_split else each
            for each in seen
        ]
        steerings = [Steering(each, calibration, run.progress, asked.seed) for each in ready]
        for steering in steerings:
            contenders = _attributable(contenders, steering, named=bool(strategies))
        variants = []
        for (number, top_k), kept in counts.items():
            variant, steering = with_top_k(ready[number], top_k), steerings[number]
            protected = protected_experts(asked, min(kept, default=variant.architecture.experts), steering)
            variants.append(Variant(variant, kept, protected, steering))
        sets = given or calibration.reserved
        return compare_models(
            opened, variants, contenders, calibration, sets, run.progress, asked.seed, per_source, methods
        )


def _contenders(
    strategies: Sequence[str] | None, corrections: Sequence[str] | None, random_seeds: int
) -> list[Contender]:
    """The strategies to compare, and random drops; each once."""
    asked = strategies or [strategy.name for strategy in working_strategies()]
    found = [parse_contender(text, corrections) for text in asked]
    none = (Correction(),)
    found += [Contender(f"random (seed {seed})", random_drop(seed), {}, none, seed) for seed in range(random_seeds)]
    if len({contender.name for contender in found}) < len(found):
        raise CompressionError("--strategies names one twice; name each once, or with other options")
    return found


def _attributable(contenders: Sequence[Contender], steering: Steering, named: bool) -> list[Contender]:
    """The contenders; those that nobody named and that need an attribution are left out where the model has none."""
    try:
        steering.rank_changes([contender.strategy for contender in contenders])
    except CompressionError as error:
        if named:
            raise
        logger.warning("%s; it is left out", error)
        return [contender for contender in contenders if not needs_attribution(contender.strategy.needs)]
    return list(contenders)


def _counts(model: OpenModel, experts: Sequence[int], ratios: Sequence[float], request: Request) -> list[int]:
    """Experts to keep, each count once, checked against the model and what a list protects."""
    layers = model.architecture.layers
    asked = [*((count, None) for count in experts), *((None, ratio) for ratio in ratios)]
    counts = list(dict.fromkeys(resolve_count(layers, *one) for one in asked))
    given_protected(request.protect, layers, min(counts, default=model.architecture.experts))
    if shared := shared_experts(model):
        raise CompressionError(
            f"{shared} shares its experts with another layer, so plans cannot be carried out in order as comparing "
            "them takes; compress with one strategy after another instead"
        )
    return counts


def attribute(
    model: str,
    request: Request | None = None,
    *,
    keys: int = 0,
    top: int = 10,
    edges_kept: int = 0,
    revision: str | None = None,
    progress: Progress | None = None,
    announce: Callable[[Forecast], None] | None = None,
    **wanted: Any,
) -> Attribution:
    """How every component shapes the routing of later layers; keywords are those of `Request` that speak of data.

    On the first `keys` sequences the `top` most influential attention heads are split by key token, too. The
    `edges_kept` strongest edges to single experts' scores are kept. `announce` is told beforehand what it will take.
    """
    asked = Request.of(request, wanted)
    with open_run(model, revision, asked.dtype, asked.device, progress) as run:
        calibration = read_calibration(run.model, asked, heldout=False)
        announce_long(announce, partial(forecast_attribution, run.model, Text.of(calibration)), run.model)
        return measure.attribute(run.model, calibration, run.progress, asked.seed, keys, top, edges_kept)


def gate(
    base: str,
    compressed: str,
    wanted: GateRequest,
    *,
    revision: str | None = None,
    compressed_revision: str | None = None,
    routing: Routing | None = None,
    progress: Progress | None = None,
) -> GateResult:
    """Test on the same items whether a compressed model is as good as its original, within a margin.

    A model that does not fit into memory is streamed, as `wanted` may also ask.
    With a `routing` the compressed model answers on pathways optimised by C3PO, and the base as it is. Raises
    `CompressionError` before any model is loaded for a task that has no prompt to optimise a pathway for, and for a
    reference set that is not the compressed model's own.
    """
    if routing is not None:
        refuse_several("--routing c3po", "leave it out, or start the command without torchrun")
    reference = None if routing is None else trusted_reference(routing)
    if reference is not None and wanted.options.stream:
        raise CompressionError("a routed model answers with all of it in memory; leave out --stream or --routing")
    tasks = here().first_before_others(lambda: resolve_tasks(wanted.options))
    if reference is not None:
        refuse_other_tasks(tasks)
    sources = find_model(base, revision, progress), find_model(compressed, compressed_revision, progress)
    answerer = None
    if routing is not None and reference is not None:
        answerer = routed_answerer(routing, reference, sources[1], wanted.options)
    return run_gate(*sources, tasks, wanted, progress or Silent(), answerer=answerer)
