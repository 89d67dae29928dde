"""Layers in order, each on what the compressed earlier layers make of the calibration text.

For each layer: run the original on the batches that have come as far as it, plan it (or take the plan that there is),
cut it, correct it toward what the original put out, and let the batches pass the smaller layer. One pass, one layer in
memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from compressor.data.batches import Calibration
from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.evaluation.evaluator import Riding
from compressor.memory import give_back
from compressor.model.architecture import MoeLayer, build_meta
from compressor.model.experts import Watch
from compressor.model.loading import parent_and_name, set_tensor
from compressor.model.opened import OpenModel, pick_dtype, refuse_shared_experts
from compressor.model.streaming import Forward, LayerVisitor, Pass, Replay
from compressor.progress import Progress
from compressor.recipe.plan import LayerPlan
from compressor.statistics.statistics import LayerStatistics, Observers, Routers, smaller_routers
from compressor.steps.correct.cut_layer import Recording
from compressor.steps.correct.refit import correct_layer
from compressor.steps.correct.step import Correct
from compressor.surgery.cutting import CutFiles, cut_keys, cut_layers

Decide = Callable[[LayerStatistics], LayerPlan]
Visited = Callable[[MoeLayer, torch.Tensor, int], None]  # told the visits [N] of a smaller layer, on so many tokens
UNCORRECTED = Correct(method="none")
COMPRESSED = "compressed"  # what the earlier layers were while a layer was planned


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What is done to every layer of a pass in order: `decide` plans it, seeing the statistics that it `needs`.

    `measure` has the error of layers measured that are not corrected. `visited` is told whom the batches that pass the
    smaller layers visit there, held-out ones excepted.
    """

    experts: int  # kept in each
    decide: Decide
    needs: frozenset[str] = frozenset()
    correction: Correct = UNCORRECTED
    seed: int = 0
    measure: bool = False
    visited: Visited | None = None


class ShadowModel:
    """The stock model with fewer experts on meta; one decoder layer of it at a time is filled and takes over."""

    def __init__(self, model: OpenModel, experts: int) -> None:
        self.partial = model.partial
        self.model = build_meta(model.architecture.with_experts(experts), model.partial.dtype)
        self.filled: str | None = None  # the layer that is
        self.empty = {key: value.detach() for key, value in self.model.state_dict().items()}

    def fill(self, unit: str, cut: Mapping[str, torch.Tensor]) -> None:
        """Fill a layer with the cut tensors and, for the rest, the original's own, which must be loaded.

        Tensors are shared, not copied.
        """
        original = self.partial.model.get_submodule(unit)
        for key in self.partial.keys_under(unit):
            module, name = parent_and_name(self.partial.model, key)
            set_tensor(self.model, key, cut[key] if key in cut else getattr(module, name))
        for name, part in self.model.get_submodule(unit).named_modules():
            for key in part._non_persistent_buffers_set:
                part._buffers[key] = original.get_submodule(name)._buffers[key]
        self.filled = unit

    def empty_again(self) -> None:
        """Empty the layer that is filled, if one is."""
        if self.filled is not None:
            for key in self.partial.keys_under(self.filled):
                set_tensor(self.model, key, self.empty[key])
        self.filled = None


@dataclass(slots=True)
class RecordingVisitor(LayerVisitor):
    """Has the batches of a pass recorded in the layers that they come to, before they pass what replaces these."""

    model: OpenModel
    calibration: Calibration | None
    active: list[Observers | Recording] = field(default_factory=list, kw_only=True)  # what watches a replay's batches

    def entering(self, batch: int) -> None:
        for watching in self.active:
            watching.enter(batch)

    def record(
        self, layers: Sequence[MoeLayer], replay: Replay, observers: Sequence[Observers] = ()
    ) -> list[Recording]:
        """Show the batches to the observers, and return what the loaded layers make of them."""
        assert self.calibration is not None
        recordings = [Recording(layer, self.calibration.tokens, self.calibration.heldout) for layer in layers]
        self.active = [*observers, *recordings]
        for recording in recordings:
            recording.attach(self.model.partial.model)
        if self.active:
            replay(range(len(self.calibration.batches)))
        for recording in recordings:
            recording.detach()
        self.active = []
        return recordings


