"""Prune or quantise: shares of the experts, each in several number formats, side by side on
held-out text.

All shares are planned from one calibration pass. If a correction is asked for, each is refitted, in
closed form unless tune is named, and its layers wait on disk. Then every pair of a share and a
format is a variant in one streamed pass; its experts are rounded to nearest as the step `quantize`
rounds them, so that a pair is what `compress` would write."""

import logging
import math
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache, partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.loader_fault import loader_fault
from compressor.checkpoint.reader import Size
from compressor.data.batches import Calibration, EvaluationSet
from compressor.distributed import refuse_several
from compressor.divergence.evaluator import Evaluator
from compressor.errors import CompressionError
from compressor.formatting import human_bytes, joined
from compressor.model.architecture import build_meta
from compressor.model.moe_layer import layers_by_decoder_layer
from compressor.model.opened import OpenModel, refuse_shared_experts
from compressor.model.substitution import Substitution
from compressor.options import validated
from compressor.pipeline.resolve import HELDOUT, Session, open_run, read_calibration
from compressor.progress import Progress
from compressor.recipe.plan import ExpertPlan
from compressor.recipe.recipe import Recipe, default_steps, make_step
from compressor.recipe.registry import load_strategy
from compressor.recipe.step import StepOptions
from compressor.report.comparison_report import Comparison, choice, sentences
from compressor.report.comparison_rows import Row, Variant, related, row_of
from compressor.report.grid import SCHEMES, STORED, TRANSFORMERS, Grid
from compressor.run_record import versions
from compressor.statistics.statistics import WEIGHTS
from compressor.steps.correct.options import Correct
from compressor.steps.correct.sequential import correct
from compressor.steps.cutting import CutFiles, cut_layers
from compressor.steps.job import output_size, stored_partial, untouched
from compressor.steps.prune.options import Prune
from compressor.steps.prune.planning import Planner, protected_experts, spec_of
from compressor.steps.quantize.choosing import (
    Formats,
    Unit,
    candidates,
    chosen_layers,
    rounding,
    sensitivities,
    units_of,
)
from compressor.steps.quantize.matrices import (
    ALL,
    EXPERTS,
    Matrix,
    expert_matrices,
    find_matrices,
)
from compressor.steps.quantize.options import ROW, SERVERS, loaders
from compressor.steps.quantize.scheme import LINEAR, Scheme, quantization_config, scheme_for
from compressor.steps.split.view import partitioned

logger = logging.getLogger(__name__)

RIDGE = Correct(method="ridge")
TRIED = 3  # shares in formats by layer that are measured
BY_LAYER, ONE = "by layer", "one width"  # names of formats that a limit of bytes chooses


Cut = Callable[["PlannedShare", str], Mapping[str, Tensor] | None]
Trial = tuple["PlannedShare", Variant, Formats]  # to be measured


