"""Tensors that a run keeps on disk for the one that goes on after it, with what is to be told of them as JSON.

A file is there whole or not at all. One that cannot be read, as after a loss of power, counts as none.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from compressor.files import replacing

TOLD = "told"


def keep_tensors(path: Path, tensors: Mapping[str, torch.Tensor], told: Any) -> None:
    """Write tensors with what is to be told of them; folders on the way are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    with replacing(path, path.with_suffix(".new")) as fresh:
        safetensors.torch.save_file(whole, fresh, metadata={TOLD: json.dumps(told)})


def told_of(path: Path) -> Any:
    """What is told of kept tensors; None if they are not there, or cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads(file.metadata()[TOLD])
    except (FileNotFoundError, SafetensorError, TypeError, KeyError, ValueError, RecursionError, OverflowError):
        return None  # TypeError: without metadata


def kept_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Tensors of which something is told."""
    found: dict[str, torch.Tensor] = safetensors.torch.load_file(path)
    return found
