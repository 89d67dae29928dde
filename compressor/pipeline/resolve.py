"""A recipe resolved on an opened model: stages, every refusal that needs no text and no weight, the key, the text."""

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypedDict

import torch

from compressor.answers.decoding import read_facts
from compressor.data.batches import HELDOUT as EVALUATED
from compressor.data.batches import (
    Calibration,
    EvaluationSet,
    TextBatches,
    TextSpec,
    evaluation_sets,
    load_tokenizer,
    read_text,
    repeat_text,
)
from compressor.data.emphasis import PLAIN, Emphasis, MarkedTokens
from compressor.data.sources import DEFAULT_SOURCE, SourceSpec, WeightedSource, local_name, parse_sources
from compressor.distributed import launched, ranks
from compressor.divergence.teacher_outputs import check_base
from compressor.errors import CompressionError
from compressor.files import file_digest
from compressor.memory import PeakMemory
from compressor.model.in_memory import opened
from compressor.model.loaded import LoadedModel
from compressor.model.opened import OpenModel, how_resident
from compressor.model.tokenizer import thinking_end
from compressor.progress import Clock, Progress, Silent
from compressor.recipe.plan import Source, check_source
from compressor.recipe.recipe import Recipe
from compressor.recipe.step import OutputSize, Requirements, Step, StepOptions, TextOptions
from compressor.recipe.steps_plan import Plan, PlannedStep
from compressor.run_record import versions
from compressor.steps.job import output_size
from compressor.steps.state import OWN, State, Texts, part_name
from compressor.steps.workdir import Workdir

logger = logging.getLogger(__name__)

LAST = 3  # rank of layerwise steps that only change tensors: any number of them may end a stage; above, each is alone
HELDOUT = 0.125  # share of the calibration sequences that evaluate and fit nothing


@dataclass(slots=True)
class Session:
    model: OpenModel
    progress: Progress
    clock: Clock
    peak: PeakMemory


class Computing(TypedDict, total=False):
    """The revision, device and dtype of a model; as for `open_run`."""

    revision: str | None
    dtype: str
    device: str
    progress: Progress | None
    resident: str


@contextmanager
def open_run(
    model: str | LoadedModel,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    progress: Progress | None = None,
    resident: str = "auto",
    deterministic: bool = False,
) -> Iterator[Session]:
    """Locate or download a model and open it lazily; until the block ends memory is watched.

    `resident` says whether layers stay on the device once they are read: "yes", "no", or "auto", where the model fits.

    With `deterministic` torch keeps to deterministic operations, and warns where it has none.
    """
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    clock = Clock()
    try:
        if deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without which CUDA's products may differ
            torch.use_deterministic_algorithms(True, warn_only=True)
        with ExitStack() as stack, PeakMemory() as peak:
            with clock.phase("open"):
                found = stack.enter_context(opened(model, revision, dtype, device, progress, resident))
            yield Session(found, progress or Silent(), clock, peak)
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@dataclass(slots=True)
class ResolvedRecipe:
    """A recipe with its steps resolved on an opened model."""

    recipe: Recipe
    model: OpenModel
    base: OpenModel
    steps: tuple[Step[Any], ...]
    requirements: tuple[Requirements, ...]
    seen: OpenModel  # the model as the first layerwise stage sees it
    before: Plan | None = None  # what earlier runs did to the model
    plan: Plan | None = None  # decisions to carry out

    @property
    def counts(self) -> list[int]:
        """Experts of a layer after each step that decides how many stay, or as many as there are if none does."""
        layers = self.seen.architecture.layers
        parts = layers[0].parts
        counts = list[int]()
        for step in self.steps:
            count = step.experts_left(layers, parts)
            if count is not None:
                counts.append(count)
                layers = tuple(replace(layer, experts=count) for layer in layers)
        return counts or [self.seen.architecture.experts]

    @property
    def options(self) -> tuple[StepOptions, ...]:
        """Options of the steps."""
        return tuple(step.options for step in self.steps)

    def output_size(self, steps: Sequence[Step[Any]], experts: int, changed: bool = False) -> OutputSize:
        """Size of what these steps write with so many experts in each layer.

        It is that of the last step that stores tensors in a way of its own. `changed`: steps write experts anew.
        """
        for step in reversed(steps):
            size: OutputSize | None = step.output_size(self.seen, experts, changed)
            if size is not None:
                return size
        return OutputSize(output_size(self.seen, experts, changed))

    @property
    def space(self) -> int:
        """Bytes on disk that the run takes, as far as sizes are known before anything is decided.

        A stage writes its checkpoint beside that of the stage before; a step on the whole model changes files in place.
        """
        most, before = 0, 0
        numbers = stage_numbers(self.options)
        for number in dict.fromkeys(numbers):
            places = [position for position, stage in enumerate(numbers) if stage == number]
            steps = [self.steps[position] for position in places]
            if before and steps[0].options.order is None:
                continue
            written = self.output_size(steps, self.counts[0])
            waiting = written.waiting
            if any(self.requirements[position].waits_on_disk for position in places):
                waiting += written.size.bytes
            most = max(most, before + written.size.bytes + waiting)
            before = written.size.bytes
        return most

    def key(self) -> str:
        """SHA-256 of everything that decides the output, the content of texts included."""
        content = self.recipe.model_dump(mode="json", exclude={"model", "revision", "steps", "gate", "output"})
        texts_of_steps = [step.calibration for step in self.options if step.calibration is not None]
        texts = [self.recipe.calibration, *texts_of_steps]
        facts = [
            self.model.fingerprint,
            self.model.checkpoint.stamp(),
            None if self.base is self.model else self.base.checkpoint.stamp(),
            content,
            [[step.name, step.to_dict()] for step in self.options],
            [content_of(entry.source) for options in texts for entry in sources_of(options)],
            None if self.plan is None else self.plan.to_dict(),
            str(self.model.partial.device),
            str(self.model.partial.dtype),
            versions(),
        ]
        return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()


