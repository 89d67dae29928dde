"""Plan every layer by the options of `prune`, in one pass over the model.

Protected experts, which no plan merges or drops, are named in a file, or found by a protector.
"""

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from compressor.data.batches import Calibration
from compressor.distributed import ranks
from compressor.divergence.evaluator import HeldoutProbe
from compressor.entry_points import STATISTICS, load
from compressor.errors import CompressionError
from compressor.formatting import ranges
from compressor.frozen import frozen
from compressor.model.inputs import Inputs
from compressor.model.moe_layer import MoeLayer
from compressor.model.mtp import Head, names_of
from compressor.model.opened import OpenModel
from compressor.model.streaming import LayerVisitor
from compressor.progress import Progress
from compressor.recipe.plan import ExpertPlan, LayerPlan, touched
from compressor.recipe.registry import Strategy, load_strategy
from compressor.records import Json, read_as, read_json
from compressor.statistics.statistics import ATTRIBUTED, LayerStatistics
from compressor.steps.correct.heads import ACCEPTANCE, chosen_heads, statistics_with_heads
from compressor.steps.correct.options import Correct
from compressor.steps.correct.sequential import (
    COMPRESSED,
    UNCORRECTED,
    LayerWork,
    comparing,
    compress_sequentially,
)
from compressor.steps.cutting import CutFiles
from compressor.steps.prune.options import Prune, protector_of
from compressor.steps.prune.selection import blocks_of, competing

logger = logging.getLogger(__name__)

MODALITIES = "modality_count"  # the statistic
WARNED = "warned of text alone"
UNREACHED = "experts_without_{}"  # text, or media: the figure of a layer
Protected = Mapping[str, frozenset[int]]  # experts by the full name of their experts module


@frozen
class Entry:
    """An entry of a list. Of a model whose experts are split, all parts of the `expert` of the
    source, or one `part`.

    `module` is needed where the decoder `layer` has several experts modules.
    """

    layer: int
    expert: int
    part: int | None = None
    module: str | None = None


def _entries(protect: str | Path | Sequence[Json] | None) -> list[Entry]:
    """Return the entries of a list, or of a JSON file as `moe-compress attribute` writes it,
    without other fields.

    None of them for None, and for the name of a protector.
    """
    if protect is None or protector_of(protect) is not None:
        return []
    where = "protect"
    content = protect
    if isinstance(protect, str | Path):
        path = Path(protect)
        if not path.is_file():
            raise CompressionError(
                f"--protect {path} is neither 'auto' nor a file; write auto or graph:N, or name a "
                "JSON list of experts such as the hubs.json of moe-compress attribute"
            )
        where = str(path)
        content = read_json(path, "mend it")
    if not isinstance(content, list | tuple):
        raise CompressionError(
            f'{where} should hold a JSON list of experts, such as [{{"layer": 3, "expert": 5}}]'
        )
    numbered = enumerate(content, start=1)
    return [read_as(Entry, entry, f"{where}, entry {number}") for number, entry in numbered]


def with_list(protect: str | Sequence[Json] | None) -> Any:
    """Return the same, a file's list in place of its name, so that the options of a run do not
    depend on the file."""
    if protector_of(protect) is not None:
        return protect
    entries = []
    for entry in _entries(protect):
        entries.append({name: value for name, value in asdict(entry).items() if value is not None})
    return tuple(entries) or None


