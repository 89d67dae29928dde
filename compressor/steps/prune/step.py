"""The step `prune`: a strategy decides which experts stay, merge or go.

Experts may be split before, so that narrower ones go, and those that stay be refitted after.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Self

from compressor.document.blocks import Text
from compressor.errors import CompressionError
from compressor.formatting import counted, setting, span
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel, refuse_shared_experts, shared_experts
from compressor.recipe.plan import ExpertPlan, describe_split, parts_of
from compressor.recipe.registry import load_strategy
from compressor.recipe.step import StepOptions
from compressor.recipe.steps_plan import PlannedStep
from compressor.records import Json
from compressor.statistics.statistics import ATTRIBUTED, OUTPUTS, WEIGHTS
from compressor.steps.correct.options import NONE
from compressor.steps.correct.sequential import correct, correction_needs
from compressor.steps.cutting import CutFiles, through_model
from compressor.steps.dispositions import all_dispositions
from compressor.steps.job import make_job, untouched
from compressor.steps.layer_files import LayerFiles
from compressor.steps.prune.options import Prune, protector_of
from compressor.steps.prune.planning import Planner, protected_experts, spec_of, with_list
from compressor.steps.section import Section, with_reconstruction
from compressor.steps.split.view import as_decided, chosen_parts, partitioned, seen_as, shapes
from compressor.steps.step import Requirements, State, Step
from compressor.steps.tensors import OutputJob

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PruneStep(Step[Prune]):
    """Drop or merge experts, with their rows of the routers."""

    why: str = ""  # the reason for the number of parts, where that was left open

    def resolve(self, model: OpenModel) -> Self | None:
        """Return the step with the experts that a file protects, a number of parts, and the
        strategy's own correction where that is left to it; None if nothing is to be done."""
        prune = self.options
        parts, why = prune.split, ""
        if parts == "auto":
            parts, why = chosen_parts(model, prune)
        if prune.keeps_all and parts == 1 and prune.top_k is None and not why:
            return None
        method: str = prune.correct.method
        if method == "auto":
            strategy = None if prune.keeps_all else load_strategy(prune.strategy, prune.options)
            method = NONE if strategy is None else strategy.correction
            shared = shared_experts(model) if method != NONE else None
            if shared:
                logger.warning(
                    "%s shares its experts with another layer, so nothing is corrected", shared
                )
                method = NONE
        correction = prune.correct.model_copy(update={"method": method})
        protect = with_list(prune.protect)
        resolved = self.with_options(split=parts, correct=correction, protect=protect)
        return replace(resolved, why=why)

    def view(self, model: OpenModel, plan: ExpertPlan | None = None) -> OpenModel:
        view = seen_as(model, int(self.options.split), self.options.top_k)
        split = plan and plan.split
        return as_decided(view, split, view.top_k) if split and split["parts"] != 1 else view

    def requirements(
        self, model: OpenModel, earlier: Sequence[StepOptions], planned: bool
    ) -> Requirements:
        """Return the need of text of strategy, protector and correction; raise `CompressionError`
        for what cannot be done.

        An attribution takes a pass of its own.
        """
        prune = self.options
        view = self.view(model)
        layers = view.architecture.layers
        parts = layers[0].parts
        if prune.sequential or prune.correct.wanted:
            refuse_shared_experts(view)
        needed = Requirements(notes=() if planned else self._sentences(view))
        if planned or prune.keeps_all:  # the plan's strategy need not be installed
            prune.count(layers, parts)
            reads = parts > 1 and not planned and prune.calibration is not None
            needed = replace(needed, text=reads, passes=int(reads))
        else:
            spec = spec_of(prune, view, parts)
            needs = spec.strategy.needs
            protects = protector_of(prune.protect) is not None
            if needs - WEIGHTS or protects:
                hidden = int(model.config.get_text_config().hidden_size)
                needed = replace(
                    needed,
                    text=True,
                    passes=2 if protects or needs & ATTRIBUTED else 1,
                    sample_bytes=len(needs & OUTPUTS) * layers[0].experts * 4 * hidden,
                    sample_tokens=prune.sample_count,
                )
            needed = replace(needed, passes=needed.passes + int(parts > 1))
        return correction_needs(prune.correct, needed)

    def experts_left(self, layers: Sequence[MoeLayer]) -> int:
        return self.options.count(layers, layers[0].parts)

    def plan(self, state: State) -> ExpertPlan:
        """Split if asked, then decide from one pass over the model, or in order where each layer
        sees the compressed ones."""
        prune = self.options
        model = self.view(state.model)
        split: Json | None = None
        if self.why:
            split = shapes(model.whole or model, 1)
        if model.is_split:
            changed = any(step.options.rewrites for step in state.run.steps)
            model = partitioned(model, state.fit, state.progress, state.seed, changed)
            split = model.split
        if split is not None and self.why:
            split = {**split, "why": self.why}
        plan = replace(untouched(model), split=split, top_k=model.top_k)
        decided = state.once("model", lambda: self.view(state.model, plan))
        return plan if prune.keeps_all else replace(self._decide(state, decided), split=split)

    def _decide(self, state: State, model: OpenModel) -> ExpertPlan:
        prune = self.options
        text = state.fit
        if text is not None:
            text = replace(text, sample_tokens=prune.sample_count)
        planner = Planner(model, text, state.progress, state.seed)
        parts = state.parts * model.architecture.layers[0].parts
        spec = spec_of(prune, model, parts)
        protected = protected_experts(prune.protect, spec.experts, planner)
        reads = spec.strategy.needs - WEIGHTS
        refits = prune.correct.wanted
        if prune.sequential and text is not None and (reads or refits):
            files = None if state.run.work is None else _files(state, model, refits)
            return planner.plan_sequentially(
                spec, prune.correct if refits else None, protected, files
            )
        if not reads:
            planner = replace(planner, calibration=None)
        files = None
        if not (refits or model.is_split or state.run.work is None):
            files = state.once("files", lambda: LayerFiles(state, model, refitted=False))
        evaluator = state.run.evaluator
        if (
            planner.calibration is None
            or spec.heads
            or evaluator is None
            or evaluator.base is not model
        ):
            return planner.plans([spec], protected, files)[0].plan
        with evaluator.keeping(len(planner.calibration.batches)) as probe:
            return planner.plans([spec], protected, files, probe)[0].plan

    def write(self, state: State) -> OutputJob:
        """Refit what stays, if asked, and return how the smaller checkpoint is written."""
        plan = state.expert_plan
        model = state.once("model", lambda: self.view(state.model, plan))
        refits = self.options.correct.wanted
        packed = [options.name for options in state.earlier if options.format]
        if packed and through_model(model.layout, plan, refits):
            raise CompressionError(
                f"steps[{state.position}]: {packed[0]} has packed experts that can only be merged, "
                f"or dropped, once they are dequantised; put {packed[0]} after it"
            )
        if not refits:
            return make_job(model, plan)
        files = _files(state, model, refits=True)
        if not state.is_written:
            text = state.text
            assert text is not None
            options = self.options.correct
            with state.run.clock.phase("correct"):
                plan = correct(model, plan, state.progress, files, text.fit, options, state.seed)
            state.run.record(state.number, decision=plan)
        return make_job(model, plan, files)

    def describe(self, planned: PlannedStep) -> Section:
        """Describe how many experts stay and why, the split, protection and reconstruction."""
        plan = planned.expert_plan
        assert plan is not None
        prune = self.options
        layers = plan.layers
        count = counted(len(layers), "MoE layer")
        summary = f"All experts of its {count} stay"
        facts = {"Sequential": "no"}
        if not prune.keeps_all:
            strategy = prune.strategy
            with suppress(CompressionError):  # it need not be installed here
                strategy += f" ({load_strategy(strategy).summary.rstrip('.')})"
            kept = span(len(layer.groups) for layer in layers)
            summary = (
                f"{kept} instead of {span(layer.experts for layer in layers)} experts in each of "
                f"its {count}: {all_dispositions(layers)}, by {strategy}"
            )
            facts["Strategy"] = prune.strategy
            options = prune.options.items()
            plain = {name: value for name, value in options if not isinstance(value, Mapping)}
            facts["Options"] = setting(plain) if plain else ""
        if plan.top_k is not None:
            summary += f"; a token is routed to {plan.top_k} of them"
        if prune.sequential:
            facts["Sequential"] = (
                "each layer was planned on what the compressed earlier layers output"
            )
        blocks = []
        if plan.split:
            blocks.append(Text(f"{split_sentence(plan.split)}."))
            parts = parts_of(plan.split)
            facts["Split"] = describe_split(plan.split) if parts > 1 else ""
            if parts > 1 and plan.experts < layers[0].experts:
                blocks.append(Text(kept_sentence(plan.experts, layers[0].experts, parts)))
            elif parts > 1 and prune.keeps_all:
                summary += "; sub-experts compute what theirs do, up to rounding"
        protected = sum(map(len, plan.protected.values()))
        if protected:
            what = f"{counted(protected, 'protected expert')}, neither merged nor dropped"
            blocks.append(Text(what))
        ways = [] if prune.keeps_all else [prune.strategy]
        section = Section(self.name, summary, ways=ways, facts=facts, blocks=blocks)
        return with_reconstruction(section, planned, layers)

    def _sentences(self, view: OpenModel) -> tuple[str, ...]:
        """Return sentences on the split, before anything is read."""
        layers = view.architecture.layers
        parts = layers[0].parts
        sentences = []
        if parts > 1 or self.why:
            split = shapes(view.whole or view, parts)
            sentences.append(f"{split_sentence({**split, 'why': self.why})}.")
        if parts > 1 and not self.options.keeps_all:
            kept = self.options.count(layers, parts)
            sentences.append(kept_sentence(kept, layers[0].experts, parts))
        return tuple(sentences)


def _files(state: State, model: OpenModel, refits: bool) -> CutFiles:
    """Return the files of layers that are cut in order: final ones where they are refitted."""
    if state.is_written or not refits:
        return CutFiles(state.kept("layers"))
    return state.once("files", lambda: LayerFiles(state, model, refitted=True))


def kept_sentence(kept: int, experts: int, parts: int) -> str:
    """Return a sentence on the sub-experts that stay in each layer, `parts` of an expert."""
    return (
        f"Keep {kept} of {experts} sub-experts in each layer, as large as {kept / parts:.4g} of "
        f"{experts // parts} experts."
    )


def split_sentence(split: Json) -> str:
    """Return a sentence on a plan's split, with the reason if it was chosen automatically."""
    parts = split["parts"]
    why = split.get("why")
    if parts == 1:
        return f"Experts stay whole: {why}"
    numbers = {
        "num_experts": (split["experts"], split["experts"] * parts),
        "num_experts_per_tok": (split["top_k"], split["top_k"] * parts),
        "width": (split["width"], split["width"] // parts),
    }
    changes = [f"{name} {before} to {after}" for name, (before, after) in numbers.items()]
    reason = f" ({why})" if why else ""
    return f"Split {describe_split(split)}: {', '.join(changes)}{reason}"
