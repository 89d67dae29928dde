"""Making a plan: one pass over the layers collects what the strategy needs, and each layer is planned as it passes."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from compressor.attribution import measure
from compressor.attribution.figures import Attribution
from compressor.data.batches import Calibration
from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.model.opened import OpenModel
from compressor.mtp.head import Head
from compressor.progress import Progress
from compressor.recipe.plan import CompressionPlan, LayerPlan, Source, touched
from compressor.recipe.registry import Strategy
from compressor.statistics.statistics import LayerStatistics, needs_attribution
from compressor.steps.correct.heads import HeadLine, compress_with_heads
from compressor.steps.correct.in_order import COMPRESSED, UNCORRECTED, LayerWork
from compressor.steps.correct.step import Correct
from compressor.steps.prune.protecting import Protected, listed
from compressor.surgery.cutting import CutFiles


@dataclass(frozen=True, slots=True)
class Wish:
    """One plan to make, everything checked that needs no data: what a request comes to on a model."""

    strategy: Strategy
    experts: int  # to keep in every layer
    options: Mapping[str, Any]
    heads: tuple[Head, ...] = ()  # multi-token-prediction heads that are planned along


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, the number of its wish, the seconds that deciding it took, and the source it is for, if for one alone."""

    plan: CompressionPlan
    wish: int
    seconds: float
    source: str | None = None
    calibration: Calibration | None = None  # what it was planned on


_Key = tuple[int, int]  # number of the wish, and of the source (-1: all)


@dataclass(slots=True)
class Planner:
    """Plans a model on text. Routing attribution is run when it is first needed, once for all plans.

    The attribution is that of the original model on the calibration's tokens, without what is held out, all counting
    alike. It stands for every plan: those made in order, and those of each source alone. Ranks share its batches.
    """

    model: OpenModel
    calibration: Calibration | None
    progress: Progress
    seed: int = 0
    _attribution: Attribution | None = None

    def attribution(self) -> Attribution:
        """The attribution; raises `CompressionError` where there is no text or the model cannot be attributed.

        All ranks ask for it together, and it is the same at all of them.
        """
        if self.calibration is None:
            raise CompressionError("routing attribution needs calibration data; pass --calibration")
        if self._attribution is None:
            fit = fit_batches(self.calibration)
            self._attribution = measure.attribute(self.model, fit, self.progress, self.seed)
        return self._attribution

    def rank_changes(self, strategies: Sequence[Strategy]) -> dict[str, Tensor]:
        """AARV summed over the later routers, [E] float64, by layer; nothing if none of the strategies needs it."""
        name = next((each.name for each in strategies if needs_attribution(each.needs)), None)
        if name is None:
            return {}
        try:
            senders = self.attribution().of_kind("expert")
        except CompressionError as error:
            raise CompressionError(
                f"strategy {name!r} needs routing attribution, which others do not: {error}"
            ) from error
        layers = self.model.architecture.layers
        changes = {layer.name: torch.zeros(layer.experts, dtype=torch.float64) for layer in layers}
        for sender in senders:
            assert sender.number is not None
            changes[sender.module][sender.number] = sender.total_rank_change
        return dict(here().broadcast_tensors(lambda: changes))

    def plans(
        self,
        wishes: Sequence[Wish],
        protected: Protected | None = None,
        per_source: bool = False,
        heads: Sequence[Head] = (),
    ) -> list[Planned]:
        """Several plans from one pass over the layers; nothing is written.

        `protected` experts, by layer name, stay as they are. `heads` are planned after the model's own layers. With
        `per_source` each calibration source gets a plan of its own after the one for all.
        """
        calibration, rank_changes = self.calibration, self.rank_changes([wish.strategy for wish in wishes])
        needs = frozenset[str]().union(*(wish.strategy.needs for wish in wishes))
        layers: dict[_Key, list[LayerPlan]] = {}
        seconds: dict[_Key, float] = {}
        line = HeadLine(self.model, heads, calibration)
        for stats in line.statistics(needs, self.progress, self.seed, per_source):

            def each(stats: LayerStatistics = stats) -> Iterator[tuple[_Key, LayerPlan]]:
                for number, wish in enumerate(wishes):
                    for source, seen in enumerate((stats, *stats.by_source), start=-1):
                        begin = time.perf_counter()
                        yield (number, source), _layer_plan(seen, wish, protected, rank_changes)
                        spent = time.perf_counter() - begin
                        seconds[number, source] = seconds.get((number, source), 0.0) + spent

            for key, made in decided(each):
                layers.setdefault(key, []).append(made)
            del stats, each  # samples need not outlive the layer
        found = []
        for (number, source), plans in sorted(layers.items()):
            data = calibration if source < 0 or calibration is None else calibration.only(source)
            name = None if source < 0 or calibration is None else calibration.source_names[source]
            plan = line.told(self._plan(wishes[number], data, plans, protected))
            found.append(Planned(plan, number, seconds.get((number, source), 0.0), name, data))
        return found

    def plan_in_order(
        self,
        wish: Wish,
        correction: Correct | None = None,
        protected: Protected | None = None,
        files: CutFiles | None = None,
    ) -> CompressionPlan:
        """Plan every layer on what the compressed, and if so asked corrected, earlier layers put out.

        `files` keeps the cut layers, so that carrying the plan out need not repeat the pass. A strategy that needs an
        attribution sees that of the original model.
        """
        assert self.calibration is not None
        rank_changes = self.rank_changes([wish.strategy])

        def decide(stats: LayerStatistics) -> LayerPlan:
            made = decided(lambda: [((0, -1), _layer_plan(stats, wish, protected, rank_changes))])
            return replace(made[0][1], upstream=COMPRESSED)

        work = LayerWork(wish.experts, decide, wish.strategy.needs, correction or UNCORRECTED, self.seed)
        layers = compress_with_heads(
            self.model, wish.heads, work, self.calibration, self.progress, files, "plan in order"
        )
        return replace(self._plan(wish, self.calibration, layers, protected), sequential=True)

    def _plan(
        self, wish: Wish, calibration: Calibration | None, layers: Iterable[LayerPlan], protected: Protected | None
    ) -> CompressionPlan:
        model = self.model
        order = {layer.name: position for position, layer in enumerate(model.architecture.layers)}
        return CompressionPlan(
            source=Source.of(model),
            experts=wish.experts,
            strategy=wish.strategy.name,
            options=dict(wish.options),
            calibration=None if calibration is None else calibration.identity,
            layers=tuple(sorted(layers, key=lambda layer: order.get(layer.module, len(order)))),
            seed=self.seed,
            protected=listed(protected),
            split=model.split,
            top_k=model.top_k,
        )


