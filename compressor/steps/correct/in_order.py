"""Layers in order, each on what the compressed earlier layers make of the calibration text.

For each layer: run the base on the batches that have come as far as it, plan it (or take the plan that there is), cut
it, correct it toward the base's output, and let the batches pass the smaller layer. One pass, one layer in memory.

Each layer's own guard lowers that layer's error, and all together can still take the model further from its base. So
corrected and uncorrected layers, side by side, are compared at the model's output: the corrected ones are the default,
and undoing them is the change that must be a gain.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.data.batches import Calibration
from compressor.devices import as_float64
from compressor.distributed import ranks
from compressor.errors import CompressionError
from compressor.evaluation.evaluator import FEWEST, Difference, Evaluator, Riding, Variants
from compressor.files import write_whole
from compressor.memory import give_back
from compressor.model.architecture import build_meta, head_of
from compressor.model.experts import Watch
from compressor.model.loading import parent_and_name, set_tensor
from compressor.model.moe_layer import MoeLayer, layers_by_unit
from compressor.model.mtp import Head, kept_heads, legs_of
from compressor.model.opened import OpenModel, pick_dtype, refuse_shared_experts
from compressor.model.streaming import (
    DEFAULT_ACTIVATION_BUDGET,
    Forward,
    LayerVisitor,
    Pass,
    Replay,
    Spill,
    hidden_of,
)
from compressor.progress import Progress
from compressor.recipe.plan import ExpertPlan, LayerPlan
from compressor.records import read_as, read_object
from compressor.statistics.statistics import LayerStatistics, Observers, Routers, smaller_routers
from compressor.steps.correct.cut_layer import Recording
from compressor.steps.correct.options import Correct
from compressor.steps.correct.refit import correct_layer
from compressor.steps.correct.streams import Originals
from compressor.steps.cutting import CutFiles, cut_keys, cut_layers

Decide = Callable[[LayerStatistics], LayerPlan]
OnRouted = Callable[[MoeLayer, Tensor, int], None]  # a smaller layer, its experts' routed tokens [N], of how many
UNCORRECTED = Correct(method="none")
COMPRESSED = "compressed"  # what the earlier layers were while a layer was planned
EVALUATED = "evaluated.json"  # beside the cut layers: what was measured, so that a run that goes on need not again


@dataclass(frozen=True, slots=True)
class LayerWork:
    """What is done to every layer of a pass in order: `decide` plans it, seeing the statistics that it `needs`.

    `measure` has the error of layers measured that are not corrected. `on_routed` is called with the routed tokens of
    each smaller layer, without those of held-out batches.
    """

    experts: int  # kept in each
    decide: Decide
    needs: frozenset[str] = frozenset()
    correction: Correct = UNCORRECTED
    seed: int = 0
    measure: bool = False
    on_routed: OnRouted | None = None

    def of_head(self, head: Head) -> "LayerWork":
        """The same work on a head's own model, with the layer named as plans name it."""
        on_routed = self.on_routed
        return replace(
            self,
            decide=lambda stats: self.decide(replace(stats, layer=head.named)),
            correction=self.correction.model_copy(update={"toward": 0.0}),  # there are no hidden states of the base's
            on_routed=None if on_routed is None else lambda layer, *routed: on_routed(head.named, *routed),
        )


