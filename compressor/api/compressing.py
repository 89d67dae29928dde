"""The Python API that makes models smaller: recipes, and the commands that are recipes of a few steps."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from compressor.errors import CompressionError
from compressor.pipeline.outcome import Outcome
from compressor.pipeline.run import Terms, decide, earlier_plan, run
from compressor.pipeline.task import first_state, open_run, prepare
from compressor.progress import Progress
from compressor.recipe.recipe import Recipe, make_step, read_recipe, recipe_of_plan
from compressor.recipe.step import Step, TextOptions
from compressor.recipe.steps_plan import Plan
from compressor.report.measuring import RunStats
from compressor.steps.prune.planning import plan_sources, refuse_per_source
from compressor.steps.state import State


def compress(
    model: str | Recipe,
    out: str | Path,
    steps: Sequence[Step] | None = None,
    *,
    calibration: str | Sequence[str] | TextOptions | None = None,
    samples: int | None = None,
    sequence_length: int | None = None,
    seed: int = 0,
    revision: str | None = None,
    base: str | None = None,
    base_revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    max_shard_bytes: int | None = None,
    overwrite: bool = False,
    accept: Callable[[Path], None] | None = None,
    terms: str | None = None,
    command: Sequence[str] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Outcome:
    """Carry out steps on a model and write what comes out; an interrupted run goes on when called again.

    `model` is a folder, a Hub id, or a whole `Recipe` (or the path of a recipe.yaml). Without `steps` those of
    `default_steps(**options)` are taken: `experts=12`, `ratio=0.25`, `strategy="reap"`, `correct="tune"` and so on.
    `accept` gets the folder of the verified output before it is put in place, and raises what speaks against that;
    where the output of this very request is in place already, nothing is written or accepted; with `accept` that
    needs `terms`, which say what it does.
    """
    if isinstance(model, Recipe) or str(model).endswith((".yaml", ".yml")):
        recipe = model if isinstance(model, Recipe) else read_recipe(Path(model))
    else:
        recipe = make_recipe(
            model, default_steps(**options) if steps is None else steps, calibration, samples, sequence_length,
            seed=seed, revision=revision, base=base, base_revision=base_revision, dtype=dtype,
            output={"max_shard_bytes": max_shard_bytes},
        )  # fmt: skip
    return run(
        recipe,
        Terms(Path(out), overwrite, accept, terms, command),
        device=device,
        progress=progress,
        observer=RunStats(),
    )


def make_recipe(
    model: str,
    steps: Sequence[Step],
    calibration: str | Sequence[str] | TextOptions | None = None,
    samples: int | None = None,
    sequence_length: int | None = None,
    **more: Any,
) -> Recipe:
    """A recipe of these steps."""
    if not isinstance(calibration, TextOptions):
        sizes = {"data": calibration, "samples": samples, "sequence_length": sequence_length}
        calibration = TextOptions(**{name: value for name, value in sizes.items() if value is not None})
    return Recipe.of({"model": model, "steps": list(steps), "calibration": calibration, **more}, "compress")


def default_steps(**options: Any) -> list[Step]:
    """The steps of `compress` where only options are given: split, prune, correct, and more where options name them.

    `constants=True` replaces experts by constants; `split`, `correct`, `routers` and `distill` name a number of parts
    or a method, other options are those of `prune`. Options of a step in a mapping: `distill={"steps": 100}`.
    """
    left = {name: value for name, value in options.items() if value is not None}
    of_steps: dict[str, dict[str, Any]] = {}
    for name, field in {"split": "parts", "correct": "method", "routers": "method", "distill": "train"}.items():
        value = left.pop(name, {})
        of_steps[name] = dict(value) if isinstance(value, dict) else {field: value}
    for option, step, field in (("split_by", "split", "by"), ("deterministic", "correct", "deterministic")):
        if option in left:
            of_steps[step][field] = left.pop(option)
    further = [make_step(name, of_steps[name]) for name in ("routers", "distill") if of_steps[name]]
    if left.pop("constants", False):
        corrected = [make_step("correct", of_steps["correct"])] if of_steps["correct"].get("method") else []
        return [make_step("constants", left), *corrected, *further]
    split, correct = {"parts": "auto", **of_steps["split"]}, {"method": "auto", **of_steps["correct"]}
    return [make_step("split", split), make_step("prune", left), make_step("correct", correct), *further]


def apply(
    plan: Plan | str | Path,
    out: str | Path,
    *,
    model: str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    max_shard_bytes: int | None = None,
    device: str = "auto",
    command: Sequence[str] | None = None,
) -> Outcome:
    """Carry out a plan (an object or a JSON file) and write the checkpoint; `model` overrides its source.

    Steps that have decided are not decided again. Where the output of this very plan is in place already, nothing is
    written.
    """
    loaded = plan if isinstance(plan, Plan) else Plan.load(Path(plan))
    recipe = recipe_of_plan(loaded).model_copy(update={"model": model} if model else {})
    recipe = Recipe.of({**dict(recipe), "revision": None if model else loaded.source.revision,
                        "output": {"max_shard_bytes": max_shard_bytes}}, "the plan")  # fmt: skip
    terms = Terms(Path(out), overwrite, terms="", command=command)
    return run(recipe, terms, plan=loaded, device=device, progress=progress, observer=RunStats())


def plan(recipe: Recipe, *, device: str = "auto", progress: Progress | None = None) -> Plan:
    """Decide what a recipe's first stage does with every expert; nothing is written."""
    with _planning(recipe, device, progress) as state:
        if state.steps[0].order is None:
            raise CompressionError(f"{state.steps[0].name} works on the whole model and decides nothing; run compress")
        decide(state, state.stage)
        return state.plan


def plan_per_source(recipe: Recipe, *, device: str = "auto", progress: Progress | None = None) -> list[Plan]:
    """The plan for all calibration sources together, then one for each alone, from one pass; nothing is written."""
    with _planning(recipe, device, progress, per_source=True) as state:
        prune, number = state.step_of("prune"), state.number_of("prune")
        if state.text is None:
            raise CompressionError(
                f"strategy {prune.strategy!r} reads no calibration data, so all sources would get the same plan; leave "
                "out --per-source"
            )
        decide(state, [each for each in state.stage if number is not None and each < number])
        return plan_sources(state)


@contextmanager
def _planning(recipe: Recipe, device: str, progress: Progress | None, per_source: bool = False) -> Iterator[State]:
    with open_run(str(recipe.model), recipe.revision, recipe.dtype, device, progress) as opened:
        task = prepare(recipe, opened.model, opened.model, earlier_plan(opened.model))
        if per_source:
            refuse_per_source(task.steps, recipe.calibration.data or ())
        yield first_state(task, opened)


def change(
    name: str,
    checkpoint: str,
    out: str | Path,
    *,
    options: dict[str, Any],
    text: TextOptions,
    seed: int = 0,
    **more: Any,
) -> Outcome:
    """Carry out one step on a checkpoint: `split`, `routers` or `distill` as commands of their own.

    The text is the step's own, so that the plan of the output, which goes on with the checkpoint's, can be repeated.
    """
    step = make_step(name, {**options, **({"calibration": text} if text.data is not None else {})})
    return compress(checkpoint, out, [step], seed=seed, **more)
