"""NumPy's npz: one archive for every file of tensors, all in float32."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from compressor.plugins import NamedOptions, Progress


class Options(NamedOptions):
    compress: bool = False
    """Compress archives."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What was written."""

    tensors: int


def export(checkpoint: Path, output: Path, options: Options, progress: Progress) -> Summary:
    """Write an archive for each safetensors file of the checkpoint."""
    files = sorted(checkpoint.glob("*.safetensors"))
    output.mkdir(parents=True)
    save = np.savez_compressed if options.compress else np.savez
    count = 0
    progress.start("npz", len(files))
    for file in files:
        tensors = load_file(file)
        arrays: dict[str, Any] = {name: value.float().numpy() for name, value in tensors.items()}
        save(output / f"{file.stem}.npz", **arrays)
        count += len(arrays)
        progress.advance(file.name)
    return Summary(count)