@dataclass(slots=True, eq=False)
class PlannedShare:
    """A share of the experts: its plan, and its refitted layers if there is a correction."""

    share: Fraction
    model: OpenModel  # whose experts the plan numbers: those of the source, or its sub-experts
    plan: ExpertPlan
    files: CutFiles | None = None
    # name, strategy and correction of its variants
    way: Mapping[str, Any] = field(default_factory=dict)
    stored: torch.dtype = field(init=False)  # in which experts are stored
    smaller: Any = field(init=False)  # the stock model with as many experts, on meta
    matrices: dict[str, list[Matrix]] = field(init=False)  # of its experts, by decoder layer

    def __post_init__(self) -> None:
        architecture = self.model.architecture
        experts = self.plan.experts
        self.stored = stored_partial(self.model).dtype
        self.smaller = build_meta(architecture.with_experts(experts), self.model.partial.dtype)
        layers = [replace(layer, experts=experts) for layer in architecture.layers]
        self.matrices = {
            decoder_layer: expert_matrices(self.smaller, moe_layers)
            for decoder_layer, moe_layers in layers_by_decoder_layer(layers).items()
        }

    def cut(self, decoder_layer: str) -> dict[str, Tensor] | None:
        """Return the loaded layer's tensors as planned, in the dtype in which experts are
        stored."""
        layers = layers_by_decoder_layer(self.model.architecture.layers).get(decoder_layer)
        if layers is None:
            return None
        tensors = {}
        if self.files is None:
            tensors = cut_layers(self.model.partial.model, layers, self.plan.by_module)
        else:
            for layer in layers:
                tensors |= self.files.tensors(layer)
        for key in {matrix.key for matrix in self.matrices[decoder_layer]}:
            tensors[key] = tensors[key].to(self.stored).to(tensors[key].dtype)
        return {key: value.to(self.model.partial.device) for key, value in tensors.items()}

    def rounded(self, formats: Formats, cut: Cut, clip: bool = True) -> Substitution:
        """Return the share with these units rounded to nearest, by searched ranges if they `clip`;
        `cut` is its own method, or keeps the last layer's tensors."""
        own = rounding(self.model, formats, self.stored, partial(cut, self), self.smaller, clip)
        return replace(own, experts=self.plan.experts)

    def units(self, dense: Sequence[Matrix] = ()) -> list[Unit]:
        """Return its experts by layer, and these other matrices."""
        return units_of([*chain.from_iterable(self.matrices.values()), *dense])

    def size(self, layers: Mapping[str, Mapping[str, str]]) -> int:
        """Return the bytes of all tensors with these formats by layer."""
        quantize = make_step("quantize", {"layers": layers, "targets": ALL}).step()
        size = quantize.output_size(self.model, self.plan.experts, self.is_changed).size
        nbytes: int = size.bytes
        return nbytes

    @property
    def is_changed(self) -> bool:
        """True if experts are merged or refitted."""
        groups = chain.from_iterable(layer.groups for layer in self.plan.layers)
        return self.files is not None or not all(group.untouched for group in groups)

    def variants(
        self, names: Iterable[str], servers: Sequence[str]
    ) -> tuple[list[tuple[Variant, Scheme | None]], list[str]]:
        """Return the share in each format whose groups fit the matrices and that the servers load;
        and sentences on the others. Bytes are those of the tensors that `compress` writes."""
        model = self.model
        experts = self.plan.experts
        layer = model.architecture.layers[0]
        changed = self.is_changed
        columns = {matrix.columns for matrix in chain.from_iterable(self.matrices.values())}
        parameters = sum(value.numel() for value in self.smaller.parameters())
        variants = []
        left_out = []
        for name in names:
            scheme = None
            fault = None
            try:
                if name != STORED:
                    scheme = scheme_for(name, None, columns)
                    fault = self._fault(scheme, servers)
            except CompressionError as error:  # its groups do not fit
                fault = str(error)
            if fault is not None:
                left_out.append(f"{name} ({fault.partition('; ')[0]})")
                continue
            if scheme is not None:
                quantize = make_step("quantize", {"scheme": name}).step()
                size = quantize.output_size(model, experts, changed).size
            elif self.share == 1:  # nothing changes
                size = Size.of(model.checkpoint.tensors.values())
            else:
                size = output_size(model, experts, changed)
            variant = Variant(
                **self.way,
                share=float(self.share),
                experts=experts,
                experts_before=layer.experts,
                split=layer.parts,
                parameters=parameters,
                bytes=size.bytes,
                scheme=name,
                group_size=None if scheme is None else scheme.group_size,
            )
            variants.append((variant, scheme))
        return variants, left_out

    def _fault(self, scheme: Scheme, servers: Sequence[str]) -> str | None:
        """Return why one of the servers does not load the format; None if all do."""
        for server in servers:
            if server != TRANSFORMERS:
                if SERVERS[server] not in loaders(scheme.name, scheme.group_size == ROW):
                    return f"{SERVERS[server]} loads no experts in it"
                continue
            # of the one that is installed
            fault = loader_fault(quantization_config({scheme: LINEAR}, []))
            if fault is not None:
                return fault
            if not find_matrices(self.model, EXPERTS).singly:
                return f"transformers loads no single experts of {self.model.architecture.family}"
        return None


