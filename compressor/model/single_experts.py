"""Experts stored one by one, as in quantised checkpoints, of a stock model that only loads fused
ones.

compressed-tensors packs matrices, so that gpt_oss, quantised, has `experts.N.gate_proj`, `up_proj`
and `down_proj` [out, in] in place of `experts.gate_up_proj` [E, in, 2 out]. Their biases may stay
fused."""

import re
from collections.abc import Collection
from typing import Any

from torch import nn
from transformers.core_model_loading import (
    Concatenate,
    Interleave,
    MergeModulelist,
    Transpose,
    WeightConverter,
)

from compressor.model.architecture import experts_modules


def single_experts(model: nn.Module, unknown: Collection[str]) -> list[Any]:
    """Return weight converters for experts that are stored one by one under names unknown to the
    loader."""
    ends = {re.split(r"\.\d+\.", name)[-1]: module for name, module in experts_modules(model)}
    converters = []
    for end, experts in ends.items():
        stored = re.compile(rf"\b{re.escape(end)}\.\d+\.down_proj\.weight")
        if not any(map(stored.search, unknown)):
            continue
        inner = ["gate_proj", "up_proj"] if experts.has_gate else ["up_proj"]
        for sources in (inner, ["down_proj"]):
            target = "gate_up_proj" if len(sources) > 1 else sources[0]
            for kind in ("weight", "bias") if experts.has_bias else ("weight",):
                # tensors are stacked, then laid out
                operations: list[Any] = [MergeModulelist(dim=0)]
                if len(sources) > 1:
                    operations.append(Concatenate(dim=1))
                    if not experts.is_concatenated:
                        operations.append(Interleave(dim=1, inverse=True))
                if experts.is_transposed and kind == "weight":
                    operations.append(Transpose(1, 2))
                suffix = "_bias" if kind == "bias" else ""
                patterns = [f".{end}.*.{source}.{kind}" for source in sources]
                converters.append(WeightConverter(patterns, f".{end}.{target}{suffix}", operations))
    return converters
