"""Router tensors on disk: kept by an interrupted run, and put into a finished checkpoint in the place of its own."""

import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from compressor.checkpoint.reader import Checkpoint
from compressor.pathways.bake_routers import RoutersBaked
from compressor.surgery.kept import keep_tensors, kept_tensors, told_of
from compressor.surgery.tensors import tensor_bytes_view


def keep(path: Path, baked: RoutersBaked) -> None:
    """Write baked routers whole, or not at all."""
    keep_tensors(path, baked.tensors, dict(baked.result))


def kept(path: Path) -> RoutersBaked | None:
    """What `keep` has written; None if there is nothing, or nothing that can be read."""
    result = told_of(path)
    return None if result is None else RoutersBaked(kept_tensors(path), result)


def put_into(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors over those of the same name, dtype and shape in a checkpoint; repeating it changes nothing."""
    checkpoint = Checkpoint(folder)
    for name, value in tensors.items():
        info = checkpoint.tensors[name]
        with checkpoint.path(name).open("r+b") as file:
            file.seek(info.begin)
            file.write(tensor_bytes_view(value))
            file.flush()
            os.fsync(file.fileno())