class ShadowModel:
    """The stock model with fewer experts on meta; one decoder layer of it at a time is filled and takes over."""

    def __init__(self, model: OpenModel, experts: int) -> None:
        self.partial = model.partial
        self.model = build_meta(model.architecture.with_experts(experts), model.partial.dtype)
        self.filled: str | None = None  # the layer that is
        self.empty = {key: value.detach() for key, value in self.model.state_dict().items()}

    def fill(self, unit: str, cut: Mapping[str, Tensor]) -> None:
        """Fill a layer with the cut tensors and, for the rest, the base's own, which must be loaded.

        Tensors are shared, not copied.
        """
        base = self.partial.model.get_submodule(unit)
        for key in self.partial.keys_under(unit):
            module, name = parent_and_name(self.partial.model, key)
            set_tensor(self.model, key, cut[key] if key in cut else getattr(module, name))
        for name, part in self.model.get_submodule(unit).named_modules():
            for key in part._non_persistent_buffers_set:
                part._buffers[key] = base.get_submodule(name)._buffers[key]
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
    correction: Correct = field(default=UNCORRECTED, kw_only=True)
    originals: Originals | None = field(default=None, kw_only=True)

    def on_batch_start(self, batch: int) -> None:
        for watching in self.active:
            watching.enter(batch)

    def on_layer_output(self, output: Any) -> None:
        hidden = hidden_of(output)
        for watching in self.active:
            if isinstance(watching, Recording) and self.originals is not None:
                watching.came_out(hidden, self.originals.shift(self.at.batch, hidden))
            else:
                watching.came_out(hidden)

    def record(
        self, layers: Sequence[MoeLayer], replay: Replay, observers: Sequence[Observers] = ()
    ) -> list[Recording]:
        """Show the batches to the observers, and return what the loaded layers make of them."""
        assert self.calibration is not None
        text = self.calibration
        recordings = [Recording(layer, text.tokens, text.heldout, text.emphasis) for layer in layers]
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
    work: LayerWork
    files: CutFiles | None
    plans: dict[str, LayerPlan] = field(default_factory=dict)
    shadow: ShadowModel = field(init=False)
    routers: Routers = field(init=False)
    counting: list[tuple[Watch, Tensor]] = field(default_factory=list)  # of routed tokens, by expert

    def __post_init__(self) -> None:
        self.shadow, self.routers = ShadowModel(self.model, self.work.experts), smaller_routers(self.model.architecture)

    def before_layer(self, unit: str, replay: Replay) -> None:
        """Have the smaller layer take over the loaded one."""
        layers = self.at.moe_layers
        if layers and self.originals is not None:
            self.originals.pass_layer(replay)
        if layers and not self._from_files(unit, layers):
            self._compress(unit, layers, replay)
        for layer in layers if self.work.on_routed is not None and self.calibration is not None else ():
            counts = torch.zeros(self.work.experts, dtype=torch.int64)
            self.counting.append((Watch(self.shadow.model, layer, on_experts=partial(self._count, counts)), counts))
            self.counting[-1][0].attach()

    def _count(self, counts: Tensor, hidden: Tensor, index: Tensor, weights: Tensor) -> None:
        assert self.calibration is not None
        if self.at.batch < len(self.calibration.batches) and self.at.batch not in self.calibration.heldout:
            counts.add_(torch.bincount(index[weights != 0], minlength=len(counts)).cpu())

    def wrap_forward(self, unit: str, own: Forward) -> Forward:
        return own if unit != self.shadow.filled else self.shadow.model.get_submodule(unit).forward

    def on_layer_end(self, unit: str) -> None:
        for watch, counts in self.counting:
            watch.detach()
            assert self.work.on_routed is not None and self.calibration is not None
            fit = (own for number, own in enumerate(self.calibration.batches) if number not in self.calibration.heldout)
            self.work.on_routed(watch.layer, ranks().all_reduce(counts), sum(batch.numel() for batch in fit))
        self.counting = []
        self.shadow.empty_again()

    def _from_files(self, unit: str, layers: Sequence[MoeLayer]) -> bool:
        """Take what an earlier run has cut, if it has cut all of these layers."""
        if self.files is None:
            return False
        plans = {layer.name: plan for layer in layers if (plan := self.files.plan(layer)) is not None}
        ranks().assert_same_on_all(len(plans), f"number of corrected layers of {unit} in its hidden folder")
        if len(plans) < len(layers):
            return False
        self.plans.update(plans)
        device = self.model.partial.device
        cut = {key: value.to(device) for layer in layers for key, value in self.files.tensors(layer).items()}
        self._take_over(unit, layers, cut)
        return True

    def _compress(self, unit: str, layers: Sequence[MoeLayer], replay: Replay) -> None:
        work, calibration = self.work, self.calibration
        statistics, recordings = [LayerStatistics(layer, seed=work.seed) for layer in layers], list[Recording]()
        if calibration is not None:
            observers = [
                Observers(self.model, layer, work.needs, calibration, self.routers, work.seed)
                for layer in (layers if work.needs else ())
            ]
            if self.originals is not None:
                self.originals.find_factor(layers, replay)
            recordings = self.record(layers if work.measure or work.correction.wanted else (), replay, observers)
            statistics = [watching.finish() for watching in observers] or statistics
            del observers
        for layer, seen in zip(layers, statistics, strict=True):
            self.plans[layer.name] = work.decide(seen)
        del statistics
        self._take_over(unit, layers, cut_layers(self.model.partial.model, layers, self.plans))
        for layer, recording in zip(layers, recordings, strict=False):
            give_back()
            writing = pick_dtype("auto", self.model.config, self.model.checkpoint)
            figures = correct_layer(self.shadow.model, layer, recording, work.correction, work.seed, writing)
            plan = self.plans[layer.name]
            if self.originals is not None and self.originals.share:
                figures["toward"] = self.originals.share
            self.plans[layer.name] = replace(plan, figures={**plan.figures, "correction": figures})
        give_back()
        state = self.shadow.model.state_dict()
        for layer in layers:
            tensors = {key: state[key] for key in cut_keys(layer)}
            if not ranks().is_alone:
                sums = [float(as_float64(value).sum()) for value in tensors.values()]
                ranks().assert_same_on_all(sums, f"result for {layer.name}")
            if self.files is not None and ranks().takes_turn(layer.index):
                self.files.save(self.plans[layer.name], layer, tensors)

    def _take_over(self, unit: str, layers: Sequence[MoeLayer], cut: Mapping[str, Tensor]) -> None:
        self.shadow.fill(unit, cut)
        for layer in layers:
            self.model.partial.release(layer.name)


