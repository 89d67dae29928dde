"""A recipe resolved on an opened model: its steps, its key and its text.

Everything that can be refused without reading text or weights is refused here.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypedDict

import torch

from compressor.answers.answering import read_facts
from compressor.data.batches import HELDOUT as EVALUATED
from compressor.data.batches import (
    Calibration,
    TextBatches,
    TextSpec,
    read_text,
    repeat_text,
)
from compressor.data.emphasis import PLAIN, Emphasis, MarkedTokens
from compressor.data.sources import (
    DEFAULT_SOURCE,
    SourceSpec,
    WeightedSource,
    local_name,
    parse_sources,
)
from compressor.distributed import launched, ranks
from compressor.divergence.teacher_outputs import check_base
from compressor.errors import CompressionError
from compressor.files import file_digest
from compressor.memory import PeakMemory, keep_freed
from compressor.model.in_memory import opened
from compressor.model.loaded import LoadedModel
from compressor.model.opened import OpenModel, how_resident
from compressor.model.tokenizer import load_tokenizer, thinking_end
from compressor.progress import Clock, Progress, Silent
from compressor.recipe.plan import Source, check_source
from compressor.recipe.recipe import MONE, Recipe
from compressor.recipe.step import StepOptions, TextOptions
from compressor.recipe.steps_plan import Plan, PlannedStep
from compressor.run_record import request_key, versions
from compressor.steps.job import OutputSize, output_size
from compressor.steps.step import OWN, Requirements, Run, Step, part_name
from compressor.steps.workdir import Workdir

logger = logging.getLogger(__name__)

HELDOUT = 0.125  # share of the calibration sequences that are evaluated on and never fitted to


@dataclass
class Session:
    """An opened model, and what a run reports about itself."""

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
    """Locate or download a model and open it lazily; peak memory is sampled until the block ends.

    `resident` says if layers stay on the device once they are read: "yes", "no", or "auto" (if the
    model fits). `deterministic` makes torch use deterministic operations, and warn where it has
    none."""
    was_enabled = torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    clock = Clock()
    try:
        if deterministic:
            # CUDA's matrix products may differ without it
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=True)
        with ExitStack() as stack, PeakMemory() as peak:
            with clock.phase("open"):
                opened_model = stack.enter_context(
                    opened(model, revision, dtype, device, progress, resident)
                )
            if opened_model.partial.resident:
                keep_freed()
            yield Session(opened_model, progress or Silent(), clock, peak)
    finally:
        torch.use_deterministic_algorithms(was_enabled, warn_only=was_warning)


@dataclass
class ResolvedRecipe:
    """A recipe with its steps resolved on an opened model."""

    recipe: Recipe
    model: OpenModel
    base: OpenModel
    steps: tuple[Step[Any], ...]
    requirements: tuple[Requirements, ...]  # of each step
    view: OpenModel  # the model as its first step sees it
    earlier: Plan | None = None  # the plan of the runs that made the model
    plan: Plan | None = None  # the plan to carry out, if its decisions are given

    @property
    def counts(self) -> list[int]:
        """Experts of a layer after each step that decides on their number; the model's number if no
        step does."""
        layers = self.view.architecture.layers
        counts = []
        for step in self.steps:
            count = step.experts_left(layers)
            if count is not None:
                counts.append(count)
                layers = tuple(replace(layer, experts=count) for layer in layers)
        return counts or [self.view.architecture.experts]

    def output_size(self, last: int, experts: int, changed: bool = False) -> OutputSize:
        """Return the size of the output after a step, with this number of experts in each layer.

        The last step that has a storage format of its own decides. `changed`: steps write experts
        anew."""
        for step in reversed(self.steps[: last + 1]):
            size: OutputSize | None = step.output_size(self.view, experts, changed)
            if size is not None:
                return size
        return OutputSize(output_size(self.view, experts, changed))

    @property
    def space(self) -> int:
        """Bytes on disk that the run takes, as far as sizes are known before anything is decided.

        A step writes its checkpoint beside the previous one, or changes that in place.
        """
        most = 0
        previous = 0
        changed = False
        for position, step in enumerate(self.steps):
            changed = changed or step.options.rewrites
            if not (previous and step.options.in_place):
                output = self.output_size(position, self.counts[0], changed)
                most = max(most, previous + output.size.bytes + output.waiting)
                previous = output.size.bytes
        return most

    def key(self) -> str:
        """Return the SHA-256 of everything that decides the output, including the content of
        texts."""
        content = self.recipe.model_dump(
            mode="json", exclude={"model", "revision", "steps", "gate", "output"}
        )
        options = [step.options for step in self.steps]
        texts = [self.recipe.calibration, *(step.calibration for step in options)]
        return request_key(
            self.model.fingerprint,
            self.model.checkpoint.stamp(),
            None if self.base is self.model else self.base.checkpoint.stamp(),
            content,
            [[step.name, step.to_dict()] for step in options],
            [
                content_of(entry.source)
                for text in texts
                if text is not None
                for entry in sources_of(text)
            ],
            None if self.plan is None else self.plan.to_dict(),
            str(self.model.partial.device),
            str(self.model.partial.dtype),
            versions(),
        )


def sources_of(options: TextOptions) -> tuple[WeightedSource, ...]:
    return parse_sources(options.data or (DEFAULT_SOURCE,))


def content_of(source: str) -> list[str]:
    """Return a source with the SHA-256 of its file, or of every file of its folder; alone if it is
    neither."""
    name = SourceSpec.parse(source).name
    files = sorted(Path(name).rglob("*")) if os.path.isdir(name) else [Path(name)]
    return [source, *(file_digest(file) for file in files if os.path.isfile(file))]


def check_order(steps: Sequence[StepOptions]) -> None:
    """Refuse an order that cannot work, and steps that several processes cannot share."""
    for position, step in enumerate(steps):
        for earlier in steps[:position]:
            reason = step.fault_after(earlier)
            if earlier.format == MONE:
                reason = "stock transformers cannot load constants"
            if reason:
                message = f"{step.name} cannot stand after {earlier.name}: {reason}"
                raise CompressionError(
                    f"steps[{position}]: {message}; put it before, or leave one of them out"
                )
        if not step.processes and not launched().is_alone:
            raise CompressionError(
                f"the step {step.name} is done by one process; start the command without torchrun"
            )


def prepare(
    recipe: Recipe,
    model: OpenModel,
    base: OpenModel,
    earlier: Plan | None,
    plan: Plan | None = None,
) -> ResolvedRecipe:
    """Resolve the steps on a model, and refuse everything that can be refused without text and
    weights."""
    if recipe.fit is not None:
        raise CompressionError("only compress carries out a fit; leave fit out of the recipe")
    if plan is not None:
        check_source(plan.source, model.fingerprint)
    if base is not model:
        check_base(model, base)
    if plan is not None and plan.base is not None and plan.base.fingerprint != base.fingerprint:
        bases = f"the base {plan.base.label}, whose fingerprint is not that of {base.source.label}"
        raise CompressionError(f"the plan was made toward {bases}; run on that base, or plan again")
    steps = list[Step[Any]]()
    for options in recipe.steps:
        step = options.step()
        resolved = step.resolve(model) if plan is None else step
        if resolved is not None:
            steps.append(resolved)
    if not steps:
        raise CompressionError(
            "the recipe has no step that does anything; add one, such as prune: {ratio: 0.25}"
        )
    check_order([step.options for step in steps])
    first = next((number for number, step in enumerate(steps) if not step.options.in_place), 0)
    view = steps[first].view(model)
    requirements = list[Requirements]()
    for position, step in enumerate(steps):
        options = step.options
        planned = plan is not None and plan.steps[position].decision is not None
        before = [other.options for other in steps[:position]]
        if position > first and not options.in_place and options.format is None:
            # it is checked when it begins, on the model that exists then
            requirements.append(Requirements(text=True, heldout=1))
        else:
            is_input = options.in_place or position == first
            requirements.append(step.requirements(model if is_input else view, before, planned))
    if earlier is not None and earlier.calibration is not None:
        # the plan's own text is that of the earlier runs, so each step that reads text records the
        # recipe's as its own
        for position, needed in enumerate(requirements):
            if needed.reads and steps[position].options.calibration is None:
                steps[position] = steps[position].with_options(calibration=recipe.calibration)
    return ResolvedRecipe(
        recipe, model, base, tuple(steps), tuple(requirements), view, earlier, plan
    )


def emphasis_of(options: TextOptions, model: OpenModel) -> Emphasis:
    """Return the emphasised tokens of the model; refuses a kind of token that the model does not
    have."""
    weights = {} if options.emphasis is None else options.emphasis.model_dump(exclude_none=True)
    if not weights:
        return PLAIN
    folder = model.source.folder
    tokenizer = load_tokenizer(folder)
    ends = read_facts(folder, tokenizer).stops
    thinking = thinking_end(tokenizer)
    tokens = {
        "end": tuple((end,) for end in sorted(ends) if end < model.vocabulary),
        "think_end": ()
        if thinking is None
        else (tuple(tokenizer(thinking, add_special_tokens=False)["input_ids"]),),
    }
    missing = {
        "end": "no end token: neither its generation_config.json and config.json nor its "
        "tokenizer name one",
        "think_end": "no token that ends thinking, as </think> does: its chat template and "
        "vocabulary show none",
    }
    for name in weights:
        if not tokens[name]:
            message = f"{model.source.label} has {missing[name]}"
            raise CompressionError(
                f"emphasis.{name}: {message}; leave it out, or mend the model's files"
            )
    return Emphasis({name: MarkedTokens(weight, tokens[name]) for name, weight in weights.items()})


def text_specs(resolved: ResolvedRecipe) -> Iterator[tuple[int | None, TextSpec]]:
    """Yield the run's text (None), then the texts that steps have of their own (by number), as far
    as any is read; if none is, the first that was named.

    The output is evaluated on the first of them.
    """
    evaluation = EVALUATED if resolved.recipe.output.evaluate else 0
    # needs of the steps that read the run's text, by the name of their part
    shared = dict[str, Requirements]()
    texts: list[tuple[int | None, TextOptions, dict[str, Requirements]]] = [
        (None, resolved.recipe.calibration, shared)
    ]
    for position, needed in enumerate(resolved.requirements):
        own = resolved.steps[position].options.calibration
        if own is None:
            shared[part_name(position)] = needed
        else:
            texts.append((position, own, {OWN: needed}))
    reads = attrgetter("reads")
    wanted = [entry for entry in texts if any(map(reads, entry[2].values()))]
    if not wanted:  # recorded by a plan, too, so that what is made by it is evaluated alike
        wanted = [entry for entry in texts if entry[1].data is not None][:1]
        evaluation = EVALUATED
    for number, options, needs in wanted:
        is_fitted = any(needed.text for needed in needs.values())
        fewest = max(needed.heldout for needed in needs.values()) if is_fitted else 0
        yield (
            number,
            TextSpec(
                sources_of(options),
                samples=options.samples if is_fitted else 0,
                sequence_length=options.sequence_length,
                seed=resolved.recipe.seed,
                heldout=max(HELDOUT, min(fewest / options.samples, 0.5)) if fewest else 0.0,
                parts={
                    name: needed.part for name, needed in needs.items() if needed.part is not None
                },
                strict=options.strict,
                emphasis=emphasis_of(options, resolved.model),
                evaluation=evaluation,
            ),
        )
        evaluation = 0


def begin(resolved: ResolvedRecipe, session: Session, work: Workdir | None = None) -> Run:
    """Return the run before its first step; this reads the run's text, with a part for each step
    that needs one, and the texts of single steps.

    A plan that is carried out repeats its texts, and is refused where they have changed.
    """
    model = resolved.model
    texts = dict[int | None, TextBatches]()
    with session.clock.phase("read text"):
        for number, spec in text_specs(resolved):
            identity = None
            if resolved.plan is not None:
                own = None if number is None else resolved.plan.steps[number]
                identity = resolved.plan.calibration if own is None else own.text
            try:
                tokenizer = load_tokenizer(model.source.folder)
                if identity is None:
                    text = read_text(spec, tokenizer, model.vocabulary)
                else:
                    evaluation = spec.evaluation
                    text = repeat_text(identity, tokenizer, model.vocabulary, evaluation=evaluation)
            except CompressionError as error:
                if spec.samples or spec.parts:
                    raise
                logger.warning("output and base are not compared on held-out text: %s", error)
                continue
            ranks().assert_same_on_all(text.identity["sha256"], "calibration text")
            texts[number] = text
    plan = first_plan(resolved, texts.get(None))
    logger.info("%s", how_resident(model))
    roles = model.layout.roles.items()
    outside = [name for name, role in roles if not role.decoder_layer]
    # in use from the first pass on
    model.cached["outside"] = model.checkpoint.read_all(outside)
    shared = session.progress, session.clock, texts, work
    return Run(model, resolved.base, resolved.steps, plan, *shared)


def evaluation_text(
    resolved: ResolvedRecipe, texts: Mapping[int | None, TextBatches]
) -> TextBatches | None:
    """Return the text that the output is evaluated on: the first one read, or else the first one
    that a plan names."""
    if texts:
        return next(iter(texts.values()))
    plan = resolved.plan
    identities = [] if plan is None else [plan.calibration, *(step.text for step in plan.steps)]
    identity = next((identity for identity in identities if identity), None)
    if identity is None:
        return None
    model = resolved.model
    return repeat_text(
        identity, load_tokenizer(model.source.folder), model.vocabulary, evaluation=EVALUATED
    )


def first_plan(resolved: ResolvedRecipe, text: TextBatches | None) -> Plan:
    """Return the plan before the first step: the decisions of earlier runs, then all steps, still
    undecided."""
    model = resolved.model
    if resolved.plan is not None:
        plan = replace(resolved.plan, source=Source.of(model), dtype=model.dtype_name)
        steps = [replace(entry, result=None) for entry in plan.steps]
    else:
        plan = resolved.earlier or Plan(
            Source.of(model), (), None, resolved.recipe.seed, model.dtype_name
        )
        steps = list(plan.steps)
        for step in resolved.steps:
            options = step.options.to_dict()
            text_options = step.options.calibration
            # files without their folders
            if text_options is not None and text_options.data is not None:
                names = [local_name(str(source)) for source in text_options.data]
                options["calibration"] = {**options["calibration"], "data": names}
            steps.append(PlannedStep(step.name, options))
    identity = plan.calibration  # that of an earlier run stays
    if identity is None and text is not None:
        identity = text.identity
    is_source = resolved.base is model or resolved.base.fingerprint == plan.source.fingerprint
    return replace(
        plan,
        steps=tuple(steps),
        calibration=identity,
        versions=versions(),
        base=plan.base if is_source else Source.of(resolved.base),
    )


def read_calibration(
    session: Session, options: TextOptions, seed: int, heldout: float = 0.0, reserve: int = 0
) -> Calibration:
    """Return calibration text, the same on all ranks, with a share held out and this many sequences
    reserved."""
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
    calibration = read_text(spec, load_tokenizer(model.source.folder), model.vocabulary).fit
    ranks().assert_same_on_all(calibration.identity["sha256"], "calibration text")
    logger.info("%s", how_resident(model))
    return calibration
