"""Layers in order, each on the calibration text as the compressed earlier layers output it.

For each layer: run the base on the batches that have reached it, plan it (or take an existing
plan), cut it, correct it toward the base's output, and let the batches pass the smaller layer. One
pass, one layer in memory.

A guard lowers each layer's error, and all corrections together can still take the model further
from its base. So layers with and without corrections are compared side by side at the model's
output. Corrected ones are the default; undoing them must be a gain."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from compressor.data.batches import Calibration
from compressor.devices import as_float64
from compressor.distributed import ranks
from compressor.divergence.evaluator import FEWEST, Difference, Evaluator, HeldoutProbe
from compressor.errors import CompressionError
from compressor.frozen import frozen
from compressor.memory import give_back
from compressor.model.architecture import head_of
from compressor.model.constant_experts import SUFFIX, Substitutes
from compressor.model.moe_layer import MoeLayer, layers_by_decoder_layer
from compressor.model.mtp import Head, kept_heads, mtp_stages
from compressor.model.opened import OpenModel, pick_dtype, refuse_shared_experts
from compressor.model.streaming import (
    DEFAULT_ACTIVATION_BUDGET,
    ActivationOffload,
    Forward,
    LayerVisitor,
    Pass,
    Replay,
    hidden_of,
)
from compressor.model.substitution import SmallerModel, Substitution
from compressor.progress import Progress
from compressor.recipe.plan import ExpertPlan, LayerPlan
from compressor.statistics.statistics import (
    CalibrationCollector,
    LayerStatistics,
    Routers,
    smaller_routers,
)
from compressor.steps.correct.cut_layer import Recording, RefittedConstants
from compressor.steps.correct.options import Correct
from compressor.steps.correct.refit import correct_layer
from compressor.steps.cutting import CutFiles, Tensors, cut_keys, cut_layers
from compressor.steps.step import Requirements
from compressor.tensor_cache import read_metadata, save_tensors

Decide = Callable[[LayerStatistics], LayerPlan]
HIDDEN_COPIES = 4  # of a layer: inputs and outputs as it was, and as it is
BASE_COPIES = 2  # more, toward the base's own hidden states
UNCORRECTED = Correct(method="none")
COMPRESSED = "compressed"  # what the earlier layers were while a layer was planned
HELDOUT_BUDGET = 2**28  # bytes of outputs that wait behind a layer
CORRECTED, UNDONE = range(2)  # variants of a comparison
# beside the cut layers: the measurement, for a run that resumes this one
EVALUATED = "evaluated.safetensors"
TOWARD = 0.5  # the default share of the way to the base's own hidden states
BENT = 0.25  # share by which twice an output may move the hidden states otherwise than twice as far


class EarlyBatches(LayerVisitor):
    """Batches that pass a layer before it has its final form, in a replay, and wait behind it for
    the others."""

    def __init__(self, offload: ActivationOffload) -> None:
        self.offload = offload
        self.outputs: dict[int, Any] = {}  # of the loaded layer, by batch
        self.passing = False

    def pass_early(
        self, replay: Replay, numbers: Iterable[int], layer_forward: Forward | None = None
    ) -> None:
        """Have these batches pass the loaded layer as it is, or another forward."""
        self.passing = True
        replay(numbers, layer_forward)
        self.passing = False

    def on_layer_output(self, output: Any) -> None:
        if self.passing:
            self.outputs[self.at.batch] = output
            self.offload.keep(self.at.batch, hidden_of(output))

    def wrap_forward(self, decoder_layer: str, layer_forward: Forward) -> Forward:
        """Return the finished output of a batch that has passed the layer already."""
        if self.at.batch not in self.outputs:
            return layer_forward
        self.offload.forget(self.at.batch)
        output = self.outputs.pop(self.at.batch)
        return lambda *args, **kwargs: output


class BaseStream(EarlyBatches):
    """Batches that pass the base's own layers, numbered behind `count` others of the same text in
    the same order."""

    def __init__(
        self, model: OpenModel, count: int, offload: ActivationOffload, toward: float | None
    ) -> None:
        super().__init__(offload)
        self.model = model
        self.count = count
        # requested share of the way to them; None: the default, if it is defined
        self.toward = toward
        self.last = torch.zeros(0)  # hidden states that came out of a layer
        self.factor = 1.0  # of an expert's output, where it joins the hidden states
        self.share = 0.0  # of the way that the loaded layer goes

    def on_layer_output(self, output: Any) -> None:
        self.last = hidden_of(output)
        super().on_layer_output(output)

    def shift(self, batch: int, hidden: Tensor) -> Tensor | None:
        """Return how far experts' outputs move toward the base's hidden states, [B, L, H] alike;
        None if not at all."""
        if not self.share:
            return None
        return self.share * (
            (hidden_of(self.outputs[batch + self.count]).to(hidden) - hidden) / self.factor
        )

    def find_factor(self, layers: Sequence[MoeLayer], replay: Replay) -> None:
        """Find the factor by which the loaded layer's experts' output is multiplied where it joins
        the hidden states.

        Where it joins them in another way, such as through a norm, or beside that of others, the
        layer's share is 0; raises `CompressionError` where another is asked for."""
        layer, *others = layers
        experts = self.model.partial.model.get_submodule(layer.name)
        sums = torch.zeros(4, dtype=torch.float64)
        outputs = []

        def scaled(scale: float, module: Any, args: Any, value: Tensor) -> Tensor:
            outputs.append(as_float64(value.detach()).flatten())
            return value * scale

        for number in sorted(self.outputs)[:1]:
            hidden = []
            for scale in (0.0, 2.0):
                with experts.register_forward_hook(partial(scaled, scale)):
                    replay([number])
                hidden.append(as_float64(self.last).flatten())
            hidden.append(as_float64(hidden_of(self.outputs[number])).flatten().to(hidden[0]))
            output = outputs[-1] if outputs else torch.zeros(0)
            twice = hidden[1] - hidden[0]
            once = hidden[2] - hidden[0]
            if not others and output.numel() == once.numel():
                bent = (twice - 2 * once).square().sum()
                sums += torch.stack([once @ output, output @ output, once @ once, bent]).cpu()
            else:
                sums[3] = torch.inf
        along, size, moved, bent = ranks().all_reduce(sums).tolist()
        unknown = bent > BENT**2 * moved
        if unknown and self.toward is not None:
            raise CompressionError(
                f"{layer.name}: its experts' output is changed before it joins the hidden states, "
                "so the target for those is unknown; leave out correct.toward"
            )
        share = TOWARD if self.toward is None else self.toward
        self.share = 0.0 if unknown else share
        self.factor = along / size if along and size else 1.0