@dataclass(slots=True)
class _InOrder(RecordingVisitor):
    """One layer at a time of a pass in order."""

    work: LayerWork
    files: CutFiles | None
    plans: dict[str, LayerPlan] = field(default_factory=dict)
    shadow: ShadowModel = field(init=False)
    routers: Routers = field(init=False)
    counting: list[tuple[Watch, torch.Tensor]] = field(default_factory=list)  # of whom the batches visit, by expert

    def __post_init__(self) -> None:
        self.shadow, self.routers = ShadowModel(self.model, self.work.experts), smaller_routers(self.model.architecture)

    def before(self, unit: str, replay: Replay) -> None:
        """Have the smaller layer take over the loaded one."""
        layers = self.at.moe_layers
        if layers and not self._from_files(unit, layers):
            self._compress(unit, layers, replay)
        if self.work.visited is not None and self.calibration is not None:
            self.counting = [self._counting(layer, self.calibration) for layer in layers]

    def _counting(self, layer: MoeLayer, data: Calibration) -> tuple[Watch, torch.Tensor]:
        """Count who visits whom in a smaller layer, held-out batches excepted."""
        counts = torch.zeros(self.work.experts, dtype=torch.int64)

        def count(hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> None:
            if self.at.batch < len(data.batches) and self.at.batch not in data.heldout:
                counts.add_(torch.bincount(index[weights != 0], minlength=len(counts)).cpu())

        return Watch(self.shadow.model, layer, on_experts=count).attach(), counts

    def replaced(self, unit: str, own: Forward) -> Forward:
        return own if unit != self.shadow.filled else self.shadow.model.get_submodule(unit).forward

    def passed(self, unit: str) -> None:
        for watch, counts in self.counting:
            watch.detach()
            assert self.work.visited is not None and self.calibration is not None
            fit = (own for number, own in enumerate(self.calibration.batches) if number not in self.calibration.heldout)
            self.work.visited(watch.layer, here().all_reduce(counts), sum(batch.numel() for batch in fit))
        self.counting = []
        self.shadow.empty_again()

    def _from_files(self, unit: str, layers: Sequence[MoeLayer]) -> bool:
        """Take what an earlier run has cut, if it has cut all of these layers."""
        if self.files is None:
            return False
        found = {layer.name: plan for layer in layers if (plan := self.files.plan(layer)) is not None}
        if len(found) < here().broadcast(lambda: len(found)):
            raise CompressionError(f"rank {here().rank} does not see {unit} in {self.files.folder}, which rank 0 sees")
        if not here().broadcast(lambda: len(found) == len(layers)):
            return False
        self.plans.update(found)
        device = self.model.partial.device
        cut = {key: value.to(device) for layer in layers for key, value in self.files.tensors(layer).items()}
        self._take_over(unit, layers, cut)
        return True

    def _compress(self, unit: str, layers: Sequence[MoeLayer], replay: Replay) -> None:
        """Plan, cut, correct and keep the layers of a unit."""
        statistics, recordings = self._watched(layers, replay)
        for layer, seen in zip(layers, statistics, strict=True):
            self.plans[layer.name] = self.work.decide(seen)
        del statistics
        self._take_over(unit, layers, cut_layers(self.model.partial.model, layers, self.plans))
        for layer, recording in zip(layers, recordings, strict=False):
            give_back()
            writing = pick_dtype("auto", self.model.config, self.model.checkpoint)
            figures = correct_layer(self.shadow.model, layer, recording, self.work.correction, self.work.seed, writing)
            plan = self.plans[layer.name]
            self.plans[layer.name] = replace(plan, figures={**plan.figures, "correction": figures})
        give_back()
        state = self.shadow.model.state_dict()
        for layer in layers:
            made = {key: state[key] for key in cut_keys(layer)}
            if not here().is_alone:
                sums = [float(value.sum(dtype=torch.float64)) for value in made.values()]
                here().assert_same_on_all(sums, f"result for {layer.name}")
            if self.files is not None and here().takes_turn(layer.index):
                self.files.save(self.plans[layer.name], layer, made)

    def _take_over(self, unit: str, layers: Sequence[MoeLayer], cut: Mapping[str, torch.Tensor]) -> None:
        """Fill the smaller layer, and give the original experts' memory back."""
        self.shadow.fill(unit, cut)
        for layer in layers:
            self.model.partial.release(layer.name)

    def _watched(self, layers: Sequence[MoeLayer], replay: Replay) -> tuple[list[LayerStatistics], list[Recording]]:
        """What the original layer shows on the calibration batches: statistics, and what to correct toward."""
        work, calibration = self.work, self.calibration
        bare = [LayerStatistics(layer, seed=work.seed) for layer in layers]
        if calibration is None:
            return bare, []
        observers = [
            Observers(self.model, layer, work.needs, calibration, self.routers, work.seed)
            for layer in (layers if work.needs else ())
        ]
        recordings = self.record(layers if work.measure or work.correction.wanted else (), replay, observers)
        return [watching.finish() for watching in observers] or bare, recordings


def compress_in_order(
    model: OpenModel,
    work: LayerWork,
    calibration: Calibration | None,
    progress: Progress,
    files: CutFiles | None = None,
    riding: Riding | None = None,
    phase: str = "correct",
    end: LayerVisitor | None = None,
) -> tuple[LayerPlan, ...]:
    """Plan, cut and correct every layer in order; returns the plans with the corrections' figures.

    `files` keeps the cut layers, and those that it has are not made again. An evaluator's batches in `riding` run
    through the compressed model to its end; so do the calibration's for the sake of a visitor `end`.
    """
    refuse_shared_experts(model)
    batches = () if calibration is None else calibration.batches
    state = _InOrder(model, calibration, work, files)
    evaluation = [] if riding is None else riding.batches
    if riding is not None:
        riding.first = len(batches)
    one = Pass(model, batches, progress, phase, work.seed, to_end=end is not None, evaluation=evaluation, shared=True)
    one.run(*(visitor for visitor in (state, riding, end) if visitor is not None))
    here().barrier()  # until all layers are kept
    return tuple(state.plans[layer.name] for layer in model.architecture.layers)
