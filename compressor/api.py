"""The public functions: plan, apply, compress, compare, gate, evaluate and traces."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from transformers import PreTrainedModel

from compressor.answers.forms import task_forms
from compressor.answers.lm_eval_run import plan_evaluation
from compressor.answers.models import identity, model_of
from compressor.answers.options import AnswerOptions, ServerOptions, TaskOptions
from compressor.answers.prompts import PromptSet
from compressor.answers.server import Server, refuse_tasks, servers_of
from compressor.answers.traces import Traces, write_traces
from compressor.checkpoint.source import ModelSource, find_model, locate
from compressor.data.sources import sources_or_texts
from compressor.distributed import ranks, refuse_several
from compressor.errors import CompressionError
from compressor.extras import require
from compressor.files import default_folder, lock_output
from compressor.model.loaded import LoadedModel, given
from compressor.model.serving import Advice
from compressor.options import one_or_several, validated
from compressor.pipeline.compress import carry_out
from compressor.pipeline.dry_run import servers_after
from compressor.pipeline.formats import export_checkpoint, find_exporter
from compressor.pipeline.outcome import Outcome
from compressor.pipeline.resolve import begin, open_run, prepare
from compressor.pipeline.run import Delivery, decide, earlier_plan, run
from compressor.progress import Progress, Silent
from compressor.prompt_date import dated
from compressor.quality_gate.baseline import SETTINGS, Baseline, check_path
from compressor.quality_gate.behaviour import Behaviour, evaluate_behaviour, shown_sentence
from compressor.quality_gate.options import BehaviourOptions, GateOptions
from compressor.quality_gate.run import (
    GateRequest,
    PowerAnalysis,
    passable,
    run_gate,
)
from compressor.quality_gate.verdict import GateResult
from compressor.recipe.recipe import (
    Recipe,
    default_steps,
    on_text,
    read_recipe,
    recipe_of_plan,
    refuse_missing,
    step_class,
)
from compressor.recipe.registry import exporter_options
from compressor.recipe.step import StepOptions, TextOptions
from compressor.recipe.steps_plan import Plan
from compressor.run_record import PACKAGES, versions
from compressor.steps.step import State

if TYPE_CHECKING:  # loaded only where models are compared
    from compressor.report.comparison_report import Comparison
    from compressor.report.data import Report

logger = logging.getLogger(__name__)

# sources by name, or texts: a `datasets.Dataset`, or strings and dicts such as {"messages": [...]}
Calibrating: TypeAlias = str | Path | Iterable[Any] | TextOptions | None
Announce: TypeAlias = Callable[[Advice], None]
# a folder, a Hub id, or a model in memory
ModelLike: TypeAlias = str | Path | PreTrainedModel | LoadedModel


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
    announce: Callable[[PowerAnalysis], None] | None = None,
    **options: Any,
) -> Outcome:
    """Carry out steps on a model and write what comes out; an interrupted run goes on when called
    again.

    `model` is a folder, a Hub id, a whole `Recipe` (or the path of a recipe.yaml), or a
    transformers model in memory with its `tokenizer`. That one stays as it is and where it is, and
    computes there; a copy of its weights lies in the temporary folder meanwhile. Without `steps`
    those of `default_steps(**options)` are taken: `experts=12`, `ratio=0.25`, `strategy="reap"`,
    `correct="tune"` and so on. Output and base are compared on held-out text unless `evaluate` is
    false. Where the output of this very request is in place already, nothing is written.

    A recipe is carried out as a whole, as by the command line: its gate, the search for the
    smallest model that passes, formats, and publishing on the Hub. It has all options but `device`,
    `overwrite`, `progress`, `command` and `announce`, which gets what the gate can show before any
    work. Raises `GateFailedError` if its gate is not passed."""
    is_file = isinstance(model, str | Path) and str(model).endswith((".yaml", ".yml"))
    if (is_file or isinstance(model, Recipe)) and (steps is not None or options):
        raise CompressionError("a recipe names its own steps; change those in it, or name a model")
    if steps is not None and options:
        raise CompressionError(
            f"compress has no option {next(iter(options))!r}; options of steps go into the steps"
        )
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
    recipe.check_installed()
    if recipe.fit is not None:
        from compressor.report.sizes import fitted

        recipe = fitted(recipe, device, progress)
    delivery = Delivery(Path(out), overwrite, device, progress, command)
    if recipe.output.push_to_hub is None or not ranks().is_first:
        return carry_out(recipe, delivery, announce)
    from compressor.hub.card import warn_of_licence
    from compressor.hub.push import check_access, push_output

    # now rather than after hours of work
    check_access(recipe.output.push_to_hub, recipe.output.private)
    if isinstance(recipe.model, str):
        warn_of_licence(
            recipe.base or recipe.model, recipe.base_revision if recipe.base else recipe.revision
        )
    outcome = carry_out(recipe, delivery, announce)
    return replace(outcome, pushed=push_output(outcome, recipe.output))


def split(model: ModelLike, out: str | Path, parts: int | str = 2, **options: Any) -> Outcome:
    """Split each expert into narrower sub-experts with the same output: `parts` of each, or "auto".

    `options` are those of `compress`.
    """
    return _one_step("prune", model, out, {"ratio": 0.0, "split": parts, **options})


def calibrate_router(model: ModelLike, out: str | Path, base: str, **options: Any) -> Outcome:
    """Calibrate a smaller model's routers against its base; `options` are those of `Routers` and
    `compress`."""
    return _one_step("routers", model, out, {**options, "base": base})


def distill(model: ModelLike, out: str | Path, base: str, **options: Any) -> Outcome:
    """Train a smaller model toward its base; `options` are those of `Distill` and `compress`."""
    return _one_step("distill", model, out, {**options, "base": base})


def _one_step(name: str, model: ModelLike, out: str | Path, options: dict[str, Any]) -> Outcome:
    """Carry out one step on a finished checkpoint, on a text of its own."""
    fields = step_class(name).model_fields.keys() - {"calibration"}
    chosen = {option: options.pop(option) for option in fields & options.keys()}
    sizes = {
        option: options.pop(option)
        for option in ("samples", "sequence_length")
        if option in options
    }
    text = text_options(options.pop("calibration", None), **sizes)
    return compress(model, out, [on_text(name, chosen, text)], **options)


def export(
    checkpoint: str | Path,
    out: str | Path,
    format: str = "onnx",
    *,
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **options: Any,
) -> Any:
    """Write a checkpoint in another format and return the exporter's summary; keep-list takes a
    plan's file, too.

    `options` are the exporter's; for ONNX `opset`, `dtype`, `quantize`, `past` and `stream`.
    """
    module = find_exporter(format)  # refused, as wrong options are, before a model is downloaded
    exporter_options(format, options)
    folder = Path(checkpoint)
    if not (getattr(module, "PLANS", False) and folder.is_file()):
        folder = locate(str(checkpoint), revision, progress).folder
    return export_checkpoint(format, folder, Path(out), options, overwrite, progress or Silent())


def write_report(
    checkpoint: str | Path,
    out: str | Path = "report.html",
    *,
    hubs: Path | None = None,
    gate: Path | None = None,
    figures: Path | None = None,
    run_models: bool = True,
    overwrite: bool = False,
    **measuring: Any,
) -> "tuple[Report, list[Path]]":
    """Write the HTML page of an output of `compress` or `apply`; returns its data, and its figures
    as PNG, if any.

    `measuring` is `model` (the base, if it has moved), `revision`, `calibration`, `samples`,
    `sequence_length`, `speed`, `device`, `dtype` and `progress`. Without `run_models` the page
    shows what folder and record hold."""
    require("matplotlib", "jinja2")
    from compressor.report import page
    from compressor.report.data import report_data
    from compressor.report.measuring import measure

    folder, target = Path(checkpoint), Path(out)
    if not folder.is_dir():
        raise CompressionError(f"{folder} is not a folder; name one that moe-compress has written")
    if measuring.get("speed") and not run_models:
        raise CompressionError(
            "--speed runs both models, and --no-measure none; leave one of them out"
        )
    page.check_report(target, figures, overwrite)
    # whatever is wrong with it is refused before anything runs
    report_data(folder, None, hubs, gate)
    measuring["calibration"] = one_or_several(measuring.get("calibration"))
    with lock_output(target):
        measured = measure(folder, **measuring) if run_models else None
        data = report_data(folder, measured, hubs, gate)
        return data, page.write_report(data, target, figures, overwrite)


def make_recipe(
    model: str | LoadedModel,
    steps: Sequence[StepOptions],
    calibration: Calibrating = None,
    samples: int | None = None,
    sequence_length: int | None = None,
    **more: Any,
) -> Recipe:
    """Return a recipe of these steps."""
    text = text_options(calibration, samples=samples, sequence_length=sequence_length)
    return Recipe.of(
        {"model": model, "steps": list(steps), "calibration": text, **more}, "compress"
    )


def text_options(calibration: Calibrating, **sizes: int | None) -> TextOptions:
    """Return the options of a text that a caller names or passes."""
    if isinstance(calibration, TextOptions):
        return calibration
    named = {"data": sources_or_texts(calibration), **sizes}
    return TextOptions.model_validate(
        {name: value for name, value in named.items() if value is not None}
    )


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
    """Carry out a plan (an object or a JSON file) and write the checkpoint; `model` overrides its
    source.

    Steps that have decided are not decided again. Where the output of this very plan is in place
    already, nothing is written."""
    loaded = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
    output = {"max_shard_bytes": max_shard_bytes, "evaluate": evaluate}
    changed: dict[str, Any] = {"output": output, "resident": resident}
    if model is not None:
        changed |= {"model": given(model, tokenizer), "revision": None}
    recipe = Recipe.of({**dict(recipe_of_plan(loaded)), **changed}, "the plan")
    return run(recipe, Delivery(Path(out), overwrite, device, progress, command), loaded)


def plan(
    recipe: Recipe,
    *,
    device: str = "auto",
    progress: Progress | None = None,
    announce: Announce | None = None,
) -> Plan:
    """Decide what a recipe's first step does with every expert; nothing is written.

    `announce` gets what servers make of the output.
    """
    assert recipe.model is not None
    with open_run(
        recipe.model, recipe.revision, recipe.dtype, device, progress, recipe.resident
    ) as opened:
        task = prepare(recipe, opened.model, opened.model, earlier_plan(opened.model))
        if announce is not None:
            announce(servers_after(task))
        started = begin(task, opened)
        first = started.steps[0]
        if first.options.in_place:
            raise CompressionError(
                f"{first.name} works on the whole model and decides nothing; run compress"
            )
        decide(State(started, started.first, opened.model))
        return started.plan


def compare(
    model: ModelLike,
    *,
    tokenizer: Any = None,
    calibration: Calibrating = None,
    seed: int = 0,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    resident: str = "auto",
    cache: Path | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> "Comparison":
    """Compare smaller models on held-out text: experts, sub-experts, number formats, corrections
    and strategies.

    `options` are those of `Grid` and `TaskOptions`: `experts=[4, 6], strategies=["reap"]`, or
    `nbytes=16_000, schemes=["none", "int4"]`. Without `evaluate` the text is taken from the
    calibration's sources, beyond what any plan or correction sees. With `tasks` every model answers
    them; results are kept in the folder `cache`."""
    from compressor.report import comparison
    from compressor.report.grid import Grid

    task_options = {name: options.pop(name) for name in TaskOptions.model_fields if name in options}
    grid = validated(Grid, options, "compare")
    text = text_options(calibration)
    candidates = comparison.candidates_of(grid)  # refused before a model is read
    tasks = comparison.TaskRun.read(
        validated(TaskOptions, task_options, "compare"), grid, device, dtype, cache
    )
    with open_run(given(model, tokenizer), revision, dtype, device, progress, resident) as run:
        return comparison.compare(run, grid, candidates, text, seed, tasks)


def _two_sources(
    base: tuple[str, str | None],
    smaller: tuple[str | None, str | None],
    servers: ServerOptions | None,
    progress: Progress | None,
) -> list[tuple[ModelSource, Server | None]]:
    """`_source` of two models, each a name and a revision; of a smaller one that is served the
    base's by default."""
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
    """Return a model by name and revision; of one that is served its tokenizer alone, and the
    server, checked."""
    source = (
        find_model(name, revision, progress)
        if server is None
        else locate(name, revision, weights=False)
    )
    return source, server and server.checked(source.folder, source.label)