def plan_shares(
    base: OpenModel,
    steps: Sequence[StepOptions],
    data: Calibration,
    progress: Progress,
    seed: int,
    shares: Sequence[float | Fraction],
    folder: Path,
) -> tuple[list[PlannedShare], list[str]]:
    """Plan all shares below 1 as the steps split, prune and correct; returns reasons why some are
    left out, too.

    Refitted layers go into the `folder`. All experts are those of the base, neither split nor
    refitted."""
    asked = next(options for options in steps if isinstance(options, Prune))
    step = asked.step().resolve(base)
    model = step.view(base)
    prune = step.options
    correction = prune.correct if prune.correct.wanted else None
    if correction is not None and asked.correct.method == "auto":
        correction = RIDGE  # the closed form is fast
    strategy = load_strategy(prune.strategy, prune.options)
    reads_text = bool(strategy.needs - WEIGHTS)
    method = "none" if correction is None else correction.method
    name = " ".join(
        [strategy.name, *(f"({option}={value})" for option, value in prune.options.items())]
    )
    way = {"name": name, "strategy": strategy.name, "correction": method}
    planned, left_out = list[PlannedShare](), list[str]()
    specs = {}
    for share in sorted({Fraction(share) for share in shares} - {Fraction(1)}, reverse=True):
        smaller = prune.model_copy(update={"ratio": 1 - float(share)})
        try:
            count = smaller.count(model.architecture.layers)
        except CompressionError as error:
            left_out.append(f"{share} of the experts ({error})")
            continue
        if count < model.architecture.experts and count not in specs:
            specs[count] = share, spec_of(smaller, model)
    if not specs:
        return planned, left_out
    if model.is_split:
        text = data if reads_text or correction else None
        model = partitioned(model, text, progress, seed, changed=correction is not None)
    planner = Planner(model, data, progress, seed)
    protected = protected_experts(prune.protect, min(specs), planner)
    planner = replace(planner, calibration=data if reads_text else None)
    wanted = [spec for _, spec in specs.values()]
    plans = planner.plans(wanted, protected)
    for (share, _), pruned in zip(specs.values(), plans, strict=True):
        plan = pruned.plan
        files = None
        if correction is not None:
            files = CutFiles(folder / str(plan.experts))
            plan = correct(model, plan, progress, files, data, correction, seed=seed)
        planned.append(PlannedShare(share, model, plan, files, way))
    return planned, left_out


def compare_sizes(
    run: Session,
    ways: Sequence[Sequence[StepOptions]],
    data: Calibration,
    sets: Sequence[EvaluationSet],
    seed: int,
    grid: Grid,
) -> Comparison:
    """Compare each share of the experts in each format on the evaluation sets; only temporary files
    are written.

    `ways` are split, prune and correct of recipes, without a number of experts. The base is always
    among the rows."""
    refuse_several("comparing sizes")
    base = run.model
    begin = time.perf_counter()
    refuse_shared_experts(base)
    evaluator = Evaluator(base, sets)
    partial_model = base.partial
    parameters = sum(
        value.numel() for key, value in partial_model.empty.items() if key not in partial_model.tied
    )
    limit = grid.nbytes if grid.bits is None else int(grid.bits * parameters / 8)
    cache = cache_bytes(base.config, grid.context, stored_partial(base).dtype)
    rows, left_out = list[Row](), list[str]()
    planned = [PlannedShare(Fraction(1), base, untouched(base))]
    names = list[str]()
    if limit is not None:
        loaded, left_out = planned[0].variants(grid.schemes, grid.servers)
        names = [variant.scheme for variant, _ in loaded]
        refuse_too_small(base, limit, cache, min(grid.shares), names, grid.servers)
    # a layer is cut once for all formats
    cut: Cut = lru_cache(maxsize=1)(PlannedShare.cut)

    def measure(trials: Sequence[Trial]) -> list[Row]:
        """Return rows of variants, those of whole experts and of sub-experts in a pass each."""
        measured = list[Row]()
        for _, group in groupby(trials, key=lambda trial: id(trial[0].model)):
            of_model = list(group)
            substitutions = [
                share.rounded(formats, cut, clip=variant.layers is not None)
                for share, variant, formats in of_model
            ]
            model = of_model[0][0].model
            results = evaluator.measure(model, substitutions, progress=run.progress)
            for (_, variant, _), figures in zip(of_model, results, strict=True):
                by_sequence = {
                    "loss_by_sequence": tuple(figures.loss.tolist()),
                    "kl_by_sequence": tuple(figures.kl.tolist()),
                }
                measured.append(row_of(variant, figures, sets, **by_sequence))
        return measured

    with tempfile.TemporaryDirectory() as folder:
        for number, steps in enumerate(ways):
            work = Path(folder) / str(number)
            smaller, reasons = plan_shares(base, steps, data, run.progress, seed, grid.shares, work)
            planned += smaller
            left_out += reasons
        seconds = time.perf_counter() - begin
        trials = list[Trial]()
        for share in planned:
            wanted = [STORED] if share.share == 1 or limit is not None else []
            if limit is None and share.share in grid.shares:
                wanted += grid.schemes
            of_share, reasons = share.variants(dict.fromkeys(wanted), grid.servers)
            left_out += reasons
            for variant, scheme in of_share:
                trials.append((share, variant, dict.fromkeys(share.units(), scheme)))
        rows += measure(trials)
        if limit is not None:
            stored = dict(zip((share for share, _, _ in trials), rows, strict=True))
            room = limit - cache
            trials = best_trials(base, stored, data, room, names, grid.servers, run.progress)
            drawn = random_trial(base, trials, data, run.progress, Path(folder), seed)
            rows += measure([*trials, *([drawn] if drawn else [])])
    return Comparison(
        model=base.source.label,
        rows=related(rows),
        calibration=data.identity,
        evaluation={evaluation_set.name: evaluation_set.tokens for evaluation_set in sets},
        calibration_seconds=seconds,
        seed=seed,
        versions=versions(),
        formats=tuple(grid.schemes),
        formats_left_out=tuple(name for name in SCHEMES if name not in (STORED, *grid.schemes)),
        left_out=tuple(dict.fromkeys(left_out)),
        parameters=parameters,
        limit=limit,
        context=grid.context,
        cache=cache,
    )


