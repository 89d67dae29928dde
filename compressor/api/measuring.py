"""The Python API that measures models and changes none: `compare`, `attribute`, `gate`, `reference`."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compressor.attribution import measure
from compressor.attribution.figures import Attribution
from compressor.checkpoint.source import locate
from compressor.data.batches import Calibration, EvaluationSet, TextSpec, evaluation_sets, load_tokenizer, read_text
from compressor.distributed import here, refuse_several
from compressor.errors import CompressionError
from compressor.evaluation.gate import GateRequest, run_gate
from compressor.evaluation.gate_verdict import GateResult
from compressor.evaluation.tasks import item_options, items_of, resolve_tasks
from compressor.files import alone, check_folder
from compressor.model.opened import OpenModel, open_model, resolve_count, shared_experts
from compressor.pathways.answering import refuse_other_tasks, routed_answerer
from compressor.pathways.options import OWN, Routing
from compressor.pathways.reference import (
    NAMES,
    Asked,
    ReferenceFacts,
    build_reference,
    trusted_reference,
    write_reference,
)
from compressor.pipeline.task import HELDOUT, find_model, open_run, sources_of
from compressor.progress import Progress, Silent
from compressor.recipe.recipe import make_step
from compressor.recipe.registry import working_strategies
from compressor.recipe.step import TextOptions
from compressor.report.comparison import Contender, Variant, compare_models, correction, parse_contender, random_drop
from compressor.report.comparison_report import Comparison
from compressor.statistics.statistics import ATTRIBUTED
from compressor.steps.constants.planning import refuse_model
from compressor.steps.correct.step import CONSTANTS, Correct
from compressor.steps.prune.planning import (
    Planner,
    protected_experts,
    refuse_per_source,
    refuse_sources_without_heldout,
)
from compressor.steps.prune.protecting import given_protected
from compressor.steps.prune.step import Prune
from compressor.steps.split.opening import dealt, seen_as, with_top_k

logger = logging.getLogger(__name__)


def compare(
    model: str,
    *,
    experts: Sequence[int] = (),
    ratios: Sequence[float] = (),
    splits: Sequence[int] = (1,),
    split_by: str = "energy",
    top_ks: Sequence[int] = (),
    strategies: Sequence[str] | None = None,
    evaluate: Sequence[str] = (),
    corrections: Sequence[str] | None = None,
    random_seeds: int = 3,
    evaluation_samples: int = 64,
    per_source: bool = False,
    constants: bool = False,
    protect: Any = None,
    calibration: str | Sequence[str] | TextOptions | None = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """What each strategy costs on this model and data.

    `strategies` are names, or name:option=value; by default all that are installed. `corrections` are tried with each;
    by default each strategy's own beside none. With several `splits` and `top_ks` there is a row for each of them;
    `experts` count those of the source. With `constants`, rows in which constants stand for experts follow, even and
    uneven; `corrections` may name `constants` then. Without `evaluate` the text is taken from the calibration's
    sources, beyond what any plan or correction sees.
    """
    text = _text_options(calibration)
    prune = Prune(protect=protect)
    if per_source and constants:
        raise CompressionError("--format mone makes one plan for all calibration sources; leave out --per-source")
    if per_source:
        refuse_per_source([prune], text.data or ())
    if constants:
        refuse_several("--format mone", "leave it out, or start the command without torchrun")
    if bool(experts) == bool(ratios):
        raise CompressionError("say how many experts to keep by --experts or --ratio")
    if constants and (top_ks or 1 not in splits):
        raise CompressionError(
            "constants stand for whole experts, and top-k stays; leave out --top-k, and name 1 among --split"
        )
    make_step("split", {"by": split_by})
    stock = corrections
    if constants and corrections is not None:  # of which one is for constants alone
        stock = [method for method in corrections if method != CONSTANTS] or ["none"]
    contenders = _contenders(strategies, stock, random_seeds)
    methods = tuple(correction(method) for method in corrections or ("none", CONSTANTS)) if constants else ()
    with open_run(model, revision, dtype, device, progress) as run:
        opened = run.model
        seen = [seen_as(opened, parts) for parts in dict.fromkeys(splits)]
        wanted_top_ks: list[int | None] = [*dict.fromkeys(top_ks)] or [None]
        counts = {
            (number, top_k): _counts(with_top_k(each, top_k), experts, ratios, prune)
            for number, each in enumerate(seen)
            for top_k in wanted_top_ks
        }
        if methods:
            refuse_model(opened)
        sets: Sequence[EvaluationSet] = ()
        if evaluate:
            sets = evaluation_sets(
                evaluate,
                load_tokenizer(opened.source.folder),
                length=text.sequence_length,
                seed=seed,
                vocab=opened.vocabulary,
                most=evaluation_samples,
            )
        data = _read_calibration(opened, text, seed, HELDOUT, 0 if evaluate else evaluation_samples)
        if per_source:
            refuse_sources_without_heldout(data)
        changed = any(method.wanted for contender in contenders for method in contender.corrections)
        ready = [
            dealt(each, data, split_by, run.progress, seed, changed=changed) if each.is_split else each for each in seen
        ]
        planners = [Planner(each, data, run.progress, seed) for each in ready]
        for planner in planners:
            contenders = _attributable(contenders, planner, named=bool(strategies))
        variants = []
        for (number, top_k), kept in counts.items():
            variant, planner = with_top_k(ready[number], top_k), planners[number]
            protected = protected_experts(prune.protect, min(kept, default=variant.architecture.experts), planner)
            variants.append(Variant(variant, kept, protected, planner))
        sets = sets or data.reserved
        return compare_models(opened, variants, contenders, data, sets, run.progress, seed, per_source, methods)


def _text_options(calibration: str | Sequence[str] | TextOptions | None) -> TextOptions:
    if isinstance(calibration, TextOptions):
        return calibration
    return TextOptions.model_validate({"data": calibration})


def _read_calibration(
    model: OpenModel, text: TextOptions, seed: int, heldout: float = 0.0, reserve: int = 0
) -> Calibration:
    """The calibration text, the same on all ranks, with a share held out and sequences reserved."""
    spec = TextSpec(sources_of(text), text.samples, text.sequence_length, seed, heldout, reserve)
    data = read_text(spec, load_tokenizer(model.source.folder), model.vocabulary).fit
    here().assert_same_on_all(data.identity["sha256"], "calibration text")
    return data


def _contenders(
    strategies: Sequence[str] | None, corrections: Sequence[str] | None, random_seeds: int
) -> list[Contender]:
    """The strategies to compare, and random drops; each once."""
    texts = strategies or [strategy.name for strategy in working_strategies()]
    contenders = [parse_contender(text, corrections) for text in texts]
    none = (Correct(method="none"),)
    contenders += [
        Contender(f"random (seed {seed})", random_drop(seed), {}, none, seed) for seed in range(random_seeds)
    ]
    if len({contender.name for contender in contenders}) < len(contenders):
        raise CompressionError("--strategies names one twice; name each once, or with other options")
    return contenders


def _attributable(contenders: Sequence[Contender], planner: Planner, named: bool) -> list[Contender]:
    """The contenders; those that nobody named and that need an attribution are left out where the model has none."""
    try:
        planner.rank_changes([contender.strategy for contender in contenders])
    except CompressionError as error:
        if named:
            raise
        logger.warning("%s; it is left out", error)
        return [contender for contender in contenders if not contender.strategy.needs & ATTRIBUTED]
    return list(contenders)


def _counts(model: OpenModel, experts: Sequence[int], ratios: Sequence[float], prune: Prune) -> list[int]:
    """Experts to keep, each count once, checked against the model and what a list protects."""
    layers = model.architecture.layers
    requested = [*((count * layers[0].parts, None) for count in experts), *((None, ratio) for ratio in ratios)]
    counts = list(dict.fromkeys(resolve_count(layers, *one) for one in requested))
    given_protected(prune.protect, layers, min(counts, default=model.architecture.experts))
    if shared := shared_experts(model):
        raise CompressionError(
            f"{shared} shares its experts with another layer, so plans cannot be carried out in order as comparing "
            "them takes; compress with one strategy after another instead"
        )
    return counts


def attribute(
    model: str,
    *,
    calibration: str | Sequence[str] | TextOptions | None = None,
    keys: int = 0,
    top: int = 10,
    edges_kept: int = 0,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    progress: Progress | None = None,
) -> Attribution:
    """How every component shapes the routing of later layers.

    On the first `keys` sequences the `top` most influential attention heads are split by key token, too. The
    `edges_kept` strongest edges to single experts' scores are kept.
    """
    text = _text_options(calibration)
    with open_run(model, revision, dtype, device, progress) as run:
        data = _read_calibration(run.model, text, seed)
        return measure.attribute(run.model, data, run.progress, seed, keys, top, edges_kept)


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
    """Test on the same items whether a compressed model is as good as its base, within a margin.

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