@frozen
class LayerWork:
    """The work on every layer of a pass in order: `decide` plans it, seeing the statistics that it
    `needs`.

    `measure` has the error of layers measured that are not corrected. With `constants` only the
    layers that have some change, and their routers stay whole."""

    experts: int | None  # kept; None: as the constants say
    decide: Decide
    needs: frozenset[str] = frozenset()
    correction: Correct = UNCORRECTED
    seed: int = 0
    measure: bool = False
    constants: Mapping[str, Substitutes] | None = None  # by experts module
    head_experts: int | None = None  # kept in heads; None: as many as in other layers

    def of_head(self, head: Head) -> "LayerWork":
        """Return the same work on a head's own model, with the layer named as plans name it."""
        return replace(
            self,
            experts=self.head_experts or self.experts,
            decide=lambda stats: self.decide(replace(stats, layer=head.named)),
            # a head has no hidden states of the base
            correction=self.correction.model_copy(update={"toward": 0.0}),
        )


@dataclass
class _InOrder(LayerVisitor):
    """Plans and refits each layer on the recorded batches of a pass, then lets them pass the
    smaller layer.

    A `probe`'s held-out batches of the base pass the base's own layers, and those without
    corrections the layers as they are cut."""

    model: OpenModel
    calibration: Calibration  # possibly without batches
    work: LayerWork
    files: CutFiles | None
    progress: Progress
    probe: HeldoutProbe | None = None
    base_stream: BaseStream | None = None
    early: EarlyBatches = field(
        default_factory=lambda: EarlyBatches(ActivationOffload(HELDOUT_BUDGET))
    )
    plans: dict[str, LayerPlan] = field(default_factory=dict)
    # while batches are replayed
    active: list[CalibrationCollector | Recording] = field(default_factory=list)
    smaller: SmallerModel = field(init=False)
    routers: Routers = field(init=False)

    def __post_init__(self) -> None:
        self.smaller = SmallerModel(self.model, self.work.experts)
        self.routers = smaller_routers(self.model.architecture)

    def on_batch_start(self, batch: int) -> None:
        for watching in self.active:
            watching.enter(batch)

    def on_layer_output(self, output: Any) -> None:
        hidden = hidden_of(output)
        for watching in self.active:
            if isinstance(watching, Recording) and self.base_stream is not None:
                watching.on_layer_output(hidden, self.base_stream.shift(self.at.batch, hidden))
            else:
                watching.on_layer_output(hidden)

    def before_layer(self, decoder_layer: str, replay: Replay) -> None:
        """Have the smaller layer take over the loaded one."""
        layers = self.at.moe_layers
        constants = self.work.constants
        if constants is not None:
            layers = [layer for layer in layers if layer.name in constants]
        if not layers:
            return
        base = self.base_stream
        if base is not None:
            base.pass_early(replay, range(base.count, 2 * base.count))
        self._pass_early(replay, None)
        files = self.files
        stored: list[Any] = []
        if files is not None:
            stored = ranks().broadcast(lambda: [files.plan(layer) for layer in layers])
        if files is None or None in stored:
            tensors = self._compress(decoder_layer, layers, replay)
        else:
            # an earlier run has finished all of them
            self.plans |= {plan.module: plan for plan in stored}
            tensors = _tensors_in(files, self.model.partial.device, layers)
            if self.probe is not None:
                cut = cut_layers(self.model.partial.model, layers, self.plans)
                self._pass_early(replay, UNDONE, self.smaller.fill(decoder_layer, cut))
            self._fill(decoder_layer, layers, tensors)
        self.smaller.put_constants(refitted_constants(layers, self.plans, tensors))

    def wrap_forward(self, decoder_layer: str, layer_forward: Forward) -> Forward:
        if decoder_layer != self.smaller.filled:
            return layer_forward
        forward: Forward = self.smaller.model.get_submodule(decoder_layer).forward
        return forward

    def on_layer_end(self, decoder_layer: str) -> None:
        self.smaller.release()

    def _pass_early(
        self, replay: Replay, variant: int | None, layer_forward: Forward | None = None
    ) -> None:
        """Have the probe's batches of a variant pass the loaded layer as it is, or this forward."""
        if self.probe is not None:
            self.early.pass_early(replay, self.probe.numbers_of(variant), layer_forward)

    def _compress(self, decoder_layer: str, layers: Sequence[MoeLayer], replay: Replay) -> Tensors:
        """Plan, cut and correct the loaded layers, and keep them; returns their constants, if they
        have any, by key."""
        work = self.work
        recordings = self._plan(layers, replay)
        tensors = cut_layers(self.model.partial.model, layers, self.plans)
        if work.constants is not None:  # routers stay whole
            experts = tuple(f"{layer.name}." for layer in layers)
            tensors = {key: value for key, value in tensors.items() if key.startswith(experts)}
        self._pass_early(replay, UNDONE, self._fill(decoder_layer, layers, tensors))
        constants = {}
        for layer in layers[: len(recordings)]:
            give_back()
            writing = pick_dtype("auto", self.model.config, self.model.checkpoint)
            plan = self.plans[layer.name]
            refitted = None
            if work.constants is not None:
                values = work.constants[layer.name].values
                wide = values.to(self.model.partial.device, torch.float32, copy=True)
                kept = [group.members[0] for group in plan.groups]
                slots = torch.tensor([*kept, *plan.constants], device=wide.device).argsort()
                refitted = RefittedConstants(wide, wide.to(writing, copy=True), slots)
                constants[constants_key(layer)] = refitted.best
            figures = correct_layer(
                self.smaller.model,
                layer,
                recordings.pop(0),  # freed before the layer is written
                work.correction,
                work.seed,
                writing,
                refitted,
                self.progress,
            )
            if self.base_stream is not None and self.base_stream.share:
                figures["toward"] = self.base_stream.share
            self.plans[layer.name] = replace(plan, figures={**plan.figures, "correction": figures})
        give_back()
        state = {**self.smaller.model.state_dict(), **constants}
        if self.files is not None and ranks().is_first:
            for layer in layers:
                keys = [key for key in (*cut_keys(layer), constants_key(layer)) if key in state]
                self.files.save(self.plans[layer.name], layer, {key: state[key] for key in keys})
        return constants

    def _plan(self, layers: Sequence[MoeLayer], replay: Replay) -> list[Recording]:
        """Plan the layers by what the batches show of them, and return what is recorded for their
        correction."""
        work = self.work
        calibration = self.calibration
        statistics = [LayerStatistics(layer, seed=work.seed) for layer in layers]
        collectors = []
        recordings = []
        if self.base_stream is not None:
            self.base_stream.find_factor(layers, replay)
        for layer in layers if calibration.batches else ():
            if work.needs:
                collectors.append(
                    CalibrationCollector(
                        self.model, layer, work.needs, calibration, self.routers, work.seed
                    )
                )
            if work.measure or work.correction.wanted:
                balances = work.correction.balances
                recordings.append(Recording(self.model.partial.model, layer, calibration, balances))
        self.active = [*collectors, *recordings]
        if self.active:
            replay(range(len(calibration.batches)))
        self.active = []
        for recording in recordings:
            recording.detach()
        if collectors:
            statistics = [collector.finish() for collector in collectors]
        for layer, measured in zip(layers, statistics, strict=True):
            self.plans[layer.name] = work.decide(measured)
        return recordings

    def _fill(self, decoder_layer: str, layers: Sequence[MoeLayer], tensors: Tensors) -> Forward:
        layer_forward = self.smaller.fill(decoder_layer, tensors)
        for layer in layers:
            self.model.partial.release(layer.name)
        return layer_forward


