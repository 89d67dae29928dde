"""Router tensors on disk: kept by an interrupted run, and put into a finished checkpoint in the place of its own."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from compressor.checkpoint.reader import Checkpoint
from compressor.files import replacing
from compressor.pathways.bake import RoutersBaked
from compressor.surgery.tensors import tensor_bytes_view

RESULT = "result"


def keep(path: Path, baked: RoutersBaked) -> None:
    """Write baked routers whole, or not at all."""
    from safetensors.torch import save_file

    with replacing(path, path.with_suffix(".new")) as fresh:
        own = {name: value.contiguous() for name, value in baked.tensors.items()}
        save_file(own, fresh, {RESULT: json.dumps(dict(baked.result))})


def kept(path: Path) -> RoutersBaked | None:
    """What `keep` has written; None if there is nothing."""
    from safetensors import safe_open

    if not path.is_file():
        return None
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        return RoutersBaked(tensors, json.loads(file.metadata()[RESULT]))


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