@dataclass(frozen=True, slots=True)
class ReferenceSummary:
    """What a reference set holds, and where it was written."""

    facts: ReferenceFacts
    kept: int  # items that the model answers right
    asked: tuple[Asked, ...]  # for each task
    files: tuple[Path, ...]


def reference(
    model: str,
    output: str | Path,
    *,
    tasks: Sequence[str] = (),
    data: str | Path | None = None,
    limit: int | None = None,
    include_path: str | Path | None = None,
    embedding: str = OWN,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ReferenceSummary:
    """Write the items that a model answers right, with embeddings and pathways, into the folder `output`.

    Items are those of lm-eval `tasks` (multiple choice; the first `limit` of each), or the lines of the JSONL file
    `data` with `prompt`, `answer` and, of multiple choice, `choices`. The whole model is read into memory. Raises
    `CompressionError` where no item is answered right, or the model's late layers cannot be run by themselves.
    """
    folder = Path(output)
    options = item_options(tasks, data, limit, include_path, dtype)
    check_folder(folder, NAMES, overwrite)
    with alone(folder):
        items = items_of(options, data)
        opened = open_model(locate(model, revision, progress), dtype, device)
        reference_set, asked = build_reference(opened, items, embedding, progress or Silent())
        files = write_reference(reference_set, folder, overwrite)
    return ReferenceSummary(reference_set.facts, len(reference_set.items), asked, tuple(files))