def correction_needs(correction: Correct, needed: Requirements) -> Requirements:
    """Return the needs of a step that corrects so, beside what it `needed` before: text, a part of
    it held out to evaluate on."""
    if not correction.wanted:
        return needed
    copies = HIDDEN_COPIES + (BASE_COPIES if correction.toward != 0 else 0)
    return replace(
        needed,
        text=True,
        heldout=max(needed.heldout, 1),
        passes=needed.passes + 1,
        hidden_copies=copies,
    )


def constants_key(layer: MoeLayer) -> str:
    """Return the name under which a layer's refitted constants [D, H] are kept beside its
    tensors."""
    return f"{layer.name}{SUFFIX}"


def refitted_constants(
    layers: Sequence[MoeLayer], plans: Mapping[str, LayerPlan], tensors: Tensors
) -> dict[str, Substitutes]:
    """Return the constants among the tensors of refitted layers, by experts module."""
    constants = {}
    for layer in layers:
        if constants_key(layer) in tensors:
            plan = plans[layer.name]
            rows = {group.members[0]: row for row, group in enumerate(plan.groups)}
            constants[layer.name] = Substitutes(plan.constants, tensors[constants_key(layer)], rows)
    return constants


def refitted_substitution(
    model: OpenModel, plans: Sequence[LayerPlan], files: CutFiles
) -> Substitution:
    """Return the model with the experts and constants in `files` in place of those of layers that
    have constants."""
    by_module = {plan.module: plan for plan in plans if plan.constants}
    layers = [layer for layer in model.architecture.layers if layer.name in by_module]
    constants = dict[str, Substitutes]()
    for layer in layers:
        constants |= refitted_constants([layer], by_module, files.tensors(layer))
    by_decoder_layer = layers_by_decoder_layer(layers)

    def tensors(decoder_layer: str) -> Tensors | None:
        inside = by_decoder_layer.get(decoder_layer)
        return None if inside is None else _tensors_in(files, model.partial.device, inside)

    return Substitution(tensors, constants=constants)


