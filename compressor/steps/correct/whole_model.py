"""What corrections did to the whole model: corrected and uncorrected layers side by side, judged at its output.

Each layer's own guard lowers that layer's error, and all together can still take the model further from the original.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import torch
from torch.nn.functional import log_softmax

from compressor.distributed.present import here
from compressor.errors import CompressionError
from compressor.evaluation.heldout import divergence, rows_at_once
from compressor.files import write_whole
from compressor.model.architecture import MoeLayer, head_of, layers_by_unit
from compressor.model.opened import OpenModel
from compressor.model.streaming import Forward, LayerStream, LayerVisitor, Replay
from compressor.progress import Progress
from compressor.recipe.plan import LayerPlan
from compressor.records import read_object
from compressor.steps.correct.in_order import ShadowModel
from compressor.surgery.cutting import CutFiles, cut_keys, cut_layers

JUDGED = "judged.json"  # beside the cut layers: what was found, so that a run that goes on need not find it again
FEWEST = 8  # held-out sequences that can tell that a correction harms
SURE = 2.0  # standard errors
WAYS = 3  # each text goes through the original, the corrected and the uncorrected layers


@dataclass(frozen=True, slots=True)
class Verdict:
    """KL of the original's next-token distributions to those of the smaller model, nats per held-out token."""

    corrected: float
    uncorrected: float
    error: float  # standard error of the difference, over sequences
    sequences: int

    @classmethod
    def of(cls, corrected: Sequence[float], uncorrected: Sequence[float]) -> Self:
        """From the KL of each held-out sequence, in the same order."""
        one, other = (torch.tensor(values, dtype=torch.float64) for values in (corrected, uncorrected))
        error = float((one - other).std()) / math.sqrt(len(one)) if len(one) > 1 else math.inf
        return cls(float(one.mean()), float(other.mean()), error, len(one))

    @property
    def undoes(self) -> bool:
        """Whether the model is surely nearer to the original without the corrections; no number is as far as can be."""
        if not (math.isfinite(self.corrected) and math.isfinite(self.uncorrected)):
            return math.isfinite(self.uncorrected)
        return self.sequences >= FEWEST and self.corrected - self.uncorrected > SURE * self.error

    @property
    def reason(self) -> str:
        """Why the corrections are undone."""
        return (
            f"on held-out text the whole model is {self.corrected:.4g} nats per token from the original with the "
            f"corrections, and {self.uncorrected:.4g} without (standard error {self.error:.2g})"
        )


@dataclass(slots=True)
class _SideBySide(LayerVisitor):
    """The batches in threes, the same text in each: for the original, the corrected and the uncorrected layers."""

    model: OpenModel
    corrected: Callable[[MoeLayer], Mapping[str, torch.Tensor]]
    plans: Mapping[str, LayerPlan]
    progress: Progress
    smaller: tuple[ShadowModel, ShadowModel] = field(init=False)
    by_unit: dict[str, list[MoeLayer]] = field(init=False)
    apart: tuple[list[float], list[float]] = field(default_factory=lambda: ([], []))  # by sequence
    _batch: int = 0
    _original: torch.Tensor | None = None

    def __post_init__(self) -> None:
        experts = len(next(iter(self.plans.values())).groups)
        self.smaller = ShadowModel(self.model, experts), ShadowModel(self.model, experts)
        self.by_unit = layers_by_unit(self.model.architecture.layers)

    def before(self, unit: str, replay: Replay) -> None:
        if layers := self.by_unit.get(unit):
            device = self.model.partial.device
            made = {key: value.to(device) for layer in layers for key, value in self.corrected(layer).items()}
            self.smaller[0].fill(unit, made)
            self.smaller[1].fill(unit, cut_layers(self.model.partial.model, layers, self.plans))

    def entering(self, batch: int) -> None:
        self._batch = batch

    def replaced(self, unit: str, own: Forward) -> Forward:
        way = self._batch % WAYS
        if way == 0 or unit not in self.by_unit:
            return own
        forward: Forward = self.smaller[way - 1].model.get_submodule(unit).forward
        return forward

    def passed(self, unit: str) -> None:
        if unit in self.by_unit:
            for each in self.smaller:
                each.empty_again()
            self.progress.advance(unit)

    @torch.no_grad()
    def finished(self, batch: int, output: Any) -> None:
        """Compare a text's next-token distributions with the original's, which come first."""
        found = log_softmax(output.logits[:, :-1].float(), dim=-1)
        way = batch % WAYS
        if way == 0:
            self._original = found
            return
        assert self._original is not None
        apart = divergence(self._original, found) / found.shape[1]
        self.apart[way - 1].extend(apart.tolist())


