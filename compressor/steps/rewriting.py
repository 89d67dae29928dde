"""Checkpoints whose tensors are stored in other shapes or dtypes, for steps with a `writer`."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.reader import DTYPE_NAMES, TORCH_DTYPES, Size
from compressor.model.opened import OpenModel
from compressor.model.own_code import json_bytes
from compressor.recipe.plan import ExpertPlan, LayerPlan
from compressor.recipe.step import OutputSize
from compressor.steps.job import make_job, stored_partial
from compressor.steps.state import State
from compressor.steps.tensors import Named, OutputJob, OutputTensor, tensor_bytes_view

Change = Callable[[str, Tensor], Tensor]  # a stored tensor by its name -> as it is to be stored


def plain_job(state: State) -> OutputJob:
    """Return the job that writes a stage's checkpoint as the steps before have left it."""
    return make_job(state.model, state.expert_plan())


def rewritten(job: OutputJob, change: Change, config: Mapping[str, Any] | None = None) -> OutputJob:
    """Return the job with each stored tensor changed, and with these fields of config.json.

    `change` has to work on tensors without data (on the device "meta"), too: shapes and dtypes are known by that.
    """
    stored = {output.name: output for output in job.outputs}

    def produce(unit: str) -> Named:
        for name, pieces in job.produce(unit):
            output = stored[name]
            data = torch.frombuffer(bytearray().join(pieces), dtype=TORCH_DTYPES[output.dtype])
            yield name, iter((tensor_bytes_view(change(name, data.view(output.shape))),))

    stated = job.files["config.json"]
    assert isinstance(stated, bytes)
    files = {**job.files, "config.json": json_bytes({**json.loads(stated), **(config or {})})}
    outputs = tuple(_changed(output, change) for output in job.outputs)
    return replace(job, outputs=outputs, produce=produce, files=files)


def rewritten_size(model: OpenModel, experts: int, change: Change, changed: bool = False) -> OutputSize:
    """Return the size of `rewritten` output with so many experts in each layer; no weight is read.

    `changed`: other steps write experts anew, in a plain dtype.
    """
    every = model.architecture.experts
    kept = [slot * every // experts for slot in range(experts)]  # equally many of each routing group
    layers = tuple(LayerPlan.keep(layer, kept) for layer in model.architecture.layers)
    job = make_job(model, ExpertPlan(experts, layers), through=stored_partial(model) if changed else None)
    return OutputSize(Size.of(_changed(output, change) for output in job.outputs))


def _changed(output: OutputTensor, change: Change) -> OutputTensor:
    empty = torch.empty(output.shape, dtype=TORCH_DTYPES[output.dtype], device="meta")
    value = change(output.name, empty)
    return replace(output, dtype=DTYPE_NAMES[value.dtype], shape=tuple(value.shape), content=None)
