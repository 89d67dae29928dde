"""From an opened model and a plan to the job that an exporter carries out."""

import json
import logging
from dataclasses import replace
from functools import partial as bind
from pathlib import Path
from typing import Any

import torch

from compressor.checkpoint.reader import Size, refuse_links
from compressor.model.architecture import build_meta
from compressor.model.inspection import stored_with
from compressor.model.loading import PartialModel
from compressor.model.opened import OpenModel, pick_dtype
from compressor.model.verification import verify_output
from compressor.mtp.head import kept_heads
from compressor.recipe.plan import CompressionPlan, LayerPlan, whole_plan
from compressor.replaceable import TEMPLATES
from compressor.surgery.configuration import output_config
from compressor.surgery.conversion import LayerChange, convert_unit, converted_outputs, through_model
from compressor.surgery.cutting import CutFiles
from compressor.surgery.heads import cut_heads, verify_heads
from compressor.surgery.tensors import OutputJob, plan_outputs, stored_unit

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


def stored_partial(model: OpenModel) -> PartialModel:
    """The model in the checkpoint's own dtype on the CPU, whatever dtype and device it is opened with."""
    return model.partial.computing_in(pick_dtype("auto", model.config, model.checkpoint), torch.device("cpu"))


def output_size(model: OpenModel, experts: int) -> Size:
    """Parameters and bytes of the output when every MoE layer keeps `experts` and nothing is merged or corrected."""
    if model.stored_parts:
        return Size.of(model.stored_parts.cut(model, _evenly(model, experts))[0])
    if not model.is_split:
        found = stored_with(model.checkpoint.tensors, model.layout, experts)
        return Size(found.parameters, found.bytes)
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


def left_out_of(model: OpenModel, plan: CompressionPlan) -> tuple[str, ...]:
    """The source's tensors that are not in the output: no part of the stock model, nor of a head that is kept."""
    heads = kept_heads(model, [layer.module for layer in plan.layers])
    kept = {name for head in heads for name in head.names.stored}
    return tuple(name for name in model.layout.left_out if name not in kept)


def _verify(model: OpenModel, experts: int, names: list[str], folder: Path) -> None:
    """Check a written folder against the stock model, and the heads whose tensors have these `names`."""
    fields = {model.architecture.count_field: experts, **model.architecture.written}
    verify_output(folder, fields, experts, model.source.folder, names)
    if names:
        verify_heads(folder, experts, names)


def make_job(
    model: OpenModel, plan: CompressionPlan, cut: CutFiles | None = None, change: LayerChange | None = None
) -> OutputJob:
    """The job of writing a plan; a correction needs its `cut` layers. `change` gives a layer's tensors other values."""
    architecture, layout = model.architecture, model.layout
    dequantized: str | None = None
    produce: Any
    heads = cut_heads(model, plan, cut, pick_dtype("auto", model.config, model.checkpoint))
    if model.stored_parts and plan.is_drop and change is None:
        outputs, produce = model.stored_parts.cut(model, plan)
    elif model.is_split or change is not None or through_model(layout, plan):
        partial = stored_partial(model)
        if model.stored_parts:
            logger.warning("parts are merged, so quantised experts are written in a plain dtype")
        small = build_meta(architecture.with_experts(plan.experts), partial.dtype)
        outputs = converted_outputs(partial, architecture, small)
        produce = bind(convert_unit, partial, architecture, plan, small, cut, change=change)
        dequantized = str(partial.dtype).removeprefix("torch.") if layout.quantized else None
    else:
        outputs = plan_outputs(model.checkpoint, layout, plan, architecture.units)
        produce = bind(stored_unit, model.checkpoint, outputs)
    outputs = [*outputs, *(output for head in heads for output in head.outputs)]
    of_heads = {head.unit: head.produce for head in heads}
    renames = {old: new for head in heads for old, new in head.renames.items()} if heads else None
    config, zeroed = output_config(model.checkpoint.raw_config, architecture, layout, plan, dequantized, renames)
    config_bytes = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    return OutputJob(
        outputs=tuple(outputs),
        units=("", *architecture.units, *of_heads),
        produce=lambda unit: of_heads[unit]() if unit in of_heads else produce(unit),
        files={**carried_files(model.source.folder), "config.json": config_bytes},
        verify=bind(_verify, model, plan.experts, [output.name for head in heads for output in head.outputs]),
        zeroed=tuple(zeroed),
    )