def gate(
    base: str | None,
    compressed: str | None,
    options: GateOptions,
    *,
    servers: ServerOptions | None = None,
    revision: str | None = None,
    compressed_revision: str | None = None,
    progress: Progress | None = None,
    announce: Callable[[PowerAnalysis], None] | None = None,
    **computing: Any,
) -> GateResult:
    """Test on the same items whether a compressed model is as good as its base, within a margin.

    `computing` is `device`, `dtype` and `cache`, the folder with results of earlier runs. A model
    that does not fit into memory is streamed, as the options may also ask. One that `servers` name
    is asked there; of its folder the tokenizer is read, by default the base's. `announce` gets what
    the gate can show, before any model is loaded. With a baseline among the options there is no
    base.

    Raises `CompressionError` before any model is loaded for a gate that not even an identical model
    passes."""
    serving = servers or ServerOptions()
    if serving.server or serving.base_server:
        refuse_several("--server", "start the command without torchrun")
    if options.prompts:
        refuse_several("--prompts", "start the command without torchrun")
    if (options.baseline is None) != (base is not None) or (base is None and compressed is None):
        raise CompressionError("name the base or its --baseline, and the smaller model")
    if options.baseline is not None and serving.base_server is not None:
        raise CompressionError("--baseline takes the base's place; leave out --base-server")
    request = GateRequest.read(options, **computing)
    passable(request.power)
    if base is not None:
        named = _two_sources((base, revision), (compressed, compressed_revision), serving, progress)
    elif compressed is not None:
        _, server = servers_of(serving)
        named = [_source(compressed, compressed_revision or revision, server, progress)] * 2
    (base_source, base_server), (compressed_source, server) = named
    for served in (base_server, server):
        if served is not None:
            refuse_tasks(served, request.tasks)
    with dated(request.date):
        return run_gate(
            base_source,
            compressed_source,
            request,
            progress or Silent(),
            server=server,
            base_server=base_server,
            announce=announce,
        )


