"""The step `prune`: a strategy decides which experts stay, merge or go."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from compressor.document.blocks import Block
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel, refuse_shared_experts
from compressor.recipe.document import protected_blocks_of
from compressor.recipe.plan import ExpertPlan
from compressor.recipe.registry import load_strategy
from compressor.recipe.step import Requirements, Step, StepOptions
from compressor.statistics.statistics import ATTRIBUTED, OUTPUTS, WEIGHTS
from compressor.steps.correct.options import Correct
from compressor.steps.prune.options import Prune, protector_of
from compressor.steps.prune.planning import planner_of, protected_experts, spec_of
from compressor.steps.prune.protection import with_list
from compressor.steps.split.view import with_top_k
from compressor.steps.state import State


@dataclass(frozen=True)
class PruneStep(Step[Prune]):
    """Drop or merge experts, with their rows of the routers."""

    @property
    def suggested_correction(self) -> str:
        """The strategy's own correction."""
        return load_strategy(self.options.strategy, self.options.options).correction

    def resolve(self, model: OpenModel, stage: Sequence[StepOptions]) -> Self:
        """Return the step with the experts that a file protects."""
        return self.with_options(protect=with_list(self.options.protect))

    def model_view(self, model: OpenModel) -> OpenModel:
        return with_top_k(model, self.options.top_k)

    def requirements(
        self, model: OpenModel, steps: Sequence[StepOptions], planned: bool
    ) -> Requirements:
        """Return the need of text of the strategy and the protector; raise `CompressionError` for
        what cannot be done.

        An attribution takes a pass of its own.
        """
        prune = self.options
        layers = model.architecture.layers
        parts = layers[0].parts
        if prune.sequential:
            refuse_shared_experts(model)
        if planned:  # the plan's strategy need not be installed
            prune.count(layers, parts)
            return Requirements()
        spec = spec_of(prune, model, parts)
        notes: tuple[str, ...] = ()
        if parts > 1:
            kept = f"Keep {spec.experts} of {layers[0].experts} sub-experts in each layer"
            notes = (
                f"{kept}, as large as {spec.experts / parts:.4g} of {layers[0].experts // parts} "
                "experts.",
            )
        needs = spec.strategy.needs
        protects = protector_of(prune.protect) is not None
        if not needs - WEIGHTS and not protects:
            return Requirements(notes=notes)
        attributes = protects or needs & ATTRIBUTED
        return Requirements(
            text=True,
            passes=2 if attributes else 1,
            sample_bytes=len(needs & OUTPUTS)
            * layers[0].experts
            * 4
            * int(model.config.get_text_config().hidden_size),
            sample_tokens=prune.sample_count,
            notes=notes,
        )

    def experts_left(self, layers: Sequence[MoeLayer], parts: int) -> int:
        return self.options.count(layers, parts)

    def decide(self, state: State) -> ExpertPlan:
        """Decide from one pass over the model, or in order where each layer sees the compressed
        ones."""
        prune = self.options
        planner = planner_of(state)
        if planner.calibration is not None:
            text = replace(planner.calibration, sample_tokens=prune.sample_count)
            planner = replace(planner, calibration=text)
        spec = spec_of(prune, state.model, state.parts)
        protected = protected_experts(prune.protect, spec.experts, planner)
        correct = state.options_of(Correct)
        reads = spec.strategy.needs - WEIGHTS
        if prune.sequential and planner.calibration is not None and (reads or correct is not None):
            files = None if state.work is None else state.cut()
            return planner.plan_sequentially(spec, correct, protected, files)
        if not reads:
            planner = replace(planner, calibration=None)
        files = None if state.refits else state.stage_files
        calibration = planner.calibration
        evaluator = state.evaluator
        if (
            calibration is None
            or spec.heads
            or evaluator is None
            or evaluator.base is not state.model
        ):
            return planner.plans([spec], protected, files)[0].plan
        with evaluator.keeping(len(calibration.batches)) as probe:
            return planner.plans([spec], protected, files, probe)[0].plan

    def describe(self, entry: Mapping[str, Any]) -> Sequence[Block]:
        return protected_blocks_of((entry.get("plan") or {}).get("protected") or {})
