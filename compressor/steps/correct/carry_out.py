"""Carry out the correction of a stage's plan: every layer refitted in order, undone where it harms the whole model.

Each layer's own guard lowers that layer's error, and all together can still take the model further from its base. So
corrected and uncorrected layers, side by side, are compared at the model's output: the corrected ones are the default,
and undoing them is the change that must be a gain.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

from torch import Tensor

from compressor.data.batches import Calibration
from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.evaluation.evaluator import FEWEST, Difference, Evaluator, Variants
from compressor.files import write_whole
from compressor.model.architecture import MoeLayer, head_of, layers_by_unit
from compressor.model.opened import OpenModel
from compressor.model.streaming import Forward, Replay
from compressor.mtp.head import kept_heads
from compressor.progress import Progress
from compressor.recipe.plan import CompressionPlan, LayerPlan
from compressor.records import read_as, read_object
from compressor.steps.correct.heads import compress_with_heads
from compressor.steps.correct.in_order import LayerWork, ShadowModel, Visited
from compressor.steps.correct.step import Correct
from compressor.surgery.cutting import CutFiles, cut_keys, cut_layers

EVALUATED = "evaluated.json"  # beside the cut layers: what was measured, so that a run that goes on need not again


def correct(
    model: OpenModel,
    plan: CompressionPlan,
    progress: Progress,
    files: CutFiles,
    calibration: Calibration,
    asked: Correct,
    visited: Visited | None = None,
) -> CompressionPlan:
    """Carry out the correction of a plan, layer by layer into `files`; returns the plan with its figures.

    Layers that are in `files` already are not made again. Corrections that take the whole model further from the base
    on held-out text are undone, except beside heads, which were corrected on what the corrected layers output.
    """
    heads = kept_heads(model, [layer.module for layer in plan.layers])
    visits: list[tuple[MoeLayer, Tensor, int]] = []  # told only of what stays
    done = [files.plan(layer) for layer in model.architecture.layers]
    done += [files.of_head(number).plan(head.layer) for number, head in enumerate(heads)]
    layers = tuple(layer for layer in done if layer is not None)
    here().assert_same_on_all(len(layers), "number of corrected layers in its hidden folder")
    if len(layers) < len(done):
        by_name = {layer.module: layer for layer in plan.layers}
        work = LayerWork(
            plan.experts,
            lambda stats: by_name[stats.layer.name],
            correction=asked,
            seed=plan.seed,
            visited=None if visited is None else lambda *seen: visits.append(seen),
        )
        layers = compress_with_heads(model, heads, work, calibration, progress, files, "correct")
    if not heads:
        corrected, layers = layers, keep_the_better(model, layers, files, calibration.heldout_batches, progress)
        visits = visits if layers == corrected else []
    if visited is not None:
        for seen in visits:
            visited(*seen)
    return replace(plan, layers=layers)


class _SideBySide(Variants):
    """Variant 0 meets the corrected layers, variant 1 the uncorrected ones, and the base's batches its own."""

    def __init__(self, model: OpenModel, files: CutFiles, plans: Mapping[str, LayerPlan]) -> None:
        experts = len(next(iter(plans.values())).groups)
        self.model, self.files, self.plans = model, files, plans
        self.smaller = ShadowModel(model, experts), ShadowModel(model, experts)

    def before(self, unit: str, replay: Replay) -> None:
        if layers := self.at.moe_layers:
            device = self.model.partial.device
            made = {key: value.to(device) for layer in layers for key, value in self.files.tensors(layer).items()}
            self.smaller[0].fill(unit, made)
            self.smaller[1].fill(unit, cut_layers(self.model.partial.model, layers, self.plans))

    def replaced(self, unit: str, own: Forward) -> Forward:
        if self.variant is None or not self.at.moe_layers:
            return own
        forward: Forward = self.smaller[self.variant].model.get_submodule(unit).forward
        return forward

    def passed(self, unit: str) -> None:
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
    undoing: Difference | None = here().broadcast(lambda: read_difference(files))
    if undoing is None:
        undoing = Difference(0.0, 0.0, 0.0, sum(map(len, texts)))
        if undoing.sequences >= FEWEST and head_of(model.partial.model) is not None:
            undoing = compare_corrections(model, plans, files, Evaluator.of(model, texts), progress)
        if here().is_first:
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
        if here().is_first and any(files.plan(layer) != undone[layer.name] for layer in layers):
            model.partial.load(model.partial.keys_under(unit))
            cut = cut_layers(model.partial.model, layers, undone)
            for layer in layers:
                files.save(undone[layer.name], layer, {key: cut[key] for key in cut_keys(layer)})
            model.partial.release(unit)
    here().barrier()  # until all layers are kept
    return tuple(undone[plan.module] for plan in plans)


def read_difference(files: CutFiles) -> Difference | None:
    """What an earlier run measured of these cut layers; None if it is not there, or cannot be read."""
    try:
        return read_as(Difference, read_object(files.folder / EVALUATED))
    except (OSError, CompressionError):
        return None
