"""The Python API that looks at models and changes none: `inspect`, `compare`, `attribute` and `gate`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.gates.verdict import GateResult
from compressor.planning.request import (
    Request,
    protected_experts,
    read_calibration,
    refuse_per_source,
    refuse_unjudged_sources,
)
from compressor.progress import Progress, Silent

if TYPE_CHECKING:
    from compressor.attribution.figures import Attribution
    from compressor.comparison.rows import Comparison
    from compressor.gates.run import GateRequest
    from compressor.model.inspection import Inspection


def inspect(model: str, revision: str | None = None, experts: int | None = None) -> "Inspection":
    """What a model is made of and what compressing it would take, from its config and safetensors headers alone."""
    from compressor.model.inspection import inspect_model

    return inspect_model(model, revision, experts)


def compare(
    model: str,
    *,
    experts: Sequence[int],
    strategies: Sequence[str] | None = None,
    evaluate: Sequence[str] = (),
    corrections: Sequence[str] | None = None,
    random_seeds: int = 3,
    evaluation_samples: int = 64,
    per_source: bool = False,
    revision: str | None = None,
    progress: Progress | None = None,
    **request: Any,
) -> "Comparison":
    """What each strategy costs on this model and data; keywords are those of `Request`, counts and options excepted.

    `strategies` are names, or name:option=value; by default all that are installed. `corrections` are tried with each;
    by default each strategy's own beside none. Without `evaluate` the text is taken from the calibration's sources,
    beyond what any plan or correction sees.
    """
    from compressor.calibration.batches import EvaluationSet, evaluation_sets, load_tokenizer
    from compressor.comparison.measure import Contender, compare_models, parse_contender, random_drop
    from compressor.correction.refit import Correction
    from compressor.model.opened import open_model, resolve_count, shared_experts
    from compressor.planning.protecting import given_protected
    from compressor.planning.registry import working_strategies

    listener = progress or Silent()
    wanted = Request(**request)
    if per_source:
        refuse_per_source(wanted)
    contenders = [
        parse_contender(text, corrections)
        for text in strategies or [strategy.name for strategy in working_strategies()]
    ]
    none = (Correction(),)
    contenders += [
        Contender(f"random (seed {seed})", random_drop(seed), {}, none, seed) for seed in range(random_seeds)
    ]
    if len({contender.name for contender in contenders}) < len(contenders):
        raise CompressionError("--strategies names one twice; name each once, or with other options")
    opened = open_model(locate(model, revision, listener), wanted.dtype, wanted.device)
    counts = [resolve_count(opened.architecture.layers, count, None) for count in dict.fromkeys(experts)]
    fewest = min(counts, default=opened.architecture.experts)
    given = given_protected(wanted.protect, opened.architecture.layers, fewest)
    if shared := shared_experts(opened):
        raise CompressionError(
            f"{shared} shares its experts with another layer, so plans cannot be carried out in order as comparing "
            "them takes; compress with one strategy after another instead"
        )
    sets: tuple[EvaluationSet, ...] = ()
    if evaluate:
        sets = evaluation_sets(
            evaluate, load_tokenizer(opened.source.folder), length=wanted.sequence_length, seed=wanted.seed,
            vocab=opened.vocabulary, most=evaluation_samples,
        )  # fmt: skip
    calibration = read_calibration(opened, wanted, heldout=True, reserve=0 if evaluate else evaluation_samples)
    sets = sets or calibration.reserved
    if per_source:
        refuse_unjudged_sources(calibration)
    protected = protected_experts(opened, wanted, given, fewest, calibration, listener)
    return compare_models(opened, contenders, counts, calibration, sets, listener, wanted.seed, per_source, protected)


def attribute(
    model: str,
    *,
    keys: int = 0,
    top: int = 10,
    revision: str | None = None,
    progress: Progress | None = None,
    **request: Any,
) -> "Attribution":
    """How every component shapes the routing of later layers; keywords are those of `Request` that speak of data.

    On the first `keys` sequences the `top` most influential attention heads are split by key token, too.
    """
    from compressor.attribution.measure import attribute as run
    from compressor.model.opened import open_model

    wanted = Request(**request)
    opened = open_model(locate(model, revision, progress), wanted.dtype, wanted.device)
    calibration = read_calibration(opened, wanted, heldout=False)
    return run(opened, calibration, progress or Silent(), wanted.seed, keys, top)


def gate(
    base: str,
    compressed: str,
    wanted: "GateRequest",
    *,
    revision: str | None = None,
    compressed_revision: str | None = None,
    progress: Progress | None = None,
) -> GateResult:
    """Test on the same items whether a compressed model is as good as its original, within a margin."""
    from compressor.evaluation.tasks import resolve_tasks
    from compressor.gates.run import run_gate

    sources = locate(base, revision, progress), locate(compressed, compressed_revision, progress)
    return run_gate(*sources, resolve_tasks(wanted.options), wanted, progress or Silent())