def _compress_model(
    model: OpenModel,
    work: LayerWork,
    calibration: Calibration | None,
    progress: Progress,
    phase: str,
    files: CutFiles | None,
    riding: Riding | None = None,
    end: LayerVisitor | None = None,
) -> tuple[LayerPlan, ...]:
    """One model's layers; for the sake of a visitor `end` the batches go on to its output."""
    batches = () if calibration is None else calibration.batches
    state = _InOrder(model, calibration, work, files, correction=work.correction)
    evaluation, own, budget = [] if riding is None else riding.batches, None, DEFAULT_ACTIVATION_BUDGET
    if work.correction.wanted and work.correction.toward != 0:
        budget //= 2
        state.originals = Originals(model, len(batches), Spill(budget), work.correction.toward)
        own, batches = state.originals.own(batches, evaluation), (*batches, *batches)
    if riding is not None:
        riding.first = len(batches)
    one = Pass(
        model,
        batches,
        progress,
        phase,
        work.seed,
        to_end=end is not None,
        evaluation=evaluation,
        shared=state.originals is None,
        own=own,
        activation_budget=budget,
    )
    one.run(*(visitor for visitor in (state, state.originals, riding, end) if visitor is not None))
    ranks().barrier()  # until all layers are kept
    return tuple(state.plans[layer.name] for layer in model.architecture.layers)


def compress_in_order(
    model: OpenModel,
    work: LayerWork,
    calibration: Calibration | None,
    progress: Progress,
    files: CutFiles | None = None,
    riding: Riding | None = None,
    phase: str = "correct",
    heads: Sequence[Head] = (),
) -> tuple[LayerPlan, ...]:
    """Plan, cut and correct every layer in order; returns the plans with the corrections' figures.

    `files` keeps the cut layers, and those that it has are not made again. An evaluator's batches in `riding` run
    through the compressed model to its end. Multi-token-prediction `heads` follow, on what the smaller model outputs.
    """
    refuse_shared_experts(model)
    if not heads:
        return _compress_model(model, work, calibration, progress, phase, files, riding)
    assert calibration is not None
    plans: tuple[LayerPlan, ...] = ()
    for number, leg in enumerate(legs_of(model, heads, calibration.batches)):
        weights = tuple(own[:, number:] for own in calibration.emphasis)  # a head has the later tokens
        own, its_work, its_files = replace(calibration, batches=leg.batches, emphasis=weights), work, files
        if leg.head is not None:
            its_work, its_files = work.of_head(leg.head), None if files is None else files.of_head(number - 1)
        with leg.hooked():
            end = leg if leg.following is not None else None
            plans += _compress_model(leg.model, its_work, own, progress, phase, its_files, end=end)
    return plans


def correct(
    model: OpenModel,
    plan: ExpertPlan,
    progress: Progress,
    files: CutFiles,
    calibration: Calibration,
    correction: Correct,
    on_routed: OnRouted | None = None,
    seed: int = 0,
) -> ExpertPlan:
    """Carry out the correction of a plan, layer by layer into `files`; returns the plan with its figures.

    Layers that are in `files` already are not made again. Corrections that take the whole model further from the base
    on held-out text are undone, except beside heads, which were corrected on what the corrected layers output.
    """
    heads = kept_heads(model, [layer.module for layer in plan.layers])
    routed = list[tuple[MoeLayer, Tensor, int]]()  # reported only for what stays
    done = [files.plan(layer) for layer in model.architecture.layers]
    done += [files.of_head(number).plan(head.layer) for number, head in enumerate(heads)]
    layers = tuple(layer for layer in done if layer is not None)
    ranks().assert_same_on_all(len(layers), "number of corrected layers in its hidden folder")
    if len(layers) < len(done):
        by_name = {layer.module: layer for layer in plan.layers}
        work = LayerWork(
            plan.experts,
            lambda stats: by_name[stats.layer.name],
            correction=correction,
            seed=seed,
            on_routed=None if on_routed is None else lambda *counts: routed.append(counts),
        )
        layers = compress_in_order(model, work, calibration, progress, files, heads=heads)
    if not heads:
        corrected, layers = layers, keep_the_better(model, layers, files, calibration.heldout_batches, progress)
        routed = routed if layers == corrected else []
    if on_routed is not None:
        for counts in routed:
            on_routed(*counts)
    return replace(plan, layers=layers)


