"""From an opened model and a plan to the job of writing it.

The layers of multi-token-prediction heads are cut like the others; what stands beside them is copied.
"""

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial as bind
from pathlib import Path
from typing import Any

import torch

from compressor.checkpoint.reader import Size, refuse_links
from compressor.checkpoint.source import locate
from compressor.errors import CompressionError
from compressor.model.architecture import build_meta
from compressor.model.inspection import stored_with
from compressor.model.loading import PartialModel
from compressor.model.opened import OpenModel, open_model, pick_dtype
from compressor.model.verification import verify_output
from compressor.mtp.head import Head, find_heads, kept_heads
from compressor.recipe.plan import CompressionPlan, LayerPlan, check_against, whole_plan
from compressor.replaceable import TEMPLATES
from compressor.surgery.configuration import expert_renames, output_config
from compressor.surgery.conversion import LayerChange, convert_unit, converted_outputs, through_model
from compressor.surgery.cutting import CutFiles
from compressor.surgery.tensors import Named, OutputJob, OutputTensor, pieces, plan_outputs, stored_unit

logger = logging.getLogger(__name__)

NOT_CARRIED = (
    ".safetensors",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".onnx",
    ".h5",
    ".msgpack",
    ".py",
    ".md",
    ".index.json",
)
NOT_CARRIED_NAMES = {  # what says of another model how it was made and judged, or is made anew
    "config.json",
    "compression.json",
    "recipe.yaml",
    "gate.json",
    "onnx_export.json",
}


def carried_files(folder: Path) -> dict[str, Path]:
    """Files that travel with the weights: generation config, tokenizer, chat templates, processors, licence.

    None is hidden; raises `CompressionError` naming a file that is a link out of the folder.
    """
    refuse_links(folder)
    found = {
        path.name: path
        for path in _visible(folder)
        if path.name not in NOT_CARRIED_NAMES and not path.name.endswith(NOT_CARRIED)
    }
    return found | {f"{TEMPLATES}/{path.name}": path for path in _visible(folder / TEMPLATES)}


