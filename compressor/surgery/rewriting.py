"""Tensors of a finished checkpoint put into the place of its own, and what its record says of them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from compressor.checkpoint.reader import Checkpoint
from compressor.records import read_object, readable_json
from compressor.run_record import COMPRESSION
from compressor.surgery.tensors import tensor_bytes_view


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


def note_result(folder: Path, name: str, asked: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, Any]:
    """Write what came of a plan's entry into the folder's compression.json; returns the entry with it."""
    record = read_object(folder / COMPRESSION)
    record["plan"][name] = {**record["plan"][name], "result": dict(result)}
    (folder / COMPRESSION).write_text(readable_json(record), encoding="utf-8")
    return {**asked, "result": dict(result)}