def judge_corrections(
    model: OpenModel,
    plans: Sequence[LayerPlan],
    corrected: Callable[[MoeLayer], Mapping[str, torch.Tensor]],
    texts: Sequence[torch.Tensor],
    progress: Progress,
) -> Verdict:
    """How far the model is from the original with and without the `corrected` tensors of its layers.

    One streamed pass: with a decoder layer of the original, both of its smaller ones are in memory. `texts` are token
    ids [B, L] with at least two tokens to a row.
    """
    units = model.architecture.units
    parts = [part for text in texts for part in text.split(rows_at_once(text.shape[1], model.vocabulary))]
    batches = [part for part in parts for _ in range(WAYS)]
    side_by_side = _SideBySide(model, corrected, {plan.module: plan for plan in plans}, progress)
    progress.start("judge the corrections", len(side_by_side.by_unit))
    LayerStream(model.partial, batches, units, units, range(len(batches))).run(side_by_side)
    return Verdict.of(*side_by_side.apart)


def keep_the_better(
    model: OpenModel,
    plans: Sequence[LayerPlan],
    files: CutFiles,
    texts: Sequence[torch.Tensor],
    progress: Progress,
) -> tuple[LayerPlan, ...]:
    """The plans of all layers in `files`; where the corrections harm the whole model, the files hold plain cuts then.

    What was found is kept beside the files, and a run that was killed goes on from there. Without enough `texts` or
    without a language-model head there is nothing to judge by, and the corrections stay.
    """
    verdict = Verdict(**here().told(lambda: asdict(_judged(model, plans, files, texts, progress))))
    if not verdict.undoes:
        return tuple(plans)
    undone = {plan.module: _undone(plan, verdict) for plan in plans}
    for unit, layers in layers_by_unit(model.architecture.layers).items():
        if here().is_first and any(files.plan(layer) != undone[layer.name] for layer in layers):
            model.partial.load(model.partial.keys_under(unit))
            cut = cut_layers(model.partial.model, layers, undone)
            for layer in layers:
                files.save(undone[layer.name], layer, {key: cut[key] for key in cut_keys(layer)})
            model.partial.release(unit)
    here().wait()  # until all layers are kept
    return tuple(undone[plan.module] for plan in plans)


def _judged(
    model: OpenModel,
    plans: Sequence[LayerPlan],
    files: CutFiles,
    texts: Sequence[torch.Tensor],
    progress: Progress,
) -> Verdict:
    """The verdict, found and kept unless it is there."""
    if (verdict := read_verdict(files)) is None:
        held = sum(map(len, texts))
        verdict = Verdict(0.0, 0.0, 0.0, held)  # tells nothing apart
        if held >= FEWEST and head_of(model.partial.model) is not None:
            verdict = judge_corrections(model, plans, files.tensors, texts, progress)
        write_whole(files.folder / JUDGED, json.dumps(asdict(verdict)))
    return verdict


def _undone(plan: LayerPlan, verdict: Verdict) -> LayerPlan:
    """The plan of a layer whose correction is undone; the errors that it had stay as they were found."""
    found = dict(plan.figures.get("correction") or {})
    if "heldout_error_before" in found:
        found["heldout_error"] = found["heldout_error_before"]
    return replace(plan, figures={**plan.figures, "correction": {**found, "kept": "none", "reason": verdict.reason}})


def read_verdict(files: CutFiles) -> Verdict | None:
    """What an earlier run found of these cut layers; None if it is not there, or cannot be read."""
    path = files.folder / JUDGED
    try:
        content = read_object(path)
        corrected, uncorrected, error = (float(content[name]) for name in ("corrected", "uncorrected", "error"))
        return Verdict(corrected, uncorrected, error, int(content["sequences"]))
    except (OSError, KeyError, TypeError, ValueError, OverflowError, CompressionError):
        return None