def formats_of(
    base: OpenModel, units: Sequence[Unit], names: Sequence[str], servers: Sequence[str]
) -> list[list[Scheme]]:
    """Return the formats of these names that the servers load, of each unit.

    Raises `CompressionError` where there is none."""
    shown = [SERVERS[name] for name in servers if name in SERVERS]
    schemes = [candidates(unit, shown, names) for unit in units]
    if not all(schemes):
        loaded = f" that {joined(shown)} load" if shown else ""
        raise CompressionError(
            f"no number format of {joined(names) or 'none'}{loaded} fits the model's matrices; "
            "name more by --schemes"
        )
    return schemes


def dense_matrices(base: OpenModel) -> list[Matrix]:
    """Return the matrices that can be quantised beside the experts."""
    return [matrix for matrix in find_matrices(base, ALL).every if matrix.expert is None]


def refuse_too_small(
    base: OpenModel,
    limit: int,
    cache: int,
    share: Fraction,
    names: Sequence[str],
    servers: Sequence[str],
) -> None:
    """Raise `CompressionError` if this share of the experts, in the smallest formats, leaves no
    room in `limit` bytes for the `cache`."""
    experts = base.architecture.experts
    smallest = PlannedShare(share, base, ExpertPlan(math.ceil(experts * share), ()))
    units = smallest.units(dense_matrices(base))
    schemes = formats_of(base, units, names, servers)
    coarsest = {unit: own[0] for unit, own in zip(units, schemes, strict=True)}
    nbytes = smallest.size(chosen_layers(coarsest)) + cache
    if nbytes > limit:
        raise CompressionError(
            f"Nothing fits in {human_bytes(limit)}: the smallest is {smallest.plan.experts} of "
            f"{experts} experts, {BY_LAYER}, with {human_bytes(nbytes)}"
        )


def best_trials(
    base: OpenModel,
    stored: Mapping[PlannedShare, Row],
    data: Calibration,
    limit: int,
    names: Sequence[str],
    servers: Sequence[str],
    progress: Progress,
) -> list[Trial]:
    """Return the three shares, each with formats by layer, of least predicted KL in `limit` bytes,
    and the best of those with one format for all. The `servers` load the formats of these `names`.

    Predicted is the measured KL of the share as `stored` and the sum of what rounding each unit of
    the base costs."""
    dense = dense_matrices(base)
    whole = next(iter(stored))
    units = whole.units(dense)
    schemes = formats_of(base, units, names, servers)
    batches = data.without_heldout().batches
    together = TRANSFORMERS in servers or not servers
    given = batches, whole.stored, progress, together
    table = sensitivities(base, units, schemes, *given)
    trials = list[Trial]()
    for share, row in stored.items():
        smaller = share.units(dense)
        own = table.of(smaller, formats_of(base, smaller, names, servers), whole.stored)
        size = share.size(chosen_layers(own.formats(own.finest))) - own.total(own.finest)
        choices = {BY_LAYER: own.best(limit - size), ONE: own.alike(limit - size)}
        for name, numbers in choices.items():
            if numbers is not None:
                variant = replace(
                    row.variant,
                    scheme=name,
                    bytes=size + own.total(numbers),
                    predicted=row.kl + own.predicted(numbers),
                    layers=chosen_layers(own.formats(numbers)),
                )
                trials.append((share, variant, own.formats(numbers)))
    ranked = sorted(trials, key=lambda trial: trial[1].predicted or 0.0)
    by_layer = [trial for trial in ranked if trial[1].scheme == BY_LAYER]
    alike = [trial for trial in ranked if trial[1].scheme == ONE]
    return [*by_layer[:TRIED], *alike[:1]]


