"""Our own forward of a model with constants, which stock transformers has none of: what a written one is checked by."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.source import ModelSource
from compressor.errors import CompressionError
from compressor.model.constant_experts import SubstitutedCheckpoint
from compressor.model.opened import OpenModel, open_substituted
from compressor.model.streaming import LayerVisitor, Pass
from compressor.steps.constants.variants import Substituting, Variant

TOKENS = 32  # that a written checkpoint is checked on
TOLERANCE = 1e-3  # of the largest logit; the same sums in the same order differ by nothing


@dataclass(slots=True)
class _Outputs(LayerVisitor):
    found: list[Tensor] = field(default_factory=list)

    def finished(self, batch: int, output: Any) -> None:
        """Note the logits of a batch."""
        self.found.append(output[0].detach().float().cpu())


def logits_with(model: OpenModel, visitor: LayerVisitor, batches: Sequence[Tensor]) -> list[Tensor]:
    """Logits [B, L, V] of each batch of token ids [B, L]; `visitor` puts the constants in, a layer at a time."""
    outputs = _Outputs()
    Pass(model, batches, to_end=True).run(visitor, outputs)
    return outputs.found


def read_constants(folder: Path, dtype: str = "auto", device: str = "auto") -> tuple[OpenModel, Variant]:
    """A written checkpoint with constants, and these by experts module; an unfit one is a `CompressionError`."""
    model = open_substituted(ModelSource(str(folder), None, folder), dtype, device)
    assert isinstance(model.checkpoint, SubstitutedCheckpoint)
    partial = model.partial
    return model, model.checkpoint.substitutes(model.architecture.layers, partial.dtype, partial.device)


def written_logits(folder: Path, batches: Sequence[Tensor], dtype: str = "auto", device: str = "auto") -> list[Tensor]:
    """Logits [B, L, V] of a written checkpoint with constants, by our own forward."""
    model, variant = read_constants(folder, dtype, device)
    return logits_with(model, Substituting(model, [variant]), batches)


def check_forward(folder: Path, source: OpenModel, visitor: LayerVisitor) -> None:
    """Refuse a written checkpoint that does not compute what the source does with what `visitor` puts into it."""
    tokens = torch.arange(TOKENS)[None] * 7919 % source.vocabulary
    [expected] = logits_with(source, visitor, [tokens])
    [found] = written_logits(folder, [tokens], source.dtype_name, str(source.partial.device))
    off, size = float((found - expected).abs().max()), float(expected.abs().max())
    if not off <= TOLERANCE * max(size, 1e-6):
        raise CompressionError(
            f"the written checkpoint's logits differ by {off:.3g} from the source's with constants; please report this "
            "model"
        )