def sources_of(options: TextOptions) -> tuple[WeightedSource, ...]:
    return parse_sources(options.data or (DEFAULT_SOURCE,))


def content_of(source: str) -> list[str]:
    """Return a source with the SHA-256 of its file, or of each file of its folder.

    What names neither stands for itself.
    """
    name = SourceSpec.parse(source).name
    files = sorted(Path(name).rglob("*")) if os.path.isdir(name) else [Path(name)]
    return [source, *(file_digest(file) for file in files if os.path.isfile(file))]


def stage_numbers(steps: Sequence[StepOptions], first: int = 0) -> list[int]:
    """Return the number of each step's stage, from `first` on.

    Layerwise steps of ascending rank are done together; a step on the whole model is a stage of its own, and so is one
    that stores tensors in another way.
    """
    numbers, stage, before = list[int](), first - 1, -1
    for step in steps:
        rank = None if step.order is None or step.order > LAST else step.order
        if rank is None or before < 0 or rank < before or (rank == before and rank < LAST):
            stage += 1
        numbers.append(stage)
        before = -1 if rank is None else rank
    return numbers


def of_stage(steps: Sequence[StepOptions], stage: int) -> list[StepOptions]:
    """Return the steps that are done together in a stage, of those of a run."""
    return [step for step, number in zip(steps, stage_numbers(steps), strict=True) if number == stage]


def check_order(steps: Sequence[StepOptions]) -> None:
    """Refuse an order that cannot work, and what several processes cannot do."""
    numbers = stage_numbers(steps)
    for number, step in enumerate(steps):
        for before in steps[:number]:
            reasons = [step.cannot_follow[key] for key in (before.name, *before.changes) if key in step.cannot_follow]
            if reasons:
                message = f"{step.name} cannot stand after {before.name}: {reasons[0]}"
                raise CompressionError(f"steps[{number}]: {message}; put it before, or leave one of them out")
        changed = {change for other in of_stage(steps, numbers[number]) for change in other.changes}
        if step.only_after and not changed & step.only_after.keys():
            makers = list(step.only_after.values())
            message = f"{step.name} works on what {' or '.join(makers)} leaves"
            raise CompressionError(f"steps[{number}]: {message}; put {makers[0]} right before it")
        if not step.processes and not launched().is_alone:
            raise CompressionError(f"the step {step.name} is done by one process; start the command without torchrun")


def prepare(
    recipe: Recipe, model: OpenModel, base: OpenModel, before: Plan | None, plan: Plan | None = None
) -> ResolvedRecipe:
    """Resolve the steps on a model; every refusal that needs no text and no weight is made here."""
    if plan is not None:
        check_source(plan.source, model.fingerprint)
    if base is not model:
        check_base(model, base)
    if plan is not None and plan.base is not None and plan.base.fingerprint != base.fingerprint:
        bases = f"the base {plan.base.label}, whose fingerprint is not that of {base.source.label}"
        raise CompressionError(f"the plan was made toward {bases}; run on that base, or plan again")
    steps = _resolved(recipe, model) if plan is None else [options.step() for options in recipe.steps]
    if not steps:
        raise CompressionError("the recipe has no step that does anything; add one, such as prune: {ratio: 0.25}")
    check_order([step.options for step in steps])
    requirements, seen = _requirements(steps, model, plan)
    if before is not None and before.calibration is not None:  # a plan has one text for all: later ones are own
        for number, needed in enumerate(requirements):
            reads = needed.text or needed.part is not None
            if reads and steps[number].options.calibration is None:
                steps[number] = steps[number].with_options(calibration=recipe.calibration)
    return ResolvedRecipe(recipe, model, base, tuple(steps), tuple(requirements), seen, before, plan)