def random_trial(
    base: OpenModel,
    trials: Sequence[Trial],
    data: Calibration,
    progress: Progress,
    folder: Path,
    seed: int,
) -> Trial | None:
    """Return experts drawn at random in place of those of the best of these pruned shares, in the
    same formats; None if none is pruned."""
    pruned = next((trial for trial in trials if trial[0].share != 1), None)
    if pruned is None:
        return None
    share, variant, formats = pruned
    draw = random.Random(seed)
    order = {}
    for layer in share.model.architecture.layers:
        groups = layer.routing_groups  # as many of each stay
        size = layer.experts // groups
        kept = list[int]()
        for begin in range(0, layer.experts, size):
            kept += draw.sample(range(begin, begin + size), share.plan.experts // groups)
        order[str(layer.index)] = " ".join(map(str, kept))
    prune = Prune(strategy="listed", options={"order": order}, split=variant.split)
    (drawn,), _ = plan_shares(base, [prune], data, progress, seed, [share.share], folder)
    way = replace(variant, name="random", strategy="random", correction="none", predicted=None)
    return drawn, way, formats


def cache_bytes(config: Any, tokens: int, dtype: torch.dtype) -> int:
    """Return bytes of the keys and values of these tokens; of latent attention (MLA), those of its
    latents.

    Layers without attention keep nothing that grows.
    """
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    window = getattr(text, "sliding_window", None) or tokens
    lengths = {"full_attention": tokens, "sliding_attention": min(tokens, window)}
    rank = getattr(text, "kv_lora_rank", None)
    if rank:
        numbers = rank + text.qk_rope_head_dim
    else:
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        numbers = (
            2 * size * (getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
        )
    return int(sum(lengths.get(kind, 0) for kind in kinds) * numbers * dtype.itemsize)


def fitted(recipe: Recipe, device: str = "auto", progress: Progress | None = None) -> Recipe:
    """Return the recipe with the share of the experts and the formats by layer that lose least in
    the bytes of its `fit`; without a step, the default ones are taken.

    The choice is made on held-out calibration text, with corrections in closed form where none is
    named. Steps that the choice makes idle are left out. Raises `CompressionError` if nothing fits,
    or nothing need be done."""
    assert recipe.model is not None and recipe.fit is not None
    grid = validated(Grid, {"nbytes": recipe.fit.bytes, "servers": recipe.fit.servers}, "--for")
    given = recipe.steps or default_steps()
    prune = next((step for step in given if isinstance(step, Prune)), None)
    if prune is None or any(step.format for step in given):
        raise CompressionError(
            "--bytes chooses experts and their format: it needs the step prune, and no quantize"
        )
    if prune.is_sized or (recipe.gate is not None and recipe.gate.search):
        raise CompressionError(
            "--bytes finds the number of experts; leave out --experts, --ratio and --search"
        )
    if prune.top_k is not None:
        raise CompressionError("--bytes compares models of one top-k; leave out --top-k")
    with open_run(
        recipe.model, recipe.revision, recipe.dtype, device, progress, recipe.resident
    ) as run:
        data = read_calibration(run, recipe.calibration, recipe.seed, HELDOUT)
        sets = [EvaluationSet("held-out calibration text", data.heldout_batches)]
        sizes = compare_sizes(run, [given], data, sets, recipe.seed, grid)
    if not sizes.fitting:
        raise CompressionError(choice(sizes)[0])
    best = sizes.fitting[0].variant
    if best is sizes.base.variant:
        raise CompressionError(
            f"{sizes.model} has {human_bytes(best.bytes)}, which fits already; nothing is to be "
            "done"
        )
    # split and pruned as the best is, and quantised at the end
    changes = {"split": best.split, "ratio": 1 - (best.share or 1.0)}
    steps = list[StepOptions]()
    for step in given:
        if not isinstance(step, Prune):
            steps.append(step)
        elif best.share != 1:
            steps.append(step.model_copy(update=changes))
    if best.layers:
        servers = [name for name in grid.servers if name in SERVERS]
        quantize = {"layers": best.layers, "targets": ALL, "servers": servers}
        steps.append(make_step("quantize", quantize))
    for line in sentences(sizes):
        logger.info("%s", line)
    return recipe.model_copy(update={"steps": tuple(steps), "fit": None})
