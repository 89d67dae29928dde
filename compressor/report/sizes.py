"""Prune or quantise: shares of the experts, each in several number formats, side by side on held-out text.

All shares are planned from one calibration pass. If a correction is asked for, each is refitted, in closed form unless
tune is named, and its layers wait on disk. Then every pair of a share and a format is a variant in one streamed pass;
its experts are rounded to nearest as the step `quantize` rounds them, so that a pair is what `compress` would write.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.loader_fault import loader_fault
from compressor.checkpoint.reader import Size
from compressor.data.batches import Calibration, EvaluationSet
from compressor.distributed import refuse_several
from compressor.errors import CompressionError
from compressor.evaluation.evaluator import Evaluator, Figures, Variants
from compressor.formatting import human_bytes, known_names
from compressor.model.loading import map_keys
from compressor.model.moe_layer import layers_by_unit
from compressor.model.opened import OpenModel, refuse_shared_experts
from compressor.model.serving import FORMATS, NAMES, loaders
from compressor.model.streaming import Forward
from compressor.pipeline.task import HELDOUT, Run, of_stage, open_run, read_calibration
from compressor.progress import Progress
from compressor.recipe.plan import ExpertPlan
from compressor.recipe.recipe import Recipe, make_step
from compressor.recipe.registry import load_strategy
from compressor.recipe.step import FORMAT, StepOptions
from compressor.report.sizes_report import STORED, Pair, SizeComparison, choice, related
from compressor.run_record import versions
from compressor.statistics.statistics import WEIGHTS
from compressor.steps.correct.in_order import ShadowModel, correct
from compressor.steps.correct.options import Correct
from compressor.steps.cutting import CutFiles, cut_layers
from compressor.steps.job import make_job, stored_partial
from compressor.steps.prune.options import Prune
from compressor.steps.prune.planning import Planner, kept_count, protected_experts, spec_of
from compressor.steps.quantize.matrices import Matrix, expert_matrices
from compressor.steps.quantize.scheme import BITS, ROW, Scheme, scheme_for
from compressor.steps.quantize.writing import largest_weights, rounded
from compressor.steps.split.opening import partitioned
from compressor.steps.state import untouched

SHARES = (Fraction(1), Fraction(3, 4), Fraction(1, 2), Fraction(1, 4))
SCHEMES = (STORED, *BITS)
TRANSFORMERS = "transformers"
SERVED = (*FORMATS, TRANSFORMERS)  # that formats can be chosen for
RIDGE = Correct(method="ridge")


@dataclass(frozen=True, slots=True)
class Kept:
    """A share of the experts: its plan, its refitted layers if there is a correction, and the formats to try."""

    share: Fraction
    model: OpenModel  # whose experts the plan numbers: those of the source, or its sub-experts
    plan: ExpertPlan
    files: CutFiles | None = None
    schemes: Mapping[str, Scheme | None] = field(default_factory=dict)
    bytes: Mapping[str, int] = field(default_factory=dict)  # of all tensors that would be written, by format


@dataclass(frozen=True, slots=True)
class Smaller:
    """The stock model with fewer experts on meta, and the experts' matrices by decoder layer."""

    shadow: ShadowModel
    matrices: Mapping[str, Sequence[Matrix]]
    keys: frozenset[str]  # state-dict entries that hold them

    @classmethod
    def of(cls, model: OpenModel, experts: int) -> "Smaller":
        shadow = ShadowModel(model, experts)
        layers = [replace(layer, experts=experts) for layer in model.architecture.layers]
        matrices = {unit: expert_matrices(shadow.model, own) for unit, own in layers_by_unit(layers).items()}
        return cls(shadow, matrices, frozenset(each.key for own in matrices.values() for each in own))

    @property
    def every(self) -> list[Matrix]:
        return [matrix for own in self.matrices.values() for matrix in own]