def _tensors_in(files: CutFiles, device: torch.device, layers: Sequence[MoeLayer]) -> Tensors:
    tensors = dict[str, Tensor]()
    for layer in layers:
        tensors |= {key: value.to(device) for key, value in files.tensors(layer).items()}
    return tensors


def compress_sequentially(
    model: OpenModel,
    work: LayerWork,
    calibration: Calibration | None,
    progress: Progress,
    files: CutFiles | None = None,
    probe: HeldoutProbe | None = None,
    phase: str = "correct",
    heads: Sequence[Head] = (),
) -> tuple[LayerPlan, ...]:
    """Plan, cut and correct every layer in order; returns the plans with the corrections' figures.

    `files` keeps the cut layers, and those that it has are not made again. The batches of an
    evaluator's `probe` run through the compressed model to its end. Multi-token-prediction `heads`
    follow, on what the smaller model outputs."""
    refuse_shared_experts(model)
    text = calibration or Calibration((), {})
    plans = list[LayerPlan]()
    for number, mtp_stage in enumerate(mtp_stages(model, heads, text.batches)):
        with mtp_stage.hooked() if heads else nullcontext():
            state = _InOrder(model, text, work, files, progress, probe)
            if mtp_stage.head is not None:
                # a head has the later tokens
                emphasis = tuple(weights[:, number:] for weights in text.emphasis)
                later = replace(text, batches=mtp_stage.batches, emphasis=emphasis)
                stage_work = work.of_head(mtp_stage.head)
                stage_files = files and files.of_head(number - 1)
                state = _InOrder(mtp_stage.model, later, stage_work, stage_files, progress)
            batches = state.calibration.batches
            evaluation = []
            share = ranks().share(batches)
            budget = DEFAULT_ACTIVATION_BUDGET
            visitors: list[LayerVisitor] = [state]
            correction = state.work.correction
            if correction.wanted and correction.toward != 0:
                budget //= 2
                offload = ActivationOffload(budget)
                base = BaseStream(state.model, len(batches), offload, correction.toward)
                state.base_stream = base
                share = ranks().share(batches, batches)
                batches = (*batches, *batches)
                visitors.append(base)
            if probe is not None:
                probe.first = len(batches)
                evaluation = probe.batches
                for variant in (None, CORRECTED, UNDONE):
                    share |= {*probe.numbers_of(variant)}
                visitors += [state.early, probe]
            if mtp_stage.following is not None:
                visitors.append(mtp_stage)
            if isinstance(state.files, LayerVisitor):
                visitors.append(state.files)
            finishing = range(len(batches), len(batches) + len(evaluation))
            text_pass = Pass(
                state.model,
                (*batches, *evaluation),
                progress,
                phase,
                work.seed,
                to_end=mtp_stage.following is not None,
                finishing=finishing,
                share=share,
                activation_budget=budget,
            )
            text_pass.run(*visitors)
            if state.files is not None:
                state.files.flush()
            ranks().barrier()  # until all layers are saved
        for layer in state.model.architecture.layers:
            if layer.name in state.plans:
                plans.append(state.plans[layer.name])
    return tuple(plans)