def given_protected(
    protect: str | Path | Sequence[Json] | None, layers: Sequence[MoeLayer], keep: int
) -> Protected:
    """Return the experts that a list, or a file with one, names; none without a list.

    Refuses entries that fit no expert, and more experts than the `keep` that stay leave places for.
    """
    protected: dict[str, frozenset[int]] = {layer.name: frozenset() for layer in layers}
    for number, entry in enumerate(_entries(protect), start=1):
        where = f"protect, entry {number}: "
        inside = [
            layer
            for layer in layers
            if layer.index == entry.layer and entry.module in (None, layer.name)
        ]
        if not inside:
            known = ranges(dict.fromkeys(layer.index for layer in layers), " to ", ", ")
            named = "" if entry.module is None else f" called {entry.module!r}"
            raise CompressionError(
                f"{where}layer {entry.layer} has no experts module{named}; layers with experts are "
                f"{known}, modules are called like {layers[0].name}"
            )
        if len(inside) > 1:
            names = " and ".join(layer.name for layer in inside)
            raise CompressionError(
                f"{where}layer {entry.layer} has several experts modules, {names}; add one as "
                "'module'"
            )
        (layer,) = inside
        count = layer.experts // layer.parts
        parts = range(layer.parts) if entry.part is None or layer.parts == 1 else [entry.part]
        if not 0 <= entry.expert < count or parts[0] not in range(layer.parts):
            part = "" if entry.part is None else f", part {entry.part}"
            raise CompressionError(
                f"{where}{layer.name} has no expert {entry.expert}{part}; the experts that this "
                f"step gets are numbered 0 to {count - 1}, and their parts 0 to {layer.parts - 1}"
            )
        experts = [entry.expert * layer.parts + part for part in parts]
        protected[layer.name] |= frozenset(experts)
    for layer in layers:
        blocks_of(layer, keep, protected[layer.name])
    return {name: experts for name, experts in protected.items() if experts}


def listed(protected: Protected | None) -> dict[str, tuple[int, ...]]:
    """Return the experts of each module in ascending order, as plans hold them, without modules
    that have none."""
    return {name: tuple(sorted(experts)) for name, experts in (protected or {}).items() if experts}


def strongest_that_fit(
    experts: Sequence[tuple[str, int]], layers: Sequence[MoeLayer], keep: int, protect: str
) -> Protected:
    """Return the strongest (module, expert) that `protect` finds, as many in each layer and group
    as stay there."""
    protected: dict[str, frozenset[int]] = {}
    for layer in layers:
        capacity = keep // layer.routing_groups
        fitting = []
        for block in competing(layer):
            strongest = [
                expert for module, expert in experts if module == layer.name and expert in block
            ]
            fitting += strongest[:capacity]
        if fitting:
            protected[layer.name] = frozenset(fitting)
    gone = len(experts) - sum(map(len, protected.values()))
    if gone:
        logger.warning(
            f"{gone} of {len(experts)} experts of --protect {protect} do not fit where {keep} are "
            "kept in every layer, so the weakest are not protected"
        )
    return protected


@frozen
class PruneSpec:
    """A requested plan, checked as far as that needs no data."""

    strategy: Strategy
    experts: int  # to keep in each layer
    heads: tuple[Head, ...] = ()  # multi-token-prediction heads that are planned along
    head_experts: int = 0  # to keep in each of them


@frozen
class Planned:
    """A plan, and the seconds that deciding it took."""

    plan: ExpertPlan
    seconds: float