class SideBySide(Variants):
    """Variants of a model that differ in their experts' number and numbers; one layer of one is filled at a time."""

    def __init__(self, model: OpenModel, variants: Sequence[tuple[Kept, Scheme | None]]) -> None:
        self.model, self.variants, self.stored = model, variants, stored_partial(model).dtype
        counts = {kept.plan.experts for kept, _ in variants}
        self.smaller = {count: Smaller.of(model, count) for count in counts}
        self.filled: int | None = None
        self.cut: tuple[Kept, dict[str, Tensor]] | None = None  # of the loaded layer

    def wrap_forward(self, unit: str, own: Forward) -> Forward:
        if self.variant is None or not self.at.moe_layers:
            return own
        shadow = self.smaller[self.variants[self.variant][0].plan.experts].shadow
        if self.filled != self.variant:  # batches of a variant follow one another
            self._fill(unit, *self.variants[self.variant])
            self.filled = self.variant
        forward: Forward = shadow.model.get_submodule(unit).forward
        return forward

    def on_layer_end(self, unit: str) -> None:
        for smaller in self.smaller.values():
            smaller.shadow.empty_again()
        self.filled = self.cut = None

    @torch.no_grad()
    def _fill(self, unit: str, kept: Kept, scheme: Scheme | None) -> None:
        smaller = self.smaller[kept.plan.experts]
        if self.cut is None or self.cut[0] is not kept:
            self.cut = kept, self._cut(kept)
        tensors = self.cut[1]
        if scheme is not None:
            tensors = {key: value.clone() if key in smaller.keys else value for key, value in tensors.items()}
        smaller.shadow.fill(unit, tensors)
        if scheme is not None:
            live, own = smaller.shadow.model, smaller.matrices[unit]
            largest = largest_weights(own, lambda matrix: matrix.of(live)) if scheme.name == "nvfp4" else {}
            for matrix in own:
                weight = matrix.of(live)
                pieces = rounded(scheme, weight.to(self.stored), self.stored, largest.get(matrix.together))
                weight.copy_(torch.cat([scheme.values(codes, scales)[0] for codes, scales in pieces]))

    def _cut(self, kept: Kept) -> dict[str, Tensor]:
        """The loaded layer's tensors as planned, its experts with the values that are written."""
        partial, layers = self.model.partial, self.at.moe_layers
        if kept.files is None:
            cut = cut_layers(partial.model, layers, {plan.module: plan for plan in kept.plan.layers})
        else:
            cut = {key: value for layer in layers for key, value in kept.files.tensors(layer).items()}
        written = self.smaller[kept.plan.experts].keys
        return {
            key: (value.to(self.stored).to(value.dtype) if key in written else value).to(partial.device)
            for key, value in cut.items()
        }


def plan_shares(
    base: OpenModel,
    steps: Sequence[StepOptions],
    data: Calibration,
    progress: Progress,
    seed: int,
    shares: Sequence[Fraction],
    folder: Path,
) -> tuple[list[Kept], list[str], dict[str, Any]]:
    """All shares as the steps split, prune and correct make them, why some are left out, and the resolved steps.

    Refitted layers go into the `folder`. All experts are those of the base, neither split nor refitted.
    """
    seen, resolved, stage = base, dict[str, Any](), of_stage(steps, 0)
    for options in stage:
        step = options.step().resolve(base, stage)
        if step is not None:
            seen = step.model_view(seen)
            resolved[step.name] = step.options
    prune = resolved["prune"]
    assert isinstance(prune, Prune)
    strategy = load_strategy(prune.strategy, prune.options)
    reads = bool(strategy.needs - WEIGHTS)
    requested = next((options for options in stage if isinstance(options, Correct)), None)
    if requested is not None and "correct" in resolved and requested.method == "auto":  # the closed form is fast
        resolved["correct"] = RIDGE
    correction: Correct | None = resolved.get("correct")
    specs, found, left_out = {}, [Kept(Fraction(1), base, untouched(base))], list[str]()
    for share in sorted({*shares} - {Fraction(1)}, reverse=True):
        smaller = prune.model_copy(update={"ratio": 1 - float(share)})
        try:
            count = kept_count(smaller, seen)
        except CompressionError as error:
            left_out.append(f"{share} of the experts ({error})")
            continue
        if count < seen.architecture.experts and count not in specs:
            specs[count] = share, spec_of(smaller, seen)
    if not specs:
        return found, left_out, resolved
    if seen.is_split:
        text = data if reads or correction else None
        seen = partitioned(seen, text, progress, seed, changed=correction is not None)
    planner = Planner(seen, data, progress, seed)
    protected = protected_experts(prune.protect, min(specs), planner)
    planner = replace(planner, calibration=data if reads else None)
    wanted = [spec for _, spec in specs.values()]
    plans = planner.plans(wanted, protected, heads=wanted[0].heads)
    for (share, _), planned in zip(specs.values(), plans, strict=True):
        plan, files = planned.plan, None
        if correction is not None:
            files = CutFiles(folder / str(plan.experts))
            plan = correct(seen, plan, progress, files, data, correction, seed=seed)
        found.append(Kept(share, seen, plan, files))
    return found, left_out, resolved