@dated()
def save_baseline(
    base: str,
    out: Path,
    options: GateOptions,
    *,
    servers: ServerOptions | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    **computing: Any,
) -> Baseline:
    """Write a base's answers to the options' tasks into the file `out`, with which `gate` needs no
    base.

    `computing` is that of `gate`."""
    if not options.tasks:
        raise CompressionError("a baseline has answers to tasks; name --tasks")
    ranks().broadcast(lambda: check_path(out, overwrite))
    request = GateRequest.read(options, **computing)
    base_server, _ = servers_of(servers or ServerOptions())
    source, server = _source(base, revision, base_server, progress)
    if server is not None:
        refuse_tasks(server, request.tasks)
    evaluation = plan_evaluation(source, request.tasks, request.evaluation, request.cache, server)
    scores = evaluation.run(progress or Silent())
    baseline = Baseline(
        base=source.label if server is None else server.label,
        identity=identity(source, server),
        settings=options.model_dump(mode="json", include=SETTINGS),
        facts=request.evaluation.facts(),
        versions=versions((*PACKAGES, "lm-eval")),
        tasks=tuple(scores.values()),
        asked=task_forms(source, server, request.tasks, request.evaluation),
    )
    if ranks().is_first:
        baseline.write(out)
    return baseline


@dated()
def evaluate(
    base: str,
    smaller: str | None,
    options: BehaviourOptions,
    *,
    limit: int | None = None,
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
    """Compare the behaviour of a smaller model with its base: answers to the same prompts, and
    divergence on text.

    Of each source of prompts at most `limit` are taken. Answers are kept in the folder `cache`, so
    that no model is asked twice. `announce` gets what the answers can show, before any model is
    loaded. A model that `servers` name writes there, `batch_size` answers at once; of its folder
    the tokenizer is read, by default the base's."""
    options.check()
    prompts = PromptSet.read(options, limit)
    named = _two_sources((base, revision), (smaller, smaller_revision), servers, progress)
    writers = [model_of(source, server, batch_size, device, dtype) for source, server in named]
    return evaluate_behaviour(
        writers[0],
        writers[1],
        options,
        prompts,
        confidence,
        cache or default_folder(),
        progress or Silent(),
        announce and (lambda usable: announce(shown_sentence(usable.answers, confidence))),
    )


def traces(
    model: str,
    options: AnswerOptions,
    out: str | Path,
    *,
    limit: int | None = None,
    seed: int = 0,
    server: ServerOptions | None = None,
    batch_size: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    revision: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Traces:
    """Write a model's own complete answers into the JSONL file `out`, and how they were made beside
    it.

    Of each source of prompts at most `limit` are taken. A run that was killed goes on when it is
    repeated. With a `server` the model answers there, and of `model` the tokenizer is read."""
    options.check()
    prompts = PromptSet.read(options, limit, seed)
    if prompts is None:
        raise CompressionError(
            "nothing is asked; name --prompts, such as a JSONL file with chats, or demo"
        )
    source, served = _source(model, revision, servers_of(server or ServerOptions())[1], progress)
    writer = model_of(source, served, batch_size, device, dtype)
    return write_traces(writer, prompts, Path(out), progress or Silent(), overwrite)
