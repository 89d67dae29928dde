"""The whole model in memory, as stock transformers loads it."""

from pathlib import Path
from typing import Any

from compressor.checkpoint.reader import Checkpoint
from compressor.errors import CompressionError
from compressor.model.architecture import load_config
from compressor.model.verification import check_filled


def load_whole(folder: Path, **settings: Any) -> Any:
    """A causal language model with `from_pretrained`'s settings, on the CPU unless they say otherwise.

    Raises `CompressionError` for a checkpoint that lacks weights: they would be random.
    """
    from transformers import AutoModelForCausalLM

    config = settings["config"] = load_config(folder)  # which names no kernels
    check_filled(Checkpoint(folder), config)
    model, info = AutoModelForCausalLM.from_pretrained(str(folder), output_loading_info=True, **settings)
    absent = sorted(info["missing_keys"]) + sorted(str(entry[0]) for entry in info["mismatched_keys"])
    if absent:
        raise CompressionError(
            f"{folder.name} lacks {len(absent)} tensors that its config asks for, such as {absent[0]!r}; "
            "download or write it again"
        )
    return model
