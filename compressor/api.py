"""The public functions: plan, apply, compress, compare, attribute, gate, evaluate and reference."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias, Unpack

from transformers import PreTrainedModel

from compressor.answers.generation import Answering, writer_of
from compressor.answers.options import ServerOptions
from compressor.answers.server import Server, refuse_tasks, servers_of
from compressor.answers.tasks import items_of, resolve_tasks
from compressor.answers.traces import Traces, write_traces
from compressor.attribution import measure
from compressor.attribution.figures import Attribution
from compressor.checkpoint.source import ModelSource, find_model, locate, locate_tokenizer
from compressor.data.batches import Calibration, EvaluationSet
from compressor.data.sources import sources_or_texts
from compressor.distributed import ranks, refuse_several
from compressor.errors import CompressionError
from compressor.extras import require
from compressor.files import check_folder, default_folder, lock_output
from compressor.hub.push import check_access, push_output
from compressor.model.loaded import LoadedModel, given
from compressor.model.moe_layer import resolve_count
from compressor.model.opened import OpenModel, open_model, shared_experts
from compressor.model.serving import Advice
from compressor.pathways.options import OWN
from compressor.pathways.reference import (
    NAMES,
    Asked,
    ReferenceFacts,
    build_reference,
    write_reference,
)
from compressor.pipeline.compress import carry_out
from compressor.pipeline.dry_run import servers_after
from compressor.pipeline.outcome import Outcome
from compressor.pipeline.resolve import (
    HELDOUT,
    Computing,
    Session,
    first_state,
    open_run,
    prepare,
    read_calibration,
    read_evaluation,
)
from compressor.pipeline.run import Delivery, decide, earlier_plan, run
from compressor.progress import Progress, Silent
from compressor.quality_gate.behaviour import Behaviour, evaluate_behaviour, shown_sentence
from compressor.quality_gate.run import GateRequest, Outlook, outlook, passable, run_gate
from compressor.quality_gate.teacher_forced import Judging
from compressor.quality_gate.verdict import GateResult
from compressor.recipe.recipe import Recipe, default_steps, make_step, read_recipe, recipe_of_plan, refuse_missing
from compressor.recipe.registry import working_strategies
from compressor.recipe.step import StepOptions, TextOptions
from compressor.recipe.steps_plan import Plan
from compressor.report.comparison import Contender, Variant, compare_models, correction, parse_contender, random_drop
from compressor.report.comparison_report import Comparison
from compressor.report.sizes import SCHEMES, SHARES, check_grid, measure_sizes
from compressor.report.sizes_report import SizeComparison
from compressor.statistics.statistics import ATTRIBUTED
from compressor.steps.constants.step import refuse_model
from compressor.steps.correct.options import Correct
from compressor.steps.prune.options import Prune
from compressor.steps.prune.planning import (
    Planner,
    protected_experts,
)
from compressor.steps.prune.protection import given_protected
from compressor.steps.split.view import partitioned, seen_as, with_top_k

logger = logging.getLogger(__name__)

# sources by name, or texts: a `datasets.Dataset`, or strings and dicts such as {"messages": [...]}
Calibrating: TypeAlias = str | Path | Iterable[Any] | TextOptions | None
Announce: TypeAlias = Callable[[Advice], None]
ModelLike: TypeAlias = str | Path | PreTrainedModel | LoadedModel  # a folder, a Hub id, or a model in memory


def compress(
    model: ModelLike | Recipe,
    out: str | Path,
    steps: Sequence[StepOptions] | None = None,
    *,
    tokenizer: Any = None,
    calibration: Calibrating = None,
    samples: int | None = None,
    sequence_length: int | None = None,
    seed: int = 0,
    revision: str | None = None,
    base: str | None = None,
    base_revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    resident: str = "auto",
    max_shard_bytes: int | None = None,
    evaluate: bool = True,
    overwrite: bool = False,
    command: Sequence[str] | None = None,
    progress: Progress | None = None,
    announce: Callable[[Outlook], None] | None = None,
    **options: Any,
) -> Outcome:
    """Carry out steps on a model and write what comes out; an interrupted run goes on when called again.

    `model` is a folder, a Hub id, a whole `Recipe` (or the path of a recipe.yaml), or a transformers model in memory
    with its `tokenizer`. That one stays as it is and where it is, and computes there; a copy of its weights lies in the
    temporary folder meanwhile. Without `steps` those of `default_steps(**options)` are taken: `experts=12`,
    `ratio=0.25`, `strategy="reap"`, `correct="tune"` and so on.
    Output and base are compared on held-out text unless `evaluate` is false.
    Where the output of this very request is in place already, nothing is written.

    A recipe is carried out as a whole, as by the command line: its gate, the search for the smallest model that passes,
    formats, and publishing on the Hub. It has all options but `device`, `overwrite`, `progress`, `command` and
    `announce`, which gets what the gate can show before any work. Raises `GateFailedError` if its gate is not passed.
    """
    is_file = isinstance(model, str | Path) and str(model).endswith((".yaml", ".yml"))
    if (is_file or isinstance(model, Recipe)) and (steps is not None or options):
        raise CompressionError("a recipe names its own steps; change those in it, or name a model")
    if isinstance(model, Recipe):
        recipe = model
    elif is_file:
        path = Path(str(model))
        recipe = read_recipe(path)
        refuse_missing(path, recipe)
    else:
        recipe = make_recipe(
            given(model, tokenizer),
            default_steps(**options) if steps is None else steps,
            calibration,
            samples,
            sequence_length,
            seed=seed,
            revision=revision,
            base=base,
            base_revision=base_revision,
            dtype=dtype,
            resident=resident,
            output={"max_shard_bytes": max_shard_bytes, "evaluate": evaluate},
        )
    require(*recipe.packages)
    publishes = recipe.output.push_to_hub is not None and ranks().is_first
    if publishes:
        check_access(str(recipe.output.push_to_hub), recipe.output.private)  # now rather than after hours of work
    delivery = Delivery(Path(out), overwrite, device, progress, command)
    outcome = carry_out(recipe, delivery, announce)
    return replace(outcome, pushed=push_output(outcome, recipe.output)) if publishes else outcome


def make_recipe(
    model: str | LoadedModel,
    steps: Sequence[StepOptions],
    calibration: Calibrating = None,
    samples: int | None = None,
    sequence_length: int | None = None,
    **more: Any,
) -> Recipe:
    """Return a recipe of these steps."""
    text = _text_options(calibration, samples=samples, sequence_length=sequence_length)
    return Recipe.of({"model": model, "steps": list(steps), "calibration": text, **more}, "compress")


def _text_options(calibration: Calibrating, **sizes: int | None) -> TextOptions:
    if isinstance(calibration, TextOptions):
        return calibration
    named = {"data": sources_or_texts(calibration), **sizes}
    return TextOptions.model_validate({name: value for name, value in named.items() if value is not None})


def apply(
    plan: Plan | str | Path,
    out: str | Path,
    *,
    model: ModelLike | None = None,
    tokenizer: Any = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    max_shard_bytes: int | None = None,
    evaluate: bool = True,
    device: str = "auto",
    resident: str = "auto",
    command: Sequence[str] | None = None,
) -> Outcome:
    """Carry out a plan (an object or a JSON file) and write the checkpoint; `model` overrides its source.

    Steps that have decided are not decided again. Where the output of this very plan is in place already, nothing is
    written.
    """
    loaded = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
    output = {"max_shard_bytes": max_shard_bytes, "evaluate": evaluate}
    changed: dict[str, Any] = {"output": output, "resident": resident}
    if model is not None:
        changed |= {"model": given(model, tokenizer), "revision": None}
    recipe = Recipe.of({**dict(recipe_of_plan(loaded)), **changed}, "the plan")
    return run(recipe, Delivery(Path(out), overwrite, device, progress, command), loaded)


def plan(
    recipe: Recipe, *, device: str = "auto", progress: Progress | None = None, announce: Announce | None = None
) -> Plan:
    """Decide what a recipe's first stage does with every expert; nothing is written.

    `announce` gets what servers make of the output.
    """
    assert recipe.model is not None
    with open_run(recipe.model, recipe.revision, recipe.dtype, device, progress, recipe.resident) as opened:
        task = prepare(recipe, opened.model, opened.model, earlier_plan(opened.model))
        if announce is not None:
            announce(servers_after(task))
        state = first_state(task, opened)
        if state.steps[0].options.order is None:
            raise CompressionError(f"{state.steps[0].name} works on the whole model and decides nothing; run compress")
        decide(state, state.stage)
        return state.plan


def on_text(name: str, options: dict[str, Any], text: TextOptions) -> StepOptions:
    """Return a step with a text of its own, so that the plan of its output goes on with earlier ones."""
    if text.data is not None or text.emphasis is not None:
        options = {**options, "calibration": text}
    return make_step(name, options)


def compare(
    model: ModelLike,
    *,
    tokenizer: Any = None,
    experts: Sequence[int] = (),
    ratios: Sequence[float] = (),
    splits: Sequence[int] = (1,),
    top_ks: Sequence[int] = (),
    strategies: Sequence[str] | None = None,
    evaluate: Sequence[str] = (),
    corrections: Sequence[str] | None = None,
    random_seeds: int = 3,
    evaluation_samples: int = 64,
    constants: bool = False,
    protect: Any = None,
    calibration: Calibrating = None,
    seed: int = 0,
    **computing: Unpack[Computing],
) -> Comparison:
    """Compare what each strategy costs on this model and data.

    `strategies` are names, or name:option=value; by default all that are installed. `corrections` are tried with each;
    by default each strategy's own beside none. With several `splits` and `top_ks` there is a row for each of them;
    `experts` count those of the source. With `constants`, rows in which constants stand for experts follow, even and
    uneven, with the corrections that are named. Without `evaluate` the text is taken from the calibration's
    sources, beyond what any plan or correction sees.
    """
    text = _text_options(calibration)
    prune = Prune(protect=protect)
    if constants:
        refuse_several("--format mone", "leave it out, or start the command without torchrun")
    if bool(experts) == bool(ratios):
        raise CompressionError("say how many experts to keep by --experts or --ratio")
    if constants and (top_ks or 1 not in splits):
        raise CompressionError(
            "constants stand for whole experts, and top-k stays; leave out --top-k, and name 1 among --split"
        )
    contenders = _contenders(strategies, corrections, random_seeds)
    methods = tuple(correction(method) for method in corrections or ("none",)) if constants else ()
    with open_run(given(model, tokenizer), **computing) as run:
        opened = run.model
        views = [seen_as(opened, parts) for parts in dict.fromkeys(splits)]
        wanted = list[int | None](dict.fromkeys(top_ks)) or [None]
        for view in views:
            for top_k in wanted:
                _counts(with_top_k(view, top_k), experts, ratios, prune)  # refused before text is read
        if methods:
            refuse_model(opened)
        data, sets = _texts(run, evaluate, text, seed, evaluation_samples)
        changed = any(method.wanted for contender in contenders for method in contender.corrections)
        variants = []
        for view in views:
            if view.is_split:
                view = partitioned(view, data, run.progress, seed, changed=changed)
            planner = Planner(view, data, run.progress, seed)
            contenders = _attributable(contenders, planner, named=bool(strategies))
            for top_k in wanted:
                model_view = with_top_k(view, top_k)
                counts = _counts(model_view, experts, ratios, prune)
                protected = protected_experts(prune.protect, min(counts, default=view.architecture.experts), planner)
                variants.append(Variant(model_view, counts, protected, planner))
        return compare_models(opened, variants, contenders, data, sets, run.progress, seed, methods)


def _texts(
    run: Session, evaluate: Sequence[str], text: TextOptions, seed: int, samples: int
) -> tuple[Calibration, Sequence[EvaluationSet]]:
    """Return the calibration text, and the text to evaluate on: of these sources, or reserved of the calibration's."""
    sets = read_evaluation(run, evaluate, text, seed, samples) if evaluate else ()
    data = read_calibration(run, text, seed, HELDOUT, 0 if evaluate else samples)
    return data, sets or data.reserved