def with_schemes(kept: Kept, names: Sequence[str], servers: Sequence[str]) -> tuple[Kept, list[str]]:
    """The share with the formats that fit its matrices and servers, the bytes of each, and sentences on the others."""
    smaller, schemes, left_out = Smaller.of(kept.model, kept.plan.experts), dict[str, Scheme | None](), list[str]()
    for name in names:
        try:
            schemes[name] = None if name == STORED else _scheme(name, kept.model, smaller, servers)
        except CompressionError as error:
            left_out.append(f"{name} ({str(error).partition('; ')[0]})")
    sizes = {name: _bytes(kept, smaller, scheme) for name, scheme in schemes.items()}
    return replace(kept, schemes=schemes, bytes=sizes), left_out


def _scheme(name: str, model: OpenModel, smaller: Smaller, servers: Sequence[str]) -> Scheme:
    """The format for these matrices; raises `CompressionError` if its groups do not fit, or a server can't load it."""
    scheme = scheme_for(name, None, {matrix.columns for matrix in smaller.every})
    for server in servers:
        if server == TRANSFORMERS:  # the one that is installed
            singly = any(role.kind == "expert" and not role.is_router for role in model.layout.roles.values())
            if fault := loader_fault(scheme.config([]), family=None if singly else model.architecture.family):
                raise CompressionError(fault)
        elif NAMES[server] not in loaders(name, scheme.group_size == ROW):
            raise CompressionError(f"{NAMES[server]} loads no experts in it")
    return scheme


def _bytes(kept: Kept, smaller: Smaller, scheme: Scheme | None) -> int:
    """Bytes of the tensors that `compress` writes of a share in a format; the base's own where nothing changes."""
    model, stored = kept.model, stored_partial(kept.model)
    if scheme is None and kept.share == 1:
        return Size.of(model.checkpoint.tensors.values()).bytes
    plain = stored if scheme is not None and model.layout.quantized else None  # which is dequantised first
    job = make_job(model, kept.plan, kept.files, through=plain)
    if scheme is None:
        return job.nbytes
    from transformers.conversion_mapping import get_model_conversion_mapping

    shadow = smaller.shadow.model
    found = map_keys((each.name for each in job.outputs), shadow, get_model_conversion_mapping(shadow)).targets
    others = sum(each.nbytes for each in job.outputs if found.get(each.name) not in smaller.keys)
    return others + sum(scheme.nbytes(each.rows, each.columns, stored.dtype) for each in smaller.every)


def check_grid(shares: Sequence[Fraction], schemes: Sequence[str], servers: Sequence[str]) -> None:
    """Refuse what is no share, and formats and servers that are not known."""
    if not shares or not all(0 < share <= 1 for share in shares):
        raise CompressionError("shares of the experts that stay are above 0 and up to 1, such as 1,3/4,1/2")
    for names, known, what in ((schemes, SCHEMES, "format"), (servers, SERVED, "server")):
        if odd := next((name for name in names if name not in known), None):
            raise CompressionError(f"there is no {what} {odd!r}; {known_names(odd, known)}")


def measure_sizes(
    run: Run,
    steps: Sequence[StepOptions],
    data: Calibration,
    sets: Sequence[EvaluationSet],
    seed: int = 0,
    shares: Sequence[Fraction] = SHARES,
    schemes: Sequence[str] = SCHEMES,
    servers: Sequence[str] = (),
    limit: int | None = None,
    bits: float | None = None,
    context: int = 0,
) -> SizeComparison:
    """Each share of the experts in each format, on the evaluation sets; nothing is written but temporary files.

    `steps` are split, prune and correct of a recipe, without a number of experts. The base is always among the pairs.
    The limit is one of bytes, or of `bits` for each parameter of the base.
    """
    base, begin, pairs = run.model, time.perf_counter(), list[Pair]()
    refuse_several("comparing sizes")
    refuse_shared_experts(base)
    evaluator, partial = Evaluator(base, sets), base.partial
    parameters = sum(value.numel() for key, value in partial.empty.items() if key not in partial.tied)
    with tempfile.TemporaryDirectory() as folder:
        planned, left_out, resolved = plan_shares(base, steps, data, run.progress, seed, shares, Path(folder))
        seconds, tried = time.perf_counter() - begin, list[Kept]()
        for kept in planned:
            names = schemes if kept.share in shares else ()
            whole = [STORED] if kept.share == 1 else []  # the base
            own, without = with_schemes(kept, list(dict.fromkeys([*whole, *names])), servers)
            tried.append(own)
            left_out += without
        for _, group in groupby(tried, key=lambda kept: id(kept.model)):
            variants = [(kept, name, scheme) for kept in group for name, scheme in kept.schemes.items()]
            visitor = SideBySide(variants[0][0].model, [(kept, scheme) for kept, _, scheme in variants])
            found = evaluator.measure(visitor.model, visitor, len(variants), run.progress)
            pairs += [
                _pair(kept, name, figures, parameters) for (kept, name, _), figures in zip(variants, found, strict=True)
            ]
    return SizeComparison(
        model=base.source.label,
        pairs=related(pairs),
        parameters=parameters,
        strategy=resolved["prune"].strategy,
        correction=resolved["correct"].method if "correct" in resolved else STORED,
        limit=limit if bits is None else int(bits * parameters / 8),
        context=context,
        cache=cache_bytes(base.config, context, stored_partial(base).dtype),
        left_out=tuple(dict.fromkeys(left_out)),
        schemes_left_out=tuple(name for name in SCHEMES if name not in (STORED, *schemes)),
        calibration=data.identity,
        evaluation={entry.name: sum(batch.numel() for batch in entry.batches) for entry in sets},
        calibration_seconds=seconds,
        seed=seed,
        versions=versions(),
    )


