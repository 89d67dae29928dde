"""Output through the model: load a layer as the stock loader does, cut it, and name it as `save_pretrained` would.

Needed where stored tensors cannot be mixed as they are: quantised experts that are merged (the output is then plain),
experts whose neurons are aligned first, and storage that only transformers' reversible conversions understand.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from compressor.checkpoint.quantized import wanted_dtype
from compressor.checkpoint.reader import refuse_nan
from compressor.errors import CompressionError
from compressor.model.architecture import Architecture, MoeLayer
from compressor.model.layout import Layout
from compressor.model.loading import PartialModel
from compressor.progress import quiet_transformers
from compressor.recipe.plan import CompressionPlan
from compressor.surgery.cutting import CutFiles, cut_layers
from compressor.surgery.tensors import Named, OutputTensor, refuse_overflow, tensor_bytes_view, tensor_output

LayerChange = Callable[[str, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]  # of a layer's tensors, by key


def through_model(layout: Layout, plan: CompressionPlan) -> bool:
    """Whether the output has to be made through the model: stored tensors cannot be picked or mixed as they are."""
    return not layout.regular or not plan.stored_as_is or (layout.quantized and not plan.is_drop)


def saved_names(small: Any, state: dict[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    """Tensors of a model by the names and in the shapes in which stock `save_pretrained` would write them."""
    from transformers.core_model_loading import revert_weight_conversion

    with quiet_transformers():
        reverted: dict[str, torch.Tensor] = revert_weight_conversion(small, state)
    return reverted.items()


def _keys_of(partial: PartialModel, unit: str, units: tuple[str, ...]) -> list[str]:
    others = () if unit else tuple(f"{other}." for other in units)
    return [key for key in partial.keys_under(unit) if not key.startswith(others) and key not in partial.tied]


def converted_outputs(partial: PartialModel, architecture: Architecture, small: Any) -> list[OutputTensor]:
    """Every tensor of the output, named and shaped as stock `save_pretrained` would write the model `small`."""
    state = {key: value.to(wanted_dtype(small, key)) for key, value in small.state_dict().items()}
    outputs = list[OutputTensor]()
    for unit in ("", *architecture.units):
        keys = [key for key in _keys_of(partial, unit, architecture.units) if key in state]
        saved = saved_names(small, {key: state[key] for key in keys})
        outputs += [tensor_output(name, tensor, unit) for name, tensor in saved]
    return outputs


def convert_unit(
    partial: PartialModel,
    architecture: Architecture,
    plan: CompressionPlan,
    small: Any,
    files: CutFiles | None,
    change: LayerChange | None,
    unit: str,
) -> Named:
    """Load a decoder layer ("" is the rest), cut it or take it from `files`, and yield its tensors as stored."""
    plans = {layer_plan.module: layer_plan for layer_plan in plan.layers}

    def cut(layer: MoeLayer) -> Mapping[str, torch.Tensor]:
        made = files.tensors(layer) if files else {}
        if plan.correction is not None and not made:
            raise CompressionError(
                f"{layer.name}: its corrected tensors can no longer be read from the work folder; run the command again"
            )
        for key, value in made.items():  # in float32, and refitted
            refuse_overflow(key, value.to(partial.model.state_dict()[key].dtype))
        return made or cut_layers(partial.model, [layer], plans)

    yield from changed_unit(partial, architecture, small, cut, unit, change)


def changed_unit(
    partial: PartialModel,
    architecture: Architecture,
    small: Any,
    made: Callable[[MoeLayer], Mapping[str, torch.Tensor]],
    unit: str,
    change: LayerChange | None = None,
) -> Named:
    """Load a decoder layer ("" is the rest), put what is `made` of its MoE layers in place, and yield all of it.

    Tensors come out by the names and in the shapes in which stock `save_pretrained` would write the model `small`.
    """
    keys = _keys_of(partial, unit, architecture.units)
    partial.load(keys)
    state = partial.model.state_dict()
    cut = {key: state[key] for key in keys}
    for layer in (layer for layer in architecture.layers if layer.unit == unit):
        cut.update({key: value.to(cut[key].dtype) for key, value in made(layer).items()})
    if change is not None and unit:
        cut.update({key: refuse_overflow(key, value.to(cut[key].dtype)) for key, value in change(unit, cut).items()})
    for name, tensor in saved_names(small, cut):
        refuse_nan(name, "the converted model", tensor)
        yield name, iter([tensor_bytes_view(tensor)])
    for key in keys:
        partial.release(key.rpartition(".")[0])