def _resolved(recipe: Recipe, model: OpenModel) -> list[Step[Any]]:
    """Return the steps that do something, with every option resolved for the model."""
    steps, described = list[Step[Any]](), replace(model, formats=recipe.output.formats)
    for stage, options in zip(stage_numbers(recipe.steps), recipe.steps, strict=True):
        step = options.step().resolve(described, of_stage(recipe.steps, stage))
        if step is not None:
            steps.append(step)
    return steps


def _requirements(
    steps: Sequence[Step[Any]], model: OpenModel, plan: Plan | None
) -> tuple[list[Requirements], OpenModel]:
    """Return the requirements of each step, and the model as the first layerwise stage sees it.

    Steps of later layerwise stages are checked on the model that is there then.
    """
    options = [step.options for step in steps]
    stages, seen, requirements = stage_numbers(options), model, list[Requirements]()
    first = next((stage for step, stage in zip(options, stages, strict=True) if step.order is not None), None)
    for number, step in enumerate(steps):
        order, stage = step.options.order, stages[number]
        planned = plan is not None and plan.steps[number].decision is not None
        if order is not None and stage == first:
            seen = step.model_view(seen)
        if order is None:
            requirements.append(step.requirements(model, options[:number], planned))
        elif stage == first or order > LAST:
            requirements.append(step.requirements(seen, of_stage(options, stage), planned))
        else:
            requirements.append(Requirements(text=True, heldout=1))
    return requirements, seen


def text_spec(resolved: ResolvedRecipe, options: TextOptions, parts: Mapping[int, str]) -> TextSpec | None:
    """Return the text of these options for the steps of these numbers, each with the name of its part.

    None if none reads.
    """
    needs = {name: resolved.requirements[number] for number, name in parts.items()}
    if not any(need.text or need.part is not None for need in needs.values()):
        return None
    fit = any(need.text for need in needs.values())
    fewest = max(need.heldout for need in needs.values()) if fit else 0
    return TextSpec(
        sources_of(options),
        samples=options.samples if fit else 0,
        sequence_length=options.sequence_length,
        seed=resolved.recipe.seed,
        heldout=max(HELDOUT, min(fewest / options.samples, 0.5)) if fewest else 0.0,
        parts={name: need.part for name, need in needs.items() if need.part is not None},
        strict=options.strict,
        emphasis=emphasis_of(options, resolved.model),
    )


def emphasis_of(options: TextOptions, model: OpenModel) -> Emphasis:
    """Return the emphasised tokens of the model; refuses those that it does not have."""
    wanted = {} if options.emphasis is None else options.emphasis.model_dump(exclude_none=True)
    if not wanted:
        return PLAIN
    folder = model.source.folder
    tokenizer = load_tokenizer(folder)
    ends = read_facts(folder, tokenizer).stops
    thinking = thinking_end(tokenizer)
    tokens = {
        "end": tuple((end,) for end in sorted(ends) if end < model.vocabulary),
        "think_end": () if thinking is None else (tuple(tokenizer(thinking, add_special_tokens=False)["input_ids"]),),
    }
    missing = {
        "end": "no end token: neither its generation_config.json and config.json nor its tokenizer name one",
        "think_end": "no token that ends thinking, as </think> does: its chat template and vocabulary show none",
    }
    for name in wanted:
        if not tokens[name]:
            message = f"{model.source.label} has {missing[name]}"
            raise CompressionError(f"emphasis.{name}: {message}; leave it out, or mend the model's files")
    return Emphasis({name: MarkedTokens(weight, tokens[name]) for name, weight in wanted.items()})


def text_specs(resolved: ResolvedRecipe) -> Iterator[tuple[int | None, TextSpec]]:
    """Yield the text of the run, and those of steps that have one of their own by their number, as far as any is read.

    The first of them is the one that the output is evaluated on.
    """
    evaluated = EVALUATED if resolved.recipe.output.evaluate else 0
    shared = dict[int, str]()  # names of the parts of the run's text
    wanted: list[tuple[int | None, TextOptions, dict[int, str]]] = [(None, resolved.recipe.calibration, shared)]
    for position, step in enumerate(resolved.options):
        if step.calibration is None:
            shared[position] = part_name(position)
        else:
            wanted.append((position, step.calibration, {position: OWN}))
    for number, options, parts in wanted:
        if (spec := text_spec(resolved, options, parts)) is not None:
            yield number, replace(spec, evaluation=evaluated)
            evaluated = 0