def _contenders(
    strategies: Sequence[str] | None, corrections: Sequence[str] | None, random_seeds: int
) -> list[Contender]:
    """Return the strategies to compare, and random drops; each once."""
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
    """Return the contenders.

    Those that nobody named and that need an attribution are left out where the model has none.
    """
    try:
        planner.rank_changes([contender.strategy for contender in contenders])
    except CompressionError as error:
        if named:
            raise
        logger.warning("%s; it is left out", error)
        return [contender for contender in contenders if not contender.strategy.needs & ATTRIBUTED]
    return list(contenders)


def _counts(model: OpenModel, experts: Sequence[int], ratios: Sequence[float], prune: Prune) -> list[int]:
    """Return the experts to keep, each count once, checked against the model and what a list protects."""
    layers = model.architecture.layers
    counts = [resolve_count(layers, count * layers[0].parts, None) for count in experts]
    counts += [resolve_count(layers, None, ratio) for ratio in ratios]
    counts = list(dict.fromkeys(counts))
    given_protected(prune.protect, layers, min(counts, default=model.architecture.experts))
    if shared := shared_experts(model):
        raise CompressionError(
            f"{shared} shares its experts with another layer, so plans cannot be carried out in order as comparing "
            "them takes; compress with one strategy after another instead"
        )
    return counts


