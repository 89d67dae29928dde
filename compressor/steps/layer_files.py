"""The files of a step's decoder layers, each written once and in its final form while the layer is
loaded."""

import shutil
from functools import cached_property

from compressor.checkpoint.quantized import wanted_dtype
from compressor.distributed import ranks
from compressor.model.experts import Parameters
from compressor.model.loading import PartialModel
from compressor.model.moe_layer import MoeLayer
from compressor.model.opened import OpenModel
from compressor.model.streaming import LayerVisitor
from compressor.recipe.plan import ExpertPlan, LayerPlan
from compressor.recipe.steps_plan import layer_to_dict
from compressor.steps.cutting import Conversion, CutFiles, Tensors, cut_keys, through_model
from compressor.steps.job import conversion_of, cut_outputs, stored_partial
from compressor.steps.step import State
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
        self.refitted = refitted
        self.is_stopped = False
        # until all MoE layers of their decoder layer are there
        self.waiting = dict[str, tuple[LayerPlan, Tensors]]()
        self.conversions = dict[int, Conversion]()  # by experts

    @cached_property
    def partial(self) -> PartialModel:
        """The model in the dtype that is written."""
        return stored_partial(self.model)

    def save(self, plan: LayerPlan, layer: MoeLayer, tensors: Tensors) -> None:
        """Keep the plan, and write the file once all MoE layers of the decoder layer have come."""
        is_known = not self.refitted and self.plan(layer) == plan
        if self.is_stopped or is_known:
            return
        self.writer.path(layer.decoder_layer).unlink(missing_ok=True)  # made by another plan
        save_tensors(self._path(layer), {}, layer_to_dict(plan))
        self.waiting[layer.name] = plan, tensors
        names = [
            other.name
            for other in self.model.architecture.layers
            if other.decoder_layer == layer.decoder_layer
        ]
        if self.waiting.keys() >= {*names}:
            plans = tuple(self.waiting[name][0] for name in names)
            self._write(layer.decoder_layer, ExpertPlan(len(plan.groups), plans))
            self.waiting.clear()

    def on_layer_end(self, decoder_layer: str) -> None:
        is_plain = not self.at.moe_layers and ranks().is_first
        if is_plain and not self.is_stopped and not self.writer.is_written(decoder_layer):
            self._write(decoder_layer, ExpertPlan(self.model.architecture.experts, ()))

    def flush(self) -> None:
        self.writer.flush()

    def plan(self, layer: MoeLayer) -> LayerPlan | None:
        return super().plan(layer) if self.writer.is_written(layer.decoder_layer) else None

    def tensors(self, layer: MoeLayer) -> Parameters:
        """Return a layer's tensors in the dtype for computing; none if it is not finished."""
        if layer.name in self.waiting:
            return dict(self.waiting[layer.name][1])
        plan = self.plan(layer)
        if plan is None:
            return {}
        conversion = self._conversion(len(plan.groups))
        model = self.model.partial.model
        stored = conversion.read(self.writer.path(layer.decoder_layer), cut_keys(layer))
        return {key: value.to(wanted_dtype(model, key)) for key, value in stored.items()}

    def _conversion(self, experts: int) -> Conversion:
        if experts not in self.conversions:
            self.conversions[experts] = conversion_of(self.model, self.partial, experts)
        return self.conversions[experts]

    def _write(self, decoder_layer: str, plan: ExpertPlan) -> None:
        """Write the file of a decoder layer that is loaded."""
        layout = self.model.layout
        through = through_model(layout, plan, self.refitted)
        # layers are written like those that mix nothing; if one cannot be, all are made anew
        if through != through_model(layout, ExpertPlan(0, ()), self.refitted):
            self.is_stopped = True
            self.writer.flush()
            shutil.rmtree(self.writer.folder, ignore_errors=True)
            return
        behind = self.model.partial.device.type != "cpu"
        names = (name for name, role in layout.roles.items() if role.decoder_layer == decoder_layer)
        views = self.model.checkpoint.read_all(names) if behind and not self.refitted else {}
        files = self if self.refitted else None
        conversion = self._conversion(plan.experts) if through else None
        outputs, produce = cut_outputs(self.model, plan, files, conversion, [decoder_layer])
        self.writer.write(decoder_layer, outputs, produce(decoder_layer), behind)
        self.views = views  # in use until the next file is written, which waits for this one
