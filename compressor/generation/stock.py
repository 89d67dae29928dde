"""The next token by the stock transformers model of a safetensors checkpoint, with the cache that it makes itself."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from compressor.checkpoint.reader import Checkpoint
from compressor.errors import CompressionError, reason_of
from compressor.model.architecture import load_config, model_class
from compressor.model.loading import quiet_transformers
from compressor.model.opened import pick_device, pick_dtype


class StockDecoder:
    """Takes tokens that are new, [S], and returns the logits of the token after them, [V] in float32 on the CPU."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._seen: list[int] = []
        self._cache: Any = None
        self._known = inspect.signature(model.forward).parameters

    @torch.inference_mode()
    def __call__(self, tokens: Sequence[int]) -> Tensor:
        self._seen.extend(tokens)
        fresh = self._seen if self._cache is None else list(tokens)  # a model without a cache reads all of it again
        total, device = len(self._seen), self._model.device
        wanted = {
            # a cache whose first layer is linear attention may count no positions
            "position_ids": torch.arange(total - len(fresh), total, device=device)[None],
            # of a long prompt only the last logits are of use, and all of them take much memory
            "logits_to_keep": 1,
        }
        output = self._model(
            input_ids=torch.tensor([fresh], device=device),
            past_key_values=self._cache,
            use_cache=True,
            **{name: value for name, value in wanted.items() if name in self._known},
        )
        self._cache = getattr(output, "past_key_values", None)
        logits: Tensor = output.logits[0, -1].float().cpu()
        return logits


def stock_decoder(folder: Path, device: str, dtype: str) -> StockDecoder:
    """Load the model whole, in its own dtype for 'auto'; whatever is unfit is a `CompressionError`."""
    from transformers import GenerationMixin

    checkpoint, config, place = Checkpoint(folder), load_config(folder), pick_device(device)
    kind, wanted = model_class(config), pick_dtype(dtype, config, checkpoint)
    if not kind.can_generate():
        raise CompressionError(f"{kind.__name__} does not generate text; name the folder of a causal language model")
    if kind.generate is not GenerationMixin.generate:
        raise CompressionError(f"{kind.__name__} does not generate token by token; use its own generate() instead")
    try:
        with quiet_transformers():
            model, report = kind.from_pretrained(str(folder), config=config, dtype=wanted, output_loading_info=True)
            model = model.to(place).eval()
    except Exception as error:  # the loader and its quantisers raise what they like
        raise CompressionError(f"transformers cannot load {folder}: {reason_of(error)}; check its files") from error
    if missing := sorted(report["missing_keys"]):
        raise CompressionError(
            f"{folder} lacks {len(missing)} tensors of {kind.__name__}, such as {missing[0]!r}; restore its files"
        )
    return StockDecoder(model)
