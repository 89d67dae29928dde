"""Tensors that a run keeps on disk for a run that resumes it, with facts about them as JSON.

Files are written atomically. One that cannot be read, as after a loss of power, counts as missing.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from compressor.files import replacing

FACTS = "facts"


def save_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Any) -> None:
    """Write tensors with facts about them, and the folders on the way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    on_cpu = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    with replacing(path, path.with_suffix(".new")) as fresh:
        safetensors.torch.save_file(on_cpu, fresh, metadata={FACTS: json.dumps(facts)})


def read_metadata(path: Path, name: str = FACTS, default: str = "null") -> Any:
    """Facts in the header of a file of tensors; None if it is not there, or cannot be read."""
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads((file.metadata() or {}).get(name, default))
    except (OSError, SafetensorError):
        return None


def load_tensors(path: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    return tensors
