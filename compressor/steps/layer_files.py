"""The files of a step's decoder layers, each written once and in its final form while the layer is
loaded."""

import shutil
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

from compressor.checkpoint.quantized import wanted_dtype
from compressor.distributed import ranks
from compressor.model.experts import Parameters
from compressor.model.loading import PartialModel
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.model.streaming import LayerVisitor
from compressor.recipe.plan import ExpertPlan, LayerPlan
from compressor.recipe.steps_plan import layer_to_dict
from compressor.steps.cutting import (
    Conversion,
    CutFiles,
    Tensors,
    cut_keys,
    cut_or_kept,
    through_model,
)
from compressor.steps.job import conversion_of, own_outputs, stored_partial
from compressor.steps.step import State
from compressor.steps.tensors import plan_outputs, stored_decoder_layer
from compressor.steps.workdir import made_by
from compressor.tensor_cache import save_tensors


class LayerFiles(CutFiles, LayerVisitor):
    """Layers of a step in their final files; beside these, only their plans are kept.

    Refitted layers are saved with their tensors, others while they are loaded. In a pass, it writes
    the decoder layers without experts."""

    def __init__(self, state: State, model: OpenModel, refitted: bool) -> None:
        assert state.writer is not None
        super().__init__(state.kept("layers"))
        self.model = model
        self.writer = state.writer
        self.target = state.folder
        self.label = (state.label,)
        self.refitted = refitted
        self.is_stopped = False
        # until all MoE layers of their decoder layer are there
        self.waiting = dict[str, tuple[LayerPlan, Tensors]]()
        self.conversions = dict[int, Conversion]()  # by experts

    @cached_property
    def partial(self) -> PartialModel:
        """The model in the dtype that is written."""
        return stored_partial(self.model)

    def file(self, decoder_layer: str) -> Path:
        """Return the file of a decoder layer."""
        return self.target / f"{decoder_layer}.safetensors"

    def is_written(self, decoder_layer: str) -> bool:
        """Return True if a decoder layer's file is on the disk."""
        return made_by(self.file(decoder_layer)) == self.label

    def save(self, plan: LayerPlan, layer: MoeLayer, tensors: Tensors) -> None:
        """Keep the plan, and write the file once all MoE layers of the decoder layer have come."""
        is_known = not self.refitted and self.plan(layer) == plan
        if self.is_stopped or is_known:
            return
        self.file(layer.decoder_layer).unlink(missing_ok=True)  # made by another plan
        save_tensors(self._path(layer), {}, layer_to_dict(plan))
        self.waiting[layer.name] = plan, tensors
        layers = [
            other
            for other in self.model.architecture.layers
            if other.decoder_layer == layer.decoder_layer
        ]
        if all(other.name in self.waiting for other in layers):
            plans = tuple(self.waiting[other.name][0] for other in layers)
            self._write(layer.decoder_layer, ExpertPlan(len(plan.groups), plans))
            self.waiting.clear()

    def on_layer_end(self, decoder_layer: str) -> None:
        is_plain = not self.at.moe_layers and ranks().is_first
        if is_plain and not self.is_stopped and not self.is_written(decoder_layer):
            self._write(decoder_layer, ExpertPlan(self.model.architecture.experts, ()))

    def flush(self) -> None:
        self.writer.flush()

    def plan(self, layer: MoeLayer) -> LayerPlan | None:
        return super().plan(layer) if self.is_written(layer.decoder_layer) else None

    def tensors(self, layer: MoeLayer) -> Parameters:
        """Return a layer's tensors in the dtype for computing; none if it is not finished."""
        if layer.name in self.waiting:
            return dict(self.waiting[layer.name][1])
        plan = self.plan(layer)
        if plan is None:
            return {}
        conversion = self._conversion(len(plan.groups))
        model = self.model.partial.model
        stored = conversion.read(self.file(layer.decoder_layer), cut_keys(layer))
        return {key: value.to(wanted_dtype(model, key)) for key, value in stored.items()}

    def _conversion(self, experts: int) -> Conversion:
        if experts not in self.conversions:
            self.conversions[experts] = conversion_of(self.model, self.partial, experts)
        return self.conversions[experts]

    def _write(self, decoder_layer: str, plan: ExpertPlan) -> None:
        """Write the file of a decoder layer that is loaded."""
        layout = self.model.layout
        roles = {
            name: role for name, role in layout.roles.items() if role.decoder_layer == decoder_layer
        }
        behind = self.model.partial.device.type != "cpu"
        views = self.model.checkpoint.read_all(roles) if behind and not self.refitted else {}
        through = through_model(layout, plan, self.refitted)
        # layers are written like those that mix nothing; if one cannot be, all are made anew
        if through != through_model(layout, ExpertPlan(0, ()), self.refitted):
            self.is_stopped = True
            self.writer.flush()
            shutil.rmtree(self.target, ignore_errors=True)
            return
        if through:
            own = own_outputs(self.model, self.partial, plan, roles)
            conversion = replace(self._conversion(plan.experts), own=own)
            outputs = conversion.outputs([decoder_layer])
            cut = partial(cut_or_kept, self.partial, plan, self if self.refitted else None)
            named = conversion.produce(cut, decoder_layer)
        else:
            outputs = plan_outputs(self.model.checkpoint, roles, plan, (decoder_layer,))
            named = stored_decoder_layer(outputs, decoder_layer)
        self.target.mkdir(parents=True, exist_ok=True)
        self.writer.write(self.file(decoder_layer), outputs, named, self.label, behind)
        self.views = views  # in use until the next file is written, which waits for this one