def fit_batches(calibration: Calibration) -> Calibration:
    """The calibration without what is held out, which nothing that decides a plan may see."""
    return Calibration(
        tuple(calibration.batches[number] for number in calibration.fit),
        calibration.identity,
        sources=tuple(calibration.source_of(number) for number in calibration.fit),
        weights=calibration.weights,
    )


def _layer_plan(
    stats: LayerStatistics, wish: Wish, protected: Protected | None, rank_changes: Mapping[str, Tensor]
) -> LayerPlan:
    """The layer as the strategy plans it; a third party's may not heed protected experts."""
    guarded = (protected or {}).get(stats.layer.name, frozenset())
    if needs_attribution(wish.strategy.needs):  # no router comes after a multi-token-prediction head's
        none = torch.zeros(stats.layer.experts, dtype=torch.float64)
        stats = stats.adding(rank_change=rank_changes.get(stats.layer.name, none))
    made = wish.strategy.plan_layer(stats, wish.experts, guarded)
    if changed := touched(made, guarded):
        raise CompressionError(
            f"{made.module}: strategy {wish.strategy.name!r} does not keep protected expert {changed[0]} as it is; "
            "choose another strategy or leave out --protect"
        )
    return made


def decided(each: Callable[[], Iterable[tuple[_Key, LayerPlan]]]) -> list[tuple[_Key, LayerPlan]]:
    """The plans of a layer as the first of several ranks makes them, each with its key."""
    made: list[tuple[_Key, LayerPlan]] = here().broadcast(lambda: list(each()))
    return made