def _pair(kept: Kept, name: str, figures: Figures, parameters: int) -> Pair:
    layer, scheme, means = kept.model.architecture.layers[0], kept.schemes[name], figures.means
    return Pair(
        share=float(kept.share),
        experts=kept.plan.experts,
        experts_before=layer.experts,
        split=layer.parts,
        scheme=name,
        group_size=None if scheme is None else scheme.group_size,
        bytes=kept.bytes[name],
        bits=8 * kept.bytes[name] / parameters,
        loss=means["loss"],
        kl=max(0.0, means["kl"]),
        flips=means["flips"],
        kl_by_sequence=tuple(figures.kl.tolist()),
        loss_by_sequence=tuple(figures.loss.tolist()),
    )


def cache_bytes(config: Any, tokens: int, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of so many tokens; of latent attention (MLA) those of its latents, as servers keep.

    Layers without attention keep nothing that grows.
    """
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    window = getattr(text, "sliding_window", None) or tokens
    lengths = {"full_attention": tokens, "sliding_attention": min(tokens, window)}
    if rank := getattr(text, "kv_lora_rank", None):
        numbers = rank + text.qk_rope_head_dim
    else:
        size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
        numbers = 2 * size * (getattr(text, "num_key_value_heads", None) or text.num_attention_heads)
    return int(sum(lengths.get(kind, 0) for kind in kinds) * numbers * dtype.itemsize)


def fitted(
    recipe: Recipe,
    limit: int,
    servers: Sequence[str] = (),
    *,
    device: str = "auto",
    progress: Progress | None = None,
) -> tuple[Recipe, SizeComparison]:
    """The recipe with the share of the experts and the format that fit into so many bytes with the least KL.

    They are found on what is held out of its calibration text, with corrections in closed form where none is named.
    Steps that the choice makes idle are left out. Raises `CompressionError` if nothing fits, or nothing need be done.
    """
    check_grid(SHARES, SCHEMES, servers)
    prune = next((step for step in recipe.steps if isinstance(step, Prune)), None)
    if prune is None or any(FORMAT in step.changes for step in recipe.steps):
        raise CompressionError("--bytes chooses experts and their format: it needs the step prune, and no quantize")
    if prune.experts is not None or prune.ratio is not None:
        raise CompressionError("--bytes finds the number of experts; leave out --experts and --ratio")
    if prune.top_k is not None:
        raise CompressionError("--bytes compares models of one top-k; leave out --top-k")
    assert recipe.model is not None
    with open_run(recipe.model, recipe.revision, recipe.dtype, device, progress, recipe.resident) as run:
        data = read_calibration(run, recipe.calibration, recipe.seed, HELDOUT)
        sets = [EvaluationSet("held-out calibration text", data.heldout_batches)]
        made = measure_sizes(run, recipe.steps, data, sets, recipe.seed, servers=servers, limit=limit)
    if not made.fitting:
        raise CompressionError(choice(made)[0])
    if (best := made.fitting[0]) is made.base:
        raise CompressionError(f"{made.model} has {human_bytes(best.bytes)}, which fits already; nothing is to be done")
    return recipe.model_copy(update={"steps": concrete(recipe.steps, best)}), made


def concrete(steps: Sequence[StepOptions], pair: Pair) -> tuple[StepOptions, ...]:
    """The steps that make a pair: split and pruned as it is, and quantised at the end."""
    idle = {*(("split", "prune", "correct") if pair.share == 1 else ("split",) if pair.split == 1 else ())}
    chosen: dict[str, dict[str, Any]] = {"split": {"parts": pair.split}, "prune": {"ratio": 1 - pair.share}}
    made = [step.model_copy(update=chosen.get(step.name, {})) for step in steps if step.name not in idle]
    return *made, *([] if pair.is_stored else [make_step("quantize", {"scheme": pair.scheme})])