class _SideBySide(Variants):
    """Variant 0 meets the corrected layers, variant 1 the uncorrected ones, and the base's batches its own."""

    def __init__(self, model: OpenModel, files: CutFiles, plans: Mapping[str, LayerPlan]) -> None:
        experts = len(next(iter(plans.values())).groups)
        self.model, self.files, self.plans = model, files, plans
        self.smaller = ShadowModel(model, experts), ShadowModel(model, experts)

    def before_layer(self, unit: str, replay: Replay) -> None:
        if layers := self.at.moe_layers:
            device = self.model.partial.device
            corrected = {key: value.to(device) for layer in layers for key, value in self.files.tensors(layer).items()}
            self.smaller[0].fill(unit, corrected)
            self.smaller[1].fill(unit, cut_layers(self.model.partial.model, layers, self.plans))

    def wrap_forward(self, unit: str, own: Forward) -> Forward:
        if self.variant is None or not self.at.moe_layers:
            return own
        forward: Forward = self.smaller[self.variant].model.get_submodule(unit).forward
        return forward

    def on_layer_end(self, unit: str) -> None:
        for each in self.smaller:
            each.empty_again()


def compare_corrections(
    model: OpenModel, plans: Sequence[LayerPlan], files: CutFiles, evaluator: Evaluator, progress: Progress
) -> Difference:
    """What undoing the corrected tensors of all layers in `files` does to the distance from the base.

    One streamed pass, in which the base runs along unless the evaluator knows it: with a decoder layer of the base,
    both of its smaller ones are in memory.
    """
    visitor = _SideBySide(model, files, {plan.module: plan for plan in plans})
    before, after = evaluator.measure(model, visitor, 2, progress, "compare the corrections")
    return Difference.of(before.kl, after.kl)


def keep_the_better(
    model: OpenModel, plans: Sequence[LayerPlan], files: CutFiles, texts: Sequence[Tensor], progress: Progress
) -> tuple[LayerPlan, ...]:
    """The plans of all layers in `files`; where undoing the corrections is a gain, the files hold plain cuts then.

    What was measured on `texts`, token ids [B, L], is kept beside the files, and a run that was killed goes on from
    there. Of fewer than eight sequences, or without a language-model head, nothing is measured: the corrections stay.
    """
    undoing: Difference | None = ranks().broadcast(lambda: read_difference(files))
    if undoing is None:
        undoing = Difference(0.0, 0.0, 0.0, sum(map(len, texts)))
        if undoing.sequences >= FEWEST and head_of(model.partial.model) is not None:
            undoing = compare_corrections(model, plans, files, Evaluator.of(model, texts), progress)
        if ranks().is_first:
            write_whole(files.folder / EVALUATED, json.dumps(asdict(undoing)))
    if not undoing.accepted:
        return tuple(plans)
    reason = (
        f"on held-out text the whole model is {undoing.before:.4g} nats per token from its base with the corrections, "
        f"and {undoing.after:.4g} without (standard error {undoing.standard_error:.2g})"
    )
    undone = dict[str, LayerPlan]()
    for plan in plans:
        figures = dict(plan.figures.get("correction") or {})
        if "heldout_error_before" in figures:  # errors stay as they were measured
            figures["heldout_error"] = figures["heldout_error_before"]
        figures |= {"kept": "none", "reason": reason}
        undone[plan.module] = replace(plan, figures={**plan.figures, "correction": figures})
    for unit, layers in layers_by_unit(model.architecture.layers).items():
        if ranks().is_first and any(files.plan(layer) != undone[layer.name] for layer in layers):
            model.partial.load(model.partial.keys_under(unit))
            cut = cut_layers(model.partial.model, layers, undone)
            for layer in layers:
                files.save(undone[layer.name], layer, {key: cut[key] for key in cut_keys(layer)})
            model.partial.release(unit)
    ranks().barrier()  # until all layers are kept
    return tuple(undone[plan.module] for plan in plans)


def read_difference(files: CutFiles) -> Difference | None:
    """What an earlier run measured of these cut layers; None if it is not there, or cannot be read."""
    try:
        return read_as(Difference, read_object(files.folder / EVALUATED))
    except (OSError, CompressionError):
        return None