def compare_sizes(
    model: ModelLike,
    *,
    tokenizer: Any = None,
    shares: Sequence[float | Fraction] = SHARES,
    schemes: Sequence[str] = SCHEMES,
    nbytes: int | None = None,
    bits: float | None = None,
    context: int = 0,
    servers: Sequence[str] = (),
    evaluate: Sequence[str] = (),
    evaluation_samples: int = 64,
    calibration: Calibrating = None,
    seed: int = 0,
    device: str = "auto",
    dtype: str = "auto",
    resident: str = "auto",
    revision: str | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> SizeComparison:
    """Prune or quantise: what shares of the experts in number formats lose, and the best that fits in `nbytes`.

    Instead of bytes there may be `bits` for each parameter of the base. `options` are those of `default_steps`:
    `strategy="reap"`, `split=2`, `correct="none"` and so on. Keys and values of `context` tokens count as bytes.
    """
    kept = [Fraction(share) for share in shares]
    check_grid(kept, schemes, servers)
    text, steps = _text_options(calibration), default_steps(**options)
    with open_run(given(model, tokenizer), revision, dtype, device, progress, resident) as run:
        data, sets = _texts(run, evaluate, text, seed, evaluation_samples)
        return measure_sizes(run, steps, data, sets, seed, kept, schemes, servers, nbytes, bits, context)


def attribute(
    model: ModelLike,
    *,
    tokenizer: Any = None,
    calibration: Calibrating = None,
    keys: int = 0,
    top: int = 10,
    edges_kept: int = 0,
    seed: int = 0,
    **computing: Unpack[Computing],
) -> Attribution:
    """Measure how every component shapes the routing of later layers.

    On the first `keys` sequences the `top` most influential attention heads are split by key token, too. The
    `edges_kept` strongest edges to single experts' scores are kept.
    """
    text = _text_options(calibration)
    with open_run(given(model, tokenizer), **computing) as run:
        data = read_calibration(run, text, seed)
        return measure.attribute(run.model, data, run.progress, seed, keys, top, edges_kept)


def _two_sources(
    base: tuple[str, str | None],
    smaller: tuple[str | None, str | None],
    servers: ServerOptions | None,
    progress: Progress | None,
) -> list[tuple[ModelSource, Server | None]]:
    """`_source` of two models, each a name and a revision; of a smaller one that is served the base's by default."""
    base_server, server = servers_of(servers or ServerOptions())
    model, revision = smaller
    if model is None:
        if server is None:
            raise CompressionError("name two models, the base and the compressed one")
        model, revision = base
    return [_source(*base, base_server, progress), _source(model, revision, server, progress)]


def _source(
    name: str, revision: str | None, server: Server | None, progress: Progress | None
) -> tuple[ModelSource, Server | None]:
    """Return a model by name and revision; of one that is served its tokenizer alone, and the server, checked."""
    source = find_model(name, revision, progress) if server is None else locate_tokenizer(name, revision)
    return source, server and server.checked(source.folder, source.label)


def gate(
    base: str,
    compressed: str | None,
    wanted: GateRequest,
    *,
    servers: ServerOptions | None = None,
    revision: str | None = None,
    compressed_revision: str | None = None,
    progress: Progress | None = None,
    announce: Callable[[Outlook], None] | None = None,
) -> GateResult:
    """Test on the same items whether a compressed model is as good as its base, within a margin.

    A model that does not fit into memory is streamed, as `wanted` may also ask.
    A model that `servers` name is asked there; of its folder the tokenizer is read, by default the base's. `announce`
    gets what the gate can show, before any model is loaded.

    Raises `CompressionError` before any model is loaded for a gate that not even an identical model passes.
    """
    if servers is not None and (servers.server or servers.base_server):
        refuse_several("--server", "start the command without torchrun")
    if wanted.answering is not None:
        refuse_several("--prompts", "start the command without torchrun")
    tasks = ranks().first_before_others(lambda: resolve_tasks(wanted.options))
    prospects = passable(outlook(tasks, wanted))
    named = _two_sources((base, revision), (compressed, compressed_revision), servers, progress)
    (base_source, base_server), (compressed_source, server) = named
    for asked in (base_server, server):
        if asked is not None:
            refuse_tasks(asked, tasks)
    if announce is not None:
        announce(prospects)
    return run_gate(
        base_source,
        compressed_source,
        tasks,
        wanted,
        progress or Silent(),
        server=server,
        base_server=base_server,
    )


def evaluate(
    base: str,
    smaller: str | None,
    answering: Answering | None = None,
    judging: Judging | None = None,
    *,
    servers: ServerOptions | None = None,
    confidence: float = 0.95,
    batch_size: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    smaller_revision: str | None = None,
    cache: Path | None = None,
    progress: Progress | None = None,
    announce: Callable[[str], None] | None = None,
) -> Behaviour:
    """Compare a smaller model with its base: the answers of both to the same prompts, and the loss on text.

    Answers are kept in the folder `cache`, so that no model is asked twice. `announce` gets what so many answers can
    show, before any model is loaded. A model that `servers` name writes there, `batch_size` answers at once; of its
    folder the tokenizer is read, by default the base's.
    """
    named = _two_sources((base, revision), (smaller, smaller_revision), servers, progress)
    writers = [writer_of(source, server, batch_size, device, dtype) for source, server in named]

    def tell(usable: Answering) -> None:
        if announce is not None:
            announce(shown_sentence(usable.answers, confidence))

    return evaluate_behaviour(
        writers[0],
        writers[1],
        answering,
        judging,
        confidence,
        cache or default_folder(),
        progress or Silent(),
        tell,
    )


def traces(
    model: str,
    answering: Answering,
    out: str | Path,
    *,
    seed: int = 0,
    server: ServerOptions | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Traces:
    """Write a model's own complete answers into the JSONL file `out`, and how they were made beside it.

    A run that was killed goes on when it is repeated. With a `server` the model answers there, and of `model` the
    tokenizer is read.
    """
    source, served = _source(model, revision, servers_of(server or ServerOptions())[1], progress)
    writer = writer_of(source, served, batch_size, device, dtype)
    return write_traces(writer, replace(answering, seed=seed), Path(out), progress or Silent(), overwrite)


@dataclass(frozen=True, slots=True)
class ReferenceSummary:
    """The content of a reference set, and its files."""

    facts: ReferenceFacts
    kept: int  # items that the model answers right
    asked: tuple[Asked, ...]  # for each task
    files: tuple[Path, ...]


def reference(
    model: str,
    output: str | Path,
    *,
    tasks: Sequence[str] = (),
    calibration: str | Path | None = None,
    limit: int | None = None,
    include_path: str | Path | None = None,
    strict: bool = False,
    embedding: str = OWN,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ReferenceSummary:
    """Write the items that a model answers right, with embeddings and pathways, into the folder `output`.

    Items are those of lm-eval `tasks` (multiple choice; the first `limit` of each), or the lines of the JSONL file
    `calibration` with `prompt`, `answer` and, of multiple choice, `choices`. Those that can't be asked are left out, or
    refused if `strict`. The whole model is read into memory. Raises `CompressionError` where no item is answered right,
    or the model's late layers cannot be run by themselves.
    """
    folder = Path(output)
    check_folder(folder, NAMES, overwrite)
    with lock_output(folder):
        items = items_of(tasks, calibration, limit, include_path, strict)
        opened = open_model(locate(model, revision, progress), dtype, device)
        reference_set, asked = build_reference(opened, items, embedding, progress or Silent(), strict=strict)
        files = write_reference(reference_set, folder, overwrite)
    return ReferenceSummary(reference_set.facts, len(reference_set.items), asked, tuple(files))