@dataclass
class Planner:
    """Plans a model on text, whose batches ranks share.

    Measurements of the whole model, such as those of protectors, are made once for all plans: on
    the base, without the held-out text, all tokens counting alike. They serve plans that are made
    in order, too."""

    model: OpenModel
    calibration: Calibration | None
    progress: Progress
    seed: int = 0
    _measured: dict[str, Any] = field(default_factory=dict)

    def once(self, name: str, measure: Callable[[Calibration], Any]) -> Any:
        """Return the result of `measure` on the text that is not held out, kept under `name`; all
        ranks take part.

        Raises `CompressionError` where there is no text.
        """
        if self.calibration is None:
            raise CompressionError(f"{name} needs calibration data; pass --calibration")
        if name not in self._measured:
            self._measured[name] = measure(self.calibration.without_heldout())
        return self._measured[name]

    def rank_changes(self, strategies: Sequence[Strategy]) -> dict[str, Tensor]:
        """AARV summed over the later routers, [E] float64, by layer; nothing if none of the
        strategies needs it."""
        name = next((strategy.name for strategy in strategies if strategy.needs & ATTRIBUTED), None)
        if name is None:
            return {}
        try:
            changes = load(STATISTICS, "rank_change")(self)
        except CompressionError as error:
            raise CompressionError(
                f"strategy {name!r} needs routing attribution, which others do not: {error}"
            ) from error
        return ranks().broadcast(lambda: changes)

    def plans(
        self,
        specs: Sequence[PruneSpec],
        protected: Protected | None = None,
        files: CutFiles | None = None,
        probe: HeldoutProbe | None = None,
    ) -> list[Planned]:
        """Return a plan for each spec from one pass over the layers.

        `protected` experts, by layer name, stay as they are. The specs' heads, which are the same
        in all, are planned after the model's own layers. With `files`, each layer is written there
        by the first plan. A `probe`, not beside heads, keeps the base's answers on its batches."""
        rank_changes = self.rank_changes([spec.strategy for spec in specs])
        needs = self._modalities.union(*(spec.strategy.needs for spec in specs))
        seconds = [0.0] * len(specs)
        by_layer = []
        accepted = dict[str, Any]()

        def decide(stats: LayerStatistics) -> list[LayerPlan]:
            decided = []
            for number, spec in enumerate(specs):
                begin = time.perf_counter()
                decided.append(_layer_plan(stats, spec, protected, rank_changes))
                seconds[number] += time.perf_counter() - begin
            if files is not None and stats.layer in self.model.architecture.layers:
                files.save(decided[0], stats.layer, {})
            return decided

        along = [visitor for visitor in (files, probe) if isinstance(visitor, LayerVisitor)]
        finishing = () if probe is None else probe.batches
        run = (self.calibration, self.progress, self.seed, accepted, along, finishing)
        for stats in statistics_with_heads(self.model, specs[0].heads, needs, *run):
            by_layer.append(ranks().broadcast(partial(decide, stats)))
            del stats  # free the samples with the layer
        if files is not None:
            files.flush()
        planned = []
        for number, spec in enumerate(specs):
            layers = []
            for layer in (plans[number] for plans in by_layer):
                if layer.module in accepted:  # before anything is made smaller
                    layer = replace(
                        layer, figures={**layer.figures, ACCEPTANCE: accepted[layer.module]}
                    )
                layers.append(layer)
            planned.append(Planned(self._plan(spec, layers, protected), seconds[number]))
        return planned

    def plan_sequentially(
        self,
        spec: PruneSpec,
        correction: Correct | None = None,
        protected: Protected | None = None,
        files: CutFiles | None = None,
    ) -> ExpertPlan:
        """Plan every layer on the output of the compressed, and with a `correction` corrected,
        earlier layers.

        `files` keeps the cut layers, so that carrying the plan out need not repeat the pass. A
        strategy that needs an attribution sees that of the base."""
        assert self.calibration is not None
        rank_changes = self.rank_changes([spec.strategy])

        def decide(stats: LayerStatistics) -> LayerPlan:
            plan: LayerPlan = ranks().broadcast(
                lambda: _layer_plan(stats, spec, protected, rank_changes)
            )
            return replace(plan, upstream=COMPRESSED)

        needs = spec.strategy.needs | self._modalities
        work = LayerWork(
            spec.experts,
            decide,
            needs,
            correction or UNCORRECTED,
            self.seed,
            head_experts=spec.head_experts,
        )
        run = (self.model, work, self.calibration, self.progress, files)
        compared: AbstractContextManager[HeldoutProbe | None] = nullcontext()
        if files is not None and correction is not None and not spec.heads:
            compared = comparing(self.model, files, self.calibration.heldout_batches)
        with compared as probe:
            layers = compress_sequentially(*run, probe, "plan in order", spec.heads)
        return self._plan(spec, layers, protected)

    @property
    def _modalities(self) -> frozenset[str]:
        """Return the statistics that tell text from media, if the model sees media."""
        towers = [
            getattr(self.model.config, name, None) for name in ("vision_config", "audio_config")
        ]
        return frozenset({MODALITIES} if self.calibration is not None and any(towers) else ())

    def _plan(
        self, spec: PruneSpec, layers: Iterable[LayerPlan], protected: Protected | None
    ) -> ExpertPlan:
        model = self.model
        order = {layer.name: position for position, layer in enumerate(model.architecture.layers)}
        ordered = sorted(layers, key=lambda layer: order.get(layer.module, len(order)))
        batches = () if self.calibration is None else self.calibration.batches
        has_media = any(isinstance(batch, Inputs) for batch in batches)
        if self._modalities and not has_media and not self._measured.get(WARNED):
            self._measured[WARNED] = True
            experts = sum(layer.experts for layer in ordered)
            unreached = sum(layer.figures.get(UNREACHED.format("text"), 0) for layer in ordered)
            logger.warning(
                "%s sees pictures or sound, and is calibrated on text alone, which never reached "
                "%d of its %d experts (%.1f %%); add a source with pictures to --calibration",
                model.source.label,
                unreached,
                experts,
                100 * unreached / experts,
            )
        mtp: Literal["keep", "drop"] | None = "keep" if spec.heads else None
        with suppress(CompressionError):  # of heads that are not understood
            if not spec.heads and names_of(model):
                mtp = "drop"
        return replace(
            ExpertPlan.of(ordered, spec.head_experts if spec.heads else None),
            protected=listed(protected),
            top_k=model.top_k,
            mtp=mtp,
        )