def _visible(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*")) if path.is_file() and not path.name.startswith(".")]


def files_with(model: OpenModel, config: Mapping[str, Any]) -> dict[str, bytes | Path]:
    """What is written beside the weights: what the source carries, and this config."""
    content = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return {**carried_files(model.source.folder), "config.json": content}


def stored_partial(model: OpenModel) -> PartialModel:
    """The model in the checkpoint's own dtype on the CPU, whatever dtype and device it is opened with."""
    return model.partial.computing_in(pick_dtype("auto", model.config, model.checkpoint), torch.device("cpu"))


def output_size(model: OpenModel, experts: int) -> Size:
    """Parameters and bytes of the output when every MoE layer keeps `experts` and nothing is merged or corrected."""
    if model.stored_parts:
        return Size.of(model.stored_parts.cut(model, _evenly(model, experts))[0])
    if not model.is_split:
        return stored_with(model.checkpoint.tensors, model.layout, experts)
    small = build_meta(model.architecture.with_experts(experts), stored_partial(model).dtype)
    return Size.of(converted_outputs(model.partial, model.architecture, small))


def _evenly(model: OpenModel, experts: int) -> CompressionPlan:
    """A plan that keeps `experts` of every layer, equally many of each routing group."""
    plan = whole_plan(model)
    kept = [place * model.architecture.experts // experts for place in range(experts)]
    layers = tuple(LayerPlan.keep(layer, kept) for layer in model.architecture.layers)
    return replace(plan, experts=experts, layers=layers)


def idle_parameters(model: OpenModel, experts: int) -> int:
    """Parameters of the experts that a token does not visit, over all layers of the output with `experts` in each."""
    small = build_meta(model.architecture.with_experts(experts))
    modules = ((layer, small.get_submodule(layer.name)) for layer in model.architecture.layers)
    return sum(
        sum(value.numel() for value in module.parameters()) // experts * (experts - layer.top_k)
        for layer, module in modules
    )


def _kept_heads(model: OpenModel, plan: CompressionPlan) -> tuple[Head, ...]:
    return kept_heads(model, [layer.module for layer in plan.layers])


def check_plan(plan: CompressionPlan, model: OpenModel) -> tuple[Head, ...]:
    """Refuse a plan that was made for another model, or for one with another head; returns the heads that it keeps."""
    heads = _kept_heads(model, plan)
    check_against(plan, (*model.architecture.layers, *(head.named for head in heads)), model.fingerprint)
    return heads


def left_out_of(model: OpenModel, plan: CompressionPlan) -> tuple[str, ...]:
    """The source's tensors that are not in the output: no part of the stock model, nor of a head that is kept."""
    kept = {name for head in _kept_heads(model, plan) for name in head.names.stored}
    return tuple(name for name in model.layout.left_out if name not in kept)


Made = tuple[list[OutputTensor], Callable[[str], Named]]  # tensors, and by decoder layer their names and bytes


def _picked(model: OpenModel, plan: CompressionPlan) -> Made:
    """Tensors that are picked and mixed from the stored ones."""
    outputs = plan_outputs(model.checkpoint, model.layout, plan, model.architecture.units)
    return outputs, bind(stored_unit, model.checkpoint, outputs)


def _converted(
    model: OpenModel,
    partial: PartialModel,
    plan: CompressionPlan,
    cut: CutFiles | None,
    change: LayerChange | None = None,
) -> Made:
    """Tensors that are made by loading one decoder layer after the other."""
    small = build_meta(model.architecture.with_experts(plan.experts), partial.dtype)
    outputs = converted_outputs(partial, model.architecture, small)
    return outputs, bind(convert_unit, partial, model.architecture, plan, small, cut, change=change)


@dataclass(frozen=True, slots=True)
class _HeadJob:
    """A head as it is written: what its model of one decoder layer gives under the head's names, and what is copied."""

    outputs: list[OutputTensor]
    produce: Callable[[], Named]
    renames: Mapping[str, str | None]  # what the stored name of an expert becomes; None for a dropped one's


def _head_job(
    model: OpenModel, head: Head, plan: CompressionPlan, beside: list[str], files: CutFiles | None, dtype: torch.dtype
) -> _HeadJob:
    """Of a head and of the stored tensors `beside` its layer; what goes through its model does so in `dtype`."""
    own = next(layer for layer in plan.layers if layer.module == head.named.name)
    alone = replace(plan, layers=(replace(own, module=head.layer.name),), protected={})
    small, unit, name_of = head.model, head.names.unit, head.stored_name
    if through_model(small.layout, plan):
        partial = PartialModel(small.checkpoint, small.config, dtype, torch.device("cpu"))
        outputs, of_unit = _converted(small, partial, alone, files)
    else:
        outputs, of_unit = _picked(small, alone)
    copied = [OutputTensor.copy(model.checkpoint.tensors[name], unit) for name in beside]
    cut = [replace(each, name=name_of(each.name), unit=unit) for each in outputs if each.unit == head.layer.unit]

    def produce() -> Named:
        yield from ((name_of(name), content) for name, content in of_unit(head.layer.unit))
        yield from ((output.name, pieces(head.checkpoint, output)) for output in copied)

    renamed = expert_renames(small.architecture, small.layout, alone).items()
    renames = {name_of(old): None if new is None else name_of(new) for old, new in renamed}
    return _HeadJob([*cut, *copied], produce, renames)


def _head_jobs(
    model: OpenModel, plan: CompressionPlan, cut: CutFiles | None, dtype: torch.dtype
) -> dict[str, _HeadJob]:
    """Of each head that the plan keeps, by its name as a decoder layer; what heads share is copied with the first."""
    found, copied = dict[str, _HeadJob](), set[str]()
    for number, head in enumerate(_kept_heads(model, plan)):
        beside = [name for name in dict.fromkeys(head.names.parts.values()) if name not in copied]
        copied.update(beside)
        files = None if cut is None else cut.of_head(number)
        found[head.names.unit] = _head_job(model, head, plan, beside, files, dtype)
    return found


def _verify(model: OpenModel, experts: int, names: list[str], folder: Path) -> None:
    """Check a written folder against the stock model, and the heads whose tensors have these `names`."""
    fields = {model.architecture.count_field: experts, **model.architecture.written}
    verify_output(folder, fields, experts, model.source.folder, names)
    if not names:
        return
    written = find_heads(open_model(locate(str(folder))))
    if missing := sorted(set(names) - {name for head in written for name in head.names.stored}):
        raise CompressionError(f"the written tensor {missing[0]!r} belongs to no multi-token-prediction head")
    for head in written:
        if head.layer.experts != experts:
            raise CompressionError(f"{head.named.name} was written with {head.layer.experts} experts, not {experts}")


def make_job(
    model: OpenModel, plan: CompressionPlan, cut: CutFiles | None = None, change: LayerChange | None = None
) -> OutputJob:
    """The job of writing a plan; a correction needs its `cut` layers. `change` gives a layer's tensors other values."""
    architecture, layout = model.architecture, model.layout
    dequantized: str | None = None
    heads = _head_jobs(model, plan, cut, pick_dtype("auto", model.config, model.checkpoint))
    if model.stored_parts and plan.is_drop and change is None:
        outputs, produce = model.stored_parts.cut(model, plan)
    elif model.is_split or change is not None or through_model(layout, plan):
        if model.stored_parts:
            logger.warning("parts are merged, so quantised experts are written in a plain dtype")
        partial = stored_partial(model)
        outputs, produce = _converted(model, partial, plan, cut, change)
        dequantized = str(partial.dtype).removeprefix("torch.") if layout.quantized else None
    else:
        outputs, produce = _picked(model, plan)
    of_heads = [output for head in heads.values() for output in head.outputs]
    renames = {old: new for head in heads.values() for old, new in head.renames.items()} if heads else None
    config, zeroed = output_config(model.checkpoint.raw_config, architecture, layout, plan, dequantized, renames)
    return OutputJob(
        outputs=(*outputs, *of_heads),
        units=("", *architecture.units, *heads),
        produce=lambda unit: heads[unit].produce() if unit in heads else produce(unit),
        files=files_with(model, config),
        verify=bind(_verify, model, plan.experts, [output.name for output in of_heads]),
        zeroed=tuple(zeroed),
    )
