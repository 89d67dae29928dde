"""The step `constants`: a constant stands for each expert that is left out (MoNE), as vLLM serves
them.

Every tensor that stays is a copy of the stored bytes, quantised ones included, unless `correct`
refitted it. Experts keep their numbers. A constant is `<experts prefix>.<id>.approx_value` [H], and
config.json lists them by decoder layer. Stock transformers computes with none, so a written
checkpoint is compared with the source by a forward of our own."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from compressor.checkpoint.reader import DTYPE_NAMES, Checkpoint
from compressor.checkpoint.source import ModelSource
from compressor.divergence.evaluator import FEWEST
from compressor.divergence.logits import read_logits
from compressor.errors import CompressionError
from compressor.formatting import counted, span
from compressor.model.constant_experts import (
    FIELD,
    NOT_STOCK,
    SUFFIX,
    SubstitutedCheckpoint,
    Substitutes,
    is_replaced,
    number_in,
)
from compressor.model.layout import expert_prefixes
from compressor.model.moe_layer import MoeLayer, left_by
from compressor.model.opened import (
    OpenModel,
    open_substituted,
    pick_dtype,
    refuse_shared_experts,
)
from compressor.model.substitution import Substitution
from compressor.model.verification import check_carried
from compressor.recipe.plan import UNEVEN, ExpertPlan
from compressor.recipe.step import StepOptions
from compressor.recipe.steps_plan import PlannedStep
from compressor.steps.configuration import config_with
from compressor.steps.constants.options import Constants
from compressor.steps.constants.search import (
    EVEN,
    ConstantsByLayer,
    LayerConstants,
    choose_replaced,
    layer_plan,
    measure,
    refit,
    substitutes_of,
)
from compressor.steps.correct.sequential import (
    constants_key,
    correction_needs,
    refitted_substitution,
)
from compressor.steps.cutting import Conversion, CutFiles
from compressor.steps.job import check_plan, files_with, left_out_of, stored_partial
from compressor.steps.prune.planning import (
    Planner,
    given_protected,
    listed,
    protected_experts,
    with_list,
)
from compressor.steps.section import Section, with_reconstruction
from compressor.steps.step import Requirements, State, Step
from compressor.steps.tensors import (
    Named,
    OutputJob,
    OutputTensor,
    in_order_of,
    refuse_overflow,
    stored_decoder_layer,
    tensor_bytes_view,
    tensor_output,
)

CHECKED = 32  # tokens that a written checkpoint is checked on
TOLERANCE = 1e-3  # of the largest logit; the same sums in the same order differ by nothing

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ConstantsStep(Step[Constants]):
    """Leave out the experts of which a constant misses least; layers may keep different numbers."""

    @property
    def budget(self) -> str:
        """The way in which the remaining experts are divided over layers."""
        return self.options.budget or (EVEN if self.options.experts_total is None else UNEVEN)

    def resolve(self, model: OpenModel) -> Self:
        """Return the step with the experts that a file protects; nothing is corrected by itself."""
        correct = self.options.correct
        if correct.method == "auto":
            correct = correct.model_copy(update={"method": "none"})
        return self.with_options(protect=with_list(self.options.protect), correct=correct)

    def requirements(
        self, model: OpenModel, earlier: Sequence[StepOptions], planned: bool
    ) -> Requirements:
        """Check model, numbers and correction; raises `CompressionError` for what this format
        cannot do."""
        refuse_model(model)
        correct = self.options.correct
        layers = model.architecture.layers
        experts = self.experts_left(layers)
        if model.layout.quantized:
            if correct.wanted:
                raise CompressionError(
                    f"--correct {correct.method} changes experts, which stay quantised with "
                    "--format mone; pass --correct none"
                )
            logger.warning(
                "vLLM serves constants only beside experts that are not quantised, and these stay "
                "quantised"
            )
        if correct.wanted:
            refuse_shared_experts(model)
            if correct.toward:
                raise CompressionError(
                    "correct: toward is not known beside constants; leave it out"
                )
        given_protected(self.options.protect, layers, experts)
        heldout = FEWEST if self.budget == UNEVEN else 0
        return correction_needs(correct, Requirements(True, heldout, passes=1))

    def _total(self, layers: Sequence[MoeLayer]) -> int:
        """Return how many experts of all layers together stay."""
        options = self.options
        total = sum(layer.experts for layer in layers)
        count = len(layers)
        if (options.experts, options.ratio, options.experts_total).count(None) != 2:
            raise CompressionError(
                "say how many experts to keep: one of --experts N, --ratio R and --experts-total N"
            )
        kept = options.experts_total or (options.experts or 0) * count
        if options.ratio is not None:
            groups = 1 if self.budget == UNEVEN else count
            kept = left_by(total // groups, options.ratio) * groups
        if self.budget == EVEN and kept % count:
            raise CompressionError(
                f"--experts-total {kept} does not divide over {count} layers; pass --budget uneven "
                f"or a multiple of {count}"
            )
        least = sum(max(layer.top_k, 1) for layer in layers)
        if not least <= kept <= total:
            raise CompressionError(
                f"{kept} experts in all cannot be kept: the {count} layers have {total}, and need "
                f"{least} for their top-k"
            )
        return kept

    def experts_left(self, layers: Sequence[MoeLayer]) -> int:
        return self._total(layers) // len(layers)

    def plan(self, state: State) -> ExpertPlan:
        """Decide for which experts of each layer constants stand."""
        assert state.text is not None
        model = state.model
        layers = state.model.architecture.layers
        calibration = state.text.fit
        planner = Planner(model, state.fit, state.progress, state.seed)
        total = self._total(layers)
        experts = self.experts_left(layers)
        protected = protected_experts(self.options.protect, experts, planner)
        constants = _measured(state)
        removed = sum(layer.experts for layer in layers) - total
        heldout = calibration.heldout_batches
        replaced, figures = choose_replaced(
            model, constants, protected, removed, self.budget, heldout, state.progress
        )
        plans = []
        for layer in layers:
            missed = constants[layer.name].missed
            dropped = sorted(replaced[layer.name])
            share = (
                float(missed[dropped].sum() / missed.sum().clamp(min=1e-300)) if dropped else 0.0
            )
            layer_figures = {
                "missed": [round(value, 6) for value in missed.tolist()],
                "share_missed": round(share, 6),
            }
            plans.append(
                layer_plan(layer, dropped, decided_by="sum g^2 ||o - c||^2", figures=layer_figures)
            )
        return ExpertPlan(
            experts,
            tuple(plans),
            listed(protected),
            format="mone",
            budget=self.budget,
            experts_total=total,
            figures=figures,
        )

    def describe(self, planned: PlannedStep) -> Section:
        """Describe how many experts are constants, who serves them, and the reconstruction."""
        plan = planned.expert_plan
        assert plan is not None
        layers = plan.layers
        replaced = sum(len(layer.constants) for layer in layers)
        before = sum(layer.experts for layer in layers)
        section = Section(
            self.name,
            f"Constants stand for {replaced:,} of the {before:,} experts of its "
            f"{counted(len(layers), 'MoE layer')}; {span(len(layer.groups) for layer in layers)} "
            f"stay in each (MoNE, arXiv:2507.00390), and the routers are whole; {NOT_STOCK}",
            ways=[self.name],
            limits=[
                "The format was checked by the tool's own forward: the written tensors give the "
                "logits that the base gives with these constants."
            ],
        )
        return with_reconstruction(section, planned, layers)

    def write(self, state: State) -> OutputJob:
        """Refit constants and the experts that stay, if asked, and return how both are written.

        What is measured and refitted waits in the work folder, as the finished output is compared
        with it."""
        model = state.model
        plan = state.expert_plan
        dropped = {layer.module: layer.constants for layer in plan.layers}
        planned = substitutes_of(dropped, _measured(state))
        layers = [layer for layer in model.architecture.layers if layer.name in planned]
        files = None
        if self.options.correct.wanted:
            files = CutFiles(state.kept("layers"))
            if not state.is_written:
                assert state.text is not None
                given = state.text.fit, state.progress, state.seed, self.options.correct, files
                with state.run.clock.phase("correct"):
                    refitted = refit(model, planned, *given)
                decided = []
                for decision in plan.layers:
                    if decision.module in refitted:
                        correction = refitted[decision.module].figures["correction"]
                        figures = {**decision.figures, "correction": correction}
                        decision = replace(decision, figures=figures)
                    decided.append(decision)
                plan = replace(plan, layers=tuple(decided))
                state.run.record(state.number, decision=plan)
            written = refitted_substitution(model, plan.layers, files)
        else:
            stored = pick_dtype("auto", model.config, model.checkpoint)
            planned = {
                name: replace(constants, values=constants.values.to(stored))
                for name, constants in planned.items()
            }
            written = Substitution(constants=planned)
        kept = kept_job(model, plan)
        added = []
        for layer in layers:
            prefixes = expert_prefixes(model.layout, layer)
            values = written.constants[layer.name].values
            for expert, value in zip(planned[layer.name].dropped, values, strict=True):
                name = f"{prefixes[expert]}{SUFFIX}"
                content = partial(iter, (tensor_bytes_view(refuse_overflow(name, value)),))
                added.append(
                    replace(tensor_output(name, value, layer.decoder_layer), content=content)
                )
        outputs = in_order_of(model.architecture.decoder_layers, [*kept.outputs, *added])
        return replace(
            kept,
            outputs=tuple(outputs),
            produce=partial(_produced, model, planned, files, kept.outputs, added),
            verify=partial(_verify, model, outputs, written),
        )


def kept_job(model: OpenModel, plan: ExpertPlan) -> OutputJob:
    """Return the job of writing everything but the constants: copies of the tensors that stay, and
    the config."""
    check_plan(plan, model)
    replaced = {layer.module: Substitutes(layer.constants, torch.empty(0)) for layer in plan.layers}
    copies = [
        OutputTensor.copy(model.checkpoint, name, role.decoder_layer)
        for name, role in model.layout.roles.items()
        if not is_replaced(role, replaced)
    ]
    config, zeroed = config_with(
        model.checkpoint.raw_config, model.architecture, model.architecture.written
    )
    constants = {str(layer.layer): list(layer.constants) for layer in plan.layers}
    config[FIELD] = {layer: experts for layer, experts in constants.items() if experts}
    return OutputJob(
        outputs=tuple(copies),
        decoder_layers=("", *model.architecture.decoder_layers),
        produce=partial(stored_decoder_layer, copies),
        files=files_with(model, config),
        verify=check_carried,
        zeroed=tuple(zeroed),
        left_out=left_out_of(model),
    )


def _measured(state: State) -> dict[str, LayerConstants]:
    """Return the constants of all layers; a run that was killed finds them in its work folder."""
    assert state.text is not None
    kept = None if state.run.work is None else state.kept("measured")
    return measure(state.model, state.text.fit, state.progress, state.seed, kept)


def _produced(
    model: OpenModel,
    planned: ConstantsByLayer,
    files: CutFiles | None,
    copies: Sequence[OutputTensor],
    added: Sequence[OutputTensor],
    decoder_layer: str,
) -> Named:
    """Yield a decoder layer's tensors by their stored names: refitted ones, experts back at their
    own numbers, then copies and constants."""
    copies = [output for output in copies if output.decoder_layer == decoder_layer]
    wanted = set[str]()
    if files is not None:
        roles = model.layout.roles
        wanted = {output.name for output in copies if roles[output.name].layer in planned}
    if files is not None and wanted:
        stored = stored_partial(model)

        def change(layer: MoeLayer) -> dict[str, Tensor]:
            if layer.name not in planned:
                return {}
            tensors = files.tensors(layer)
            del tensors[constants_key(layer)]
            dropped = planned[layer.name].dropped
            kept = [expert for expert in range(layer.experts) if expert not in dropped]
            for key, value in tensors.items():
                if key.startswith(f"{layer.name}."):
                    tensors[key] = value.new_zeros(layer.experts, *value.shape[1:])
                    tensors[key][kept] = value
                refuse_overflow(key, value.to(stored.dtype))
            return tensors

        own = {
            output.name: output for output in copies if output.dtype != DTYPE_NAMES[stored.dtype]
        }
        conversion = Conversion(stored, model.architecture, stored.model, own, model.partial.dtype)
        for name, content in conversion.produce(change, decoder_layer):
            if name in wanted:
                yield name, content
    copies = [output for output in copies if output.name not in wanted]
    yield from stored_decoder_layer([*copies, *added], decoder_layer)


def refuse_model(model: OpenModel) -> None:
    """Refuse a model of which single experts cannot be left out, or whose layers vLLM would not
    tell apart."""
    layout = model.layout
    fused = next(
        (
            name
            for name, role in layout.roles.items()
            if role.kind == "fused" and not role.is_router
        ),
        None,
    )
    if fused is not None or not layout.regular:
        raise CompressionError(
            f"--format mone leaves out single experts, but {model.architecture.family} checkpoints "
            f"store all experts of a layer together{'' if fused is None else f' ({fused})'}; "
            "compress without --format mone"
        )
    for layer in model.architecture.layers:
        prefixes = expert_prefixes(layout, layer)
        shared = {prefix.rpartition(".")[0] for prefix in prefixes.values()}
        if (
            len(prefixes) < layer.experts
            or len(shared) > 1
            or number_in(min(shared)) != layer.index
        ):
            raise CompressionError(
                f"{layer.name}: vLLM finds constants by names such as layers.3.experts.7, and "
                "this checkpoint's are "
                f"others ({min(shared, default='none')}); compress without --format mone"
            )


def read_constants(
    folder: Path, dtype: str = "auto", device: str = "auto"
) -> tuple[OpenModel, ConstantsByLayer]:
    """Return a written checkpoint with constants, and these by experts module; an unfit one is a
    `CompressionError`."""
    model = open_substituted(ModelSource.of(folder), dtype, device)
    assert isinstance(model.checkpoint, SubstitutedCheckpoint)
    partial = model.partial
    return model, model.checkpoint.substitutes(
        model.architecture.layers, partial.dtype, partial.device
    )


def _verify(
    source: OpenModel, outputs: Sequence[OutputTensor], substitution: Substitution, folder: Path
) -> None:
    """Refuse a written checkpoint that has other tensors than the outputs, or does not compute what
    this variant of the source does."""
    stored = {(name, info.dtype, info.shape) for name, info in Checkpoint(folder).tensors.items()}
    differing = stored ^ {(output.name, output.dtype, output.shape) for output in outputs}
    if differing:
        raise CompressionError(
            f"the written tensor {min(differing)[0]!r} is not as planned; please report this model"
        )
    check_carried(folder, source.source.folder)
    tokens = torch.arange(CHECKED)[None] * 7919 % source.vocabulary
    written, constants = read_constants(folder, source.dtype_name, str(source.partial.device))
    everywhere = torch.ones(tokens.shape, dtype=torch.bool)
    [expected] = read_logits(source, [(substitution, tokens, everywhere)], Tensor.float)
    substituted = Substitution(constants=constants)
    [logits] = read_logits(written, [(substituted, tokens, everywhere)], Tensor.float)
    difference = float((logits - expected).abs().max())
    if not difference <= TOLERANCE * max(float(expected.abs().max()), 1e-6):
        raise CompressionError(
            f"the written checkpoint's logits differ by {difference:.3g} from the source's with "
            "constants; please report this model"
        )
