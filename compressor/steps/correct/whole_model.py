"""What corrections did to the whole model: corrected and uncorrected layers side by side, compared at its output.

Each layer's own guard lowers that layer's error, and all together can still take the model further from its base. So
the corrected layers are the default, and undoing them is the change that must be a gain.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

import torch

from compressor.distributed.ranks import here
from compressor.errors import CompressionError
from compressor.evaluation.evaluator import FEWEST, Difference, Evaluator, Variants
from compressor.files import write_whole
from compressor.model.architecture import MoeLayer, head_of, layers_by_unit
from compressor.model.opened import OpenModel
from compressor.model.streaming import Forward, Replay
from compressor.progress import Progress
from compressor.recipe.plan import LayerPlan
from compressor.records import read_as, read_object
from compressor.steps.correct.in_order import ShadowModel
from compressor.surgery.cutting import CutFiles, cut_keys, cut_layers

EVALUATED = "evaluated.json"  # beside the cut layers: what was measured, so that a run that goes on need not again
WAYS = 3  # each text goes through the base's, the corrected and the uncorrected layers


class _SideBySide(Variants):
    """Variant 0 meets the corrected layers, variant 1 the uncorrected ones, and the base's batches its own."""

    def __init__(
        self,
        model: OpenModel,
        corrected: Callable[[MoeLayer], Mapping[str, torch.Tensor]],
        plans: Mapping[str, LayerPlan],
    ) -> None:
        experts = len(next(iter(plans.values())).groups)
        self.model, self.corrected, self.plans = model, corrected, plans
        self.smaller = ShadowModel(model, experts), ShadowModel(model, experts)

    def before(self, unit: str, replay: Replay) -> None:
        if layers := self.at.moe_layers:
            device = self.model.partial.device
            made = {key: value.to(device) for layer in layers for key, value in self.corrected(layer).items()}
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
    model: OpenModel,
    plans: Sequence[LayerPlan],
    corrected: Callable[[MoeLayer], Mapping[str, torch.Tensor]],
    evaluator: Evaluator,
    progress: Progress,
) -> Difference:
    """What undoing the `corrected` tensors of all layers does to the distance from the base.

    One streamed pass, in which the base runs along unless the evaluator knows it: with a decoder layer of the base,
    both of its smaller ones are in memory.
    """
    visitor = _SideBySide(model, corrected, {plan.module: plan for plan in plans})
    before, after = evaluator.measure(model, visitor, 2, progress, "compare the corrections")
    return Difference.of(before.kl, after.kl)


def keep_the_better(
    model: OpenModel,
    plans: Sequence[LayerPlan],
    files: CutFiles,
    texts: Sequence[torch.Tensor],
    progress: Progress,
    evaluator: Evaluator | None = None,
) -> tuple[LayerPlan, ...]:
    """The plans of all layers in `files`; where undoing the corrections is a gain, the files hold plain cuts then.

    What was measured is kept beside the files, and a run that was killed goes on from there. Measured is on `texts`,
    token ids [B, L], or with the `evaluator` that is given. Of fewer than eight sequences, or without a language-model
    head, nothing is measured, and the corrections stay.
    """
    known = here().broadcast(lambda: None if (kept := read_difference(files)) is None else asdict(kept))
    if known is not None:
        undoing = Difference(**known)
    else:
        held = sum(map(len, texts)) if evaluator is None else evaluator.sequences
        undoing = Difference(0.0, 0.0, 0.0, held)
        if held >= FEWEST and head_of(model.partial.model) is not None:
            undoing = compare_corrections(
                model, plans, files.tensors, evaluator or Evaluator.of(model, texts), progress
            )
        if here().is_first:
            write_whole(files.folder / EVALUATED, json.dumps(asdict(undoing)))
    if not undoing.accepted:
        return tuple(plans)
    undone = {plan.module: _undone(plan, undoing) for plan in plans}
    for unit, layers in layers_by_unit(model.architecture.layers).items():
        if here().is_first and any(files.plan(layer) != undone[layer.name] for layer in layers):
            model.partial.load(model.partial.keys_under(unit))
            cut = cut_layers(model.partial.model, layers, undone)
            for layer in layers:
                files.save(undone[layer.name], layer, {key: cut[key] for key in cut_keys(layer)})
            model.partial.release(unit)
    here().barrier()  # until all layers are kept
    return tuple(undone[plan.module] for plan in plans)


def _undone(plan: LayerPlan, undoing: Difference) -> LayerPlan:
    """The plan of a layer whose correction is undone; the errors that it had stay as they were measured."""
    figures = dict(plan.figures.get("correction") or {})
    if "heldout_error_before" in figures:
        figures["heldout_error"] = figures["heldout_error_before"]
    reason = (
        f"on held-out text the whole model is {undoing.before:.4g} nats per token from its base with the corrections, "
        f"and {undoing.after:.4g} without (standard error {undoing.standard_error:.2g})"
    )
    return replace(plan, figures={**plan.figures, "correction": {**figures, "kept": "none", "reason": reason}})


def read_difference(files: CutFiles) -> Difference | None:
    """What an earlier run measured of these cut layers; None if it is not there, or cannot be read."""
    try:
        return read_as(Difference, read_object(files.folder / EVALUATED))
    except (OSError, CompressionError):
        return None
