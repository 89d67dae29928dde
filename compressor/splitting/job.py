"""From an opened model and the order of its neurons to the job that an exporter carries out, one layer in memory."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import partial as bind
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.errors import CompressionError
from compressor.model.architecture import MoeLayer, build_meta, discover, load_config
from compressor.model.opened import OpenModel
from compressor.model.verification import verify_output
from compressor.plans.plan import CompressionPlan
from compressor.plans.whole import whole_plan
from compressor.run_record import COMPRESSION
from compressor.splitting.shape import SplitShape
from compressor.splitting.tensors import Factors, split_layer
from compressor.surgery.configuration import config_with
from compressor.surgery.conversion import changed_unit, converted_outputs
from compressor.surgery.job import carried_files, compression_record, stored_partial
from compressor.surgery.tensors import MAX_SHARD_BYTES, OutputJob


def split_plan(model: OpenModel, shape: SplitShape, split: Mapping[str, Any], seed: int) -> CompressionPlan:
    """The plan that keeps every part; its experts are numbered as they are after the split."""
    return replace(whole_plan(model, shape.architecture), seed=seed, split=split)


def split_job(
    model: OpenModel,
    shape: SplitShape,
    factors: Factors,
    orders: Mapping[str, Tensor],
    plan: CompressionPlan,
    max_shard_bytes: int | None = None,
) -> OutputJob:
    """The job that writes the split model; `orders` are the neurons [E, I] of each layer's experts, by its name.

    A checkpoint that is stored quantised is written in the dtype that it is computed in.
    """
    architecture, partial = model.architecture, stored_partial(model)
    large = build_meta(shape.architecture.config, partial.dtype)
    outputs = converted_outputs(partial, architecture, large)

    def change(layer: MoeLayer) -> Mapping[str, Tensor]:
        stock, state = partial.model, partial.model.state_dict()
        return split_layer(stock.get_submodule(layer.name), state, layer, orders[layer.name], shape.parts, factors)

    config, zeroed = config_with(model.checkpoint.raw_config, architecture, model.layout, shape.fields)
    if model.layout.quantized:
        _leave_quantization(config, str(partial.dtype).removeprefix("torch."))
    config_bytes = (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()
    carried = carried_files(model.source.folder)
    record = compression_record(model, plan, outputs, zeroed, carried)
    shard_bytes = max_shard_bytes or MAX_SHARD_BYTES
    facts = [plan.to_dict(), model.checkpoint.stamp(), shard_bytes, hashlib.sha256(config_bytes).hexdigest()]
    return OutputJob(
        digest=hashlib.sha256(json.dumps(facts).encode()).hexdigest(),
        outputs=tuple(outputs),
        units=("", *architecture.units),
        produce=bind(changed_unit, partial, architecture, large, change),
        files={**carried, "config.json": config_bytes, COMPRESSION: record},
        verify=bind(verify_split, shape=shape, original=model.source.folder),
        max_shard_bytes=shard_bytes,
    )


def _leave_quantization(config: dict[str, Any], dtype: str) -> None:
    """Let a config say that nothing is quantised, and what is stored instead."""
    for node in (config, *(value for value in config.values() if isinstance(value, dict))):
        node.pop("quantization_config", None)
    config.pop("torch_dtype", None)
    config["dtype"] = dtype


def verify_split(folder: Path, shape: SplitShape, original: Path) -> None:
    """Check a written split model as the stock loader sees it; raises `CompressionError` for what is not as planned."""
    wanted = shape.architecture
    verify_output(folder, wanted.count_field, wanted.experts, original)
    for found, layer in zip(discover(load_config(folder)).layers, wanted.layers, strict=True):
        if found.top_k != layer.top_k:
            raise CompressionError(
                f"the written config sends a token to {found.top_k} experts of {layer.name} instead of {layer.top_k}; "
                "please report this model"
            )