def _layer_plan(
    stats: LayerStatistics,
    spec: PruneSpec,
    protected: Protected | None,
    rank_changes: Mapping[str, Tensor],
) -> LayerPlan:
    """Return the layer as the strategy plans it; a third party's may not heed protected experts."""
    guarded = (protected or {}).get(stats.layer.name, frozenset())
    if spec.strategy.needs & ATTRIBUTED:  # no router comes after a multi-token-prediction head's
        none = torch.zeros(stats.layer.experts, dtype=torch.float64)
        stats = stats.adding(rank_change=rank_changes.get(stats.layer.name, none))
    is_head = any(head.named.name == stats.layer.name for head in spec.heads)
    keep = spec.head_experts if is_head else spec.experts
    plan = spec.strategy.plan_layer(stats, keep, guarded)
    if MODALITIES in stats.values:
        # of text and of media: the share of the choices of kept experts, and the number of experts
        # that no token chose
        kept = [expert for group in plan.groups for expert in group.members]
        figures = dict(plan.figures)
        for name, counts in zip(("text", "media"), stats.modality_count.T, strict=True):
            total = counts.sum()
            if name == "text" or total > 0:
                figures[UNREACHED.format(name)] = int((counts == 0).sum())
            if total > 0:
                figures[f"kept_share_of_{name}"] = round(float(counts[kept].sum() / total), 6)
        plan = replace(plan, figures=figures)
    changed = touched(plan, guarded)
    if changed:
        raise CompressionError(
            f"{plan.module}: strategy {spec.strategy.name!r} does not keep protected expert "
            f"{changed[0]} as it is; choose another strategy or leave out --protect"
        )
    return plan


def spec_of(prune: Prune, model: OpenModel, parts: int = 1) -> PruneSpec:
    """Check count, protected experts and strategy: every refusal that needs no data. `experts`
    count `parts` each."""
    strategy = load_strategy(prune.strategy, prune.options).balancing(prune.balance)
    layers = model.architecture.layers
    if strategy.check is not None:
        heads = [names.number for names in names_of(model)]
        strategy.check([*(layer.index for layer in layers), *heads], strategy.options)
    experts = prune.count(layers, parts)
    given_protected(prune.protect, layers, experts)
    return PruneSpec(strategy, experts, *chosen_heads(model, prune.mtp, experts))


def protected_experts(protect: Any, keep: int, planner: Planner) -> Protected:
    """The experts that a list names, or as many of those that a protector finds on the calibration
    data as fit."""
    layers = planner.model.architecture.layers
    protector = protector_of(protect)
    if protector is None:
        return given_protected(protect, layers, keep)
    experts = protector(planner)  # by all processes together
    return ranks().broadcast(lambda: strongest_that_fit(experts, layers, keep, protect))