def first_state(resolved: ResolvedRecipe, session: Session, work: Workdir | None = None) -> State:
    """Return the state before the first step, once texts are read."""
    with session.clock.phase("read text"):
        texts = read_texts(resolved)
    plan = first_plan(resolved, texts[0])
    first = len(plan.steps) - len(resolved.steps)
    for needed in resolved.requirements:
        for note in () if needed.notes_are_described else needed.notes:
            logger.info("%s", note)
    logger.info("%s", how_resident(resolved.model))
    return State(
        resolved.model,
        resolved.base,
        resolved.model,
        resolved.steps,
        plan,
        session.progress,
        session.clock,
        texts,
        work,
        number=first,
        first=first,
    )


def read_texts(resolved: ResolvedRecipe) -> Texts:
    """The run's text with a part for each step that wants one, and the texts of steps that have one of their own.

    A plan that is carried out repeats its texts, and is refused where they have changed.
    """
    texts = dict[int | None, TextBatches]()
    for number, spec in text_specs(resolved):
        tokenizer = load_tokenizer(resolved.model.source.folder)
        repeated = None
        if resolved.plan is not None:
            repeated = resolved.plan.calibration if number is None else resolved.plan.steps[number].text
        if repeated is not None:
            text = repeat_text(repeated, tokenizer, resolved.model.vocabulary, evaluation=spec.evaluation)
        else:
            text = read_text(spec, tokenizer, resolved.model.vocabulary)
        ranks().assert_same_on_all(text.identity["sha256"], "calibration text")
        texts[number] = text
    return texts.get(None), {number: text for number, text in texts.items() if number is not None}


def evaluation_text(resolved: ResolvedRecipe, texts: Texts) -> TextBatches | None:
    """The text that the output is evaluated on: the first that is read, or the one that the carried out plan names."""
    run, own = texts
    if run is not None or own:
        return run or own[min(own)]
    named = () if resolved.plan is None else (resolved.plan.calibration, *(step.text for step in resolved.plan.steps))
    identity = next(filter(None, named), None)
    if identity is None:
        return None
    model = resolved.model
    return repeat_text(identity, load_tokenizer(model.source.folder), model.vocabulary, evaluation=EVALUATED)


def first_plan(resolved: ResolvedRecipe, text: TextBatches | None) -> Plan:
    """The plan before the first step: what earlier runs did to the model, then all steps, nothing decided yet."""
    model = resolved.model
    if resolved.plan is not None:
        plan = replace(resolved.plan, source=Source.of(model), dtype=model.dtype_name)
        steps = [replace(entry, result=None) for entry in plan.steps]
    else:
        plan = resolved.before or Plan(Source.of(model), (), None, resolved.recipe.seed, model.dtype_name)
        steps = [*plan.steps]
        first_stage = max((entry.stage for entry in steps), default=-1) + 1
        for step, stage in zip(resolved.options, stage_numbers(resolved.options, first_stage), strict=True):
            options = step.to_dict()
            if step.calibration is not None and step.calibration.data is not None:  # files without their folders
                names = [local_name(str(source)) for source in step.calibration.data]
                options["calibration"] = {**options["calibration"], "data": names}
            steps.append(PlannedStep(step.name, options, stage=stage))
    is_source = resolved.base is model or resolved.base.fingerprint == plan.source.fingerprint
    return replace(
        plan,
        steps=tuple(steps),
        calibration=plan.calibration if text is None else text.identity,
        versions=versions(),
        base=plan.base if is_source else Source.of(resolved.base),
    )


def read_calibration(
    session: Session, options: TextOptions, seed: int, heldout: float = 0.0, reserve: int = 0
) -> Calibration:
    """Return the calibration text, the same on all ranks, with a share held out and sequences reserved."""
    model = session.model
    spec = TextSpec(
        sources_of(options),
        options.samples,
        options.sequence_length,
        seed,
        heldout,
        reserve,
        strict=options.strict,
        emphasis=emphasis_of(options, model),
    )
    data = read_text(spec, load_tokenizer(model.source.folder), model.vocabulary).fit
    ranks().assert_same_on_all(data.identity["sha256"], "calibration text")
    logger.info("%s", how_resident(model))
    return data


def read_evaluation(
    session: Session, names: Sequence[str], options: TextOptions, seed: int, most: int
) -> tuple[EvaluationSet, ...]:
    """Return text to evaluate on, at most so many sequences of it."""
    return evaluation_sets(
        names,
        load_tokenizer(session.model.source.folder),
        length=options.sequence_length,
        seed=seed,
        vocab=session.model.vocabulary,
        most=most,
        strict=options.strict,
    )