def correct(
    model: OpenModel,
    plan: ExpertPlan,
    progress: Progress,
    files: CutFiles,
    calibration: Calibration,
    correction: Correct,
    seed: int = 0,
) -> ExpertPlan:
    """Carry out the correction of a plan, layer by layer into `files`; returns the plan with its
    figures.

    Layers that are in `files` already are not made again. Corrections that take the whole model
    further from the base on held-out text are undone, except beside heads, which were corrected on
    what the corrected layers output."""
    heads = kept_heads(model, [layer.module for layer in plan.layers])

    def finished() -> list[LayerPlan | None]:
        plans = [files.plan(layer) for layer in model.architecture.layers]
        return plans + [files.of_head(number).plan(head.layer) for number, head in enumerate(heads)]

    stored = ranks().broadcast(finished)
    layers = tuple(layer for layer in stored if layer is not None)
    is_measured = bool(heads) or ranks().broadcast(lambda: read_difference(files)) is not None
    if len(layers) < len(stored) or not is_measured:
        by_module = plan.by_module
        work = LayerWork(
            plan.experts,
            lambda stats: by_module[stats.layer.name],
            correction=correction,
            seed=seed,
            head_experts=plan.head_experts,
        )
        texts = () if heads else calibration.heldout_batches
        with comparing(model, files, texts) as probe:
            layers = compress_sequentially(
                model, work, calibration, progress, files, probe, heads=heads
            )
    undoing: Difference | None = ranks().broadcast(lambda: read_difference(files))
    if undoing is None or not undoing.accepted:
        return replace(plan, layers=layers)
    # undoing all corrections is a gain: the files are to hold plain cuts
    reason = (
        f"on held-out text the whole model is {undoing.before:.4g} nats per token from its base "
        "with the corrections, "
        f"and {undoing.after:.4g} without (standard error {undoing.standard_error:.2g})"
    )
    undone = {}
    for layer in layers:
        figures = dict(layer.figures.get("correction") or {})
        if "heldout_error_before" in figures:  # errors stay as they were measured
            figures["heldout_error"] = figures["heldout_error_before"]
        figures |= {"kept": "none", "reason": reason}
        undone[layer.module] = replace(layer, figures={**layer.figures, "correction": figures})
    for decoder_layer, inside in layers_by_decoder_layer(model.architecture.layers).items():
        if ranks().is_first and any(files.plan(moe) != undone[moe.name] for moe in inside):
            model.partial.load(model.partial.keys_under(decoder_layer))
            cut = cut_layers(model.partial.model, inside, undone)
            for moe in inside:
                files.save(undone[moe.name], moe, {key: cut[key] for key in cut_keys(moe)})
            model.partial.release(decoder_layer)
    files.flush()
    ranks().barrier()  # until all layers are saved
    return replace(plan, layers=tuple(undone.values()))


@contextmanager
def comparing(
    model: OpenModel, files: CutFiles, texts: Sequence[Tensor]
) -> Iterator[HeldoutProbe | None]:
    """Measure in a pass that corrects layers what undoing all corrections does to the distance from
    the base.

    It is kept beside the files, for a run that resumes this one. There is no probe where that has
    been done, or where fewer than eight sequences, or a model without a language-model head, make
    undoing no gain."""
    undoing = Difference(0.0, 0.0, 0.0, sum(map(len, texts)))
    if ranks().broadcast(lambda: read_difference(files)) is not None:
        yield None
        return
    if undoing.sequences < FEWEST or head_of(model.partial.model) is None:
        yield None
    else:
        with Evaluator.of(model, texts).measuring(model.partial.model, variants=2) as probe:
            yield probe
        undoing = Difference.of(probe.figures[CORRECTED].kl, probe.figures[UNDONE].kl)
    if ranks().is_first:
        save_tensors(files.folder / EVALUATED, {}, asdict(undoing))


def read_difference(files: CutFiles) -> Difference | None:
    """Return the difference that an earlier run measured; None if it is not there, or cannot be
    read."""
    figures = read_metadata(files.folder / EVALUATED)
    return None if figures is None else Difference(**figures)
